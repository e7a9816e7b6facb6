"""The gradients of queries and of the tables: a program owns tiles of rows of one head, and walks the keys that they see.

    dS = (dY V^T) silu'(S);     dQ += alpha dS K

A table's gradient is a sum over pairs: of positions along the diagonals of each tile, of times over the pairs of a bucket. Each
program has a row of its own for these sums and takes its tiles in a fixed order, so every sum has one order; the rows are added
up afterwards.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.exact.backends.triton.scores import load_rows
from rooftile.recommend.hstu.kernels.pairs import (
    FAR,
    Numbers,
    UserTensors,
    column_of,
    first_place,
    keys_of,
    own_scores,
    places_of,
    scores,
    sees_of,
    silu,
    slope,
    tile_at,
    times_of,
    user_and_tile,
)
from rooftile.recommend.hstu.kernels.shape import Launch, launch_of
from rooftile.recommend.hstu.problem import Problem, Users
from rooftile.runtime.launch import Kernel

# programs that share the tiles where tables have gradients: two for each multiprocessor of the largest GPUs
PROGRAMS = 264


@triton.jit
def _add_at(sums, distance, ds, numbers):
    """Adds numbers ds (n,) to the columns of distances (n,), all of them different: what lies outside goes to two columns behind."""
    column = distance + numbers.zero
    inside = (column >= 0) & (column < numbers.columns)
    tl.atomic_add(sums + column, ds, mask=inside, sem="relaxed")
    tl.atomic_add(sums + numbers.columns, tl.sum(tl.where(column < 0, ds, 0.0)), sem="relaxed")
    tl.atomic_add(sums + numbers.columns + 1, tl.sum(tl.where(column >= numbers.columns, ds, 0.0)), sem="relaxed")
    # the next sums to these columns may come from other threads
    tl.debug_barrier()


@triton.jit
def _add_positions(sums, ds, i_0, j_0, user, numbers, SPEC: tl.constexpr):
    """Adds the gradients ds (ROWS, KEYS) of a tile's scores to the columns of their distances."""
    r = tl.arange(0, SPEC.ROWS)
    c = tl.arange(0, SPEC.KEYS)
    if i_0 + numbers.zero - j_0 - (SPEC.KEYS - 1) >= numbers.columns and i_0 + SPEC.ROWS <= user.end:
        # all pairs are farther apart than the table's last column
        tl.atomic_add(sums + numbers.columns + 1, tl.sum(ds), sem="relaxed")
        tl.debug_barrier()
    else:
        events = tl.where((i_0 + r < user.end)[:, None], ds, 0.0)
        # each row moves by its number, which makes columns of diagonals; a row's end comes back at its start, once or more often
        turned = tl.gather(events, (r[:, None] + c[None, :]) % SPEC.KEYS, 1)
        turns = (r[:, None] + c[None, :]) // SPEC.KEYS
        for n in tl.static_range((SPEC.ROWS + SPEC.KEYS - 2) // SPEC.KEYS + 1):
            _add_at(sums, i_0 - j_0 - c + n * SPEC.KEYS, tl.sum(tl.where(turns == n, turned, 0.0), 0), numbers)
        if SPEC.TARGETS:
            if i_0 + SPEC.ROWS > user.end:
                # all targets have one position
                _add_at(sums, user.end - (j_0 + c), tl.sum(ds - events, 0), numbers)


@triton.jit
def _add_placed(sums, ds, place, there, key_place, present, numbers):
    """Adds the gradients ds (ROWS, KEYS) of scores to the columns of distances between positions of the caller's own.

    The first and last places of rows and keys bound the columns; each column's pairs are one sum, and far tiles have one column.
    """
    low = column_of(tl.min(tl.where(there, place, FAR)) - tl.max(tl.where(present, key_place, -FAR)), numbers)
    high = column_of(tl.max(tl.where(there, place, -FAR)) - tl.min(tl.where(present, key_place, FAR)), numbers)
    for column in tl.range(low, high):
        farther = place[:, None] - (column - numbers.zero) > key_place[None, :]
        tl.atomic_add(sums + column, tl.sum(tl.where(farther, 0.0, ds)), sem="relaxed")
        ds = tl.where(farther, ds, 0.0)
    tl.atomic_add(sums + high, tl.sum(ds), sem="relaxed")


@triton.jit
def _add_times(sums, ds, row_times, key_times, low, high, tensors):
    """Adds the gradients ds of scores to the buckets of their times, which go from `low` to `high`."""
    for b in tl.range(low, high):
        reached = row_times - tl.load(tensors.edges + b) >= key_times
        tl.atomic_add(sums + b, tl.sum(tl.where(reached, 0.0, ds)), sem="relaxed")
        ds = tl.where(reached, ds, 0.0)
    tl.atomic_add(sums + high, tl.sum(ds), sem="relaxed")


# fmt: off
@triton.jit
def _walk_keys(
    dq, q, dy, i_0, place, origin, row_times, earliest, latest, low, high, k_ptr, v_ptr, k_stride, v_stride, positions, times,
    walk, tiles, user, tensors, numbers, SPEC: tl.constexpr, MASKED: tl.constexpr, SUMS: tl.constexpr,
):
    # fmt: on
    s = tl.arange(0, SPEC.KEYS)
    d = tl.arange(0, SPEC.BLOCK_D)
    dv = tl.arange(0, SPEC.BLOCK_DV)
    i = i_0 + tl.arange(0, SPEC.ROWS)
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
        key_place = places_of(j, present, origin, user, tensors, SPEC)
        x, low, high = scores(
            x, place[:, None], key_place[None, :], tl.minimum(i_0, user.end) - j_0 - (SPEC.KEYS - 1), row_times, earliest, latest, key_times, first, last, low, high, user, tensors, numbers, SPEC
        )
        _, gate = silu(x)
        ds = tl.dot(dy, tl.trans(v), input_precision=SPEC.PRECISION) * slope(x, gate)
        if MASKED:
            ds = tl.where(sees_of(i[:, None], j[None, :], user, numbers, SPEC), ds, 0.0)
        if SUMS and SPEC.POSITIONS:
            if SPEC.PLACED:
                _add_placed(positions, ds * user.factor, place, i < user.n, key_place, present, numbers)
            else:
                _add_positions(positions, ds * user.factor, i_0, j_0, user, numbers, SPEC)
        if SUMS and SPEC.TIMES:
            _add_times(times, ds * user.factor, row_times, key_times, low, high, tensors)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=SPEC.PRECISION)
    return dq, low, high


