"""`Matrices`: the matrices of all adapters beside one projection, in memory of fixed size."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rooftile.engine.adapters.targets import column_blocks

# columns of the result that a program computes
COLUMNS = 128


class Matrices(NamedTuple):
    """The matrices of all slots beside one projection, which is made of parts with matrices of their own.

    Args:
        a: (slots, parts * R, in), the rows of each part's A; what a rank leaves of R is 0.
        b: (slots, out, R).
        ranks: (slots, parts) int32, the ranks rounded up to 16; 0 where an adapter has nothing for a part.
        bounds: the first column of each part in the result, and the end of the last.
        blocks: (blocks, 4) int32: parts of the result that programs compute: part, first column, end of the part, nothing.
    """

    a: Tensor
    b: Tensor
    ranks: Tensor
    bounds: tuple[int, ...]
    blocks: Tensor

    @classmethod
    def of(cls, a: Tensor, b: Tensor, ranks: Tensor, bounds: tuple[int, ...]) -> Matrices:
        """Makes the matrices of a projection with such bounds."""
        blocks = torch.tensor([(*block, 0) for block in column_blocks(bounds, COLUMNS)], dtype=torch.int32, device=a.device)
        return cls(a, b, ranks, bounds, blocks)

    @property
    def rank(self) -> int:
        """The rank that there is room for."""
        return self.b.shape[2]

    def clear(self, slot: int) -> None:
        """Makes a slot add nothing."""
        self.ranks[slot] = 0

    def write(self, slot: int, part: int, a: Tensor, b: Tensor) -> None:
        """Writes the matrices of a part, (r, in) and (rows, r)."""
        rank = len(a)
        begin, end = self.bounds[part : part + 2]
        mine = self.a[slot, part * self.rank : (part + 1) * self.rank]
        mine.zero_()[:rank].copy_(a)
        self.b[slot, begin:end].zero_()[:, :rank].copy_(b)
        self.ranks[slot, part] = -(-rank // 16) * 16
