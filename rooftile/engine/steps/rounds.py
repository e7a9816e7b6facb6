"""`Rounds`: the parts of a step's chunks between the places where a state is kept.

A state is kept after tokens in the middle of a chunk, too. A recurrence then reads the chunk in parts, one after the other; the
rest of the model reads it at once. The n-th parts of all chunks of a step are one round, which an operator reads together. Under
`deterministic` a part has one token (see `batch_invariant`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise, zip_longest
from typing import NamedTuple

import torch
from torch import Tensor


class Round(NamedTuple):
    """Parts of chunks, back to back, each of another sequence."""

    rows: slice | Tensor
    """Their rows in the step."""
    cu: Tensor  # (c + 1,) int32, the offsets of the parts
    slots: Tensor  # (c,) the slots of their answers
    kept: Tensor | None = None
    """(2, k): slots whose states are kept after the round, and the rows of states to copy them to."""

    def keep(self, *memories: Tensor) -> None:
        """Copies the states that are kept after this round, in one layer's memories (rows, ...)."""
        if self.kept is not None:
            for memory in memories:
                memory.index_copy_(0, self.kept[1], memory.index_select(0, self.kept[0]))


class Rounds(NamedTuple):
    """All rounds of a step, in their order."""

    parts: tuple[Round, ...]
    order: Tensor | None = None
    """The step's row of each row of the rounds; None if they follow one another as in the step."""

    def run(self, read: Callable[..., Tensor], *given: Tensor) -> Tensor:
        """Calls read(round, *tensors) for each round with its rows of `given`; returns all outputs in the order of the step.

        Rows of padding, which are in no round, are 0.
        """
        found = [read(part, *(x[part.rows] for x in given)) for part in self.parts]
        y = found[0] if len(found) == 1 else torch.cat(found)
        return y if self.order is None else y.new_zeros(given[0].shape[0], *y.shape[1:]).index_copy_(0, self.order, y)


class Mark(NamedTuple):
    """A place in a chunk after which a state is kept."""

    offset: int  # tokens of the chunk before it
    row: int  # where the state is kept


class MarkedChunk(NamedTuple):
    """A chunk of one sequence, with marks that rise."""

    tokens: int
    slot: int
    marks: tuple[Mark, ...] = ()


class _Part(NamedTuple):
    """A chunk between two marks."""

    begin: int  # its first row in the step
    end: int
    slot: int
    kept: int | None  # the row of states that its end is kept in


def rounds_of(chunks: Sequence[MarkedChunk], device: torch.device, *, first: int = 0, single: bool = False) -> Rounds:
    """Cuts chunks, which lie back to back, into rounds.

    Args:
        chunks: the chunks.
        device: where the rounds are used; they reach it in one copy, which nobody waits for.
        first: the first row of the first chunk in the step.
        single: whether a part has one token.
    """
    firsts = accumulate((chunk.tokens for chunk in chunks), initial=first)
    parts = [_parts_of(chunk, begin, single) for chunk, begin in zip(chunks, firsts, strict=False)]
    rounds = [[part for part in each if part is not None] for each in zip_longest(*parts)]
    arrays: list[list[int]] = []
    for each in rounds:
        kept = [(part.slot, part.kept) for part in each if part.kept is not None]
        arrays += [
            [*accumulate((part.end - part.begin for part in each), initial=0)], [part.slot for part in each],
            [slot for slot, _ in kept], [row for _, row in kept],
            [row for part in each for row in range(part.begin, part.end)],
        ]  # fmt: skip
    sent = _sent(arrays, device)
    cu, slots, sources, targets, rows = (sent[n::5] for n in range(5))
    made = [
        Round(rows[n], cu[n].int(), slots[n], torch.stack((sources[n], targets[n])) if len(sources[n]) else None)
        for n in range(len(rounds))
    ]
    if len(chunks) == 1 and not single:
        # the parts of one chunk follow one another
        return Rounds(tuple(part._replace(rows=slice(one.begin, one.end)) for part, (one,) in zip(made, rounds, strict=True)))
    return Rounds(tuple(made), torch.cat(rows))


def _sent(arrays: Sequence[list[int]], device: torch.device) -> list[Tensor]:
    """Copies arrays to a device; each begins at a multiple of 16 bytes, as kernels are compiled for."""
    packed = torch.tensor([number for array in arrays for number in (*array, *[0] * (len(array) % 2))])
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    parts = packed.split([len(array) + len(array) % 2 for array in arrays])
    return [part[: len(array)] for part, array in zip(parts, arrays, strict=True)]


def _parts_of(chunk: MarkedChunk, first: int, single: bool) -> list[_Part]:
    rows = {mark.offset: mark.row for mark in chunk.marks}
    ends = range(1, chunk.tokens + 1) if single else sorted({*rows, chunk.tokens})
    return [_Part(first + begin, first + end, chunk.slot, rows.get(end)) for begin, end in pairwise([0, *ends])]
