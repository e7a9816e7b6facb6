"""Tiles of consecutive queries, and for each the union of the blocks that they chose.

A tile's queries and the heads of their group are the rows of one matrix product, which a single query of few heads could not
fill. Each block of the union has a word: bit r is set if the tile's query r chose it. Everything is in the packed layout, where
sequence b has the tiles from place cu_q[b] // rows + b on; no host reads an offset.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# entries of a part of a block's list
EACH = 2048
# the rows of a tile's product, at least where the group allows it, and the most queries of a tile: the bits of a word
ROWS = 64
MOST_QUERIES = 16
# fp32 has no matrix instruction: the factors of larger products fill shared memory and registers
FP32_ROWS = 16


class TileTable(NamedTuple):
    """The tiles of queries, without their lists."""

    queries: int  # so many to a tile, a power of two
    rows: Tensor  # the table of `Tiles`
    sequence: Tensor  # int64 (tiles,)


class Tiles(NamedTuple):
    """The tiles of queries. Positions are those of keys."""

    queries: int  # so many to a tile, a power of two
    # int32 (tiles, 5): first row, number of queries, first position, first row of the keys, number of keys
    table: Tensor
    sequence: Tensor  # int64 (tiles,)
    counts: Tensor  # int32 (Hk, tiles)
    entries: Tensor  # int32 (Hk, tiles, most, 2): a block and its word; rising


class KeyTiles(NamedTuple):
    """The blocks of keys, and for each the tiles that list it, in parts: all queries choose the first block of a text."""

    table: Tensor  # int32 (places, 3): first row, first position, number of keys of its sequence
    entries: Tensor  # int32 (Hk * tiles * most, 2): a tile and its word
    # int32 (parts, 4): the block, counted through all heads, -1 for none; its first entry and its last, excluded; the place of
    # its sums, -1 if it is the block's only one
    parts: Tensor
    joins: Tensor  # int32 (Hk * places, 2): where the parts of a block are kept, and how many; 0 if there is one
    kept: int  # the most parts that are kept


def queries_for(group: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """Returns the queries of a tile."""
    rows = FP32_ROWS if dtype == torch.float32 else ROWS
    return min(MOST_QUERIES, 1 << max(rows // group, 1).bit_length() - 1)


def table_of(cu_q: Tensor, cu_k: Tensor, total: int, queries: int) -> TileTable:
    """Returns the tiles of `total` queries, so many to a tile; cu_k has the offsets of their sequences' keys."""
    R = queries
    sequences = torch.arange(cu_q.shape[0] - 1, device=cu_q.device)
    first = cu_q[:-1] // R + sequences
    place = torch.arange(total // R + cu_q.shape[0] - 1, device=cu_q.device)
    of = (torch.searchsorted(first, place, right=True) - 1).clamp(min=0)
    T, S = cu_q.diff()[of], cu_k.diff()[of]
    local = (place - first[of]) * R
    rows = torch.stack([cu_q[of] + local, (T - local).clamp(0, R), local + S - T, cu_k[of], S], dim=-1)
    return TileTable(R, rows.to(torch.int32), of)


def tiles_of(
    chosen: Tensor,  # int32 (total_q, Hk, n), -1 for none
    cu_q: Tensor,
    cu_k: Tensor,
    block: int,
    queries: int,
) -> Tiles:
    """Returns the tiles of queries with the unions of their choices. A block past the end of its sequence is in none."""
    total, Hk, n = chosen.shape
    R, table, of = table_of(cu_q, cu_k, total, queries)
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
    return Tiles(R, table, of, counts, torch.stack([blocks.to(torch.int32), words.to(torch.int32)], dim=-1))


def key_tiles_of(tiles: Tiles, cu_k: Tensor, total_k: int, block: int, each: int = EACH) -> KeyTiles:
    """Returns the blocks of keys with the tiles that list them, in their order, in parts of `each`."""
    Hk, count, most = tiles.entries.shape[:3]
    device = cu_k.device
    sequences = torch.arange(cu_k.shape[0] - 1, device=device)
    first = cu_k[:-1] // block + sequences
    place = torch.arange(total_k // block + cu_k.shape[0] - 1, device=device)
    of = (torch.searchsorted(first, place, right=True) - 1).clamp(min=0)
    position = (place - first[of]) * block
    table = torch.stack([cu_k[of] + position, position, cu_k.diff()[of]], dim=-1).to(torch.int32)
    places = len(place)
    listed = tiles.entries[..., 0] + first[tiles.sequence][:, None]
    is_there = torch.arange(most, device=device) < tiles.counts[..., None]
    heads = torch.arange(Hk, device=device)[:, None, None] * places
    keys, order = torch.where(is_there, listed + heads, Hk * places).flatten().sort(stable=True)
    starts = torch.searchsorted(keys, torch.arange(Hk * places + 1, device=device))
    tile = torch.arange(count, device=device, dtype=torch.int32)[:, None].expand(Hk, count, most)
    entries = torch.stack([tile.flatten()[order], tiles.entries[..., 1].flatten()[order]], dim=-1)
    return KeyTiles(table, entries, *_parts(starts, len(entries), each))


def _parts(starts: Tensor, most: int, each: int) -> tuple[Tensor, Tensor, int]:
    """Cuts lists of at most `most` entries in all, which begin at `starts`, into parts; no length is read from the device."""
    blocks = len(starts) - 1
    count = (-(-starts.diff() // each)).clamp(min=1)
    shared = torch.where(count > 1, count, 0)
    ends, kept = count.cumsum(0), shared.cumsum(0) - shared
    part = torch.arange(blocks + most // each, device=starts.device)
    of = torch.searchsorted(ends, part, right=True).clamp(max=max(blocks - 1, 0))
    if not blocks:
        return part.new_zeros(0, 4, dtype=torch.int32), shared.new_zeros(0, 2, dtype=torch.int32), 0
    within = part - (ends - count)[of]
    first = starts[of] + within * each
    place = torch.where(shared[of] > 0, kept[of] + within, -1)
    is_part = part < ends[-1]
    parts = torch.stack([torch.where(is_part, of, -1), first, torch.minimum(first + each, starts[of + 1]), place], dim=-1)
    return parts.to(torch.int32), torch.stack([kept, shared], dim=-1).to(torch.int32), 2 * most // each
