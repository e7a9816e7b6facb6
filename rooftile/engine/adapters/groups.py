"""`RowGroups`: the rows of a step, grouped by their adapters and cut into tiles, as products with adapters read them.

A tile is some rows of one adapter, which need not lie side by side. Rows of the base are in no tile.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# rows of a tile in a step of few rows, such as a decode step, and of more: as many as a product with matrix units has at least
SMALL, LARGE = 16, 64
# rows up to which tiles are small
FEW = 512
# a tile is four numbers: slot of the adapter, its first row in the order, how many rows, and nothing, so that 16 bytes align
WIDTH = 4


class RowGroups(NamedTuple):
    """The tiles of a step, on its device.

    Args:
        buffer: int32: the tiles, and then the rows in their order.
        tiles: how many tiles there are, with empty ones.
        block: the most rows of a tile.
    """

    buffer: Tensor
    tiles: int
    block: int

    @property
    def table(self) -> Tensor:
        """The tiles (tiles, 4)."""
        return self.buffer[: WIDTH * self.tiles].view(self.tiles, WIDTH)

    @property
    def order(self) -> Tensor:
        """The rows, by adapters."""
        return self.buffer[WIDTH * self.tiles :]


def block_of(rows: int) -> int:
    """Returns the most rows of a tile in a step of `rows` rows."""
    return SMALL if rows <= FEW else LARGE


def most_tiles(rows: int, adapters: int) -> int:
    """Returns how many tiles a step of `rows` rows has at most."""
    return min(rows, rows // block_of(rows) + adapters)


def group_rows(slots: Tensor, *, rows: int | None = None, tiles: int | None = None) -> RowGroups:
    """Groups rows, on the host.

    Args:
        slots: (n,), the slot of each row's adapter; -1 for the base.
        rows: the rows of a step that is padded; None for n.
        tiles: how many tiles to make, the last ones empty; None for as many as there are.
    """
    given = slots.numpy()
    rows = len(given) if rows is None else rows
    block = block_of(rows)
    adapted = np.flatnonzero(given >= 0)
    order = adapted[np.argsort(given[adapted], kind="stable")]
    each, counts = np.unique(given[order], return_counts=True)
    found, start = [], 0
    for slot, count in zip(each.tolist(), counts.tolist(), strict=True):
        found += [(slot, start + n, min(block, count - n), 0) for n in range(0, count, block)]
        start += count
    tiles = len(found) if tiles is None else tiles
    buffer = torch.zeros(WIDTH * tiles + rows, dtype=torch.int32)
    if found:
        buffer[: WIDTH * len(found)] = torch.tensor(found, dtype=torch.int32).flatten()
        buffer[WIDTH * tiles : WIDTH * tiles + len(order)] = torch.from_numpy(order)
    return RowGroups(buffer, tiles, block)
