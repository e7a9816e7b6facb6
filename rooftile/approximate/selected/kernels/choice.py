"""The choice of blocks by the weights of compressed keys: no score leaves the chip.

A program owns a tile of queries with the heads of a group, and walks the compressed keys twice: first for the largest exponent and
the sum of each row, then for the weights. The lse of the compressed attention, where it is known, saves the first walk. In the second the weights are summed over the heads, and over the compressed keys that
overlap with a block, by products with matrices of small whole numbers. The best blocks so far are kept as 64-bit words, the score's
bits above, and below them a number that is larger for a lower block, so that ties go to the lower one.

Everything after the products of queries and keys is in fp32, and those products are as the inputs allow.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.approximate.selected.kernels.shape import in_log2, rows_of, strides_of
from rooftile.approximate.selected.tiles import TileTable
from rooftile.backends.triton.scores import LOG2E
from rooftile.launch import Kernel

# compressed keys of a step, and queries of a tile as a matrix product takes them
KEYS, QUERIES = 128, 16
# a block's number is below this
FAR = tl.constexpr(2**31 - 1)


class Choice(NamedTuple):
    """The compile-time configuration."""

    GROUP: int
    QUERIES: int
    ROWS: int
    D: int
    BLOCK_D: int
    KEYS: int
    RATIO: int  # strides of a block
    BACK: int  # compressed keys that begin before a block and overlap with it
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
def _scores(q, k_ptr, k_stride, c, n, position, scale, SHAPE: tl.constexpr):
    """A tile of scores in log2, -inf for compressed keys that are not there or not complete at a query's position."""
    d = tl.arange(0, SHAPE.BLOCK_D)
    there = (c >= 0) & (c < n)
    k_tile = k_ptr + c.to(tl.int64)[:, None] * k_stride + d[None, :]
    k = tl.load(k_tile, mask=there[:, None] & (d < SHAPE.D)[None, :], other=0.0)
    x = tl.dot(q, tl.trans(k), input_precision=SHAPE.PRECISION) * (scale * LOG2E)
    sees = there[None, :] & (c[None, :] * SHAPE.STRIDE + (SHAPE.LENGTH - 1) <= position[:, None])
    return tl.where(sees, x, float("-inf"))


@triton.jit(do_not_specialize=["tiles", "H"])
def _choose(
    q_ptr, k_ptr, lse_ptr, chosen_ptr, table_ptr, q_strides, k_strides, tiles, H, scale, SHAPE: tl.constexpr,
):  # fmt: skip
    """chosen (total, Hk, COUNT), with the lse (total, H) of the compressed attention or without."""
    ROWS: tl.constexpr = SHAPE.ROWS
    KEYS: tl.constexpr = SHAPE.KEYS
    MOST: tl.constexpr = SHAPE.MOST
    NEW: tl.constexpr = SHAPE.NEW
    tile = tl.program_id(0) % tiles
    hk = tl.program_id(0) // tiles
    row, h, position, r, there = rows_of(table_ptr, tile, hk, SHAPE)
    d = tl.arange(0, SHAPE.BLOCK_D)
    q_tile = q_ptr + row[:, None] * q_strides[0] + h[:, None] * q_strides[1] + d[None, :]
    q = tl.load(q_tile, mask=there[:, None] & (d < SHAPE.D)[None, :], other=0.0)
    held = tl.load(table_ptr + tile * 5 + 1)
    first_position = tl.load(table_ptr + tile * 5 + 2)
    n = tl.load(table_ptr + tile * 5 + 4)
    k_ptr += tl.load(table_ptr + tile * 5 + 3).to(tl.int64) * k_strides[0] + hk * k_strides[1]
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
            x = _scores(q, k_ptr, k_strides[0], c, n, position, scale, SHAPE)
            m_new = tl.maximum(m, tl.max(x, 1))
            reference = tl.where(m_new == float("-inf"), 0.0, m_new)
            l = l * tl.exp2(m - reference) + tl.sum(tl.exp2(x - reference[:, None]), 1)
            m = m_new
        lse = tl.where(l == 0.0, float("inf"), m + tl.log2(l))

    # row t of the tile sums its heads; block b of a step sums the compressed keys that overlap with it
    t = tl.arange(0, 16)
    heads = tl.where((r[None, :] == t[:, None]) & there[None, :], 1.0, 0.0)
    at = tl.arange(0, KEYS) - SHAPE.BACK
    b = tl.arange(0, MOST)
    begins = at[:, None] - b[None, :] * SHAPE.RATIO
    ends = tl.minimum(begins + (SHAPE.BACK + 1), SHAPE.RATIO)
    overlaps = tl.where(b[None, :] < NEW, tl.maximum(ends - tl.maximum(begins, 0), 0), 0).to(tl.float32)
    # a position before the first key is in no block; division truncates towards zero
    own = tl.where(first_position + t < 0, -1, (first_position + t) // SHAPE.BLOCK)
    best = tl.full((16, MOST), -1, tl.int64)
    for step in range(tl.cdiv(blocks, NEW)):
        c = step * (NEW * SHAPE.RATIO) + at
        x = _scores(q, k_ptr, k_strides[0], c, n, position, scale, SHAPE)
        p = tl.exp2(x - lse[:, None])
        summed = tl.dot(heads, p, input_precision="ieee")
        score = tl.dot(summed, overlaps, input_precision="ieee")
        j = step * NEW + b
        is_always = (j[None, :] < SHAPE.FIRST) | (j[None, :] > own[:, None] - SHAPE.LOCAL)
        score = tl.where(is_always, float("inf"), score)
        word = (score.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (-j[None, :] + FAR).to(tl.int64)
        word = tl.where((j[None, :] <= own[:, None]) & (b[None, :] < NEW), word, -1)
        best = tl.topk(tl.reshape(tl.join(best, word), (16, 2 * MOST)), MOST)
    number = -(best & FAR).to(tl.int32) + FAR
    number = tl.where((best >= 0) & (b[None, :] < SHAPE.COUNT), number, FAR)
    number = tl.sort(number)
    number = tl.where(number == FAR, -1, number)
    out_row = tl.load(table_ptr + tile * 5).to(tl.int64) + t
    out = chosen_ptr + (out_row[:, None] * (H // SHAPE.GROUP) + hk) * SHAPE.COUNT + b[None, :]
    tl.store(out, number, mask=(t < held)[:, None] & (b < SHAPE.COUNT)[None, :])


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
        constants = {"SHAPE": shape, "num_warps": 8 if shape.BLOCK_D > 64 else 4}
        # no kernel reads what stands for an absent lse
        tensors = (q, compressed, chosen if lse is None else lse, chosen, table.rows)
        _start((tiles * compressed.shape[1], 1, 1), (*tensors, *numbers), constants)
    return chosen


def choice_of(
    q: Tensor, Hk: int, queries: int, length: int, stride: int, block: int, count: int, first: int, local: int,
    has_lse: bool = False,
) -> Choice:  # fmt: skip
    """The configuration of a call."""
    group, dim = q.shape[1] // Hk, q.shape[-1]
    rows, padded = (max(16, 1 << (size - 1).bit_length()) for size in (queries * group, dim))
    ratio, back = block // stride, length // stride - 1
    most = max(16, 1 << (count - 1).bit_length())
    while most < (KEYS - back) // ratio:
        most *= 2
    new = min((KEYS - back) // ratio, most)
    precision = "ieee" if q.dtype == torch.float32 else "tf32"
    return Choice(
        group, queries, rows, dim, padded, KEYS, ratio, back, new, most, length, stride, block, count, first, local,
        has_lse, precision,
    )
