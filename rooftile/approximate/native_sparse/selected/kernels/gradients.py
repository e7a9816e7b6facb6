"""The backward: dq, and dk with dv. Weights are recomputed from lse, as in FlashAttention-2.

A row whose lse is far from 0 (see `backends.triton.far_rows`) is NaN to the walks, and computed again by those that set NaN aside,
with what its lse has lost: the program of its dq finds that, and leaves it to the programs of dk.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.approximate.native_sparse.selected.kernels.lists import KeyLists, sequence_of
from rooftile.approximate.native_sparse.selected.kernels.shape import (
    LaunchOptions,
    SelectedShape,
    constants_of,
    in_log2,
    launch_of,
    rows_of,
    shape_of,
    strides_of,
)
from rooftile.approximate.native_sparse.selected.tiles import Tiles, queries_of_step
from rooftile.exact.backends.triton.far_rows import is_far
from rooftile.exact.backends.triton.scores import LOG2E, nan_if_non_finite, zero_non_finite
from rooftile.runtime.launch import Kernel

# All queries choose the first block of a text, so split its list: at least LEAST_OF_PART queries per part, about PARTS parts in all. A
# step over four queries took 2.7 us on an H200 (h200-native-sparse.jsonl), and the longest part must end with the others.
LEAST_OF_PART, PARTS = 1024, 2048
# dq holds two tiles of queries beside its steps
STAGES_Q, STAGES_KV = 2, 3


@triton.jit
def _rest_of_lse(q, lse, position, r, k_ptr, k_stride, entries, count, S, scale, SHAPE: tl.constexpr):
    """log2 of the sum of exp(x - lse): 0 but for what the rounding of lse has lost."""
    s = tl.arange(0, SHAPE.KEYS)
    d = tl.arange(0, SHAPE.BLOCK_D)
    PER: tl.constexpr = SHAPE.BLOCK // SHAPE.KEYS
    total = tl.zeros(lse.shape, tl.float32)
    for n in range(count * PER):
        entry = n // PER
        j = tl.load(entries + entry * 2) * SHAPE.BLOCK + (n - entry * PER) * SHAPE.KEYS + s
        word = tl.load(entries + entry * 2 + 1)
        k_tile = k_ptr + j.to(tl.int64)[:, None] * k_stride + d[None, :]
        k = tl.load(k_tile, mask=(j < S)[:, None] & (d < SHAPE.D)[None, :], other=0.0)
        x = tl.dot(q, tl.trans(k), input_precision=SHAPE.PRECISION)
        sees = (((word >> r) & 1) != 0)[:, None] & (j[None, :] <= position[:, None]) & (j < S)[None, :]
        total += tl.sum(tl.where(sees, tl.exp2(x * (scale * LOG2E) - lse[:, None]), 0.0), 1)
    return tl.log2(total)


@triton.jit
def _dq_walk(
    dq, q, do, lse, rest, delta, position, r, listed, scale, SHAPE: tl.constexpr, NAN_SAFE: tl.constexpr
):  # fmt: skip
    k_ptr, v_ptr, k_stride, v_stride, entries, count, S = listed
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
        e = x * (scale * LOG2E) - lse[:, None]
        p = tl.where(sees, tl.exp2(e - rest[:, None] if NAN_SAFE else e), 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision=SHAPE.PRECISION)
        ds = p * (dp - delta[:, None]) * scale
        if NAN_SAFE:
            ds = tl.where(sees, ds, 0.0)
            k = zero_non_finite(k)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=SHAPE.PRECISION)
    return dq


@triton.jit(do_not_specialize=["tiles", "most", "H"])
def _backward_q(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, rests_ptr, dq_ptr, table_ptr, counts_ptr, entries_ptr,
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
    far = is_far(lse, SHAPE.FAR)
    rest = tl.zeros((ROWS,), tl.float32)
    if tl.max(tl.where(far, 1, 0), 0) > 0:
        rest = tl.where(far, _rest_of_lse(q, lse, position, r, k_ptr, k_strides[0], entries, count, S, scale, SHAPE), 0.0)
    tl.store(rests_ptr + place, rest, mask=there)
    marked = tl.where(far, float("nan"), lse)
    listed = (k_ptr, v_ptr, k_strides[0], v_strides[0], entries, count, S)
    dq = tl.zeros((ROWS, BLOCK_D), tl.float32)
    dq = _dq_walk(dq, q, do, marked, rest, delta, position, r, listed, scale, SHAPE, False)
    if tl.max(tl.where(dq == dq, 0, 1)) > 0:
        dq = tl.zeros((ROWS, BLOCK_D), tl.float32)
        dq = _dq_walk(dq, q, do, lse, rest, delta, position, r, listed, scale, SHAPE, True)
    dq_tile = dq_ptr + place[:, None] * SHAPE.D + d[None, :]
    tl.store(dq_tile, dq.to(dq_ptr.dtype.element_ty), mask=there[:, None] & (d < SHAPE.D)[None, :])


@triton.jit
def _dkdv_walk(
    dk, dv_sum, k, v, j, q_ptr, do_ptr, lse_ptr, delta_ptr, rests_ptr, queries_ptr, start, stop, hk, S, later, q_stride, q_stride_h, H,
    scale, SHAPE: tl.constexpr, NAN_SAFE: tl.constexpr,
):  # fmt: skip
    m = tl.arange(0, SHAPE.ROWS)
    d = tl.arange(0, SHAPE.BLOCK_D)
    dv = tl.arange(0, SHAPE.BLOCK_DV)
    h = hk * SHAPE.GROUP + m % SHAPE.GROUP
    for n in range(start, stop, SHAPE.QUERIES):
        entry = n + m // SHAPE.GROUP
        row = tl.load(queries_ptr + entry, mask=(entry < stop) & (m < SHAPE.QUERIES * SHAPE.GROUP), other=-1)
        there = row >= 0
        place = row.to(tl.int64) * H + h
        q_tile = q_ptr + (row.to(tl.int64) * q_stride + h.to(tl.int64) * q_stride_h)[:, None] + d[None, :]
        q = tl.load(q_tile, mask=there[:, None] & (d < SHAPE.D)[None, :], other=0.0)
        do_tile = do_ptr + (place * SHAPE.DV)[:, None] + dv[None, :]
        do = tl.load(do_tile, mask=there[:, None] & (dv < SHAPE.DV)[None, :], other=0.0)
        lse = in_log2(tl.load(lse_ptr + place, mask=there, other=float("inf")))
        delta = tl.load(delta_ptr + place, mask=there, other=0.0)
        # a row that is not there has weights of 0, as its lse is infinite
        sees = (j[:, None] <= (row + later)[None, :]) & (j < S)[:, None] & there[None, :]
        if NAN_SAFE:
            q = zero_non_finite(q)
        x = tl.dot(k, tl.trans(q), input_precision=SHAPE.PRECISION)
        if NAN_SAFE:
            e = x * (scale * LOG2E) - lse[None, :] - tl.load(rests_ptr + place, mask=there, other=0.0)[None, :]
        else:
            e = x * (scale * LOG2E) - tl.where(is_far(lse, SHAPE.FAR), float("nan"), lse)[None, :]
        p = tl.where(sees, tl.exp2(e), 0.0)
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


@triton.jit(do_not_specialize=["sequences", "places", "extra", "each", "H"])
def _backward_kv(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, rests_ptr, dk_ptr, dv_ptr, kept_ptr, cu_q_ptr, cu_k_ptr, queries_ptr, starts_ptr,
    q_strides, k_strides, v_strides, sequences, places, extra, each, H, scale, SHAPE: tl.constexpr,
):  # fmt: skip
    """dk (total, Hk, D) and dv (total, Hk, Dv); of a block with several parts their sums, kept (parts, BLOCK, D + Dv) in fp32.

    The first `extra` programs have the later parts of long lists, by the places of their sums; the others each have the first
    part of a block.
    """
    KEYS: tl.constexpr = SHAPE.KEYS
    BLOCK_D: tl.constexpr = SHAPE.BLOCK_D
    BLOCK_DV: tl.constexpr = SHAPE.BLOCK_DV
    PER: tl.constexpr = SHAPE.BLOCK // SHAPE.KEYS
    part = 0
    n = tl.program_id(0) // PER - extra
    if n < 0:
        kept = tl.program_id(0) // PER
        n = 0
        step = 1
        blocks = places * (H // SHAPE.GROUP)
        while step * 2 < blocks:
            step *= 2
        while step > 0:
            at = n + step
            if (at < blocks) & (tl.load(starts_ptr + tl.minimum(at, blocks)) // each * 2 <= kept):
                n = at
            step //= 2
        part = (kept - tl.load(starts_ptr + n) // each * 2).to(tl.int32)
        if part == 0:
            return
    start, stop = tl.load(starts_ptr + n), tl.load(starts_ptr + n + 1)
    is_long = stop - start > each
    kept = start // each * 2 + part
    start += part.to(tl.int64) * each
    if (part > 0) & (start >= stop):
        return
    stop = tl.minimum(start + each, stop)
    place = n % places
    hk = n // places
    b = sequence_of(place, cu_k_ptr, sequences, SHAPE.BLOCK)
    first_k = tl.load(cu_k_ptr + b)
    S = tl.load(cu_k_ptr + b + 1) - first_k
    # a row's position, less its number
    later = S - tl.load(cu_q_ptr + b + 1)
    s = tl.program_id(0) % PER * SHAPE.KEYS + tl.arange(0, SHAPE.KEYS)
    j = (place - first_k // SHAPE.BLOCK - b) * SHAPE.BLOCK + s
    d = tl.arange(0, SHAPE.BLOCK_D)
    dv = tl.arange(0, SHAPE.BLOCK_DV)
    row = first_k.to(tl.int64) + j
    there = (j < S)[:, None]
    k_tile = k_ptr + row[:, None] * k_strides[0] + hk.to(tl.int64) * k_strides[1] + d[None, :]
    v_tile = v_ptr + row[:, None] * v_strides[0] + hk.to(tl.int64) * v_strides[1] + dv[None, :]
    k = tl.load(k_tile, mask=there & (d < SHAPE.D)[None, :], other=0.0)
    v = tl.load(v_tile, mask=there & (dv < SHAPE.DV)[None, :], other=0.0)
    dk = tl.zeros((KEYS, BLOCK_D), tl.float32)
    dv_sum = tl.zeros((KEYS, BLOCK_DV), tl.float32)
    dk, dv_sum = _dkdv_walk(
        dk, dv_sum, k, v, j, q_ptr, do_ptr, lse_ptr, delta_ptr, rests_ptr, queries_ptr, start, stop, hk, S, later, q_strides[0],
        q_strides[1], H, scale, SHAPE, False,
    )  # fmt: skip
    if tl.max(tl.where(dk == dk, 0, 1)) + tl.max(tl.where(dv_sum == dv_sum, 0, 1)) > 0:
        dk = tl.zeros((KEYS, BLOCK_D), tl.float32)
        dv_sum = tl.zeros((KEYS, BLOCK_DV), tl.float32)
        dk, dv_sum = _dkdv_walk(
            dk, dv_sum, k, v, j, q_ptr, do_ptr, lse_ptr, delta_ptr, rests_ptr, queries_ptr, start, stop, hk, S, later, q_strides[0],
            q_strides[1], H, scale, SHAPE, True,
        )  # fmt: skip
    if is_long:
        line = kept_ptr + (kept * SHAPE.BLOCK + s)[:, None] * (SHAPE.D + SHAPE.DV)
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


@triton.jit(do_not_specialize=["sequences", "places", "each", "HK"])
def _join_kv(kept_ptr, cu_k_ptr, starts_ptr, dk_ptr, dv_ptr, sequences, places, each, HK, SHAPE: tl.constexpr):
    """dk and dv of a block whose list has several parts: their sums, in order."""
    KEYS: tl.constexpr = SHAPE.KEYS
    BLOCK_D: tl.constexpr = SHAPE.BLOCK_D
    BLOCK_DV: tl.constexpr = SHAPE.BLOCK_DV
    PER: tl.constexpr = SHAPE.BLOCK // SHAPE.KEYS
    n = tl.program_id(0) // PER
    start = tl.load(starts_ptr + n)
    count = tl.cdiv(tl.load(starts_ptr + n + 1) - start, each)
    if count <= 1:
        return
    place = n % places
    b = sequence_of(place, cu_k_ptr, sequences, SHAPE.BLOCK)
    first_k = tl.load(cu_k_ptr + b)
    s = tl.program_id(0) % PER * SHAPE.KEYS + tl.arange(0, SHAPE.KEYS)
    j = (place - first_k // SHAPE.BLOCK - b) * SHAPE.BLOCK + s
    d = tl.arange(0, SHAPE.BLOCK_D)
    dv = tl.arange(0, SHAPE.BLOCK_DV)
    dk = tl.zeros((KEYS, BLOCK_D), tl.float32)
    dv_sum = tl.zeros((KEYS, BLOCK_DV), tl.float32)
    for part in range(count):
        line = kept_ptr + ((start // each * 2 + part) * SHAPE.BLOCK + s)[:, None] * (SHAPE.D + SHAPE.DV)
        dk += tl.load(line + d[None, :], mask=(d < SHAPE.D)[None, :], other=0.0)
        dv_sum += tl.load(line + SHAPE.D + dv[None, :], mask=(dv < SHAPE.DV)[None, :], other=0.0)
    there = (j < tl.load(cu_k_ptr + b + 1) - first_k)[:, None]
    _store_kv(dk, dv_sum, dk_ptr, dv_ptr, (first_k.to(tl.int64) + j) * HK + n // places, there, SHAPE)


def launch_of_kv(shape: SelectedShape) -> LaunchOptions:
    """A launch of dk and dv: as `launch_of`, with eight warps for heads up to 64, whose step spills in four."""
    launch = launch_of(shape, STAGES_KV)
    return launch._replace(warps=8) if max(shape.BLOCK_D, shape.BLOCK_DV) <= 64 else launch


_start_q, _start_kv, _start_join = Kernel(_backward_q), Kernel(_backward_kv), Kernel(_join_kv)


def dq(
    do: Tensor, lse: Tensor, delta: Tensor, rests: Tensor, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float, block: int,
    launch: LaunchOptions | None = None,
) -> Tensor:  # fmt: skip
    """Returns dq from contiguous do (total, H, Dv), lse and delta (total, H) in fp32. Fills in the rests of rows."""
    found, count = q.new_empty(q.shape), tiles.table.shape[0]
    shape = shape_of(q, v, k.shape[1], block, tiles.queries)
    if q.shape[0]:
        tensors = (q, k, v, do, lse, delta, rests, found, tiles.table, tiles.counts, tiles.entries)
        numbers = (*strides_of(q, k, v), count, tiles.entries.shape[2], q.shape[1], scale)
        _start_q((count * k.shape[1], 1, 1), (*tensors, *numbers), constants_of(shape, launch or launch_of(shape, STAGES_Q)))
    return found


def dkdv(
    do: Tensor, lse: Tensor, delta: Tensor, rests: Tensor, q: Tensor, k: Tensor, v: Tensor, lists: KeyLists, cu_q: Tensor, cu_k: Tensor,
    scale: float, block: int, launch: LaunchOptions | None = None, each: int | None = None, queries: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns dk and dv from contiguous do (total, H, Dv), lse, delta and rests (total, H) in fp32, after `dq`.

    A list of more than `each` queries has parts. Their sums are kept from place 2 (start // each) on: a list from `start` to `stop`
    has ceil((stop - start) / each) parts, at least 2, and 2 (stop // each) is as many places further on or more. So no length is
    read from the device.

    queries: of a step.
    """
    H, (total_k, Hk, D), sequences = q.shape[1], k.shape, cu_k.shape[0] - 1
    dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
    shape = shape_of(q, v, Hk, block, queries or queries_of_step(H // Hk, q.dtype))
    constants, per = constants_of(shape, launch or launch_of_kv(shape)), block // shape.KEYS
    if total_k:
        places, entries = total_k // block + sequences, lists.queries.numel()
        each = each or max(LEAST_OF_PART, triton.next_power_of_2(entries // PARTS))
        extra = 2 * (entries // each)
        kept = torch.empty(extra, block, D + v.shape[-1], dtype=torch.float32, device=q.device)
        tensors = (q, k, v, do, lse, delta, rests, dk, dv, kept, cu_q, cu_k, lists.queries, lists.starts)
        numbers = (*strides_of(q, k, v), sequences, places, extra, each, H, scale)
        _start_kv(((extra + places * Hk) * per, 1, 1), (*tensors, *numbers), constants)
        if extra:
            tensors = (kept, cu_k, lists.starts, dk, dv)
            _start_join((places * Hk * per, 1, 1), (*tensors, sequences, places, each, Hk), constants)
    return dk, dv
