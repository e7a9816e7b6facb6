"""How a step is computed under `deterministic`, so that an answer's bits do not depend on what runs beside it.

What a token is computed from is its sequence's tokens up to itself. What may not matter is how the scheduler came to it: in which
batch, in a chunk of which prompt or by itself, again after a preemption, or after a prefix that another request has read.

On a GPU every kernel gives a row the same bits in any batch: norms, gates and the sampler by their tiles, the products by
`rooftile.fused.linear`, attention by blocks of keys at multiples of their size. Only attention of single queries has a kernel of
its own, so a single token is read as a chunk of one.

PyTorch's operations on a CPU promise less: the order of their sums depends on shapes, and even an activation's last bits on where
in memory a number lies. So a CPU computes one tile of TILE positions of one sequence at a time. A tile begins at a multiple of
TILE and is filled up with padding: all shapes, and a token's row in them, follow from its position. Experts gather their rows
from the whole tile, so products are `rooftile.fused.linear` here, too, which tells them that neighbours may not matter.

A recurrence reads one token after the other on both (see `Rounds`), of a prompt, too: its kernels for chunks pass a state on at
places that depend on where a chunk begins, and add otherwise than those for single tokens, which an answer is computed with.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from rooftile.engine.steps.rounds import Mark, MarkedChunk, Rounds, rounds_of
from rooftile.engine.steps.step_inputs import Chunks, StepInputs

TILE = 16

Found = TypeVar("Found", Tensor, tuple[Tensor, ...])


class SequenceTile(NamedTuple):
    """TILE positions of one sequence, of which a step reads some; a row that it does not read has the position -1."""

    rows: slice
    """The step's rows."""
    places: Tensor
    """Their rows in the tile."""
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    chunks: Chunks

    def rounds(self, kept: Collection[tuple[int, int, int]]) -> Rounds:
        """Returns the rounds in which a recurrence reads the tile, of one token each.

        Args:
            kept: where states are kept: slots, tokens before it, and rows of states.
        """
        slot, first = int(self.slots[0]), int(self.places[0])
        begin = int(self.positions[first])
        marks = tuple(Mark(end - begin, row) for its, end, row in kept if its == slot and 0 < end - begin <= len(self.places))
        chunk = MarkedChunk(len(self.places), slot, marks)
        return rounds_of([chunk], self.slots.device, first=first, single=True)


def tiles_of(inputs: StepInputs, table: Tensor, size: int) -> Iterator[SequenceTile]:
    """Cuts the tokens of a step into tiles.

    Args:
        inputs: the step, on the host.
        table: the block tables, a row per slot, with columns for whole tiles.
        size: tokens per block.
    """
    number = inputs.positions // TILE
    begins = (number.diff() != 0) | (inputs.slots.diff() != 0)
    ends = [0, *(begins.nonzero()[:, 0] + 1).tolist(), len(number)]
    for begin, end in pairwise(ends):
        rows, places = slice(begin, end), inputs.positions[begin:end] % TILE
        positions, tokens = torch.full((TILE,), -1), torch.zeros(TILE, dtype=torch.int64)
        positions[places], tokens[places] = inputs.positions[rows], inputs.tokens[rows]
        slot, stop = inputs.slots[begin], (int(number[begin]) + 1) * TILE
        # keys after a token are hidden by every mask; whatever they are, there are always as many
        chunks = Chunks(
            TILE, table[slot, : -(-stop // size)][None], torch.tensor([stop], dtype=torch.int32),
            torch.tensor([0, TILE], dtype=torch.int32),
        )  # fmt: skip
        yield SequenceTile(rows, places, tokens, positions, slot.expand(TILE), chunks)


def row_by_row(compute: Callable[..., Found], *tensors: Tensor) -> Found:
    """Computes each row of some tensors by itself, and puts the results together."""
    if len(tensors[0]) < 2:
        return compute(*tensors)
    found = [compute(*(x[n : n + 1] for x in tensors)) for n in range(len(tensors[0]))]
    if isinstance(found[0], Tensor):
        return torch.cat(found)
    return tuple(map(torch.cat, zip(*found, strict=True)))
