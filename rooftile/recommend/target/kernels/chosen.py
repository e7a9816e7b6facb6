"""Attention over chosen events, forward and the gradient of candidates: a program has one candidate and head, and reads its events.

Every candidate has events of its own, so there is no tile of products: a program is as fast as rows come from the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rooftile.exact.backends.triton.scores import load_rows
from rooftile.recommend.target.kernels.pairs import LOG2E, Numbers, softmax_again, weight
from rooftile.recommend.target.kernels.shape import launch_of
from rooftile.recommend.target.problem import Batch, Problem, first_events
from rooftile.runtime.launch import Kernel


@triton.jit
def _events(events_ptr, first, i, h, n, H, numbers, SPEC: tl.constexpr):
    """A tile of a candidate's list: its places in the list, the events' rows, and which are there."""
    s = n * SPEC.KEYS + tl.arange(0, SPEC.KEYS)
    heads = 1 if SPEC.SHARED else H
    list_ptr = events_ptr + (i * heads + (0 if SPEC.SHARED else h)) * numbers.k
    place = tl.load(list_ptr + s, mask=s < numbers.k, other=-1).to(tl.int64)
    return s, first + tl.maximum(place, 0), place >= 0


@triton.jit
def _scores(q, k, bias_ptr, at, there, bias_stride, numbers, SPEC: tl.constexpr):
    x = tl.sum(q[None, :] * k, 1) * numbers.scale
    if SPEC.BIAS:
        x += tl.load(bias_ptr + at * bias_stride, mask=there, other=0.0).to(tl.float32)
    return tl.where(there, x, float("-inf"))


# fmt: off
@triton.jit(do_not_specialize=["H"])
def _chosen_outputs(
    q_ptr, k_ptr, v_ptr, bias_ptr, events_ptr, first_ptr, o_ptr, lse_ptr, q_strides, k_strides, v_strides, bias_strides, H, numbers,
    SPEC: tl.constexpr,
):
    # fmt: on
    BLOCK_DV: tl.constexpr = SPEC.BLOCK_DV
    numbers = Numbers(*numbers)
    h = (tl.program_id(0) % H).to(tl.int64)
    i = (tl.program_id(0) // H).to(tl.int64)
    first = tl.load(first_ptr + i)
    d = tl.arange(0, SPEC.BLOCK_D)
    dv = tl.arange(0, SPEC.BLOCK_DV)
    q = tl.load(q_ptr + i * q_strides[0] + h * q_strides[1] + d, mask=d < SPEC.D, other=0.0).to(tl.float32)
    k_ptr += (h // numbers.group) * k_strides[1]
    v_ptr += (h // numbers.group) * v_strides[1]
    bias_ptr += h * bias_strides[1]
    acc = tl.zeros((BLOCK_DV,), tl.float32)
    m = i * 0.0 - float("inf")
    l = i * 0.0
    found = i * 0
    for n in tl.range(0, tl.cdiv(numbers.k, SPEC.KEYS), num_stages=SPEC.STAGES):
        _, at, there = _events(events_ptr, first, i, h, n, H, numbers, SPEC)
        k = load_rows(k_ptr + at[:, None] * k_strides[0] + d[None, :], there, d, SPEC.D, True).to(tl.float32)
        v = k if SPEC.SAME else load_rows(v_ptr + at[:, None] * v_strides[0] + dv[None, :], there, dv, SPEC.DV, True).to(tl.float32)
        x = _scores(q, k, bias_ptr, at, there, bias_strides[0], numbers, SPEC)
        found += tl.sum(there.to(tl.int32), 0)
        if SPEC.SOFTMAX:
            m_new = tl.maximum(m, tl.max(x, 0))
            pivot = tl.where(m_new == float("-inf"), 0.0, m_new)
            alpha = tl.exp2((m - pivot) * LOG2E)
            w = tl.exp2((x - pivot) * LOG2E)
            l = l * alpha + tl.sum(w, 0)
            acc = acc * alpha
            m = m_new
        else:
            w, _ = weight(x, SPEC)
        acc += tl.sum(w[:, None] * v, 0)
    if SPEC.SOFTMAX:
        acc = acc / tl.where(l == 0.0, 1.0, l)
        tl.store(lse_ptr + i * H + h, tl.where(l == 0.0, float("-inf"), m + tl.log2(l) / LOG2E))
    if SPEC.MEAN:
        acc = acc / tl.maximum(found, 1).to(tl.float32)
    tl.store(o_ptr + (i * H + h) * SPEC.DV + dv, acc.to(o_ptr.dtype.element_ty), mask=dv < SPEC.DV)


# fmt: off
@triton.jit(do_not_specialize=["H"])
def _chosen_gradients(
    q_ptr, k_ptr, v_ptr, bias_ptr, events_ptr, first_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, w_ptr, ds_ptr,
    q_strides, k_strides, v_strides, bias_strides, do_strides, H, numbers, SPEC: tl.constexpr,
):
    # fmt: on
    BLOCK_D: tl.constexpr = SPEC.BLOCK_D
    numbers = Numbers(*numbers)
    h = (tl.program_id(0) % H).to(tl.int64)
    i = (tl.program_id(0) // H).to(tl.int64)
    first = tl.load(first_ptr + i)
    d = tl.arange(0, SPEC.BLOCK_D)
    dv = tl.arange(0, SPEC.BLOCK_DV)
    q = tl.load(q_ptr + i * q_strides[0] + h * q_strides[1] + d, mask=d < SPEC.D, other=0.0).to(tl.float32)
    do = tl.load(do_ptr + i * do_strides[0] + h * do_strides[1] + dv, mask=dv < SPEC.DV, other=0.0).to(tl.float32)
    k_ptr += (h // numbers.group) * k_strides[1]
    v_ptr += (h // numbers.group) * v_strides[1]
    bias_ptr += h * bias_strides[1]
    lse = i * 0.0
    delta = i * 0.0
    if SPEC.SOFTMAX:
        lse = tl.load(lse_ptr + i * H + h)
        delta = tl.load(delta_ptr + i * H + h)
    factor = i * 0.0 + 1.0
    if SPEC.MEAN:
        found = i * 0
        for n in range(0, tl.cdiv(numbers.k, SPEC.KEYS)):
            _, _, there = _events(events_ptr, first, i, h, n, H, numbers, SPEC)
            found += tl.sum(there.to(tl.int32), 0)
        factor = 1.0 / tl.maximum(found, 1).to(tl.float32)
    dq = tl.zeros((BLOCK_D,), tl.float32)
    for n in tl.range(0, tl.cdiv(numbers.k, SPEC.KEYS), num_stages=SPEC.STAGES):
        s, at, there = _events(events_ptr, first, i, h, n, H, numbers, SPEC)
        k = load_rows(k_ptr + at[:, None] * k_strides[0] + d[None, :], there, d, SPEC.D, True).to(tl.float32)
        v = k if SPEC.SAME else load_rows(v_ptr + at[:, None] * v_strides[0] + dv[None, :], there, dv, SPEC.DV, True).to(tl.float32)
        x = _scores(q, k, bias_ptr, at, there, bias_strides[0], numbers, SPEC)
        dw = tl.sum(do[None, :] * v, 1) * factor
        if SPEC.SOFTMAX:
            w = softmax_again(x, lse)
            ds = w * (dw - delta)
        else:
            w, slope = weight(x, SPEC)
            ds = dw * slope
        ds = tl.where(there, ds, 0.0)
        w = tl.where(there, w * factor, 0.0)
        dq += tl.sum(ds[:, None] * k, 0)
        pair = (i * H + h) * numbers.k + s
        tl.store(w_ptr + pair, w, mask=s < numbers.k)
        tl.store(ds_ptr + pair, ds, mask=s < numbers.k)
    tl.store(dq_ptr + (i * H + h) * SPEC.D + d, (dq * numbers.scale).to(dq_ptr.dtype.element_ty), mask=d < SPEC.D)


_start = Kernel(_chosen_outputs)
_start_gradients = Kernel(_chosen_gradients)


def outputs(batch: Batch, problem: Problem) -> tuple[Tensor, Tensor]:
    """Returns o (total_q, H, Dv), and lse (total_q, H) fp32, which is empty without softmax."""
    q, keys, values = batch[:3]
    o = q.new_empty(*q.shape[:2], values.shape[2])
    lse = q.new_empty(batch.lse_shape if problem.weights == "softmax" else (0, 0), dtype=batch.wide)
    call = launch_of("chosen", batch, problem)
    if o.numel():
        arguments = (q, keys, values, call.bias, batch.events, first_events(batch), o, lse)
        _start((q.shape[0] * call.H, 1, 1), (*arguments, *call.strides, call.H, call.numbers), call.constants)
    return o, lse


def gradients_of_candidates(
    do: Tensor, lse: Tensor, delta: Tensor, batch: Batch, problem: Problem
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns dq (total_q, H, D), and the weights and the scores' gradients of all pairs (total_q, H, k) in fp32."""
    q, keys, values, _, events = batch[:5]
    assert events is not None
    dq = q.new_empty(q.shape)
    w, ds = (q.new_empty((*q.shape[:2], events.shape[2]), dtype=batch.wide) for _ in range(2))
    call = launch_of("chosen", batch, problem)
    if dq.numel():
        arguments = (q, keys, values, call.bias, events, first_events(batch), do, lse, delta, dq, w, ds)
        strides = (*call.strides, (do.stride(0), do.stride(1)))
        _start_gradients((q.shape[0] * call.H, 1, 1), (*arguments, *strides, call.H, call.numbers), call.constants)
    return dq, w, ds
