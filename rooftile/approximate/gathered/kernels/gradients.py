"""The backward: dq, then dk with dv. Weights are recomputed from lse, as in FlashAttention-2.

Rounds that join are one softmax, so their weights come from the joined lse, and delta from the joined o. The first round's
program of dq writes delta, which dk reads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.approximate.gathered.kernels.outputs import low_rounds, numbers_of, tensors_of
from rooftile.approximate.gathered.kernels.shape import (
    HIDDEN,
    holds_nan,
    launch,
    load_lse,
    load_places,
    parts_of,
    seen_pairs,
    shape_of,
    strides_of,
    tile_of_group,
    weights,
)
from rooftile.approximate.gathered.lists import RowLists
from rooftile.exact.backends.triton.scores import LOG2E, nan_if_non_finite, zero_non_finite
from rooftile.runtime.launch import Kernel


@triton.jit
def _dq_walk(
    dq, q, do, lse, rest, delta, i, at, there, low, k_ptr, v_ptr, k_stride, v_stride, keys_ptr, marks_ptr, lows_ptr, stride, group,
    S, M, groups, key_width, scale, SHAPE: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, SHAPE.BLOCK_D)
    dv = tl.arange(0, SHAPE.BLOCK_DV)
    for n in range((1 + SHAPE.BEFORE) * ((key_width + SHAPE.KEYS - 1) // SHAPE.KEYS)):
        j_at, j_there = tile_of_group(group - SHAPE.BEFORE, n, groups, key_width, M, SHAPE.KEYS, SHAPE)
        j, j_there = load_places(keys_ptr, j_at, j_there, S)
        row = j.to(tl.int64)[:, None]
        k = tl.load(k_ptr + row * k_stride + d[None, :], mask=j_there[:, None] & (d < SHAPE.D)[None, :], other=0.0)
        v = tl.load(v_ptr + row * v_stride + dv[None, :], mask=j_there[:, None] & (dv < SHAPE.DV)[None, :], other=0.0)
        j = tl.where(j_there, j, HIDDEN)
        sees = seen_pairs(i[:, None], j[None, :], at[:, None], j_at[None, :], low[:, None], SHAPE)
        x = tl.dot(q, tl.trans(k), input_precision=SHAPE.PRECISION)
        p = tl.where(sees, tl.exp2(x * (scale * LOG2E) - lse[:, None] - rest[:, None]), 0.0)
        if SHAPE.ROUNDS > 1:
            p *= weights(at[:, None], there[:, None], j_at[None, :], j_there[None, :], marks_ptr, lows_ptr, stride, groups, SHAPE)
        dp = tl.dot(do, tl.trans(v), input_precision=SHAPE.PRECISION)
        ds = p * (dp - delta[:, None]) * scale
        if SHAPE.REPAIR:
            ds = tl.where(sees, ds, 0.0)
            k = zero_non_finite(k)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=SHAPE.PRECISION)
    return dq


@triton.jit(do_not_specialize=["tiles", "T", "S", "N", "M", "groups", "width", "key_width", "H", "B"])
def _backward_q(
    q_ptr, k_ptr, v_ptr, do_ptr, o_ptr, lse_ptr, delta_ptr, dq_ptr, rows_ptr, keys_ptr, marks_ptr, lows_ptr, flags_ptr, q_strides,
    k_strides, v_strides, tiles, T, S, N, M, groups, width, key_width, H, B, low_rounds, scale, SHAPE: tl.constexpr,
):  # fmt: skip
    """A part of dq for each row of each slice, as the forward writes o; and delta, as lse lies."""
    if SHAPE.REPAIR:
        if tl.load(flags_ptr + tl.program_id(0)) == 0:
            return
    ROWS: tl.constexpr = SHAPE.ROWS
    BLOCK_D: tl.constexpr = SHAPE.BLOCK_D
    tile, part, r, b, h = parts_of(tiles, H, B)
    per = (width + ROWS - 1) // ROWS
    group = tile // per
    at, within = tile_of_group(group, tile % per, groups, width, N, ROWS, SHAPE)
    i, there = load_places(rows_ptr + part * N, at, within, T)
    d = tl.arange(0, SHAPE.BLOCK_D)
    dv = tl.arange(0, SHAPE.BLOCK_DV)
    row = i.to(tl.int64)
    place = (b.to(tl.int64) * T + row) * H + h
    if SHAPE.KIND == "lists":
        statistics = part * N + at
        written = within
        target = statistics
    else:
        statistics = place
        written = there
        target = place + r.to(tl.int64) * B * T * H
    q_tile = q_ptr + b.to(tl.int64) * q_strides[0] + row[:, None] * q_strides[1] + h.to(tl.int64) * q_strides[2] + d[None, :]
    q = tl.load(q_tile, mask=there[:, None] & (d < SHAPE.D)[None, :], other=0.0)
    rows_v = there[:, None] & (dv < SHAPE.DV)[None, :]
    do = tl.load(do_ptr + place[:, None] * SHAPE.DV + dv[None, :], mask=rows_v, other=0.0)
    o = tl.load(o_ptr + statistics[:, None] * SHAPE.DV + dv[None, :], mask=rows_v, other=0.0)
    lse, rest = load_lse(lse_ptr, statistics, there)
    # a row that sees nothing has no weights, whatever do holds
    delta = tl.where(lse == float("inf"), 0.0, tl.sum(o.to(tl.float32) * do.to(tl.float32), 1))
    tl.store(delta_ptr + statistics, delta, mask=written & (r == 0))
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
    i_place = i + (S - T)
    dq = tl.zeros((ROWS, BLOCK_D), tl.float32)
    dq = _dq_walk(
        dq, q, do, lse, rest, delta, i_place, at, there, low, k_ptr, v_ptr, k_strides[1], v_strides[1], keys_ptr, marks_ptr, lows_ptr,
        stride, group, S, M, groups, key_width, scale, SHAPE,
    )  # fmt: skip
    if not SHAPE.REPAIR:
        tl.store(flags_ptr + tl.program_id(0), holds_nan(dq))
    dq_tile = dq_ptr + target[:, None] * SHAPE.D + d[None, :]
    tl.store(dq_tile, dq.to(dq_ptr.dtype.element_ty), mask=written[:, None] & (d < SHAPE.D)[None, :])


@triton.jit
def _dkdv_walk(
    dk, dv_sum, k, v, j, j_at, j_there, q_ptr, do_ptr, lse_ptr, delta_ptr, q_stride, b, h, rows_ptr, marks_ptr, lows_ptr, part,
    stride, group, T, S, N, groups, width, H, scale, SHAPE: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, SHAPE.BLOCK_D)
    dv = tl.arange(0, SHAPE.BLOCK_DV)
    # queries of the own group, and of the one behind it
    for n in range((1 + SHAPE.BEFORE) * ((width + SHAPE.ROWS - 1) // SHAPE.ROWS)):
        at, there = tile_of_group(group, n, groups, width, N, SHAPE.ROWS, SHAPE)
        i, there = load_places(rows_ptr, at, there, T)
        row = i.to(tl.int64)
        place = (b.to(tl.int64) * T + row) * H + h
        statistics = place
        if SHAPE.KIND == "lists":
            statistics = part * N + at
        low = at
        if SHAPE.KIND == "window":
            low = tl.load(lows_ptr + at, mask=there, other=0)
        q = tl.load(q_ptr + row[:, None] * q_stride + d[None, :], mask=there[:, None] & (d < SHAPE.D)[None, :], other=0.0)
        rows_v = there[:, None] & (dv < SHAPE.DV)[None, :]
        do = tl.load(do_ptr + place[:, None] * SHAPE.DV + dv[None, :], mask=rows_v, other=0.0)
        # a row that is not there has no weights
        lse, rest = load_lse(lse_ptr, statistics, there)
        delta = tl.load(delta_ptr + statistics, mask=there, other=0.0)
        sees = seen_pairs((i + (S - T))[:, None], j[None, :], at[:, None], j_at[None, :], low[:, None], SHAPE)
        if SHAPE.REPAIR:
            q = zero_non_finite(q)
            sees = sees & there[:, None]
        # rows are queries: what belongs to a query stays in few registers, and what belongs to a key is there once
        x = tl.dot(q, tl.trans(k), input_precision=SHAPE.PRECISION)
        p = tl.where(sees, tl.exp2(x * (scale * LOG2E) - lse[:, None] - rest[:, None]), 0.0)
        if SHAPE.ROUNDS > 1:
            p *= weights(at[:, None], there[:, None], j_at[None, :], j_there[None, :], marks_ptr, lows_ptr, stride, groups, SHAPE)
        kept = p
        values = do
        if SHAPE.REPAIR:
            kept = tl.where(sees, p + nan_if_non_finite(do, 1)[:, None], 0.0)
            values = zero_non_finite(do)
        dv_sum = tl.dot(tl.trans(kept.to(do.dtype)), values, dv_sum, input_precision=SHAPE.PRECISION)
        dp = tl.dot(do, tl.trans(v), input_precision=SHAPE.PRECISION)
        ds = p * (dp - delta[:, None]) * scale
        if SHAPE.REPAIR:
            ds = tl.where(sees, ds, 0.0)
        dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=SHAPE.PRECISION)
    return dk, dv_sum


@triton.jit(do_not_specialize=["tiles", "T", "S", "N", "M", "groups", "width", "key_width", "H", "B"])
def _backward_kv(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, rows_ptr, keys_ptr, marks_ptr, lows_ptr, flags_ptr,
    q_strides, k_strides, v_strides, tiles, T, S, N, M, groups, width, key_width, H, B, low_rounds, scale, SHAPE: tl.constexpr,
):  # fmt: skip
    """Parts of dk and dv for each key of each slice: by its position in "lists", else by its place in (R, B, S, H)."""
    if SHAPE.REPAIR:
        if tl.load(flags_ptr + tl.program_id(0)) == 0:
            return
    KEYS: tl.constexpr = SHAPE.KEYS
    BLOCK_D: tl.constexpr = SHAPE.BLOCK_D
    BLOCK_DV: tl.constexpr = SHAPE.BLOCK_DV
    tile, part, r, b, h = parts_of(tiles, H, B)
    per = (key_width + KEYS - 1) // KEYS
    group = tile // per
    j_at, within = tile_of_group(group, tile % per, groups, key_width, M, KEYS, SHAPE)
    j, j_there = load_places(keys_ptr + part * M, j_at, within, S)
    d = tl.arange(0, SHAPE.BLOCK_D)
    dv = tl.arange(0, SHAPE.BLOCK_DV)
    row = j.to(tl.int64)
    j = tl.where(j_there, j, HIDDEN)
    k_ptr += b.to(tl.int64) * k_strides[0] + (h // SHAPE.GROUP).to(tl.int64) * k_strides[2]
    v_ptr += b.to(tl.int64) * v_strides[0] + (h // SHAPE.GROUP_V).to(tl.int64) * v_strides[2]
    k_tile = k_ptr + row[:, None] * k_strides[1] + d[None, :]
    v_tile = v_ptr + row[:, None] * v_strides[1] + dv[None, :]
    k = tl.load(k_tile, mask=j_there[:, None] & (d < SHAPE.D)[None, :], other=0.0)
    v = tl.load(v_tile, mask=j_there[:, None] & (dv < SHAPE.DV)[None, :], other=0.0)
    q_ptr += b.to(tl.int64) * q_strides[0] + h.to(tl.int64) * q_strides[2]
    rows_ptr += part * N
    stride = B.to(tl.int64) * H * N
    inside = (b * H + h).to(tl.int64) * N
    marks_ptr += r * SHAPE.ROUNDS * stride + inside
    lows_ptr += r * low_rounds * stride + inside
    dk = tl.zeros((KEYS, BLOCK_D), tl.float32)
    dv_sum = tl.zeros((KEYS, BLOCK_DV), tl.float32)
    dk, dv_sum = _dkdv_walk(
        dk, dv_sum, k, v, j, j_at, j_there, q_ptr, do_ptr, lse_ptr, delta_ptr, q_strides[1], b, h, rows_ptr, marks_ptr, lows_ptr,
        part, stride, group, T, S, N, groups, width, H, scale, SHAPE,
    )  # fmt: skip
    if not SHAPE.REPAIR:
        tl.store(flags_ptr + tl.program_id(0), holds_nan(dk) + holds_nan(dv_sum))
    if SHAPE.KIND == "lists":
        place = part * M + j_at
        written = within
    else:
        place = ((r * B + b).to(tl.int64) * S + row) * H + h
        written = j_there
    dk_tile = dk_ptr + place[:, None] * SHAPE.D + d[None, :]
    tl.store(dk_tile, dk.to(dk_ptr.dtype.element_ty), mask=written[:, None] & (d < SHAPE.D)[None, :])
    dv_tile = dv_ptr + place[:, None] * SHAPE.DV + dv[None, :]
    tl.store(dv_tile, dv_sum.to(dv_ptr.dtype.element_ty), mask=written[:, None] & (dv < SHAPE.DV)[None, :])


_start_q, _start_kv = Kernel(_backward_q), Kernel(_backward_kv)


def backward(
    do: Tensor, o: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, lists: RowLists, scale: float
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the parts of dq, dk and dv in fp32, a part per round or group, from contiguous do (B, T, H, Dv).

    o and lse are the joined ones; for "lists" of each row of each group, as the forward gives them. The parts of "lists"
    are (B, H, N, D), parts of others (R, B, T, H, D), where keys have the heads of queries.
    """
    (B, T, H, D), S, Dv = q.shape, k.shape[1], v.shape[-1]
    R, N, M = lists.rows.shape[0], lists.rows.shape[3], lists.keys.shape[3]
    rows, keys = ((R, B, T, H), (R, B, S, H)) if lists.joins else ((B, H, N), (B, H, M))
    wide: dict[str, torch.dtype] = {"dtype": torch.float32}
    dq, dk, dv = q.new_empty(*rows, D, **wide), q.new_empty(*keys, D, **wide), q.new_empty(*keys, Dv, **wide)
    delta = lse.new_empty(lse.shape[:-1])
    numbers = (T, S, N, M, *numbers_of(lists), H, B, low_rounds(lists), scale)
    if N and B:
        shape = shape_of(q, k, v, lists, "dq")
        tiles = lists.groups * -(-lists.width // shape.ROWS)
        tensors = (q, k, v, do, o, lse, delta, dq, *tensors_of(lists))
        launch(_start_q, tiles * R * B * H, tensors, (*strides_of(q, k, v), tiles, *numbers), shape)
    if M and B:
        shape = shape_of(q, k, v, lists, "dkdv")
        tiles = lists.groups * -(-lists.key_width // shape.KEYS)
        tensors = (q, k, v, do, lse, delta, dk, dv, *tensors_of(lists))
        launch(_start_kv, tiles * R * B * H, tensors, (*strides_of(q, k, v), tiles, *numbers), shape)
    return dq, dk, dv
