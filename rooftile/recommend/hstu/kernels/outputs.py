"""The forward: a program owns a tile of rows of one head of a user, and walks the keys that some of them see.

    S = alpha Q K_j^T + bias;  Y += silu(S) V_j, 0 where the pair is hidden

There is no softmax, so there is nothing to rescale and no statistic to keep. A target's own row is a product of two rows: targets
never meet in a tile, so what is wrong with one does not reach another.
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
    keys_of,
    own_scores,
    places_of,
    scores,
    sees_of,
    silu,
    tile_at,
    times_of,
    user_and_tile,
)
from rooftile.recommend.hstu.kernels.shape import launch_of
from rooftile.recommend.hstu.problem import Problem, Users
from rooftile.runtime.launch import Kernel


# fmt: off
@triton.jit
def _walk_keys(
    acc, q, i, top, place, origin, row_times, earliest, latest, low, high, k_ptr, v_ptr, k_stride, v_stride, walk, tiles,
    user, tensors, numbers, SPEC: tl.constexpr, MASKED: tl.constexpr,
):
    # fmt: on
    s = tl.arange(0, SPEC.KEYS)
    d = tl.arange(0, SPEC.BLOCK_D)
    dv = tl.arange(0, SPEC.BLOCK_DV)
    for m in tl.range(0, tiles, num_stages=SPEC.STAGES):
        j_0 = tile_at(m, walk, SPEC.KEYS, MASKED)
        j = j_0 + s
        present = j < user.end
        k = load_rows(k_ptr + j.to(tl.int64)[:, None] * k_stride + d[None, :], present, d, SPEC.D, MASKED)
        v = load_rows(v_ptr + j.to(tl.int64)[:, None] * v_stride + dv[None, :], present, dv, SPEC.DV, MASKED)
        x = tl.dot(q, tl.trans(k), input_precision=SPEC.PRECISION)
        key_times = 0
        first = 0
        last = 0
        if SPEC.TIMES:
            key_times, first, last = times_of(tensors.key_times, j, present, user)
            key_times = key_times[None, :]
        x, low, high = scores(
            x, place, places_of(j, present, origin, user, tensors, SPEC)[None, :], top - j_0 - (SPEC.KEYS - 1), row_times, earliest, latest, key_times, first, last, low, high, user, tensors, numbers, SPEC
        )
        w, _ = silu(x)
        if MASKED:
            w = tl.where(sees_of(i[:, None], j[None, :], user, numbers, SPEC), w, 0.0)
        acc = tl.dot(w.to(v.dtype), v, acc, input_precision=SPEC.PRECISION)
    return acc, low, high


# fmt: off
@triton.jit(do_not_specialize=["B", "H"])
def _forward(
    q_ptr, k_ptr, v_ptr, y_ptr, cu_ptr, targets_ptr, position_ptr, time_ptr, edges_ptr, row_times_ptr, key_times_ptr, places_ptr,
    q_strides, k_strides, v_strides, B, H, numbers, SPEC: tl.constexpr,
):
    # fmt: on
    ROWS: tl.constexpr = SPEC.ROWS
    BLOCK_DV: tl.constexpr = SPEC.BLOCK_DV
    numbers = Numbers(*numbers)
    tensors = UserTensors(cu_ptr, targets_ptr, position_ptr, time_ptr, edges_ptr, row_times_ptr, key_times_ptr, places_ptr)
    h = tl.program_id(0) % H
    user, tile = user_and_tile(tl.program_id(0) // H, h, B, tensors, numbers, SPEC.ROWS, SPEC)
    i_0 = tile * SPEC.ROWS
    if i_0 >= user.n:
        return
    i = i_0 + tl.arange(0, SPEC.ROWS)
    d = tl.arange(0, SPEC.BLOCK_D)
    dv = tl.arange(0, SPEC.BLOCK_DV)
    q_ptr += user.start * q_strides[0] + h.to(tl.int64) * q_strides[1]
    k_ptr += user.start * k_strides[0] + h.to(tl.int64) * k_strides[1]
    v_ptr += user.start * v_strides[0] + h.to(tl.int64) * v_strides[1]
    rows = i.to(tl.int64)[:, None]
    there = i < user.n
    q = load_rows(q_ptr + rows * q_strides[0] + d[None, :], there, d, SPEC.D, True)
    row_times = 0
    earliest = 0
    latest = 0
    low = user.n * 0
    high = user.n * 0
    if SPEC.TIMES:
        row_times, earliest, latest = times_of(row_times_ptr, i, there, user)
        row_times = row_times[:, None]
        low += numbers.buckets - 1
        high += numbers.buckets - 1
    origin = first_place(i_0, user, tensors, SPEC)
    place = places_of(i, there, origin, user, tensors, SPEC)[:, None]
    acc = tl.zeros((ROWS, BLOCK_DV), tl.float32)
    walk = keys_of(i_0, user, numbers, SPEC)
    top = tl.minimum(i_0, user.end)
    # fmt: off
    acc, low, high = _walk_keys(
        acc, q, i, top, place, origin, row_times, earliest, latest, low, high, k_ptr, v_ptr, k_strides[0], v_strides[0], walk, walk.clear,
        user, tensors, numbers, SPEC, False)
    acc, low, high = _walk_keys(
        acc, q, i, top, place, origin, row_times, earliest, latest, low, high, k_ptr, v_ptr, k_strides[0], v_strides[0], walk,
        walk.context + walk.left + walk.right, user, tensors, numbers, SPEC, True)
    # fmt: on
    if SPEC.TARGETS:
        if i_0 + SPEC.ROWS > user.end:
            own = there & (i >= user.end)
            k = load_rows(k_ptr + rows * k_strides[0] + d[None, :], own, d, SPEC.D, True)
            v = load_rows(v_ptr + rows * v_strides[0] + dv[None, :], own, dv, SPEC.DV, True)
            w, _ = silu(own_scores(q, k, i, there, user, tensors, numbers, SPEC))
            acc += tl.where(own[:, None], w[:, None] * v.to(tl.float32), 0.0)
    y = (acc * user.factor).to(y_ptr.dtype.element_ty)
    y_tile = y_ptr + ((user.start + rows) * H + h) * SPEC.DV + dv[None, :]
    tl.store(y_tile, y, mask=there[:, None] & (dv < SPEC.DV)[None, :])


_start = Kernel(_forward)


def forward(q: Tensor, k: Tensor, v: Tensor, users: Users, problem: Problem, y: Tensor | None = None) -> Tensor:
    """Returns y (total, H, Dv), written into a tensor that is given; the last axes of q, k and v are contiguous."""
    y = v.new_empty(v.shape) if y is None else y
    call = launch_of("forward", q, k, v, users, problem, "rows")
    if y.numel():
        _start((call.programs, 1, 1), (q, k, v, y, *call.users, *call.strides, call.B, call.H, call.numbers), call.constants)
    return y
