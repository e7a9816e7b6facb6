"""Lists on the device: the union of the blocks that a tile of queries chose, and for each block the queries that chose it."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.approximate.native_sparse.selected.tiles import Tiles, tiles_of
from rooftile.runtime.launch import Kernel

# choices of a tile that one program sorts; PyTorch's operations make the lists of more
MOST_CHOICES = 1024
# the fewest that a sort is given
LEAST_CHOICES = 32
# choices that a program takes where they need no order
PIECE = 1024
# one more than the largest block's word, which holds a block and a query of a tile
NONE = tl.constexpr(2**31 - 1)


class KeyLists(NamedTuple):
    """The queries that chose a block of keys and are not before it, for all blocks of all key heads, head by head.

    A query that lists a block twice has -1 in the place of its second entry. The queries of block b are
    `queries[starts[b] : starts[b + 1]]`, rising. Sequence b has blocks from place `cu_k[b] // block + b` on.
    """

    queries: Tensor  # int32 (total_q * Hk * n,)
    starts: Tensor  # int64 (Hk * places + 1,)


class Union(NamedTuple):
    """The compile-time configuration of the union of a tile."""

    QUERIES: int
    COUNT: int  # choices of a query
    PADDED: int  # the same, padded to a power of two
    BLOCK: int


@triton.jit
def sequence_of(place, offsets_ptr, sequences, SIZE: tl.constexpr):
    """The sequence of each place: the last one that begins at or before it.

    With SIZE, places count pieces of SIZE rows, of which sequence b has some from `offsets[b] // SIZE + b` on.
    """
    found = place * 0
    step = 1
    while step * 2 < sequences:
        step *= 2
    while step > 0:
        at = found + step
        there = at < sequences
        first = tl.load(offsets_ptr + at, mask=there, other=0)
        if SIZE:
            first = first // SIZE + at
        found = tl.where(there & (first <= place), at, found)
        step //= 2
    return found


@triton.jit(do_not_specialize=["sequences", "tiles", "heads"])
def _unite(
    chosen_ptr, cu_q_ptr, cu_k_ptr, table_ptr, counts_ptr, entries_ptr, sequences, tiles, heads, UNION: tl.constexpr
):  # fmt: skip
    """The rows of `Tiles` for one tile and one key head."""
    QUERIES: tl.constexpr = UNION.QUERIES
    PADDED: tl.constexpr = UNION.PADDED
    MOST: tl.constexpr = QUERIES * PADDED
    tile, hk = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    b = sequence_of(tile, cu_q_ptr, sequences, QUERIES)
    first_q, first_k = tl.load(cu_q_ptr + b), tl.load(cu_k_ptr + b)
    T, S = tl.load(cu_q_ptr + b + 1) - first_q, tl.load(cu_k_ptr + b + 1) - first_k
    local = (tile - first_q // QUERIES - b) * QUERIES
    held = tl.minimum(tl.maximum(T - local, 0), QUERIES)
    if hk == 0:
        tl.store(table_ptr + tile * 5, first_q + local)
        tl.store(table_ptr + tile * 5 + 1, held)
        tl.store(table_ptr + tile * 5 + 2, local + S - T)
        tl.store(table_ptr + tile * 5 + 3, first_k)
        tl.store(table_ptr + tile * 5 + 4, S)
    at = tl.arange(0, MOST)
    r, i = at // PADDED, at % PADDED
    row = (first_q + local).to(tl.int64) + r
    listed = (r < held) & (i < UNION.COUNT)
    block = tl.load(chosen_ptr + (row * heads + hk) * UNION.COUNT + i, mask=listed, other=-1)
    is_there = (block >= 0) & (block < tl.cdiv(S, UNION.BLOCK))
    # blocks have 16 tokens or more, so a block and one of 16 queries fit
    word = tl.sort(tl.where(is_there, block * 16 + r, NONE))
    block = word // 16
    before = tl.gather(block, tl.maximum(at - 1, 0), 0)
    is_listed = word != NONE
    is_first = is_listed & ((before != block) | (at == 0))
    place = tl.cumsum(is_first.to(tl.int32), 0) - 1
    list_row = (hk * tiles + tile).to(tl.int64)
    to = entries_ptr + (list_row * (QUERIES * UNION.COUNT) + place) * 2
    tl.store(to, block, mask=is_first)
    tl.atomic_or(to + 1, 1 << (word % 16), mask=is_listed, sem="relaxed")
    tl.store(counts_ptr + list_row, tl.sum(is_first.to(tl.int32), 0))


@triton.jit(do_not_specialize=["sequences", "total", "heads", "places"])
def _number(
    chosen_ptr, cu_q_ptr, cu_k_ptr, numbers_ptr, sequences, total, heads, places, COUNT: tl.constexpr, BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
):  # fmt: skip
    """The number of each chosen block among the places of all heads, and one past them for a block that the query does not see."""
    at = tl.program_id(0).to(tl.int64) * PIECE + tl.arange(0, PIECE)
    there = at < total
    row = (at // COUNT // heads).to(tl.int32)
    hk = (at // COUNT % heads).to(tl.int32)
    b = sequence_of(row, cu_q_ptr, sequences, 0)
    first_q = tl.load(cu_q_ptr + b, mask=there, other=0)
    first_k = tl.load(cu_k_ptr + b, mask=there, other=0)
    T = tl.load(cu_q_ptr + b + 1, mask=there, other=0) - first_q
    S = tl.load(cu_k_ptr + b + 1, mask=there, other=0) - first_k
    position = row - first_q + S - T
    block = tl.load(chosen_ptr + at, mask=there, other=-1)
    sees = (block >= 0) & (position >= 0) & (block <= position // BLOCK)
    tl.store(numbers_ptr + at, tl.where(sees, hk * places + first_k // BLOCK + b + block, heads * places), mask=there)


@triton.jit(do_not_specialize=["total", "each"])
def _name(numbers_ptr, order_ptr, queries_ptr, total, each, PIECE: tl.constexpr):
    """The queries of sorted choices, of which a query has `each`; -1 where it names a block again."""
    at = tl.program_id(0).to(tl.int64) * PIECE + tl.arange(0, PIECE)
    there, has_before = at < total, (at < total) & (at > 0)
    query = tl.load(order_ptr + at, mask=there, other=0) // each
    before = tl.load(order_ptr + at - 1, mask=has_before, other=0) // each
    is_same = tl.load(numbers_ptr + at, mask=there, other=0) == tl.load(numbers_ptr + at - 1, mask=has_before, other=-1)
    tl.store(queries_ptr + at, tl.where(has_before & is_same & (query == before), -1, query).to(tl.int32), mask=there)


_start_unite, _start_number, _start_name = Kernel(_unite), Kernel(_number), Kernel(_name)


def unions(chosen: Tensor, cu_q: Tensor, cu_k: Tensor, block: int, queries: int) -> Tiles:
    """`tiles_of` in one kernel, where the choices of a tile are few enough to be sorted in registers."""
    total, Hk, n = chosen.shape
    padded = max(triton.next_power_of_2(n), LEAST_CHOICES // queries) if n else 0
    if not n or not total or queries * padded > MOST_CHOICES:
        return tiles_of(chosen, cu_q, cu_k, block, queries)
    sequences = cu_q.shape[0] - 1
    tiles = total // queries + sequences
    table = chosen.new_empty(tiles, 5)
    # bits are added to the words
    counts, entries = chosen.new_empty(Hk, tiles), chosen.new_zeros(Hk, tiles, queries * n, 2)
    tensors = (chosen.contiguous(), cu_q, cu_k, table, counts, entries)
    _start_unite((tiles * Hk, 1, 1), (*tensors, sequences, tiles, Hk), _constants(Union(queries, n, padded, block)))
    return Tiles(queries, table, counts, entries)


def key_lists(chosen: Tensor, cu_q: Tensor, cu_k: Tensor, total_k: int, block: int) -> KeyLists:
    """Returns the queries (in `chosen`, (total_q, Hk, n) int32) of all blocks of `total_k` keys."""
    (_, Hk, n), total, sequences = chosen.shape, chosen.numel(), cu_q.shape[0] - 1
    places = total_k // block + sequences
    numbers, queries = chosen.new_empty(total), chosen.new_empty(total)
    bounds = torch.arange(Hk * places + 1, dtype=torch.int32, device=chosen.device)
    if total:
        grid, piece = (-(-total // PIECE), 1, 1), _constants_of_piece(n, block)
        _start_number(grid, (chosen.contiguous(), cu_q, cu_k, numbers, sequences, total, Hk, places), piece)
        numbers, order = numbers.sort(stable=True)
        _start_name(grid, (numbers, order, queries, total, Hk * n), _constants_of_names())
    return KeyLists(queries, torch.searchsorted(numbers, bounds))


@cache
def _constants(union: Union) -> dict[str, Any]:
    return {"UNION": union, "num_warps": 1 if union.QUERIES * union.PADDED <= 128 else 4}


@cache
def _constants_of_piece(count: int, block: int) -> dict[str, Any]:
    return {"COUNT": count, "BLOCK": block, "PIECE": PIECE}


@cache
def _constants_of_names() -> dict[str, Any]:
    return {"PIECE": PIECE}
