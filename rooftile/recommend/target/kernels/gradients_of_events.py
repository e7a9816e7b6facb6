"""The gradients of keys, values and the bias over whole histories: a program owns a tile of events of one of their heads.

    W^T = w(S)^T;    dV += W^T dO;    dK += scale dS^T Q;    db += rowsum dS^T

It walks the candidates of the heads that share it, in one order, so there is no atomic addition.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rooftile.exact.backends.triton.scores import load_rows
from rooftile.recommend.target.kernels.pairs import Numbers, softmax_again, user_and_tile, weight
from rooftile.recommend.target.kernels.shape import launch_of, slots
from rooftile.recommend.target.problem import Batch, Problem
from rooftile.runtime.launch import Kernel


# fmt: off
@triton.jit(do_not_specialize=["B", "H"])
def _gradients_of_events(
    q_ptr, k_ptr, v_ptr, bias_ptr, cu_q_ptr, cu_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, db_ptr,
    q_strides, k_strides, v_strides, bias_strides, do_strides, B, H, numbers, SPEC: tl.constexpr,
):
    # fmt: on
    KEYS: tl.constexpr = SPEC.KEYS
    BLOCK_D: tl.constexpr = SPEC.BLOCK_D
    BLOCK_DV: tl.constexpr = SPEC.BLOCK_DV
    numbers = Numbers(*numbers)
    Hk = H // numbers.group
    kv = tl.program_id(0) % Hk
    user, tile = user_and_tile(tl.program_id(0) // Hk, cu_ptr, cu_q_ptr, cu_ptr, B, SPEC.KEYS)
    if tile * SPEC.KEYS >= user.keys:
        return
    j = tile * SPEC.KEYS + tl.arange(0, SPEC.KEYS)
    present = j < user.keys
    at = user.key_0 + j.to(tl.int64)
    d = tl.arange(0, SPEC.BLOCK_D)
    d_v = tl.arange(0, SPEC.BLOCK_DV)
    r = tl.arange(0, SPEC.ROWS)
    k = load_rows(k_ptr + at[:, None] * k_strides[0] + kv.to(tl.int64) * k_strides[1] + d[None, :], present, d, SPEC.D, True)
    v = load_rows(v_ptr + at[:, None] * v_strides[0] + kv.to(tl.int64) * v_strides[1] + d_v[None, :], present, d_v, SPEC.DV, True)
    factor = 1.0 / tl.maximum(user.keys, 1).to(tl.float32) if SPEC.MEAN else 1.0
    dk = tl.zeros((KEYS, BLOCK_D), tl.float32)
    dv = tl.zeros((KEYS, BLOCK_DV), tl.float32)
    for c in range(0, numbers.group):
        h = (kv * numbers.group + c).to(tl.int64)
        db = tl.zeros((KEYS,), tl.float32)
        if SPEC.BIAS:
            bias = tl.load(bias_ptr + at * bias_strides[0] + h * bias_strides[1], mask=present, other=0.0).to(tl.float32)[:, None]
        for n in tl.range(0, tl.cdiv(user.rows, SPEC.ROWS), num_stages=SPEC.STAGES):
            i = n * SPEC.ROWS + r
            there = i < user.rows
            rows = user.row_0 + i.to(tl.int64)
            q = load_rows(q_ptr + rows[:, None] * q_strides[0] + h * q_strides[1] + d[None, :], there, d, SPEC.D, True)
            do = load_rows(do_ptr + rows[:, None] * do_strides[0] + h * do_strides[1] + d_v[None, :], there, d_v, SPEC.DV, True)
            x = tl.dot(k, tl.trans(q), input_precision=SPEC.PRECISION) * numbers.scale  # (KEYS, ROWS)
            if SPEC.BIAS:
                x += bias
            # a candidate that is not there is a row of zeros, and its weights are 0
            dw = tl.dot(v, tl.trans(do), input_precision=SPEC.PRECISION) * factor
            if SPEC.SOFTMAX:
                w = softmax_again(x, tl.load(lse_ptr + rows * H + h, mask=there, other=float("inf"))[None, :])
                ds = w * (dw - tl.load(delta_ptr + rows * H + h, mask=there, other=0.0)[None, :])
            else:
                w, slope = weight(x, SPEC)
                w = tl.where(there[None, :], w, 0.0)
                ds = tl.where(there[None, :], dw * slope, 0.0)
            dv = tl.dot(w.to(do.dtype), do, dv, input_precision=SPEC.PRECISION)
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=SPEC.PRECISION)
            if SPEC.BIAS:
                db += tl.sum(ds, 1)
        if SPEC.BIAS:
            tl.store(db_ptr + at * H + h, db, mask=present)
    dk_tile = dk_ptr + (at[:, None] * Hk + kv) * SPEC.D + d[None, :]
    dv_tile = dv_ptr + (at[:, None] * Hk + kv) * SPEC.DV + d_v[None, :]
    tl.store(dk_tile, (dk * numbers.scale).to(dk_ptr.dtype.element_ty), mask=present[:, None] & (d < SPEC.D)[None, :])
    tl.store(dv_tile, (dv * factor).to(dv_ptr.dtype.element_ty), mask=present[:, None] & (d_v < SPEC.DV)[None, :])


_start = Kernel(_gradients_of_events)


def gradients_of_events(
    do: Tensor, lse: Tensor, delta: Tensor, batch: Batch, problem: Problem
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Returns dk (total, Hk, D), dv (total, Hk, Dv), and the bias's gradient for each head (total, H) in fp32."""
    q, keys, values, bias = batch[:4]
    dk, dv = keys.new_empty(keys.shape), values.new_empty(values.shape)
    db = None if bias is None else q.new_empty((keys.shape[0], q.shape[1]), dtype=batch.wide)
    call = launch_of("events", batch, problem)
    if dk.numel():
        grid = slots(batch.cu, keys.shape[0], call.tile.keys) * keys.shape[1]
        out = (dk, dv, batch.cu if db is None else db)
        arguments = (q, keys, values, call.bias, batch.cu_q, batch.cu, do, lse, delta, *out)
        strides = (*call.strides, (do.stride(0), do.stride(1)))
        _start((grid, 1, 1), (*arguments, *strides, call.B, call.H, call.numbers), call.constants)
    return dk, dv, db
