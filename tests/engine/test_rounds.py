"""Chunks of prompts in rounds: a recurrence over rows, part by part, is the one over each chunk."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from rooftile.engine.steps.rounds import Mark, MarkedChunk, Round, Rounds, rounds_of

ROWS = 30


def read_by(rounds: Rounds, x: Tensor, memory: Tensor) -> Tensor:
    """A recurrence S = S / 2 + x, y = S, on the rows of a memory."""

    def read(part: Round, x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        assert part.cu.dtype == torch.int32
        for begin, end, slot in zip(part.cu[:-1].tolist(), part.cu[1:].tolist(), part.slots.tolist(), strict=True):
            assert begin < end
            for n in range(begin, end):
                memory[slot] = y[n] = memory[slot] / 2 + x[n]
        part.keep(memory)
        return y

    return rounds.run(read, x)


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_parts_of_chunks_are_read_one_after_the_other(seed: int, single: bool) -> None:
    rng = random.Random(seed)
    slots = rng.sample(range(8), seed % 4 + 1)
    lengths = [rng.randint(1, 9) for _ in slots]
    free = iter(range(10, ROWS))
    chunks = [
        MarkedChunk(length, slot, tuple(Mark(n, next(free)) for n in sorted(rng.sample(range(1, length + 1), min(3, length)))))
        for slot, length in zip(slots, lengths, strict=True)
    ]
    x, memory = torch.randn(sum(lengths), 2, dtype=torch.float64), torch.randn(ROWS, 2, dtype=torch.float64)
    due, state, row = memory.clone(), [], 0
    for chunk in chunks:
        rows = {mark.offset: mark.row for mark in chunk.marks}
        for n in range(1, chunk.tokens + 1):
            due[chunk.slot] = due[chunk.slot] / 2 + x[row]
            state.append(due[chunk.slot].clone())
            row += 1
            if n in rows:
                due[rows[n]] = due[chunk.slot]
    rounds = rounds_of(chunks, torch.device("cpu"), single=single)
    assert torch.equal(read_by(rounds, x, memory), torch.stack(state))
    assert torch.equal(memory, due)
    most = max(lengths) if single else max(len({*(mark.offset for mark in each.marks), each.tokens}) for each in chunks)
    assert len(rounds.parts) == most
    if single:
        assert all((part.cu.diff() == 1).all() for part in rounds.parts)


def test_rows_of_padding_are_zeros() -> None:
    """A tile of eight rows, of which the step reads three."""
    rounds = rounds_of([MarkedChunk(3, 1, (Mark(2, 9),))], torch.device("cpu"), first=4, single=True)
    x, memory = torch.ones(8, 1), torch.zeros(10, 1)
    assert read_by(rounds, x, memory)[:, 0].tolist() == [0, 0, 0, 0, 1, 1.5, 1.75, 0]
    assert memory[:, 0].tolist() == [0, 1.75, 0, 0, 0, 0, 0, 0, 0, 1.5]
