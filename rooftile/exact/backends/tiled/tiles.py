"""The tiles of a score matrix, and those that hold visible pairs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rooftile.exact.masks import Mask, key_range, sees_all

# Rows of a tile (over the query heads of one key head), keys of a tile, and scores per portion over all its heads: 2 MiB
# of fp32, so that they and their gradients stay in the L2 caches of two cores. The fastest, or close to it, of eleven
# choices timed at lengths of 256 to 4,096 (two Sapphire Rapids cores, 2026-11).
ROWS = 256
KEYS = 512
SCORES = 4 * ROWS * KEYS


class Tile(NamedTuple):
    """Queries [t, t_stop) against keys [s, s_stop), and whether some of its pairs are hidden."""

    t: int
    t_stop: int
    s: int
    s_stop: int
    partial: bool


def rows_for(group: int) -> int:
    """Returns the queries per tile if `group` query heads share a key head: their rows are stacked in one product."""
    return max(ROWS // group, 16)


def heads_for(group: int, T: int, S: int, Hk: int) -> int:
    """Returns the key heads per portion. It depends on one sequence only, never on the batch."""
    scores = group * min(rows_for(group), max(T, 1)) * min(KEYS, max(S, 1))
    return min(Hk, max(1, SCORES // scores))


def query_tiles(T: int, group: int) -> Iterator[tuple[int, int]]:
    rows = rows_for(group)
    for t in range(0, T, rows):
        yield t, min(t + rows, T)


def key_tiles(mask: Mask, t: int, t_stop: int, T: int, S: int) -> Iterator[Tile]:
    """Yields the tiles of queries [t, t_stop) that hold a visible pair."""
    start, stop = key_range(mask, t, t_stop, T, S)
    for s in range(start, stop, KEYS):
        s_stop = min(s + KEYS, stop)
        yield Tile(t, t_stop, s, s_stop, not sees_all(mask, t, t_stop, s, s_stop, T, S))


def hidden_pairs(mask: Mask, tile: Tile, T: int, S: int) -> Tensor:
    """Marks the hidden pairs of a tile: booleans (t_stop - t, s_stop - s)."""
    i = torch.arange(tile.t, tile.t_stop)[:, None] + (S - T)
    j = torch.arange(tile.s, tile.s_stop)
    return (j < mask.first_key(i)) | (j > mask.last_key(i))
