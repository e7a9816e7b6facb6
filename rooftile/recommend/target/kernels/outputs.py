"""The forward over whole histories: a program owns a tile of candidates of one head of a user, and walks the user's events.

    S = scale Q K_j^T + bias_j;    O += w(S) V_j

With softmax, w(S) = exp(S - m), and sums are rescaled when the largest score m of a candidate grows. The tile and the order of the
events are the same for every number of candidates, so under `deterministic` a candidate's bits depend on nothing but itself and its
user. Else a history is cut into parts where programs are fewer than processors, and the parts' sums are added up.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.exact.backends.triton.scores import load_rows
from rooftile.recommend.target.kernels.pairs import LOG2E, Numbers, user_and_tile, weight
from rooftile.recommend.target.kernels.shape import launch_of, slots
from rooftile.recommend.target.problem import Batch, Problem
from rooftile.runtime.launch import Kernel


# fmt: off
@triton.jit
def _walk(
    acc, m, l, q, k_ptr, v_ptr, bias_ptr, k_stride, v_stride, bias_stride, first, tiles, keys, scale,
    SPEC: tl.constexpr, MASKED: tl.constexpr,
):
    # fmt: on
    s = tl.arange(0, SPEC.KEYS)
    d = tl.arange(0, SPEC.BLOCK_D)
    dv = tl.arange(0, SPEC.BLOCK_DV)
    for n in tl.range(0, tiles, num_stages=SPEC.STAGES):
        j = (first + n) * SPEC.KEYS + s
        present = j < keys
        rows = j.to(tl.int64)[:, None]
        k = load_rows(k_ptr + rows * k_stride + d[None, :], present, d, SPEC.D, MASKED)
        v = k if SPEC.SAME else load_rows(v_ptr + rows * v_stride + dv[None, :], present, dv, SPEC.DV, MASKED)
        x = tl.dot(q, tl.trans(k), input_precision=SPEC.PRECISION) * scale
        if SPEC.BIAS:
            bias = tl.load(bias_ptr + j.to(tl.int64) * bias_stride, mask=present, other=0.0) if MASKED else tl.load(bias_ptr + j.to(tl.int64) * bias_stride)
            x += bias.to(tl.float32)[None, :]
        if MASKED:
            x = tl.where(present[None, :], x, float("-inf"))
        if SPEC.SOFTMAX:
            m_new = tl.maximum(m, tl.max(x, 1))
            # a candidate that has met no event yet: -inf - -inf is nan
            pivot = tl.where(m_new == float("-inf"), 0.0, m_new)
            alpha = tl.exp2((m - pivot) * LOG2E)
            w = tl.exp2((x - pivot[:, None]) * LOG2E)
            l = l * alpha + tl.sum(w, 1)
            acc = acc * alpha[:, None]
            m = m_new
        else:
            w, _ = weight(x, SPEC)
        acc = tl.dot(w.to(v.dtype), v, acc, input_precision=SPEC.PRECISION)
    return acc, m, l


# fmt: off
@triton.jit(do_not_specialize=["B", "H", "total"])
def _outputs(
    q_ptr, k_ptr, v_ptr, bias_ptr, cu_q_ptr, cu_ptr, o_ptr, lse_ptr, q_strides, k_strides, v_strides, bias_strides, B, H, total,
    numbers, SPEC: tl.constexpr,
):
    # fmt: on
    ROWS: tl.constexpr = SPEC.ROWS
    BLOCK_DV: tl.constexpr = SPEC.BLOCK_DV
    numbers = Numbers(*numbers)
    h = tl.program_id(0) % H
    user, tile = user_and_tile(tl.program_id(0) // H, cu_q_ptr, cu_q_ptr, cu_ptr, B, SPEC.ROWS)
    if tile * SPEC.ROWS >= user.rows:
        return
    i = tile * SPEC.ROWS + tl.arange(0, SPEC.ROWS)
    there = i < user.rows
    rows = user.row_0 + i.to(tl.int64)
    d = tl.arange(0, SPEC.BLOCK_D)
    dv = tl.arange(0, SPEC.BLOCK_DV)
    kv = (h // numbers.group).to(tl.int64)
    q = load_rows(q_ptr + rows[:, None] * q_strides[0] + h.to(tl.int64) * q_strides[1] + d[None, :], there, d, SPEC.D, True)
    k_ptr += user.key_0 * k_strides[0] + kv * k_strides[1]
    v_ptr += user.key_0 * v_strides[0] + kv * v_strides[1]
    bias_ptr += user.key_0 * bias_strides[0] + h.to(tl.int64) * bias_strides[1]
    acc = tl.zeros((ROWS, BLOCK_DV), tl.float32)
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    l = tl.zeros((ROWS,), tl.float32)
    # the tiles of this part of the history: whole ones, and one with the user's last events
    tiles = tl.cdiv(user.keys, SPEC.KEYS)
    each = tl.cdiv(tiles, tl.num_programs(1))
    first = tl.program_id(1) * each
    stop = tl.minimum(first + each, tiles)
    clear = tl.maximum(tl.minimum(stop, user.keys // SPEC.KEYS) - first, 0)
    # fmt: off
    acc, m, l = _walk(acc, m, l, q, k_ptr, v_ptr, bias_ptr, k_strides[0], v_strides[0], bias_strides[0], first, clear, user.keys, numbers.scale, SPEC, False)
    acc, m, l = _walk(acc, m, l, q, k_ptr, v_ptr, bias_ptr, k_strides[0], v_strides[0], bias_strides[0], first + clear, stop - first - clear, user.keys, numbers.scale, SPEC, True)
    # fmt: on
    rows += tl.program_id(1).to(tl.int64) * total
    if SPEC.SOFTMAX:
        acc = acc / tl.where(l == 0.0, 1.0, l)[:, None]
        lse = tl.where(l == 0.0, float("-inf"), m + tl.log2(l) / LOG2E)
        tl.store(lse_ptr + rows * H + h, lse, mask=there)
    if SPEC.MEAN:
        acc = acc / tl.maximum(user.keys, 1).to(tl.float32)
    o_tile = o_ptr + (rows[:, None] * H + h) * SPEC.DV + dv[None, :]
    tl.store(o_tile, acc.to(o_ptr.dtype.element_ty), mask=there[:, None] & (dv < SPEC.DV)[None, :])


_start = Kernel(_outputs)

# the least tiles of events in a part of a history, below which a program hardly has work
LEAST_TILES = 8


def outputs(batch: Batch, problem: Problem) -> tuple[Tensor, Tensor]:
    """Returns o (total_q, H, Dv), and lse (total_q, H) fp32, which is empty without softmax."""
    q, keys, values = batch[:3]
    call = launch_of("outputs", batch, problem)
    grid = slots(batch.cu_q, q.shape[0], call.tile.rows) * call.H
    parts = 1 if problem.deterministic else parts_of(grid, keys.shape[0] // max(call.B, 1) // call.tile.keys, q.device)
    o = q.new_empty(parts, *q.shape[:2], values.shape[2], dtype=q.dtype if parts == 1 else batch.wide)
    lse = q.new_empty((parts, *batch.lse_shape) if problem.weights == "softmax" else (1, 0, 0), dtype=batch.wide)
    if o.numel():
        arguments = (q, keys, values, call.bias, batch.cu_q, batch.cu, o, lse, *call.strides)
        _start((grid, parts, 1), (*arguments, call.B, call.H, q.shape[0], call.numbers), call.constants)
    return (o[0], lse[0]) if parts == 1 else _merged(o, lse, q.dtype)


def parts_of(programs: int, tiles: int, device: torch.device) -> int:
    """The parts into which histories of some tiles are cut, so that few programs become enough for all processors."""
    return max(min(2 * processors(device) // max(programs, 1), tiles // LEAST_TILES), 1)


@cache
def processors(device: torch.device) -> int:
    """The number of processors of a GPU, each of which runs programs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


def _merged(o: Tensor, lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Joins parts of a history: o (parts, total_q, H, Dv), and lse (parts, total_q, H) with softmax."""
    if not lse.numel():
        return o.sum(0).to(dtype), lse[0]
    whole = lse.logsumexp(0)
    shares = torch.exp(lse - torch.where(whole.isneginf(), 0.0, whole))
    return (shares[..., None] * o).sum(0).to(dtype), whole
