"""`Rounds`: how recurrences read the chunks of a step, so that states are kept after tokens in the middle of a chunk, too.

The tokens up to a mark are read once more, as a sequence of their own, beside the chunk: both begin with the same state, and an
operator reads both in one call. Only the recurrence reads them twice. Where that would be many tokens, the chunk ends there,
and goes on in another *round*, that is another call, for which a host needs about as long as for all of a layer. Under
`deterministic` a round has one token of each chunk (see `batch_invariant`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

# tokens that are read once more for a mark, at most: to read more takes a GPU longer than a host needs for another round
LONGEST = 4096
# the tokens that are read once more, at most, as a multiple of the tokens of a round
MOST = 3


class Round(NamedTuple):
    """Sequences back to back. All begin with states from before the round."""

    rows: slice | Tensor
    """Their rows in the step."""
    cu: Tensor  # (c,) + 1, int32, the offsets of the sequences
    slots: Tensor  # (c,) the rows of the states that they begin with
    targets: Tensor  # (c,) the rows of the states that they leave
    tokens: int | None = None
    """How many of the rows have outputs; None for all. The others are read once more."""
    kept: Tensor | None = None
    """(2, k): rows of states to copy after the round, and the rows to copy them to."""

    def keep(self, *memories: Tensor) -> None:
        """Copies the states that are kept after this round, in one layer's memories (rows, ...)."""
        if self.kept is not None:
            for memory in memories:
                memory.index_copy_(0, self.kept[1], memory.index_select(0, self.kept[0]))


class Rounds(NamedTuple):
    """All rounds of a step, in their order."""

    parts: tuple[Round, ...]
    order: Tensor | None = None
    """The step's row of each output of the rounds; None if they follow one another as in the step."""

    def run(self, read: Callable[..., Tensor], *given: Tensor) -> Tensor:
        """Calls read(round, *tensors) for each round with its rows of `given`; returns all outputs in the order of the step.

        Rows of padding, which are in no round, are 0.
        """
        found = [read(part, *(x[part.rows] for x in given))[: part.tokens] for part in self.parts]
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
    """Tokens of a chunk in one round."""

    begin: int  # its first row in the step
    end: int
    slot: int
    marks: tuple[tuple[int, int], ...]  # up to which row of the step it is read once more, and the row of the state
    kept: int | None  # where the state after its last token is kept


def rounds_of(chunks: Sequence[MarkedChunk], device: torch.device, *, first: int = 0, single: bool = False) -> Rounds:
    """Cuts chunks, which lie back to back, into rounds.

    Args:
        chunks: the chunks.
        device: where the rounds are used; they reach it in one copy, which nobody waits for.
        first: the first row of the first chunk in the step.
        single: whether a round has one token of each chunk.
    """
    firsts = accumulate((chunk.tokens for chunk in chunks), initial=first)
    parts = [_parts_of(chunk, begin, single) for chunk, begin in zip(chunks, firsts, strict=False)]
    rounds = [[part for part in each if part is not None] for each in zip_longest(*parts)]
    arrays: list[list[int]] = []
    for each in rounds:
        copied = [(part.slot, part.kept) for part in each if part.kept is not None]
        again = [(part.begin, end, part.slot, row) for part in each for end, row in part.marks]
        sequences = [(part.begin, part.end, part.slot, part.slot) for part in each] + again
        arrays += [
            [*accumulate((end - begin for begin, end, *_ in sequences), initial=0)], [slot for _, _, slot, _ in sequences],
            [target for *_, target in sequences], [slot for slot, _ in copied], [row for _, row in copied],
            [row for begin, end, *_ in sequences for row in range(begin, end)],
        ]  # fmt: skip
    sent = _sent(arrays, device)
    cu, slots, targets, copied_from, copied_to, rows = (sent[n::6] for n in range(6))
    counts = [sum(part.end - part.begin for part in each) for each in rounds]
    made = tuple(
        Round(
            rows[n], cu[n].int(), slots[n], targets[n], counts[n],
            torch.stack((copied_from[n], copied_to[n])) if len(copied_to[n]) else None,
        )
        for n in range(len(rounds))
    )  # fmt: skip
    in_order = not single and (len(rounds) == 1 or len(chunks) == 1)
    return Rounds(made, None if in_order else torch.cat([row[:count] for row, count in zip(rows, counts, strict=True)]))


def _sent(arrays: Sequence[list[int]], device: torch.device) -> list[Tensor]:
    """Copies arrays to a device; each begins at a multiple of 16 bytes, as kernels are compiled for."""
    packed = torch.tensor([number for array in arrays for number in (*array, *[0] * (len(array) % 2))])
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    parts = packed.split([len(array) + len(array) % 2 for array in arrays])
    return [part[: len(array)] for part, array in zip(parts, arrays, strict=True)]


def _parts_of(chunk: MarkedChunk, first: int, single: bool) -> list[_Part]:
    rows = {mark.offset: mark.row for mark in chunk.marks}
    found: list[_Part] = []
    begin, again, marks = 0, 0, list[tuple[int, int]]()
    for offset in range(1, chunk.tokens + 1) if single else sorted({*rows, chunk.tokens}):
        tokens = offset - begin
        if not single and offset < chunk.tokens and tokens <= LONGEST and again + tokens <= MOST * tokens:
            marks.append((first + offset, rows[offset]))
            again += tokens
            continue
        found.append(_Part(first + begin, first + offset, chunk.slot, tuple(marks), rows.get(offset)))
        begin, again, marks = offset, 0, []
    return found
