"""The choice of blocks by the weights of compressed keys: no score leaves the chip.

A program owns a tile of queries with the heads of a group, and walks the compressed keys twice: first for the largest exponent and
the sum of each row, then for the weights. The lse of the compressed attention, where it is known, saves the first walk.

A compressed key is no longer than a block, so it reaches from the block that it begins in into the next at most. In the second walk
a step has the compressed keys that begin in NEW blocks, and adds up, over these keys and the heads, weights times the strides inside
of the block, and those beyond. The score of a block is its own inside and the beyond of the one before. The best blocks so far are
kept as 64-bit words, the score's bits above, and below them a number that is larger for a lower block, so that ties go to the lower.

Everything after the products of queries and keys is in fp32, and those products are as the inputs allow.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.approximate.native_sparse.selected.kernels.shape import in_log2, strides_of
from rooftile.approximate.native_sparse.selected.tiles import TileTable
from rooftile.exact.backends.triton.scores import LOG2E
from rooftile.runtime.launch import Kernel

# compressed keys of a step, unless more begin in a block
KEYS = 128
# dims of a product in fp32, which has no matrix instruction: a whole head would be unrolled, and its keys fill shared memory
DEPTH = 32
# a block's number is below this
FAR = tl.constexpr(2**31 - 1)
FEW = tl.constexpr(16)


class Choice(NamedTuple):
    """The compile-time configuration."""

    GROUP: int
    HEADS: int  # the heads of a group, padded to a power of two
    QUERIES: int
    TILE: int  # queries, padded so that a matrix product has its rows
    D: int
    BLOCK_D: int
    DEPTH: int  # dims of a product: all of BLOCK_D, or a part at a time
    KEYS: int
    RATIO: int  # strides of a block
    PADDED: int  # the same, padded to a power of two
    NEW: int  # blocks of a step
    MOST: int  # blocks that are kept: a power of two, at least NEW
    LENGTH: int
    STRIDE: int
    BLOCK: int
    COUNT: int
    FIRST: int
    LOCAL: int
    HAS_LSE: bool
    PRECISION: str


@triton.jit
def _scores(q, q_rows, rows_there, k_ptr, k_stride, c, n, position, scale, SHAPE: tl.constexpr):
    """A tile of scores in log2, -inf for compressed keys that are not there or not complete at a query's position.

    q is read from its rows again where a product takes a part of the dims at a time.
    """
    there = (c >= 0) & (c < n)
    k_rows = k_ptr + c.to(tl.int64)[:, None] * k_stride
    if SHAPE.DEPTH == SHAPE.BLOCK_D:
        d = tl.arange(0, SHAPE.BLOCK_D)
        k = tl.load(k_rows + d[None, :], mask=there[:, None] & (d < SHAPE.D)[None, :], other=0.0)
        x = tl.dot(q, tl.trans(k), input_precision=SHAPE.PRECISION)
    else:
        ROWS: tl.constexpr = SHAPE.TILE * SHAPE.HEADS
        KEYS: tl.constexpr = SHAPE.KEYS
        x = tl.zeros((ROWS, KEYS), tl.float32)
        for first in range(0, SHAPE.D, SHAPE.DEPTH):
            d = first + tl.arange(0, SHAPE.DEPTH)
            part = tl.load(q_rows + d[None, :], mask=rows_there[:, None] & (d < SHAPE.D)[None, :], other=0.0)
            k = tl.load(k_rows + d[None, :], mask=there[:, None] & (d < SHAPE.D)[None, :], other=0.0)
            x = tl.dot(part, tl.trans(k), x, input_precision=SHAPE.PRECISION)
    x *= scale * LOG2E
    sees = there[None, :] & (c[None, :] * SHAPE.STRIDE + (SHAPE.LENGTH - 1) <= position[:, None])
    return tl.where(sees, x, float("-inf"))


@triton.jit
def _by_block(p, SHAPE: tl.constexpr):
    """Sums of p (ROWS, KEYS) over the heads of a group and the keys that begin in a block: (TILE, NEW)."""
    p = tl.reshape(p, (SHAPE.TILE, SHAPE.HEADS, SHAPE.NEW, SHAPE.PADDED))
    return tl.sum(tl.sum(p, 3), 1)


@triton.jit(do_not_specialize=["tiles", "H"])
def _choose(
    q_ptr, k_ptr, lse_ptr, chosen_ptr, table_ptr, q_strides, k_strides, tiles, H, scale, SHAPE: tl.constexpr,
):  # fmt: skip
    """chosen (total, Hk, COUNT), with the lse (total, H) of the compressed attention or without."""
    HEADS: tl.constexpr = SHAPE.HEADS
    TILE: tl.constexpr = SHAPE.TILE
    ROWS: tl.constexpr = TILE * HEADS
    KEYS: tl.constexpr = SHAPE.KEYS
    MOST: tl.constexpr = SHAPE.MOST
    NEW: tl.constexpr = SHAPE.NEW
    PADDED: tl.constexpr = SHAPE.PADDED
    tile = tl.program_id(0) % tiles
    hk = tl.program_id(0) // tiles
    held = tl.load(table_ptr + tile * 5 + 1)
    first_position = tl.load(table_ptr + tile * 5 + 2)
    m_row = tl.arange(0, ROWS)
    r, g = m_row // HEADS, m_row % HEADS
    there = (r < held) & (r < SHAPE.QUERIES) & (g < SHAPE.GROUP)
    row, h, position = tl.load(table_ptr + tile * 5).to(tl.int64) + r, hk * SHAPE.GROUP + g, first_position + r
    d = tl.arange(0, SHAPE.DEPTH)
    q_rows = q_ptr + row[:, None] * q_strides[0] + h.to(tl.int64)[:, None] * q_strides[1]
    q = tl.load(q_rows + d[None, :], mask=there[:, None] & (d < SHAPE.D)[None, :], other=0.0)
    n = tl.load(table_ptr + tile * 5 + 4)
    k_ptr += tl.load(table_ptr + tile * 5 + 3).to(tl.int64) * k_strides[0] + hk.to(tl.int64) * k_strides[1]
    # the last compressed key and the last block that one of the queries sees
    last = first_position + held - 1
    stop = tl.minimum(tl.maximum(last - (SHAPE.LENGTH - 1) + SHAPE.STRIDE, 0) // SHAPE.STRIDE, n)
    blocks = tl.maximum(last, -1) // SHAPE.BLOCK + 1

    if SHAPE.HAS_LSE:
        lse = in_log2(tl.load(lse_ptr + row * H + h, mask=there, other=float("inf")))
    else:
        m = tl.full((ROWS,), float("-inf"), tl.float32)
        l = tl.zeros((ROWS,), tl.float32)
        for step in range(tl.cdiv(stop, KEYS)):
            c = step * KEYS + tl.arange(0, KEYS)
            x = _scores(q, q_rows, there, k_ptr, k_strides[0], c, n, position, scale, SHAPE)
            m_new = tl.maximum(m, tl.max(x, 1))
            reference = tl.where(m_new == float("-inf"), 0.0, m_new)
            l = l * tl.exp2(m - reference) + tl.sum(tl.exp2(x - reference[:, None]), 1)
            m = m_new
        lse = tl.where(l == 0.0, float("inf"), m + tl.log2(l))

    # the rows that pad a tile have no weights
    lse = tl.where(there, lse, float("inf"))
    # compressed key `at` of a step begins in its b-th block, at stride `inner` of it
    t, b, i, at = tl.arange(0, TILE), tl.arange(0, NEW), tl.arange(0, MOST), tl.arange(0, KEYS)
    inner = at % PADDED
    inside = tl.minimum(SHAPE.RATIO - inner, SHAPE.LENGTH // SHAPE.STRIDE).to(tl.float32)
    beyond = SHAPE.LENGTH // SHAPE.STRIDE - inside
    # a position before the first key is in no block; division truncates towards zero
    own = tl.where(first_position + t < 0, -1, (first_position + t) // SHAPE.BLOCK)
    best = tl.full((TILE, MOST), -1, tl.int64)
    # this sum goes from the last block of a step to the first block of the next
    left = tl.zeros((TILE,), tl.float32)
    for step in range(tl.cdiv(blocks, NEW)):
        c = tl.where(inner < SHAPE.RATIO, (step * NEW + at // PADDED) * SHAPE.RATIO + inner, n)
        x = _scores(q, q_rows, there, k_ptr, k_strides[0], c, n, position, scale, SHAPE)
        p = tl.exp2(x - lse[:, None])
        own_sum = _by_block(p * inside[None, :], SHAPE)
        next_sum = _by_block(p * beyond[None, :], SHAPE)
        if NEW <= FEW:
            # Triton 3.6 finds no layout for a gather from so few blocks
            is_before = (b[:, None] - 1 == b[None, :])[None, :, :]
            before = tl.sum(tl.where(is_before, next_sum[:, None, :], 0.0), 2)
        else:
            before = tl.gather(next_sum, tl.broadcast_to(tl.maximum(b - 1, 0)[None, :], (TILE, NEW)), 1)
        score = own_sum + tl.where(b[None, :] == 0, left[:, None], before)
        left = tl.sum(tl.where(b[None, :] == NEW - 1, next_sum, 0.0), 1)
        j = step * NEW + b
        is_always = (j[None, :] < SHAPE.FIRST) | (j[None, :] > own[:, None] - SHAPE.LOCAL)
        score = tl.where(is_always, float("inf"), score)
        word = (score.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (-j[None, :] + FAR).to(tl.int64)
        word = tl.where(j[None, :] <= own[:, None], word, -1)
        if NEW < MOST:
            if NEW <= FEW:
                word = tl.max(tl.where((i[:, None] == b[None, :])[None, :, :], word[:, None, :], -1), 2)
            else:
                place = tl.broadcast_to(tl.minimum(i, NEW - 1)[None, :], (TILE, MOST))
                word = tl.where(i[None, :] < NEW, tl.gather(word, place, 1), -1)
        best = tl.topk(tl.reshape(tl.join(best, word), (TILE, 2 * MOST)), MOST)
    number = -(best & FAR).to(tl.int32) + FAR
    number = tl.where((best >= 0) & (i[None, :] < SHAPE.COUNT), number, FAR)
    number = tl.sort(number)
    number = tl.where(number == FAR, -1, number)
    out_row = tl.load(table_ptr + tile * 5).to(tl.int64) + t
    out = chosen_ptr + (out_row[:, None] * (H // SHAPE.GROUP) + hk) * SHAPE.COUNT + i[None, :]
    tl.store(out, number, mask=(t < held)[:, None] & (i < SHAPE.COUNT)[None, :])


_start = Kernel(_choose)


def choose(
    q: Tensor, compressed: Tensor, lse: Tensor | None, table: TileTable, scale: float, length: int, stride: int, block: int,
    count: int, first: int, local: int,
) -> Tensor:  # fmt: skip
    """Returns the blocks (total, Hk, count) int32, rising, then -1, of packed queries (total, H, D).

    lse: of the compressed attention, (total, H) fp32, if it is known.
    table: tiles of queries with the compressed keys in place of the keys.
    """
    shape = choice_of(q, compressed.shape[1], table.queries, length, stride, block, count, first, local, lse is not None)
    chosen = q.new_empty(q.shape[0], compressed.shape[1], count, dtype=torch.int32)
    tiles = table.rows.shape[0]
    if q.shape[0]:
        numbers = (*strides_of(q, compressed), tiles, q.shape[1], scale)
        constants = {"SHAPE": shape, "num_warps": 8 if shape.BLOCK_D > 64 or shape.PRECISION == "ieee" else 4}
        # no kernel reads what stands for an absent lse
        tensors = (q, compressed, chosen if lse is None else lse, chosen, table.rows)
        _start((tiles * compressed.shape[1], 1, 1), (*tensors, *numbers), constants)
    return chosen


def choice_of(
    q: Tensor, Hk: int, queries: int, length: int, stride: int, block: int, count: int, first: int, local: int,
    has_lse: bool = False,
) -> Choice:  # fmt: skip
    """The configuration of a call."""
    group, dim, ratio = q.shape[1] // Hk, q.shape[-1], block // stride
    heads, padded = triton.next_power_of_2(group), triton.next_power_of_2(ratio)
    keys = max(KEYS, padded)
    new = keys // padded
    most = max(triton.next_power_of_2(count), new)
    precision = "ieee" if q.dtype == torch.float32 else "tf32"
    block_d = max(16, triton.next_power_of_2(dim))
    depth = min(block_d, DEPTH) if q.dtype == torch.float32 else block_d
    return Choice(
        group,
        heads,
        queries,
        max(queries, 16 // heads),
        dim,
        block_d,
        depth,
        keys,
        ratio,
        padded,
        new,
        most,
        length,
        stride,
        block,
        count,
        first,
        local,
        has_lse,
        precision,
    )
