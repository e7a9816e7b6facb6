"""Tiles of consecutive queries, and for each the union of the blocks that they chose.

A tile's queries and the heads of their group are the rows of one matrix product, which a single query of few heads could not
fill. Each block of the union has a word: bit r is set if the tile's query r chose it. Everything is in the packed layout, where
sequence b has the tiles from place cu_q[b] // rows + b on; no host reads an offset.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# the rows of a tile's product, at least where the group allows it, and the most queries of a tile: the bits of a word
ROWS = 64
MOST_QUERIES = 16
# fp32 has no matrix instruction: the factors of larger products fill shared memory and registers
FP32_ROWS = 16


class TileTable(NamedTuple):
    """The tiles of queries, without their lists."""

    queries: int  # queries per tile, a power of two
    rows: Tensor  # the table of `Tiles`


class Tiles(NamedTuple):
    """The tiles of queries. Positions are positions of keys."""

    queries: int  # queries per tile, a power of two
    # int32 (tiles, 5): first row, number of queries, first position, first row of the keys, number of keys
    table: Tensor
    counts: Tensor  # int32 (Hk, tiles)
    entries: Tensor  # int32 (Hk, tiles, most, 2): a block and its word; rising


def queries_for(group: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """Returns the queries of a tile."""
    rows = FP32_ROWS if dtype == torch.float32 else ROWS
    return min(MOST_QUERIES, 1 << max(rows // group, 1).bit_length() - 1)


def queries_of_step(group: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """Returns the queries of a step over those that chose a block: no bits say which, so there may be more."""
    rows = FP32_ROWS if dtype == torch.float32 else ROWS
    return 1 << max(rows // group, 1).bit_length() - 1


def table_of(cu_q: Tensor, cu_k: Tensor, total: int, queries: int) -> TileTable:
    """Returns the tiles of `total` queries, `queries` to a tile; cu_k has the offsets of their sequences' keys."""
    R = queries
    sequences = torch.arange(cu_q.shape[0] - 1, device=cu_q.device)
    first = cu_q[:-1] // R + sequences
    place = torch.arange(total // R + cu_q.shape[0] - 1, device=cu_q.device)
    of = (torch.searchsorted(first, place, right=True) - 1).clamp(min=0)
    T, S = cu_q.diff()[of], cu_k.diff()[of]
    local = (place - first[of]) * R
    rows = torch.stack([cu_q[of] + local, (T - local).clamp(0, R), local + S - T, cu_k[of], S], dim=-1)
    return TileTable(R, rows.to(torch.int32))


def tiles_of(
    chosen: Tensor,  # int32 (total_q, Hk, n), -1 for none
    cu_q: Tensor,
    cu_k: Tensor,
    block: int,
    queries: int,
) -> Tiles:
    """Returns the tiles of queries with the unions of their choices. A block past the end of its sequence is in none."""
    total, Hk, n = chosen.shape
    R, table = table_of(cu_q, cu_k, total, queries)
    row, held, _, _, S = table.unbind(-1)
    rows = row[:, None] + torch.arange(R, device=chosen.device)
    is_row = torch.arange(R, device=chosen.device) < held[:, None]  # (tiles, R)
    # by head and tile: the choices of R queries
    listed = chosen[rows.clamp(max=max(total - 1, 0))].permute(2, 0, 1, 3) if total else chosen.new_zeros(Hk, len(row), R, n)
    # compared as blocks: a large index times the size of a block would pass int32
    is_there = is_row[..., None] & (listed >= 0) & (listed < -(-S // block)[:, None, None])
    none = torch.iinfo(torch.int32).max
    keys, order = torch.where(is_there, listed, none).flatten(-2).sort(dim=-1, stable=True)  # (Hk, tiles, R n)
    bits = (1 << (order // max(n, 1))).masked_fill(keys == none, 0)
    is_new = torch.ones_like(keys, dtype=torch.bool)
    is_new[..., 1:] = keys[..., 1:] != keys[..., :-1]
    is_new &= keys != none
    # a query that lists a block twice sees it once
    is_again = torch.zeros_like(is_new)
    is_again[..., 1:] = (keys[..., 1:] == keys[..., :-1]) & (bits[..., 1:] == bits[..., :-1])
    to = (is_new.cumsum(-1) - 1).clamp(min=0)
    words = torch.zeros_like(bits).scatter_add_(-1, to, bits.masked_fill(is_again, 0))
    blocks = torch.zeros_like(keys).scatter_(-1, torch.where(is_new, to, keys.shape[-1] - 1), keys)
    counts = is_new.sum(-1, dtype=torch.int32)
    if keys.shape[-1]:
        # blocks that are there again were written to the last place, which is right only where the union fills it
        is_full = counts == keys.shape[-1]
        blocks[..., -1] = torch.where(is_full, keys[..., -1], 0)
    return Tiles(R, table, counts, torch.stack([blocks.to(torch.int32), words.to(torch.int32)], dim=-1))
