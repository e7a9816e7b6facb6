"""The forward: o and lse.

A product with a weight of 0 is not harmless when the other factor is NaN. A tile whose result holds a NaN is computed again with
the non-finite factors set aside, and NaN in the rows that see them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.approximate.native_sparse.selected.kernels.shape import (
    LaunchOptions,
    constants_of,
    launch_of,
    lines_of,
    rows_of,
    shape_of,
    strides_of,
)
from rooftile.approximate.native_sparse.selected.tiles import Tiles
from rooftile.exact.backends.triton.scores import LN2, LOG2E, nan_if_non_finite, zero_non_finite
from rooftile.runtime.launch import Kernel

STAGES = 3


@triton.jit
def _forward_walk(
    acc, m, l, q, position, r, k_ptr, v_ptr, k_strides, v_strides, entries, count, S, pages_ptr, scale, SHAPE: tl.constexpr,
    NAN_SAFE: tl.constexpr,
):  # fmt: skip
    s = tl.arange(0, SHAPE.KEYS)
    d = tl.arange(0, SHAPE.BLOCK_D)
    dv = tl.arange(0, SHAPE.BLOCK_DV)
    PER: tl.constexpr = SHAPE.BLOCK // SHAPE.KEYS
    for n in range(count * PER):
        entry = n // PER
        j = tl.load(entries + entry * 2) * SHAPE.BLOCK + (n - entry * PER) * SHAPE.KEYS + s
        word = tl.load(entries + entry * 2 + 1)
        there = (j < S)[:, None]
        k_tile = k_ptr + lines_of(j, S, pages_ptr, k_strides, SHAPE) + d[None, :]
        v_tile = v_ptr + lines_of(j, S, pages_ptr, v_strides, SHAPE) + dv[None, :]
        k = tl.load(k_tile, mask=there & (d < SHAPE.D)[None, :], other=0.0)
        v = tl.load(v_tile, mask=there & (dv < SHAPE.DV)[None, :], other=0.0)
        if NAN_SAFE:
            x = tl.dot(q, tl.trans(zero_non_finite(k)), input_precision=SHAPE.PRECISION) + nan_if_non_finite(k, 1)[None, :]
        else:
            x = tl.dot(q, tl.trans(k), input_precision=SHAPE.PRECISION)
        sees = (((word >> r) & 1) != 0)[:, None] & (j[None, :] <= position[:, None]) & (j < S)[None, :]
        x = tl.where(sees, x * (scale * LOG2E), float("-inf"))
        m_new = tl.maximum(m, tl.max(x, 1))
        # a row that has met no key yet: -inf - -inf is nan
        reference = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(x - reference[:, None])
        alpha = tl.exp2(m - reference)
        l = l * alpha + tl.sum(p, 1)
        if NAN_SAFE:
            p = tl.where(sees, p + nan_if_non_finite(v, 1)[None, :], 0.0)
            v = zero_non_finite(v)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=SHAPE.PRECISION)
        m = m_new
    return acc, m, l


@triton.jit(do_not_specialize=["tiles", "most", "H"])
def _forward(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, table_ptr, counts_ptr, entries_ptr, pages_ptr,
    q_strides, k_strides, v_strides, tiles, most, H, scale, SHAPE: tl.constexpr,
):  # fmt: skip
    """o (total, H, Dv) and lse (total, H). With pages all queries are of one sequence."""
    ROWS: tl.constexpr = SHAPE.ROWS
    BLOCK_DV: tl.constexpr = SHAPE.BLOCK_DV
    tile = tl.program_id(0) % tiles
    hk = tl.program_id(0) // tiles
    row, h, position, r, there = rows_of(table_ptr, tile, hk, SHAPE)
    d = tl.arange(0, SHAPE.BLOCK_D)
    dv = tl.arange(0, SHAPE.BLOCK_DV)
    q_tile = q_ptr + row[:, None] * q_strides[0] + h.to(tl.int64)[:, None] * q_strides[1] + d[None, :]
    q = tl.load(q_tile, mask=there[:, None] & (d < SHAPE.D)[None, :], other=0.0)
    keys = tl.load(table_ptr + tile * 5 + 3).to(tl.int64)
    S = tl.load(table_ptr + tile * 5 + 4)
    k_ptr += keys * k_strides[0] + hk.to(tl.int64) * k_strides[1]
    v_ptr += keys * v_strides[0] + hk.to(tl.int64) * v_strides[1]
    list_row = (hk * tiles + tile).to(tl.int64)
    count = tl.load(counts_ptr + list_row)
    entries = entries_ptr + list_row * most * 2
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    l = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BLOCK_DV), tl.float32)
    acc, m, l = _forward_walk(
        acc, m, l, q, position, r, k_ptr, v_ptr, k_strides, v_strides, entries, count, S, pages_ptr, scale, SHAPE, False
    )
    if tl.max(tl.where(acc == acc, 0, 1)) > 0:
        m = tl.full((ROWS,), float("-inf"), tl.float32)
        l = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, BLOCK_DV), tl.float32)
        acc, m, l = _forward_walk(
            acc, m, l, q, position, r, k_ptr, v_ptr, k_strides, v_strides, entries, count, S, pages_ptr, scale, SHAPE, True
        )
    sees_none = l == 0.0
    l = tl.where(sees_none, 1.0, l)
    place = row * H + h
    tl.store(lse_ptr + place, tl.where(sees_none, float("-inf"), (m + tl.log2(l)) * LN2), mask=there)
    o = (acc / l[:, None]).to(o_ptr.dtype.element_ty)
    tl.store(o_ptr + place[:, None] * SHAPE.DV + dv[None, :], o, mask=there[:, None] & (dv < SHAPE.DV)[None, :])


_start = Kernel(_forward)


def forward(
    q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float, block: int, launch: LaunchOptions | None = None,
    pages: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns o (total, H, Dv) and lse (total, H) of packed tensors whose last axis is contiguous.

    pages: the pages (N,) int32 of the one sequence; k and v are then a cache's, (P, size, Hk, D) and (P, size, Hk, Dv).
    """
    (total, H, _), Hk, count = q.shape, k.shape[-2], tiles.table.shape[0]
    o = q.new_empty(total, H, v.shape[-1])
    lse = q.new_empty(total, H, dtype=torch.float32)
    shape = shape_of(q, v, Hk, block, tiles.queries, 0 if pages is None else k.shape[1])
    if total:
        # strides of a token, a head, and of a page
        strides = strides_of(q, k, v) if pages is None else (*strides_of(q), *((*x.stride()[1:3], x.stride(0)) for x in (k, v)))
        numbers = (*strides, count, tiles.entries.shape[2], H, scale)
        # the kernel reads no pages without SHAPE.PAGE; the table only fills the argument
        tensors = (q, k, v, o, lse, tiles.table, tiles.counts, tiles.entries, tiles.table if pages is None else pages)
        _start((count * Hk, 1, 1), (*tensors, *numbers), constants_of(shape, launch or launch_of(shape, STAGES)))
    return o, lse
