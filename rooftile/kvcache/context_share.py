"""`ContextShare`: which tokens of a sequence lie on one of several ranks (context parallelism).

A block of the pool has `size` tokens on each rank, so `ranks * size` in all, and the same number on every rank. The ranks hold
its tokens in order:

    positions      0 .. size - 1     size .. 2 size - 1     ...     of the first block of the table, and of each further one
    rank           0                 1                      ...

So tables, copies and prefixes are the same integers on all ranks, and a copy of a block moves nothing from rank to rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class ContextShare(NamedTuple):
    """The tokens of one rank, and how it hears of the others.

    Args:
        rank, ranks: this rank's number, from 0, and how many there are.
        size: tokens of a block on each rank.
        gather: joins the tensors of all ranks, (n, ...), to (ranks, n, ...); a CUDA graph can capture it.
        first: overwrites a tensor with rank 0's, and returns it; a CUDA graph can capture it.

    Example:
        >>> share = ContextShare(1, 2, 8, gather, first)                                        # doctest: +SKIP
        >>> share.held(torch.tensor([7, 12, 16, 21]))                                           # doctest: +SKIP
        tensor([0, 4, 8, 8])
    """

    rank: int
    ranks: int
    size: int
    gather: Callable[[Tensor], Tensor]
    first: Callable[[Tensor], Tensor]

    @property
    def block(self) -> int:
        """Tokens of a block on all ranks together."""
        return self.ranks * self.size

    def held(self, lengths: Tensor) -> Tensor:
        """Returns how many of the first `lengths` tokens of sequences this rank holds."""
        rest = lengths % self.block - self.rank * self.size
        return torch.div(lengths, self.block, rounding_mode="floor") * self.size + rest.clamp(0, self.size)

    def cells(self, blocks: Tensor, positions: Tensor) -> Tensor:
        """Returns the slots of tokens in this rank's cache; -1 for tokens of other ranks.

        Args:
            blocks: the block of each token.
            positions: positions in the sequences, of at least 0.
        """
        place = positions % self.block - self.rank * self.size
        return torch.where((place >= 0) & (place < self.size), blocks * self.size + place, -1)
