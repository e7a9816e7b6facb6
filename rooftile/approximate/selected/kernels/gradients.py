"""The backward: dq, and dk with dv. Weights are recomputed from lse, as in FlashAttention-2."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.approximate.selected.kernels.shape import Launch, constants_of, in_log2, rows_of, shape_of, strides_of
from rooftile.approximate.selected.tiles import KeyTiles, Tiles
from rooftile.backends.triton.scores import LOG2E, nan_if_non_finite, zero_non_finite
from rooftile.launch import Kernel


@triton.jit
def _dq_walk(
    dq, q, do, lse, delta, position, r, k_ptr, v_ptr, k_stride, v_stride, entries, count, S, scale, SHAPE: tl.constexpr,
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
        line = j.to(tl.int64)[:, None]
        k = tl.load(k_ptr + line * k_stride + d[None, :], mask=there & (d < SHAPE.D)[None, :], other=0.0)
        v = tl.load(v_ptr + line * v_stride + dv[None, :], mask=there & (dv < SHAPE.DV)[None, :], other=0.0)
        x = tl.dot(q, tl.trans(k), input_precision=SHAPE.PRECISION)
        sees = (((word >> r) & 1) != 0)[:, None] & (j[None, :] <= position[:, None]) & (j < S)[None, :]
        p = tl.where(sees, tl.exp2(x * (scale * LOG2E) - lse[:, None]), 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision=SHAPE.PRECISION)
        ds = p * (dp - delta[:, None]) * scale
        if NAN_SAFE:
            ds = tl.where(sees, ds, 0.0)
            k = zero_non_finite(k)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=SHAPE.PRECISION)
    return dq


@triton.jit(do_not_specialize=["tiles", "most", "H"])
def _backward_q(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, table_ptr, counts_ptr, entries_ptr,
    q_strides, k_strides, v_strides, tiles, most, H, scale, SHAPE: tl.constexpr,
):  # fmt: skip
    """dq (total, H, D)."""
    ROWS: tl.constexpr = SHAPE.ROWS
    BLOCK_D: tl.constexpr = SHAPE.BLOCK_D
    tile = tl.program_id(0) % tiles
    hk = tl.program_id(0) // tiles
    row, h, position, r, there = rows_of(table_ptr, tile, hk, SHAPE)
    d = tl.arange(0, SHAPE.BLOCK_D)
    dv = tl.arange(0, SHAPE.BLOCK_DV)
    place = row * H + h
    q_tile = q_ptr + row[:, None] * q_strides[0] + h.to(tl.int64)[:, None] * q_strides[1] + d[None, :]
    q = tl.load(q_tile, mask=there[:, None] & (d < SHAPE.D)[None, :], other=0.0)
    do = tl.load(do_ptr + place[:, None] * SHAPE.DV + dv[None, :], mask=there[:, None] & (dv < SHAPE.DV)[None, :], other=0.0)
    lse = in_log2(tl.load(lse_ptr + place, mask=there, other=float("inf")))
    delta = tl.load(delta_ptr + place, mask=there, other=0.0)
    keys = tl.load(table_ptr + tile * 5 + 3).to(tl.int64)
    S = tl.load(table_ptr + tile * 5 + 4)
    k_ptr += keys * k_strides[0] + hk.to(tl.int64) * k_strides[1]
    v_ptr += keys * v_strides[0] + hk.to(tl.int64) * v_strides[1]
    list_row = (hk * tiles + tile).to(tl.int64)
    count = tl.load(counts_ptr + list_row)
    entries = entries_ptr + list_row * most * 2
    dq = tl.zeros((ROWS, BLOCK_D), tl.float32)
    dq = _dq_walk(
        dq, q, do, lse, delta, position, r, k_ptr, v_ptr, k_strides[0], v_strides[0], entries, count, S, scale, SHAPE, False
    )
    if tl.max(tl.where(dq == dq, 0, 1)) > 0:
        dq = tl.zeros((ROWS, BLOCK_D), tl.float32)
        dq = _dq_walk(
            dq, q, do, lse, delta, position, r, k_ptr, v_ptr, k_strides[0], v_strides[0], entries, count, S, scale, SHAPE, True
        )
    dq_tile = dq_ptr + place[:, None] * SHAPE.D + d[None, :]
    tl.store(dq_tile, dq.to(dq_ptr.dtype.element_ty), mask=there[:, None] & (d < SHAPE.D)[None, :])


@triton.jit
def _dkdv_walk(
    dk, dv_sum, k, v, j, q_ptr, do_ptr, lse_ptr, delta_ptr, table_ptr, entries_ptr, start, stop, hk, S, q_stride, q_stride_h, H,
    scale, SHAPE: tl.constexpr, NAN_SAFE: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, SHAPE.BLOCK_D)
    dv = tl.arange(0, SHAPE.BLOCK_DV)
    for n in range(start, stop):
        tile = tl.load(entries_ptr + n * 2)
        word = tl.load(entries_ptr + n * 2 + 1)
        row, h, position, r, there = rows_of(table_ptr, tile, hk, SHAPE)
        place = row * H + h
        q_tile = q_ptr + row[:, None] * q_stride + h.to(tl.int64)[:, None] * q_stride_h + d[None, :]
        q = tl.load(q_tile, mask=there[:, None] & (d < SHAPE.D)[None, :], other=0.0)
        do = tl.load(do_ptr + place[:, None] * SHAPE.DV + dv[None, :], mask=there[:, None] & (dv < SHAPE.DV)[None, :], other=0.0)
        lse = in_log2(tl.load(lse_ptr + place, mask=there, other=float("inf")))
        delta = tl.load(delta_ptr + place, mask=there, other=0.0)
        sees = (((word >> r) & 1) != 0)[None, :] & (j[:, None] <= position[None, :]) & (j < S)[:, None] & there[None, :]
        if NAN_SAFE:
            q = zero_non_finite(q)
        x = tl.dot(k, tl.trans(q), input_precision=SHAPE.PRECISION)
        p = tl.where(sees, tl.exp2(x * (scale * LOG2E) - lse[None, :]), 0.0)
        kept = p
        values = do
        if NAN_SAFE:
            kept = tl.where(sees, p + nan_if_non_finite(do, 1)[None, :], 0.0)
            values = zero_non_finite(do)
        dv_sum = tl.dot(kept.to(do.dtype), values, dv_sum, input_precision=SHAPE.PRECISION)
        dp = tl.dot(v, tl.trans(do), input_precision=SHAPE.PRECISION)
        ds = p * (dp - delta[None, :]) * scale
        if NAN_SAFE:
            ds = tl.where(sees, ds, 0.0)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=SHAPE.PRECISION)
    return dk, dv_sum


@triton.jit(do_not_specialize=["places", "H"])
def _backward_kv(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, kept_ptr, table_ptr, keys_ptr, parts_ptr, entries_ptr,
    q_strides, k_strides, v_strides, places, H, scale, SHAPE: tl.constexpr,
):  # fmt: skip
    """dk (total, Hk, D) and dv (total, Hk, Dv); of a block with several parts their sums, kept (parts, BLOCK, D + Dv) in fp32."""
    KEYS: tl.constexpr = SHAPE.KEYS
    BLOCK_D: tl.constexpr = SHAPE.BLOCK_D
    BLOCK_DV: tl.constexpr = SHAPE.BLOCK_DV
    PER: tl.constexpr = SHAPE.BLOCK // SHAPE.KEYS
    part = parts_ptr + tl.program_id(0) // PER * 4
    n = tl.load(part)
    if n < 0:
        return
    start, stop, kept = tl.load(part + 1), tl.load(part + 2), tl.load(part + 3)
    place = n % places
    hk = n // places
    first = tl.load(keys_ptr + place * 3).to(tl.int64)
    S = tl.load(keys_ptr + place * 3 + 2)
    s = tl.program_id(0) % PER * SHAPE.KEYS + tl.arange(0, SHAPE.KEYS)
    j = tl.load(keys_ptr + place * 3 + 1) + s
    d = tl.arange(0, SHAPE.BLOCK_D)
    dv = tl.arange(0, SHAPE.BLOCK_DV)
    row = first + s
    there = (j < S)[:, None]
    k_tile = k_ptr + row[:, None] * k_strides[0] + hk.to(tl.int64) * k_strides[1] + d[None, :]
    v_tile = v_ptr + row[:, None] * v_strides[0] + hk.to(tl.int64) * v_strides[1] + dv[None, :]
    k = tl.load(k_tile, mask=there & (d < SHAPE.D)[None, :], other=0.0)
    v = tl.load(v_tile, mask=there & (dv < SHAPE.DV)[None, :], other=0.0)
    dk = tl.zeros((KEYS, BLOCK_D), tl.float32)
    dv_sum = tl.zeros((KEYS, BLOCK_DV), tl.float32)
    dk, dv_sum = _dkdv_walk(
        dk, dv_sum, k, v, j, q_ptr, do_ptr, lse_ptr, delta_ptr, table_ptr, entries_ptr, start, stop, hk, S, q_strides[0],
        q_strides[1], H, scale, SHAPE, False,
    )  # fmt: skip
    if tl.max(tl.where(dk == dk, 0, 1)) + tl.max(tl.where(dv_sum == dv_sum, 0, 1)) > 0:
        dk = tl.zeros((KEYS, BLOCK_D), tl.float32)
        dv_sum = tl.zeros((KEYS, BLOCK_DV), tl.float32)
        dk, dv_sum = _dkdv_walk(
            dk, dv_sum, k, v, j, q_ptr, do_ptr, lse_ptr, delta_ptr, table_ptr, entries_ptr, start, stop, hk, S,
            q_strides[0], q_strides[1], H, scale, SHAPE, True,
        )  # fmt: skip
    if kept >= 0:
        line = kept_ptr + (kept.to(tl.int64) * SHAPE.BLOCK + s)[:, None] * (SHAPE.D + SHAPE.DV)
        tl.store(line + d[None, :], dk, mask=(d < SHAPE.D)[None, :])
        tl.store(line + SHAPE.D + dv[None, :], dv_sum, mask=(dv < SHAPE.DV)[None, :])
    else:
        _store_kv(dk, dv_sum, dk_ptr, dv_ptr, row * (H // SHAPE.GROUP) + hk, there, SHAPE)


@triton.jit
def _store_kv(dk, dv_sum, dk_ptr, dv_ptr, place, there, SHAPE: tl.constexpr):
    d = tl.arange(0, SHAPE.BLOCK_D)
    dv = tl.arange(0, SHAPE.BLOCK_DV)
    dk_tile = dk_ptr + place[:, None] * SHAPE.D + d[None, :]
    tl.store(dk_tile, dk.to(dk_ptr.dtype.element_ty), mask=there & (d < SHAPE.D)[None, :])
    dv_tile = dv_ptr + place[:, None] * SHAPE.DV + dv[None, :]
    tl.store(dv_tile, dv_sum.to(dv_ptr.dtype.element_ty), mask=there & (dv < SHAPE.DV)[None, :])


@triton.jit(do_not_specialize=["places", "HK"])
def _join_kv(kept_ptr, joins_ptr, keys_ptr, dk_ptr, dv_ptr, places, HK, SHAPE: tl.constexpr):
    """dk and dv of a block whose list has several parts: their sums, in order."""
    KEYS: tl.constexpr = SHAPE.KEYS
    BLOCK_D: tl.constexpr = SHAPE.BLOCK_D
    BLOCK_DV: tl.constexpr = SHAPE.BLOCK_DV
    PER: tl.constexpr = SHAPE.BLOCK // SHAPE.KEYS
    n = tl.program_id(0) // PER
    first, count = tl.load(joins_ptr + n * 2).to(tl.int64), tl.load(joins_ptr + n * 2 + 1)
    if count == 0:
        return
    place = n % places
    s = tl.program_id(0) % PER * SHAPE.KEYS + tl.arange(0, SHAPE.KEYS)
    d = tl.arange(0, SHAPE.BLOCK_D)
    dv = tl.arange(0, SHAPE.BLOCK_DV)
    dk = tl.zeros((KEYS, BLOCK_D), tl.float32)
    dv_sum = tl.zeros((KEYS, BLOCK_DV), tl.float32)
    for part in range(count):
        line = kept_ptr + ((first + part) * SHAPE.BLOCK + s)[:, None] * (SHAPE.D + SHAPE.DV)
        dk += tl.load(line + d[None, :], mask=(d < SHAPE.D)[None, :], other=0.0)
        dv_sum += tl.load(line + SHAPE.D + dv[None, :], mask=(dv < SHAPE.DV)[None, :], other=0.0)
    there = (tl.load(keys_ptr + place * 3 + 1) + s < tl.load(keys_ptr + place * 3 + 2))[:, None]
    row = tl.load(keys_ptr + place * 3).to(tl.int64) + s
    _store_kv(dk, dv_sum, dk_ptr, dv_ptr, row * HK + n // places, there, SHAPE)


_start_q, _start_kv, _start_join = Kernel(_backward_q), Kernel(_backward_kv), Kernel(_join_kv)


def dq(
    do: Tensor, lse: Tensor, delta: Tensor, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float, block: int,
    launch: Launch | None = None,
) -> Tensor:  # fmt: skip
    """Returns dq from contiguous do (total, H, Dv), lse and delta (total, H) in fp32."""
    found, count = q.new_empty(q.shape), tiles.table.shape[0]
    shape = shape_of(q, v, k.shape[1], block, tiles.queries)
    if q.shape[0]:
        tensors = (q, k, v, do, lse, delta, found, tiles.table, tiles.counts, tiles.entries)
        numbers = (*strides_of(q, k, v), count, tiles.entries.shape[2], q.shape[1], scale)
        _start_q((count * k.shape[1], 1, 1), (*tensors, *numbers), constants_of(shape, launch))
    return found


def dkdv(
    do: Tensor, lse: Tensor, delta: Tensor, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, of_keys: KeyTiles, scale: float,
    block: int, launch: Launch | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns dk and dv from contiguous do (total, H, Dv), lse and delta (total, H) in fp32."""
    H, (total_k, Hk, D), places = q.shape[1], k.shape, of_keys.table.shape[0]
    dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
    shape = shape_of(q, v, Hk, block, tiles.queries)
    constants, per = constants_of(shape, launch), block // shape.KEYS
    if total_k:
        kept = torch.empty(of_keys.kept, block, D + v.shape[-1], dtype=torch.float32, device=q.device)
        tensors = (q, k, v, do, lse, delta, dk, dv, kept, tiles.table, of_keys.table, of_keys.parts, of_keys.entries)
        numbers = (*strides_of(q, k, v), places, H, scale)
        _start_kv((of_keys.parts.shape[0] * per, 1, 1), (*tensors, *numbers), constants)
        if of_keys.kept:
            _start_join((places * Hk * per, 1, 1), (kept, of_keys.joins, of_keys.table, dk, dv, places, Hk), constants)
    return dk, dv