# fmt: off
@triton.jit(do_not_specialize=["B", "H", "slots"])
def _gradients_of_rows(
    q_ptr, k_ptr, v_ptr, dy_ptr, dq_ptr, positions_ptr, times_ptr,
    cu_ptr, targets_ptr, position_ptr, time_ptr, edges_ptr, row_times_ptr, key_times_ptr, places_ptr,
    q_strides, k_strides, v_strides, dy_strides, B, H, slots, numbers, SPEC: tl.constexpr, SUMS: tl.constexpr,
):
    # fmt: on
    numbers = Numbers(*numbers)
    tensors = UserTensors(cu_ptr, targets_ptr, position_ptr, time_ptr, edges_ptr, row_times_ptr, key_times_ptr, places_ptr)
    h = tl.program_id(0) % H
    positions = positions_ptr + tl.program_id(0).to(tl.int64) * (numbers.columns + 2)
    times = times_ptr + tl.program_id(0).to(tl.int64) * numbers.buckets
    # fmt: off
    for slot in tl.range(tl.program_id(0) // H, slots, tl.num_programs(0) // H, num_stages=1):
        _tile(
            q_ptr + h.to(tl.int64) * q_strides[1], k_ptr + h.to(tl.int64) * k_strides[1], v_ptr + h.to(tl.int64) * v_strides[1],
            dy_ptr + h.to(tl.int64) * dy_strides[1], dq_ptr, positions, times, q_strides[0], k_strides[0], v_strides[0],
            dy_strides[0], slot, h, B, H, tensors, numbers, SPEC, SUMS)
    # fmt: on


# fmt: off
@triton.jit
def _tile(
    q_ptr, k_ptr, v_ptr, dy_ptr, dq_ptr, positions, times, q_stride, k_stride, v_stride, dy_stride, slot, h, B, H,
    tensors, numbers, SPEC: tl.constexpr, SUMS: tl.constexpr,
):
    # fmt: on
    ROWS: tl.constexpr = SPEC.ROWS
    BLOCK_D: tl.constexpr = SPEC.BLOCK_D
    user, tile = user_and_tile(slot, h, B, tensors, numbers, SPEC.ROWS, SPEC)
    i_0 = tile * SPEC.ROWS
    if i_0 < user.n:
        i = i_0 + tl.arange(0, SPEC.ROWS)
        d = tl.arange(0, SPEC.BLOCK_D)
        dv = tl.arange(0, SPEC.BLOCK_DV)
        rows = i.to(tl.int64)[:, None]
        there = i < user.n
        k_ptr += user.start * k_stride
        v_ptr += user.start * v_stride
        q = load_rows(q_ptr + (user.start + rows) * q_stride + d[None, :], there, d, SPEC.D, True)
        dy = load_rows(dy_ptr + (user.start + rows) * dy_stride + dv[None, :], there, dv, SPEC.DV, True)
        row_times = 0
        earliest = 0
        latest = 0
        low = user.n * 0
        high = user.n * 0
        if SPEC.TIMES:
            row_times, earliest, latest = times_of(tensors.row_times, i, there, user)
            row_times = row_times[:, None]
            low += numbers.buckets - 1
            high += numbers.buckets - 1
        origin = first_place(i_0, user, tensors, SPEC)
        place = places_of(i, there, origin, user, tensors, SPEC)
        dq = tl.zeros((ROWS, BLOCK_D), tl.float32)
        walk = keys_of(i_0, user, numbers, SPEC)
        # fmt: off
        dq, low, high = _walk_keys(
            dq, q, dy, i_0, place, origin, row_times, earliest, latest, low, high, k_ptr, v_ptr, k_stride, v_stride,
            positions, times, walk, walk.clear, user, tensors, numbers, SPEC, False, SUMS)
        dq, low, high = _walk_keys(
            dq, q, dy, i_0, place, origin, row_times, earliest, latest, low, high, k_ptr, v_ptr, k_stride, v_stride,
            positions, times, walk, walk.context + walk.left + walk.right, user, tensors, numbers, SPEC, True, SUMS)
        # fmt: on
        if SPEC.TARGETS:
            if i_0 + SPEC.ROWS > user.end:
                own = there & (i >= user.end)
                k = load_rows(k_ptr + rows * k_stride + d[None, :], own, d, SPEC.D, True)
                v = load_rows(v_ptr + rows * v_stride + dv[None, :], own, dv, SPEC.DV, True)
                x = own_scores(q, k, i, there, user, tensors, numbers, SPEC)
                _, gate = silu(x)
                ds = tl.where(own, tl.sum(dy.to(tl.float32) * v.to(tl.float32), 1) * slope(x, gate), 0.0)
                dq += tl.where(own[:, None], ds[:, None] * k.to(tl.float32), 0.0)
                if SUMS and SPEC.POSITIONS:
                    column = tl.minimum(tl.maximum(numbers.zero, 0), numbers.columns - 1)
                    tl.atomic_add(positions + column, tl.sum(ds) * user.factor, sem="relaxed")
                    tl.debug_barrier()
                if SUMS and SPEC.TIMES:
                    at = user.start + i
                    key_times = tl.load(tensors.key_times + at, mask=there, other=0)
                    own_times = tl.load(tensors.row_times + at, mask=there, other=0)
                    _add_times(times, ds * user.factor, own_times, key_times, 0, numbers.buckets - 1, tensors)
        dq *= numbers.alpha * user.factor
        dq_tile = dq_ptr + ((user.start + rows) * H + h) * SPEC.D + d[None, :]
        tl.store(dq_tile, dq.to(dq_ptr.dtype.element_ty), mask=there[:, None] & (d < SPEC.D)[None, :])


_start = Kernel(_gradients_of_rows)


def gradients_of_rows(
    dq: Tensor, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, users: Users, problem: Problem
) -> tuple[Tensor | None, Tensor | None]:
    """Fills dq (total, H, D), and returns the gradients of the tables in fp32; the last axes of all inputs are contiguous."""
    call = launch_of("rows", q, k, v, users, problem, "rows")
    tables = users.position_table, users.time_table
    has_sums = any(table is not None for table in tables)
    H = call.H
    programs = min(call.programs, max(PROGRAMS // H, 1) * H) if has_sums else call.programs
    widths = (0 if table is None else table.shape[1] + more for table, more in zip(tables, (2, 0), strict=True))
    sums = tuple(torch.zeros((programs, width), dtype=torch.float32, device=q.device) for width in widths)
    if dq.numel():
        strides = (*call.strides, (dy.stride(0), dy.stride(1)))
        arguments = (q, k, v, dy, dq, *sums, *call.users, *strides, call.B, H, call.programs // H, call.numbers)
        _start((programs, 1, 1), arguments, _with_sums(call, has_sums))
    positions, times = (
        None if table is None else _added(found, H, table.shape[0]) for found, table in zip(sums, tables, strict=True)
    )
    if positions is not None:
        positions[:, 0] += positions[:, -2]
        positions[:, -3] += positions[:, -1]
        positions = positions[:, :-2]
    return positions, times


def _added(sums: Tensor, H: int, rows: int) -> Tensor:
    """Adds the rows of all programs of a head, and the heads for a table that they share."""
    found = sums.view(-1, H, sums.shape[1]).sum(0)
    return found if rows == H else found.sum(0, keepdim=True)


_WITH_SUMS: dict[tuple[int, bool], dict[str, object]] = {}


def _with_sums(call: Launch, has_sums: bool) -> dict[str, object]:
    """The constants of a launch, one dictionary per kind."""
    key = id(call.constants), has_sums
    if key not in _WITH_SUMS:
        _WITH_SUMS[key] = {**call.constants, "SUMS": has_sums}
    return _WITH_SUMS[key]
