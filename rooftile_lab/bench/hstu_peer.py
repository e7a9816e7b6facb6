"""HSTU attention as public Triton kernels compute it, written anew: a gather and a logarithm per pair, atomic sums.

It has what the kernels of generative-recommenders have: a grid of padded users, a mask on every tile, the bucket of a pair by a
logarithm in fp32, one backward kernel that owns keys and adds dQ atomically, and a table's gradient by an atomic
addition per pair. Causal users with tables of distances (column i - j) and times alone.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _bias(i, j, row_times, key_times, positions_ptr, times_ptr, columns, buckets, step, BIAS: tl.constexpr):
    """The bias of a tile of pairs, and its columns in both tables."""
    place = tl.minimum(tl.maximum(i[:, None] - j[None, :], 0), columns - 1)
    seconds = (row_times[:, None] - key_times[None, :]).to(tl.float32)
    bucket = (tl.log(tl.maximum(seconds, 1.0)) / step).to(tl.int32)
    bucket = tl.minimum(tl.maximum(bucket, 0), buckets - 1)
    return tl.load(positions_ptr + place) + tl.load(times_ptr + bucket), place, bucket


@triton.jit
def _forward(
    q_ptr, k_ptr, v_ptr, y_ptr, cu_ptr, seconds_ptr, positions_ptr, times_ptr, H, alpha, scale, columns, buckets, step,
    D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    start = tl.load(cu_ptr + b).to(tl.int64)
    n = (tl.load(cu_ptr + b + 1) - start).to(tl.int32)
    i_0 = tl.program_id(0) * ROWS
    if i_0 >= n:
        return
    i = i_0 + tl.arange(0, ROWS)
    d = tl.arange(0, D)
    at = (start * H + h) * D
    q = tl.load(q_ptr + at + i.to(tl.int64)[:, None] * (H * D) + d[None, :], mask=(i < n)[:, None], other=0.0)
    row_times = tl.load(seconds_ptr + start + i, mask=i < n, other=0)
    acc = tl.zeros((ROWS, D), tl.float32)
    for j_0 in tl.range(0, tl.minimum(i_0 + ROWS, n), KEYS):
        j = j_0 + tl.arange(0, KEYS)
        there = (j < n)[:, None]
        k = tl.load(k_ptr + at + j.to(tl.int64)[:, None] * (H * D) + d[None, :], mask=there, other=0.0)
        v = tl.load(v_ptr + at + j.to(tl.int64)[:, None] * (H * D) + d[None, :], mask=there, other=0.0)
        x = tl.dot(q, tl.trans(k)) * alpha
        if BIAS:
            key_times = tl.load(seconds_ptr + start + j, mask=j < n, other=0)
            found, _, _ = _bias(i, j, row_times, key_times, positions_ptr, times_ptr, columns, buckets, step, BIAS)
            x += found
        w = x / (1.0 + tl.exp(-x)) * scale
        w = tl.where(i[:, None] >= j[None, :], w, 0.0)
        acc = tl.dot(w.to(v.dtype), v, acc)
    tl.store(y_ptr + at + i.to(tl.int64)[:, None] * (H * D) + d[None, :], acc.to(y_ptr.dtype.element_ty), mask=(i < n)[:, None])


@triton.jit
def _backward(
    q_ptr, k_ptr, v_ptr, dy_ptr, dq_ptr, dk_ptr, dv_ptr, d_positions_ptr, d_times_ptr, cu_ptr, seconds_ptr, positions_ptr,
    times_ptr, H, alpha, scale, columns, buckets, step,
    D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    start = tl.load(cu_ptr + b).to(tl.int64)
    n = (tl.load(cu_ptr + b + 1) - start).to(tl.int32)
    j_0 = tl.program_id(0) * KEYS
    if j_0 >= n:
        return
    j = j_0 + tl.arange(0, KEYS)
    d = tl.arange(0, D)
    at = (start * H + h) * D
    there = (j < n)[:, None]
    keys = at + j.to(tl.int64)[:, None] * (H * D) + d[None, :]
    k = tl.load(k_ptr + keys, mask=there, other=0.0)
    v = tl.load(v_ptr + keys, mask=there, other=0.0)
    key_times = tl.load(seconds_ptr + start + j, mask=j < n, other=0)
    dk = tl.zeros((KEYS, D), tl.float32)
    dv = tl.zeros((KEYS, D), tl.float32)
    for i_0 in tl.range(j_0 // ROWS * ROWS, n, ROWS):
        i = i_0 + tl.arange(0, ROWS)
        rows = at + i.to(tl.int64)[:, None] * (H * D) + d[None, :]
        q = tl.load(q_ptr + rows, mask=(i < n)[:, None], other=0.0)
        dy = tl.load(dy_ptr + rows, mask=(i < n)[:, None], other=0.0)
        x = tl.dot(q, tl.trans(k)) * alpha
        if BIAS:
            row_times = tl.load(seconds_ptr + start + i, mask=i < n, other=0)
            found, place, bucket = _bias(i, j, row_times, key_times, positions_ptr, times_ptr, columns, buckets, step, BIAS)
            x += found
        gate = 1.0 / (1.0 + tl.exp(-x))
        seen = (i[:, None] >= j[None, :]) & (i < n)[:, None] & (j < n)[None, :]
        w = tl.where(seen, x * gate * scale, 0.0)
        dv = tl.dot(tl.trans(w.to(dy.dtype)), dy, dv)
        ds = tl.dot(dy, tl.trans(v)) * (gate * (1.0 + x * (1.0 - gate))) * scale
        ds = tl.where(seen, ds, 0.0)
        if BIAS:
            tl.atomic_add(d_positions_ptr + place, ds, mask=seen, sem="relaxed")
            tl.atomic_add(d_times_ptr + bucket, ds, mask=seen, sem="relaxed")
        ds = ds.to(q.dtype)
        dk = tl.dot(tl.trans(ds), q, dk)
        tl.atomic_add(dq_ptr + rows, tl.dot(ds, k) * alpha, mask=(i < n)[:, None], sem="relaxed")
    tl.store(dk_ptr + keys, (dk * alpha).to(dk_ptr.dtype.element_ty), mask=there)
    tl.store(dv_ptr + keys, dv.to(dv_ptr.dtype.element_ty), mask=there)


class HSTUPeer(torch.autograd.Function):
    """`HSTUPeer.apply(q, k, v, positions, times, cu, seconds, longest, alpha, scale, step)`: y of causal users.

    q, k and v are (total, H, D) and contiguous, D a power of two; the tables fp32, (P,) and (M,), or None for both. `longest` is
    the number of rows of the longest user.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, positions: Any, times: Any, *rest: Any) -> Tensor:
        cu, seconds, longest, *_ = rest
        y = torch.empty_like(v)
        tile = {"ROWS": 128 if q.shape[2] <= 128 else 64, "KEYS": 64}
        grid = (triton.cdiv(longest, tile["ROWS"]), (len(cu) - 1) * q.shape[1])
        _forward[grid](q, k, v, y, *_tables(cu, seconds, positions, times, q, rest), **_constants(q, positions, tile))
        ctx.save_for_backward(q, k, v, positions, times)
        ctx.rest = rest
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, positions, times = ctx.saved_tensors
        cu, seconds, longest, *_ = ctx.rest
        dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        sums = [dq if table is None else torch.zeros_like(table) for table in (positions, times)]
        tile = {"ROWS": 64, "KEYS": 64}
        grid = (triton.cdiv(longest, tile["KEYS"]), (len(cu) - 1) * q.shape[1])
        given = (q, k, v, grads[0].contiguous(), dq, dk, dv, *sums)
        _backward[grid](*given, *_tables(cu, seconds, positions, times, q, ctx.rest), **_constants(q, positions, tile))
        tables = (None, None) if positions is None else sums
        return dq.to(q.dtype), dk, dv, *tables, *[None] * 6


def _tables(cu: Tensor, seconds: Tensor, positions: Any, times: Any, q: Tensor, rest: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments behind queries, keys, values and results; q stands in for tables that are not there."""
    alpha, scale, step = rest[3:]
    columns, buckets = (1 if table is None else len(table) for table in (positions, times))
    tables = (q if table is None else table for table in (positions, times))
    return cu, seconds, *tables, q.shape[1], alpha, scale, columns, buckets, step


def _constants(q: Tensor, positions: Any, tile: dict[str, int]) -> dict[str, Any]:
    return {"D": q.shape[2], "BIAS": positions is not None, "num_warps": 8 if q.shape[2] > 64 else 4, "num_stages": 2, **tile}
