"""The forward: o and lse of each row in each round or cluster.

A product with a weight of 0 is not harmless when the other factor is NaN. A tile whose result holds a NaN is computed again by a
second launch, with the non-finite factors set aside, and NaN in the rows that see them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.approximate.gathered.kernels.shape import (
    HIDDEN,
    holds_nan,
    launch,
    load_places,
    parts_of,
    seen_pairs,
    shape_of,
    store_lse,
    strides_of,
    tile_of_group,
    weights,
)
from rooftile.approximate.gathered.lists import RowLists
from rooftile.exact.backends.triton.scores import LOG2E, nan_if_non_finite, zero_non_finite
from rooftile.runtime.launch import Kernel


@triton.jit
def _forward_walk(
    acc, m, l, q, i, at, there, low, k_ptr, v_ptr, k_stride, v_stride, keys_ptr, marks_ptr, lows_ptr, stride, group, S, M, groups,
    key_width, scale, SHAPE: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, SHAPE.BLOCK_D)
    dv = tl.arange(0, SHAPE.BLOCK_DV)
    for n in range((1 + SHAPE.BEFORE) * ((key_width + SHAPE.KEYS - 1) // SHAPE.KEYS)):
        j_at, j_there = tile_of_group(group - SHAPE.BEFORE, n, groups, key_width, M, SHAPE.KEYS, SHAPE)
        j, j_there = load_places(keys_ptr, j_at, j_there, S)
        row = j.to(tl.int64)[:, None]
        k = tl.load(k_ptr + row * k_stride + d[None, :], mask=j_there[:, None] & (d < SHAPE.D)[None, :], other=0.0)
        v = tl.load(v_ptr + row * v_stride + dv[None, :], mask=j_there[:, None] & (dv < SHAPE.DV)[None, :], other=0.0)
        if SHAPE.REPAIR:
            x = tl.dot(q, tl.trans(zero_non_finite(k)), input_precision=SHAPE.PRECISION) + nan_if_non_finite(k, 1)[None, :]
        else:
            x = tl.dot(q, tl.trans(k), input_precision=SHAPE.PRECISION)
        j = tl.where(j_there, j, HIDDEN)
        sees = seen_pairs(i[:, None], j[None, :], at[:, None], j_at[None, :], low[:, None], SHAPE)
        x = tl.where(sees, x * (scale * LOG2E), float("-inf"))
        m_new = tl.maximum(m, tl.max(x, 1))
        # a row that has met no key yet: -inf - -inf is nan
        reference = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(x - reference[:, None])
        if SHAPE.ROUNDS > 1:
            p *= weights(at[:, None], there[:, None], j_at[None, :], j_there[None, :], marks_ptr, lows_ptr, stride, groups, SHAPE)
        alpha = tl.exp2(m - reference)
        l = l * alpha + tl.sum(p, 1)
        if SHAPE.REPAIR:
            p = tl.where(sees, p + nan_if_non_finite(v, 1)[None, :], 0.0)
            v = zero_non_finite(v)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=SHAPE.PRECISION)
        m = m_new
    return acc, m, l


@triton.jit(do_not_specialize=["tiles", "T", "S", "N", "M", "groups", "width", "key_width", "H", "B"])
def _forward(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, rows_ptr, keys_ptr, marks_ptr, lows_ptr, flags_ptr, q_strides, k_strides, v_strides,
    tiles, T, S, N, M, groups, width, key_width, H, B, low_rounds, scale, SHAPE: tl.constexpr,
):  # fmt: skip
    """o and lse: of a slice's row in its list for "lists", else of its place in (R, B, T, H)."""
    if SHAPE.REPAIR:
        if tl.load(flags_ptr + tl.program_id(0)) == 0:
            return
    ROWS: tl.constexpr = SHAPE.ROWS
    BLOCK_DV: tl.constexpr = SHAPE.BLOCK_DV
    tile, part, r, b, h = parts_of(tiles, H, B)
    per = (width + ROWS - 1) // ROWS
    group = tile // per
    at, within = tile_of_group(group, tile % per, groups, width, N, ROWS, SHAPE)
    i, there = load_places(rows_ptr + part * N, at, within, T)
    d = tl.arange(0, SHAPE.BLOCK_D)
    dv = tl.arange(0, SHAPE.BLOCK_DV)
    row = i.to(tl.int64)
    q_tile = q_ptr + b.to(tl.int64) * q_strides[0] + row[:, None] * q_strides[1] + h.to(tl.int64) * q_strides[2] + d[None, :]
    q = tl.load(q_tile, mask=there[:, None] & (d < SHAPE.D)[None, :], other=0.0)
    k_ptr += b.to(tl.int64) * k_strides[0] + (h // SHAPE.GROUP).to(tl.int64) * k_strides[2]
    v_ptr += b.to(tl.int64) * v_strides[0] + (h // SHAPE.GROUP_V).to(tl.int64) * v_strides[2]
    keys_ptr += part * M
    stride = B.to(tl.int64) * H * N
    inside = (b * H + h).to(tl.int64) * N
    marks_ptr += r * SHAPE.ROUNDS * stride + inside
    lows_ptr += r * low_rounds * stride + inside
    low = at
    if SHAPE.KIND == "window":
        low = tl.load(lows_ptr + at, mask=there, other=0)
    # queries of "lists" are the last T of S tokens
    i_place = i + (S - T)
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    l = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BLOCK_DV), tl.float32)
    acc, m, l = _forward_walk(
        acc, m, l, q, i_place, at, there, low, k_ptr, v_ptr, k_strides[1], v_strides[1], keys_ptr, marks_ptr, lows_ptr, stride,
        group, S, M, groups, key_width, scale, SHAPE,
    )  # fmt: skip
    if not SHAPE.REPAIR:
        tl.store(flags_ptr + tl.program_id(0), holds_nan(acc))
    sees_none = l == 0.0
    l = tl.where(sees_none, 1.0, l)
    o = acc / l[:, None]
    if SHAPE.OWN:
        own = v_ptr + row[:, None] * v_strides[1] + dv[None, :]
        mask = (sees_none & there)[:, None] & (dv < SHAPE.DV)[None, :]
        o += tl.load(own, mask=mask, other=0.0).to(tl.float32)
    if SHAPE.KIND == "lists":
        place = part * N + at
        written = within
    else:
        place = ((r * B + b).to(tl.int64) * T + row) * H + h
        written = there
    store_lse(lse_ptr, place, tl.where(sees_none, float("-inf"), m), l, written)
    o_tile = o_ptr + place[:, None] * SHAPE.DV + dv[None, :]
    tl.store(o_tile, o.to(o_ptr.dtype.element_ty), mask=written[:, None] & (dv < SHAPE.DV)[None, :])


