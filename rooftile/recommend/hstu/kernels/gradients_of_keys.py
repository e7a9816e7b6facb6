"""The gradients of keys and values: a program owns a tile of keys of one head of a user, and walks the rows that see some of them.

    P^T = silu(S)^T;            dV += P^T dY
    dS = (dY V^T) silu'(S);     dK += alpha dS^T Q

Products are transposed, keys by rows, so that each sum is over a tile's columns. A target's own pair is a product of two rows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rooftile.exact.backends.triton.scores import load_rows
from rooftile.recommend.hstu.kernels.pairs import (
    Numbers,
    UserTensors,
    first_place,
    own_scores,
    places_of,
    rows_of,
    scores,
    sees_of,
    silu,
    slope,
    tile_at,
    times_of,
    user_and_tile,
)
from rooftile.recommend.hstu.kernels.shape import launch_of
from rooftile.recommend.hstu.problem import Problem, Users
from rooftile.runtime.launch import Kernel


# fmt: off
@triton.jit
def _walk_rows(
    dk, dv, k, v, j_0, j, place, origin, key_times, first, last, low, high, q_ptr, dy_ptr, q_stride, dy_stride, walk, tiles,
    user, tensors, numbers, SPEC: tl.constexpr, MASKED: tl.constexpr,
):
    # fmt: on
    r = tl.arange(0, SPEC.ROWS)
    d = tl.arange(0, SPEC.BLOCK_D)
    d_v = tl.arange(0, SPEC.BLOCK_DV)
    for m in tl.range(0, tiles, num_stages=SPEC.STAGES):
        i_0 = tile_at(m, walk, SPEC.ROWS, MASKED)
        i = i_0 + r
        # a row past the end has a gradient of zero
        there = i < user.n
        q = load_rows(q_ptr + i.to(tl.int64)[:, None] * q_stride + d[None, :], there, d, SPEC.D, True)
        dy = load_rows(dy_ptr + i.to(tl.int64)[:, None] * dy_stride + d_v[None, :], there, d_v, SPEC.DV, True)
        x = tl.dot(k, tl.trans(q), input_precision=SPEC.PRECISION)  # (KEYS, ROWS)
        row_times = 0
        earliest = 0
        latest = 0
        if SPEC.TIMES:
            row_times, earliest, latest = times_of(tensors.row_times, i, there, user)
            row_times = row_times[None, :]
        x, low, high = scores(
            x, places_of(i, there, origin, user, tensors, SPEC)[None, :], place, tl.minimum(i_0, user.end) - j_0 - (SPEC.KEYS - 1), row_times, earliest, latest, key_times, first, last, low, high, user, tensors, numbers, SPEC
        )
        w, gate = silu(x)
        ds = tl.dot(v, tl.trans(dy), input_precision=SPEC.PRECISION) * slope(x, gate)
        if MASKED:
            sees = sees_of(i[None, :], j[:, None], user, numbers, SPEC)
            w = tl.where(sees, w, 0.0)
            ds = tl.where(sees, ds, 0.0)
        dv = tl.dot(w.to(dy.dtype), dy, dv, input_precision=SPEC.PRECISION)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=SPEC.PRECISION)
    return dk, dv, low, high


# fmt: off
@triton.jit(do_not_specialize=["B", "H"])
def _gradients_of_keys(
    q_ptr, k_ptr, v_ptr, dy_ptr, dk_ptr, dv_ptr,
    cu_ptr, targets_ptr, position_ptr, time_ptr, edges_ptr, row_times_ptr, key_times_ptr, places_ptr,
    q_strides, k_strides, v_strides, dy_strides, B, H, numbers, SPEC: tl.constexpr,
):
    # fmt: on
    KEYS: tl.constexpr = SPEC.KEYS
    BLOCK_D: tl.constexpr = SPEC.BLOCK_D
    BLOCK_DV: tl.constexpr = SPEC.BLOCK_DV
    numbers = Numbers(*numbers)
    tensors = UserTensors(cu_ptr, targets_ptr, position_ptr, time_ptr, edges_ptr, row_times_ptr, key_times_ptr, places_ptr)
    h = tl.program_id(0) % H
    user, tile = user_and_tile(tl.program_id(0) // H, h, B, tensors, numbers, SPEC.KEYS, SPEC)
    j_0 = tile * SPEC.KEYS
    if j_0 >= user.n:
        return
    j = j_0 + tl.arange(0, SPEC.KEYS)
    d = tl.arange(0, SPEC.BLOCK_D)
    d_v = tl.arange(0, SPEC.BLOCK_DV)
    q_ptr += user.start * q_strides[0] + h.to(tl.int64) * q_strides[1]
    k_ptr += user.start * k_strides[0] + h.to(tl.int64) * k_strides[1]
    v_ptr += user.start * v_strides[0] + h.to(tl.int64) * v_strides[1]
    dy_ptr += user.start * dy_strides[0] + h.to(tl.int64) * dy_strides[1]
    keys = j.to(tl.int64)[:, None]
    there = j < user.n
    present = j < user.end
    k = load_rows(k_ptr + keys * k_strides[0] + d[None, :], present, d, SPEC.D, True)
    v = load_rows(v_ptr + keys * v_strides[0] + d_v[None, :], present, d_v, SPEC.DV, True)
    key_times = 0
    first = 0
    last = 0
    low = user.n * 0
    high = user.n * 0
    if SPEC.TIMES:
        key_times, first, last = times_of(key_times_ptr, j, present, user)
        key_times = key_times[:, None]
    origin = first_place(j_0, user, tensors, SPEC)
    place = places_of(j, there, origin, user, tensors, SPEC)[:, None]
    dk = tl.zeros((KEYS, BLOCK_D), tl.float32)
    dv = tl.zeros((KEYS, BLOCK_DV), tl.float32)
    walk = rows_of(j_0, user, numbers, SPEC)
    # fmt: off
    dk, dv, low, high = _walk_rows(
        dk, dv, k, v, j_0, j, place, origin, key_times, first, last, low, high, q_ptr, dy_ptr, q_strides[0], dy_strides[0], walk, walk.clear,
        user, tensors, numbers, SPEC, False)
    dk, dv, low, high = _walk_rows(
        dk, dv, k, v, j_0, j, place, origin, key_times, first, last, low, high, q_ptr, dy_ptr, q_strides[0], dy_strides[0], walk,
        walk.context + walk.left + walk.right, user, tensors, numbers, SPEC, True)
    # fmt: on
    if SPEC.TARGETS:
        if j_0 + SPEC.KEYS > user.end:
            own = there & (j >= user.end)
            q = load_rows(q_ptr + keys * q_strides[0] + d[None, :], own, d, SPEC.D, True)
            k = load_rows(k_ptr + keys * k_strides[0] + d[None, :], own, d, SPEC.D, True)
            v = load_rows(v_ptr + keys * v_strides[0] + d_v[None, :], own, d_v, SPEC.DV, True)
            dy = load_rows(dy_ptr + keys * dy_strides[0] + d_v[None, :], own, d_v, SPEC.DV, True)
            x = own_scores(q, k, j, there, user, tensors, numbers, SPEC)
            w, gate = silu(x)
            ds = tl.sum(dy.to(tl.float32) * v.to(tl.float32), 1) * slope(x, gate)
            dk = tl.where(own[:, None], ds[:, None] * q.to(tl.float32), dk)
            dv = tl.where(own[:, None], w[:, None] * dy.to(tl.float32), dv)
    dk *= numbers.alpha * user.factor
    dv *= user.factor
    at = (user.start + keys) * H + h
    tl.store(dk_ptr + at * SPEC.D + d[None, :], dk.to(dk_ptr.dtype.element_ty), mask=there[:, None] & (d < SPEC.D)[None, :])
    tl.store(dv_ptr + at * SPEC.DV + d_v[None, :], dv.to(dv_ptr.dtype.element_ty), mask=there[:, None] & (d_v < SPEC.DV)[None, :])


_start = Kernel(_gradients_of_keys)


def gradients_of_keys(
    dk: Tensor, dv: Tensor, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, users: Users, problem: Problem
) -> None:  # fmt: skip
    """Fills dk (total, H, D) and dv (total, H, Dv); the last axes of all inputs are contiguous."""
    call = launch_of("keys", q, k, v, users, problem, "keys")
    if dk.numel():
        strides = (*call.strides, (dy.stride(0), dy.stride(1)))
        _start((call.programs, 1, 1), (q, k, v, dy, dk, dv, *call.users, *strides, call.B, call.H, call.numbers), call.constants)
