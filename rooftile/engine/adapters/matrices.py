"""`Matrices`: the matrices of all adapters beside one projection, in memory of fixed size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from rooftile.engine.adapters.groups import LARGE, SMALL
from rooftile.engine.adapters.targets import column_blocks


class Work(NamedTuple):
    """The part of B that a program reads at once.

    Args:
        ranks: how many ranks, a power of two.
        columns: how many columns of the result.
    """

    ranks: int
    columns: int


def work_of(rows: int, rank: int, dtype: torch.dtype) -> Work:
    """Returns the work of a program whose tile has `rows` rows, where there is room for `rank`.

    Few rows wait for B, so a program reads 16 KB of it at once; many have their own numbers in registers. There are no matrix
    units for fp32, whose products take more registers.
    """
    wide = dtype == torch.float32
    ranks = min(1 << (rank - 1).bit_length(), 16 if wide else 64 if rows == SMALL else 32)
    if rows == SMALL:
        return Work(ranks, (2048 if wide else 8192) // ranks)
    return Work(ranks, 64 if wide else 256)


class Matrices(NamedTuple):
    """The matrices of all slots beside one projection, which is made of parts with matrices of their own.

    Args:
        a: (slots, parts * R, in), the rows of each part's A; what a rank leaves of R is 0.
        b: (slots, R, out): rows of one rank side by side, so that a smaller rank reads whole lines of memory.
        ranks: (slots, parts) int32, the ranks rounded up to 16; 0 where an adapter has nothing for a part.
        bounds: the first column of each part in the result, and the end of the last.
        blocks: (blocks, 4) int32, by the rows of a tile: the blocks of the result that programs compute: part, first column, end
            of the part, nothing.
    """

    a: Tensor
    b: Tensor
    ranks: Tensor
    bounds: tuple[int, ...]
    blocks: Mapping[int, Tensor]

    @classmethod
    def of(cls, a: Tensor, b: Tensor, ranks: Tensor, bounds: tuple[int, ...]) -> Matrices:
        """Makes the matrices of a projection with such bounds."""
        blocks = {}
        for rows in (SMALL, LARGE):
            found = [(*block, 0) for block in column_blocks(bounds, work_of(rows, b.shape[1], b.dtype).columns)]
            blocks[rows] = torch.tensor(found, dtype=torch.int32, device=a.device)
        return cls(a, b, ranks, bounds, blocks)

    @property
    def rank(self) -> int:
        """The rank that there is room for."""
        return self.b.shape[1]

    @property
    def aligned(self) -> bool:
        """Whether all parts of the result begin at multiples of 16 columns."""
        return all(bound % 16 == 0 for bound in self.bounds)

    def clear(self, slot: int) -> None:
        """Makes a slot add nothing."""
        self.ranks[slot] = 0

    def write(self, slot: int, part: int, a: Tensor, b: Tensor) -> None:
        """Writes the matrices of a part, (r, in) and (rows, r)."""
        rank = len(a)
        begin, end = self.bounds[part : part + 2]
        mine = self.a[slot, part * self.rank : (part + 1) * self.rank]
        mine.zero_()[:rank].copy_(a)
        self.b[slot, :, begin:end].zero_()[:rank].copy_(b.T)
        self.ranks[slot, part] = -(-rank // 16) * 16