_start = Kernel(_forward)


def forward(q: Tensor, k: Tensor, v: Tensor, lists: RowLists, scale: float) -> tuple[Tensor, Tensor]:
    """Returns o and lse of each row of each round, lse as two numbers (see `shape.store_lse`).

    For "lists" in the order of the list, (B, H, N, Dv) and (B, H, N, 2); else by place, (R, B, T, H, Dv) and (R, B, T, H, 2).
    """
    (B, T, H, _), S = q.shape, k.shape[1]
    R, N, M = lists.rows.shape[0], lists.rows.shape[3], lists.keys.shape[3]
    sizes = (R, B, T, H) if lists.joins else (B, H, N)
    o, lse = q.new_empty(*sizes, v.shape[-1]), q.new_empty(*sizes, 2, dtype=torch.float32)
    shape = shape_of(q, k, v, lists, "forward")
    tiles = lists.groups * -(-lists.width // shape.ROWS)
    if N and B:
        tensors = (q, k, v, o, lse, *tensors_of(lists))
        numbers = (*strides_of(q, k, v), tiles, T, S, N, M, *numbers_of(lists), H, B, low_rounds(lists), scale)
        launch(_start, tiles * R * B * H, tensors, numbers, shape)
    return o, lse


def tensors_of(lists: RowLists) -> tuple[Tensor, ...]:
    """The lists as a kernel takes them: what is not there is not read."""
    marks, lows = (lists.rows if x is None else x for x in (lists.marks, lists.lows))
    return lists.rows, lists.keys, marks, lows


def numbers_of(lists: RowLists) -> tuple[int, int, int]:
    """Groups, and their widths."""
    return lists.groups, lists.width, lists.key_width


def low_rounds(lists: RowLists) -> int:
    """The rounds of which each row has its lowest key."""
    return 1 if lists.lows is None else lists.lows.shape[1]
