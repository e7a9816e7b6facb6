"""Chunks of prompts in rounds: a recurrence over rows, part by part, is the one over each chunk."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from rooftile.engine.steps.rounds import MOST, Mark, MarkedChunk, Round, Rounds, rounds_of

ROWS = 30


def read_by(rounds: Rounds, x: Tensor, memory: Tensor) -> Tensor:
    """A recurrence S = S / 2 + x, y = S, on the rows of a memory."""

    def read(part: Round, x: Tensor) -> Tensor:
        y, states = torch.empty_like(x), memory[part.slots]
        assert part.cu.dtype == torch.int32
        for begin, end, state in zip(part.cu[:-1].tolist(), part.cu[1:].tolist(), states, strict=True):
            assert begin < end
            for n in range(begin, end):
                y[n] = state.div_(2).add_(x[n])
        assert len(set(part.targets.tolist())) == len(part.targets)
        memory.index_copy_(0, part.targets, states)
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
    if single:
        assert len(rounds.parts) == max(lengths)
        assert all((part.cu.diff() == 1).all() for part in rounds.parts)
    for part in rounds.parts:
        assert len(part.rows) <= (1 + MOST) * part.tokens


@pytest.mark.parametrize(
    ("tokens", "marks", "rounds", "read"),
    [
        (600, (256, 512, 592), 1, 600 + 256 + 512 + 592),
        (1000, (256, 512, 992), 1, 1000 + 256 + 512 + 992),
        (2000, (256, 512, 1024, 1984), 1, 2000 + 256 + 512 + 1024 + 1984),
        # no mark behind more than 4,096 tokens is read once more: a second round begins there
        (8000, (256, 512, 1024, 2048, 4096, 7984), 2, 8000 + 256 + 512 + 1024 + 2048 + 4096),
        (8192, (4096, 8176), 2, 8192 + 4096),
        (400, range(16, 400, 16), 5, 400 + 4 * 16 * (1 + 2 + 3 + 4 + 5)),
    ],
)
def test_few_rounds_and_few_tokens_are_read_once_more(tokens: int, marks: tuple, rounds: int, read: int) -> None:
    found = rounds_of([MarkedChunk(tokens, 0, tuple(Mark(mark, mark) for mark in marks))], torch.device("cpu"))
    assert (len(found.parts), sum(len(part.rows) for part in found.parts)) == (rounds, read)


def test_rows_of_padding_are_zeros() -> None:
    """A tile of eight rows, of which the step reads three."""
    rounds = rounds_of([MarkedChunk(3, 1, (Mark(2, 9),))], torch.device("cpu"), first=4, single=True)
    x, memory = torch.ones(8, 1), torch.zeros(10, 1)
    assert read_by(rounds, x, memory)[:, 0].tolist() == [0, 0, 0, 0, 1, 1.5, 1.75, 0]
    assert memory[:, 0].tolist() == [0, 1.75, 0, 0, 0, 0, 0, 0, 0, 1.5]
