"""`StepTokens`: where the tokens of a step lie in the cache, as the attention of every layer needs it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from rooftile.engine.steps.rounds import Round, Rounds
from rooftile.engine.steps.step_inputs import Chunks, StepInputs


class StepTokens(NamedTuple):
    """The tokens of a step: chunks of prompts first, then single tokens."""

    size: int  # tokens per block
    cells: Tensor  # (total,) each token's slot in the cache; -1 for padding
    positions: Tensor  # (total,) positions in their sequences; below 0 for padding
    slots: Tensor  # (total,) slots of their answers
    table: Tensor  # the block tables of all slots
    chunks: Chunks | None
    single: tuple[Tensor, Tensor] | None  # block tables (B, N) and lengths (B,) of the single tokens
    on_host: StepInputs | None  # the same step on the host; None in a graph, which serves steps of all lengths
    rows: Tensor | None = None  # (blocks,) int32: the row of each block; None if a block is its own row
    marked: Rounds | None = None  # the rounds of the chunks, where a state is kept within one of them

    @property
    def split(self) -> int:
        """How many tokens the chunks have."""
        return 0 if self.chunks is None else self.chunks.tokens

    def rounds(self) -> Rounds | None:
        """Returns the rounds in which recurrences read the chunks; None if there are no chunks."""
        if self.marked is not None or self.chunks is None:
            return self.marked
        # all tokens of a chunk have the same slot
        cu = self.chunks.cu_q
        slots = self.slots[cu[:-1].long()]
        return Rounds((Round(slice(None), cu, slots, slots),))

    def rows_of(self, blocks: Tensor) -> Tensor:
        """Returns the row of each block; a block without a row gets an arbitrary one, which is never read."""
        return blocks if self.rows is None else self.rows[blocks.long()]

    def known(self) -> StepInputs:
        """Returns the step on the host, for methods that are never captured in a graph."""
        assert self.on_host is not None, "an approximate method in a graph"
        return self.on_host

    def narrow(self, table: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Returns block tables with no more columns than the step's longest sequence has, and the lengths.

        The tensors of an approximate method are as wide as the tables. A graph has all columns.
        """
        if self.on_host is None:
            return table, lengths
        return table[:, : int(self.known().positions.max()) // self.size + 1], lengths

    def sequences(self) -> Iterator[tuple[int, int, int, Tensor]]:
        """Yields the chunks one by one: first and last token (excluded), length of the sequence so far, its block table."""
        if self.chunks is not None:
            cu_q, lengths = self.known().cu_q.tolist(), self.known().chunk_lengths.tolist()
            for (begin, end), length, table in zip(pairwise(cu_q), lengths, self.chunks.table, strict=True):
                yield begin, end, length, table

    def send(self, x: Tensor) -> Tensor:
        """Copies a tensor of the host to the device, without waiting for it."""
        return x.pin_memory().to(self.cells.device, non_blocking=True) if self.cells.is_cuda else x
