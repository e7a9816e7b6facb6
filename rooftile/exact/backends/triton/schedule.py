"""Assigns tiles of heads of sequences to programs, and to a tile of queries the tiles of keys that it walks.

Dense: heads are taken in waves whose keys and values fit in the L2 cache together, and inside a wave the tiles with the most
work go first (under a causal mask the last queries), so that the chip does not wait for one long tile at the end.

Packed: sequence b owns the slots from cu[b] // BLOCK + b on. That is never fewer than its tiles, and needs no prefix sum,
no longest length and no word from the host; a slot past a sequence's end has nothing to do.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from rooftile.exact.backends.device.listed import List
from rooftile.exact.backends.device.visibility import first_key, last_key


@triton.jit
def dense_tile(pid, tiles, BH, wave, LAST_FIRST: tl.constexpr):
    """The (batch and head, tile) of program `pid`: `wave` heads run together."""
    i_wave = pid // (wave * tiles)
    here = tl.minimum(wave, BH - i_wave * wave)
    rank = pid - i_wave * wave * tiles
    i_bh = i_wave * wave + rank % here
    i_tile = rank // here
    if LAST_FIRST:
        i_tile = tiles - 1 - i_tile
    return i_bh, i_tile


@triton.jit
def packed_tile(slot, cu, B, BLOCK: tl.constexpr):
    """The (sequence, tile) of a slot; the tile may lie past the sequence's end."""
    low = 0
    high = B
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu + middle).to(tl.int32) // BLOCK + middle <= slot:
            low = middle
        else:
            high = middle
    return low, slot - (tl.load(cu + low).to(tl.int32) // BLOCK + low)


class TilePlace(NamedTuple):
    """A program's tile: of which sequence and head, and where the sequence lies."""

    b: tl.tensor
    h: tl.tensor
    i: tl.tensor  # the tile's number in the head
    bh: tl.tensor  # batch and head as one number; packed: the head
    row_0: tl.tensor  # the sequence's first query in a batch that is contiguous
    key_0: tl.tensor  # and its first key
    T: tl.tensor
    S: tl.tensor


@triton.jit
def place_of(
    n, cu_ptr, cu_q_ptr, cu_k_ptr, B, H, T, S, tiles, wave, BLOCK: tl.constexpr, LAST_FIRST: tl.constexpr, PACKED: tl.constexpr
):  # fmt: skip
    """Finds tile number n of H heads; cu_ptr has the offsets of the rows that are cut into tiles, queries or keys."""
    if PACKED:
        bh = n % H
        h = bh
        b, i = packed_tile(n // H, cu_ptr, B, BLOCK)
        row_0 = tl.load(cu_q_ptr + b).to(tl.int64)
        key_0 = tl.load(cu_k_ptr + b).to(tl.int64)
        T = (tl.load(cu_q_ptr + b + 1) - row_0).to(tl.int32)
        S = (tl.load(cu_k_ptr + b + 1) - key_0).to(tl.int32)
    else:
        bh, i = dense_tile(n, tiles, B * H, wave, LAST_FIRST)
        b = bh // H
        h = bh % H
        row_0 = b.to(tl.int64) * T
        key_0 = b.to(tl.int64) * S
    return TilePlace(b, h, i, bh, row_0, key_0, T, S)


@triton.jit
def first_of_sequence(ptr, strides, b, row_0, PACKED: tl.constexpr):
    """Points to the first row of a sequence in head 0; strides are (batch, row, head)."""
    return ptr + (row_0 * strides[1] if PACKED else b.to(tl.int64) * strides[0])


@triton.jit
def first_of_head(ptr, strides, b, row_0, h, PACKED: tl.constexpr):
    """Points to the first row of a sequence in head h."""
    return first_of_sequence(ptr, strides, b, row_0, PACKED) + h.to(tl.int64) * strides[2]


class KeyTiles(NamedTuple):
    """The keys that a tile of queries walks: masked ones from `start` on, clear ones, and masked ones from `clear_stop` on.

    Along a list of blocks all are masked, and to the right.
    """

    start: tl.tensor
    clear_start: tl.tensor
    clear_stop: tl.tensor
    left: tl.tensor  # how many tiles of each
    clear: tl.tensor
    right: tl.tensor
    safe: tl.tensor  # how many tiles of SAFE_S keys all of them are
    blocks: List


@triton.jit
def key_tiles(
    t_0, T, S, mask, lists, cu_q_ptr, b, h,
    SPEC: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, SAFE_S: tl.constexpr,
):  # fmt: skip
    """Finds the keys that some of BLOCK_T queries from t_0 on see, and within them the keys that all see."""
    offset = S - T
    top = t_0 + offset
    bottom = tl.minimum(t_0 + BLOCK_T, T) - 1 + offset
    start = first_key(top, mask, SPEC) // BLOCK_S * BLOCK_S
    stop = last_key(bottom, S, mask, SPEC) + 1
    clear_start = tl.cdiv(first_key(bottom, mask, SPEC), BLOCK_S) * BLOCK_S
    clear_stop = tl.maximum(last_key(top, S, mask, SPEC) + 1, 0) // BLOCK_S * BLOCK_S
    stop = tl.maximum(stop, start)
    clear_start = tl.minimum(clear_start, tl.cdiv(stop, BLOCK_S) * BLOCK_S)
    clear_stop = tl.maximum(clear_stop, clear_start)
    left = (clear_start - start) // BLOCK_S
    right = tl.cdiv(tl.maximum(stop - clear_stop, 0), BLOCK_S)
    clear = (clear_stop - clear_start) // BLOCK_S
    safe = tl.cdiv(stop - start, SAFE_S)
    blocks = List(lists.entries_ptr, lists.bits_ptr, lists.numbers[4])
    if SPEC.BLOCKS:
        stride_b, stride_h, per, most, part = lists.numbers
        row = b.to(tl.int64) * stride_b + (h // per) * stride_h + t_0 // SPEC.LIST_T
        if SPEC.PACKED:
            row += tl.load(cu_q_ptr + b).to(tl.int32) // SPEC.LIST_T + b
        # a slot past the end has no list
        count = tl.load(lists.counts_ptr + tl.where(S > 0, row, 0))
        count = tl.where(S > 0, tl.maximum(tl.minimum(count, most), 0), 0)
        clear = 0
        left = 0
        right = count * (SPEC.LIST_S // BLOCK_S)
        safe = count * (SPEC.LIST_S // SAFE_S)
        bits_row = row * part * (SPEC.LIST_T * (SPEC.LIST_S // 32))
        blocks = List(lists.entries_ptr + row * most, lists.bits_ptr + bits_row, part)
    return KeyTiles(start, clear_start, clear_stop, left, clear, right, safe, blocks)
