"""Targets' pairs with themselves, added to what kernels that know the history alone have computed.

    y_i += c silu(x) v_i,    dq_i += c alpha dx k_i,    dk_i = c alpha dx q_i,    dv_i = c silu(x) dy_i,    dx = (dy_i v_i) silu'(x)

with x = alpha q_i k_i and c the factor of the user's sums. No other row sees a target's key, so its gradients are these alone.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rooftile.exact.backends.triton.scores import load_rows
from rooftile.recommend.hstu.kernels.pairs import Numbers, UserTensors, own_scores, silu, slope, user_and_tile
from rooftile.recommend.hstu.kernels.shape import launch_of
from rooftile.recommend.hstu.problem import Problem, Users
from rooftile.runtime.launch import Kernel


@triton.jit
def _targets(cu_ptr, targets_ptr, B, H, numbers, SPEC: tl.constexpr):
    """A program's user, head, rows, and which of them are targets."""
    numbers = Numbers(*numbers)
    tensors = UserTensors(cu_ptr, targets_ptr, cu_ptr, cu_ptr, cu_ptr, cu_ptr, cu_ptr, cu_ptr)
    h = tl.program_id(0) % H
    user, tile = user_and_tile(tl.program_id(0) // H, h, B, tensors, numbers, SPEC.ROWS, SPEC)
    i = tile * SPEC.ROWS + tl.arange(0, SPEC.ROWS)
    own = (i >= user.end) & (i < user.n)
    return user, h.to(tl.int64), i, own, tensors, numbers


# fmt: off
@triton.jit(do_not_specialize=["B", "H"])
def _own_outputs(
    q_ptr, k_ptr, v_ptr, y_ptr, cu_ptr, targets_ptr, q_strides, k_strides, v_strides, B, H, numbers, SPEC: tl.constexpr
):
    # fmt: on
    user, h, i, own, tensors, numbers = _targets(cu_ptr, targets_ptr, B, H, numbers, SPEC)
    if tl.max(own.to(tl.int32), 0) > 0:
        d = tl.arange(0, SPEC.BLOCK_D)
        dv = tl.arange(0, SPEC.BLOCK_DV)
        rows = (user.start + i.to(tl.int64))[:, None]
        q = load_rows(q_ptr + rows * q_strides[0] + h * q_strides[1] + d[None, :], own, d, SPEC.D, True)
        k = load_rows(k_ptr + rows * k_strides[0] + h * k_strides[1] + d[None, :], own, d, SPEC.D, True)
        v = load_rows(v_ptr + rows * v_strides[0] + h * v_strides[1] + dv[None, :], own, dv, SPEC.DV, True)
        w, _ = silu(own_scores(q, k, i, own, user, tensors, numbers, SPEC))
        there = own[:, None] & (dv < SPEC.DV)[None, :]
        y_tile = y_ptr + (rows * H + h) * SPEC.DV + dv[None, :]
        y = tl.load(y_tile, mask=there, other=0.0).to(tl.float32) + (w * user.factor)[:, None] * v.to(tl.float32)
        tl.store(y_tile, y.to(y_ptr.dtype.element_ty), mask=there)


# fmt: off
@triton.jit(do_not_specialize=["B", "H"])
def _own_gradients(
    q_ptr, k_ptr, v_ptr, dy_ptr, dq_ptr, dk_ptr, dv_ptr, cu_ptr, targets_ptr, q_strides, k_strides, v_strides, dy_strides, B, H,
    numbers, SPEC: tl.constexpr,
):
    # fmt: on
    user, h, i, own, tensors, numbers = _targets(cu_ptr, targets_ptr, B, H, numbers, SPEC)
    if tl.max(own.to(tl.int32), 0) > 0:
        d = tl.arange(0, SPEC.BLOCK_D)
        d_v = tl.arange(0, SPEC.BLOCK_DV)
        rows = (user.start + i.to(tl.int64))[:, None]
        q = load_rows(q_ptr + rows * q_strides[0] + h * q_strides[1] + d[None, :], own, d, SPEC.D, True).to(tl.float32)
        k = load_rows(k_ptr + rows * k_strides[0] + h * k_strides[1] + d[None, :], own, d, SPEC.D, True).to(tl.float32)
        v = load_rows(v_ptr + rows * v_strides[0] + h * v_strides[1] + d_v[None, :], own, d_v, SPEC.DV, True).to(tl.float32)
        dy = load_rows(dy_ptr + rows * dy_strides[0] + h * dy_strides[1] + d_v[None, :], own, d_v, SPEC.DV, True).to(tl.float32)
        x = own_scores(q, k, i, own, user, tensors, numbers, SPEC)
        w, gate = silu(x)
        ds = tl.sum(dy * v, 1) * slope(x, gate) * (numbers.alpha * user.factor)
        line = rows * H + h
        there = own[:, None] & (d < SPEC.D)[None, :]
        dq_tile = dq_ptr + line * SPEC.D + d[None, :]
        dq = tl.load(dq_tile, mask=there, other=0.0).to(tl.float32) + ds[:, None] * k
        tl.store(dq_tile, dq.to(dq_ptr.dtype.element_ty), mask=there)
        tl.store(dk_ptr + line * SPEC.D + d[None, :], (ds[:, None] * q).to(dk_ptr.dtype.element_ty), mask=there)
        there = own[:, None] & (d_v < SPEC.DV)[None, :]
        dv = (w * user.factor)[:, None] * dy
        tl.store(dv_ptr + line * SPEC.DV + d_v[None, :], dv.to(dv_ptr.dtype.element_ty), mask=there)


_start_outputs = Kernel(_own_outputs)
_start_gradients = Kernel(_own_gradients)


def add_own_outputs(y: Tensor, q: Tensor, k: Tensor, v: Tensor, users: Users, problem: Problem) -> None:
    """Adds targets' own pairs to y (total, H, Dv); without tables."""
    call = launch_of("rows", q, k, v, users, problem, "rows")
    if y.numel():
        arguments = (q, k, v, y, *call.users[:2], *call.strides, call.B, call.H, call.numbers)
        _start_outputs((call.programs, 1, 1), arguments, call.constants)


def add_own_gradients(
    dq: Tensor, dk: Tensor, dv: Tensor, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, users: Users, problem: Problem
) -> None:
    """Adds targets' own pairs to dq, and writes them to dk and dv."""
    call = launch_of("rows", q, k, v, users, problem, "rows")
    if dq.numel():
        strides = (*call.strides, (dy.stride(0), dy.stride(1)))
        arguments = (q, k, v, dy, dq, dk, dv, *call.users[:2], *strides, call.B, call.H, call.numbers)
        _start_gradients((call.programs, 1, 1), arguments, call.constants)
