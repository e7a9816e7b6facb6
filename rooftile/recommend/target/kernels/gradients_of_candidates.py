"""The gradient of candidates over whole histories: a program owns a tile of candidates and walks the user's events.

dW = dO V^T;    dS = W (dW - delta) with softmax, dW w'(S) without;    dQ += scale dS K
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
def _gradients_of_candidates(
    q_ptr, k_ptr, v_ptr, bias_ptr, cu_q_ptr, cu_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr,
    q_strides, k_strides, v_strides, bias_strides, do_strides, B, H, numbers, SPEC: tl.constexpr,
):
    # fmt: on
    ROWS: tl.constexpr = SPEC.ROWS
    BLOCK_D: tl.constexpr = SPEC.BLOCK_D
    numbers = Numbers(*numbers)
    h = tl.program_id(0) % H
    user, tile = user_and_tile(tl.program_id(0) // H, cu_q_ptr, cu_q_ptr, cu_ptr, B, SPEC.ROWS)
    if tile * SPEC.ROWS >= user.rows:
        return
    i = tile * SPEC.ROWS + tl.arange(0, SPEC.ROWS)
    there = i < user.rows
    rows = user.row_0 + i.to(tl.int64)
    d = tl.arange(0, SPEC.BLOCK_D)
    d_v = tl.arange(0, SPEC.BLOCK_DV)
    s = tl.arange(0, SPEC.KEYS)
    kv = (h // numbers.group).to(tl.int64)
    q = load_rows(q_ptr + rows[:, None] * q_strides[0] + h.to(tl.int64) * q_strides[1] + d[None, :], there, d, SPEC.D, True)
    do = load_rows(do_ptr + rows[:, None] * do_strides[0] + h.to(tl.int64) * do_strides[1] + d_v[None, :], there, d_v, SPEC.DV, True)
    k_ptr += user.key_0 * k_strides[0] + kv * k_strides[1]
    v_ptr += user.key_0 * v_strides[0] + kv * v_strides[1]
    bias_ptr += user.key_0 * bias_strides[0] + h.to(tl.int64) * bias_strides[1]
    factor = 1.0 / tl.maximum(user.keys, 1).to(tl.float32) if SPEC.MEAN else 1.0
    if SPEC.SOFTMAX:
        lse = tl.load(lse_ptr + rows * H + h, mask=there, other=0.0)[:, None]
        delta = tl.load(delta_ptr + rows * H + h, mask=there, other=0.0)[:, None]
    dq = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for n in tl.range(0, tl.cdiv(user.keys, SPEC.KEYS), num_stages=SPEC.STAGES):
        j = n * SPEC.KEYS + s
        present = j < user.keys
        at = j.to(tl.int64)
        k = load_rows(k_ptr + at[:, None] * k_strides[0] + d[None, :], present, d, SPEC.D, True)
        v = k if SPEC.SAME else load_rows(v_ptr + at[:, None] * v_strides[0] + d_v[None, :], present, d_v, SPEC.DV, True)
        x = tl.dot(q, tl.trans(k), input_precision=SPEC.PRECISION) * numbers.scale
        if SPEC.BIAS:
            x += tl.load(bias_ptr + at * bias_strides[0], mask=present, other=0.0).to(tl.float32)[None, :]
        # an event that is not there is a row of zeros, which adds nothing
        dw = tl.dot(do, tl.trans(v), input_precision=SPEC.PRECISION) * factor
        if SPEC.SOFTMAX:
            ds = softmax_again(x, lse) * (dw - delta)
        else:
            _, slope = weight(x, SPEC)
            ds = dw * slope
        ds = tl.where(present[None, :], ds, 0.0)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=SPEC.PRECISION)
    dq_tile = dq_ptr + (rows[:, None] * H + h) * SPEC.D + d[None, :]
    tl.store(dq_tile, (dq * numbers.scale).to(dq_ptr.dtype.element_ty), mask=there[:, None] & (d < SPEC.D)[None, :])


_start = Kernel(_gradients_of_candidates)


def gradients_of_candidates(do: Tensor, lse: Tensor, delta: Tensor, batch: Batch, problem: Problem) -> Tensor:
    """Returns dq (total_q, H, D)."""
    q, keys, values = batch[:3]
    dq = q.new_empty(q.shape)
    call = launch_of("candidates", batch, problem)
    if dq.numel():
        grid = slots(batch.cu_q, q.shape[0], call.tile.rows) * call.H
        arguments = (q, keys, values, call.bias, batch.cu_q, batch.cu, do, lse, delta, dq)
        strides = (*call.strides, (do.stride(0), do.stride(1)))
        _start((grid, 1, 1), (*arguments, *strides, call.B, call.H, call.numbers), call.constants)
    return dq
