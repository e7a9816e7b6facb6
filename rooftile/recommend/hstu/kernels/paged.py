"""Rows of users against their histories in pages: a program owns a tile of rows of one head, and a share of the history.

    S = alpha Q K_j^T + bias;  Y_n = sum over the keys j of share n of silu(S) V_j;  Y = scale sum_n Y_n

Rows are few and histories long, so a history is cut into shares of equal length, and there are programs for each. There is no
softmax, so what they find is added up as it is, in the order of the shares, by a second kernel. Keys and values are read through
the block table; 8-bit ones become 16-bit ones in registers, exactly, and their scales multiply the scores and the weights.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.exact.backends.triton.schedule import packed_tile
from rooftile.exact.backends.triton.scores import load_rows
from rooftile.recommend.hstu.kernels.pairs import (
    NEVER,
    Numbers,
    User,
    UserTensors,
    Walk,
    keys_of,
    own_scores,
    scores,
    sees_of,
    silu,
    tile_at,
    times_of,
)
from rooftile.recommend.hstu.kernels.shape import Tiles, numbers_of
from rooftile.recommend.hstu.paged.problem import Pages
from rooftile.recommend.hstu.problem import Problem
from rooftile.runtime.launch import Kernel


class PagedShape(NamedTuple):
    """The compile-time configuration: what `pairs` reads of a `Shape`, and the pages' part."""

    D: int
    DV: int
    BLOCK_D: int
    BLOCK_DV: int
    ROWS: int
    KEYS: int
    STAGES: int
    LEFT: bool
    RIGHT: bool
    PREFIX: bool
    CHUNK: bool
    CONTEXTUAL: bool
    TARGETS: bool  # rows are candidates, with keys and values of their own
    POSITIONS: bool
    PLACED: bool  # positions of the caller's own, which there are none of
    TIMES: bool
    PRECISION: str
    SIZE: int  # events per block
    SCALED: bool
    SPLIT: bool  # shares are added up by the second kernel


class PageTensors(NamedTuple):
    """A user's pages of one head."""

    k: tl.tensor
    v: tl.tensor
    k_scale: tl.tensor
    v_scale: tl.tensor
    table: tl.tensor  # the user's row
    key_times: tl.tensor


class PageStrides(NamedTuple):
    """Strides per block and per event."""

    k_block: tl.tensor
    k_event: tl.tensor
    v_block: tl.tensor
    v_event: tl.tensor
    scale_block: tl.tensor
    scale_event: tl.tensor


# tiles for head dims up to 64, 128 and 256: for up to FEW rows per user on average, and for more
FEW = 16
TILES: dict[str, tuple[Tiles, Tiles, Tiles]] = {
    "few": (Tiles(16, 128, 4, 3), Tiles(16, 64, 4, 3), Tiles(16, 64, 4, 2)),
    "many": (Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 2)),
}
WIDE = (Tiles(16, 32, 4, 2), Tiles(16, 32, 4, 1), Tiles(16, 16, 4, 1))
# keys per share: one row per user leaves a GPU idle unless its history is cut fine; candidates fill it, and each share of theirs is
# written and read once more
SHARES = {"few": 512, "many": 2048}
# the most bytes of all shares' sums; where they would be more, shares are longer
MOST_SUMS = 1 << 28


@triton.jit
def _load_pages(
    pages, base, scales, block_stride, event_stride, strides, block, place, present, d, dtype: tl.constexpr, DIM: tl.constexpr,
    MASKED: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Loads a tile of keys or values (KEYS, dim), and their scales."""
    x = load_rows(base + (block * block_stride + place * event_stride)[:, None] + d[None, :], present, d, DIM, MASKED)
    scale = 0.0
    if SPEC.SCALED:
        scale = tl.load(scales + block * strides.scale_block + place * strides.scale_event, mask=present, other=0.0)
    return x.to(dtype), scale


# fmt: off
@triton.jit
def _walk_pages(
    acc, q, i, top, row_times, earliest, latest, low, high, pages, strides, walk, tiles, user, tensors, numbers,
    SPEC: tl.constexpr, MASKED: tl.constexpr,
):
    # fmt: on
    s = tl.arange(0, SPEC.KEYS)
    d = tl.arange(0, SPEC.BLOCK_D)
    dv = tl.arange(0, SPEC.BLOCK_DV)
    for m in tl.range(0, tiles, num_stages=SPEC.STAGES):
        j_0 = tile_at(m, walk, SPEC.KEYS, MASKED)
        j = j_0 + s
        present = j < user.end
        block = tl.load(pages.table + j // SPEC.SIZE, mask=present, other=0).to(tl.int64)
        place = j % SPEC.SIZE
        # fmt: off
        k, k_scale = _load_pages(
            pages, pages.k, pages.k_scale, strides.k_block, strides.k_event, strides, block, place, present, d, q.dtype, SPEC.D,
            MASKED, SPEC)
        v, v_scale = _load_pages(
            pages, pages.v, pages.v_scale, strides.v_block, strides.v_event, strides, block, place, present, dv, q.dtype, SPEC.DV,
            MASKED, SPEC)
        # fmt: on
        x = tl.dot(q, tl.trans(k), input_precision=SPEC.PRECISION)
        if SPEC.SCALED:
            x = x * k_scale[None, :]
        key_times = 0
        first = 0
        last = 0
        if SPEC.TIMES:
            times = tl.load(pages.key_times + block * SPEC.SIZE + place, mask=present, other=0)
            first = tl.min(tl.where(present, times, NEVER))
            last = tl.max(tl.where(present, times, -NEVER))
            key_times = times[None, :]
        x, low, high = scores(
            x, tl.minimum(i, user.end)[:, None], j[None, :], top - j_0 - (SPEC.KEYS - 1), row_times, earliest, latest, key_times, first, last, low, high, user, tensors, numbers, SPEC
        )
        w, _ = silu(x)
        if MASKED:
            w = tl.where(sees_of(i[:, None], j[None, :], user, numbers, SPEC), w, 0.0)
        if SPEC.SCALED:
            w = w * v_scale[None, :]
        acc = tl.dot(w.to(v.dtype), v, acc, input_precision=SPEC.PRECISION)
    return acc, low, high


@triton.jit
def _share_of(walk, begin, stop, KEYS: tl.constexpr):
    """The part of a walk between two keys, which are multiples of KEYS."""
    end = walk.clear_stop + walk.right * KEYS
    start = tl.minimum(tl.maximum(walk.start, begin), stop)
    end = tl.maximum(tl.minimum(end, stop), start)
    clear_start = tl.minimum(tl.maximum(walk.clear_start, start), end)
    clear_stop = tl.minimum(tl.maximum(walk.clear_start + walk.clear * KEYS, clear_start), end)
    left = (clear_start - start) // KEYS
    return Walk(0, start, left, clear_start, (clear_stop - clear_start) // KEYS, clear_stop, (end - clear_stop) // KEYS)


# fmt: off
@triton.jit(
    do_not_specialize=["B", "H", "total", "table_stride", "share"],
    do_not_specialize_on_alignment=["cu_ptr", "lengths_ptr", "table_ptr"],
)
def _paged(
    q_ptr, y_ptr, cu_ptr, lengths_ptr, table_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, own_k_ptr, own_v_ptr, position_ptr,
    time_ptr, edges_ptr, row_times_ptr, key_times_ptr, q_strides, own_k_strides, own_v_strides, strides, k_head, v_head, table_stride,
    B, H, total, share, numbers, SPEC: tl.constexpr,
):
    # fmt: on
    ROWS: tl.constexpr = SPEC.ROWS
    BLOCK_DV: tl.constexpr = SPEC.BLOCK_DV
    numbers = Numbers(*numbers)
    strides = PageStrides(*strides)
    h = tl.program_id(0) % H
    part = tl.program_id(1)
    b, tile = packed_tile(tl.program_id(0) // H, cu_ptr, B, SPEC.ROWS)
    row_0 = tl.load(cu_ptr + b).to(tl.int64)
    rows = (tl.load(cu_ptr + b + 1) - row_0).to(tl.int32)
    length = tl.load(lengths_ptr + b).to(tl.int32)
    r_0 = tile * SPEC.ROWS
    if (r_0 >= rows) | ((part > 0) & (part * share >= length)):
        return
    before = length - rows
    if SPEC.TARGETS:
        before = length
    h_wide = h.to(tl.int64)
    # a row's number among the user's, less its number among all
    user = User(
        row_0 - before, before + rows, length, length * 0, numbers.scale, position_ptr + h * numbers.position_step,
        time_ptr + h * numbers.time_step,
    )
    tensors = UserTensors(cu_ptr, cu_ptr, position_ptr, time_ptr, edges_ptr, row_times_ptr, row_times_ptr, cu_ptr)
    pages = PageTensors(
        k_ptr + h_wide * k_head, v_ptr + h_wide * v_head, k_scale_ptr + h, v_scale_ptr + h,
        table_ptr + b.to(tl.int64) * table_stride, key_times_ptr,
    )
    i = before + r_0 + tl.arange(0, SPEC.ROWS)
    there = i < user.n
    at = (user.start + i)[:, None]
    d = tl.arange(0, SPEC.BLOCK_D)
    dv = tl.arange(0, SPEC.BLOCK_DV)
    q = load_rows(q_ptr + at * q_strides[0] + h_wide * q_strides[1] + d[None, :], there, d, SPEC.D, True)
    row_times = 0
    earliest = 0
    latest = 0
    low = length * 0
    high = length * 0
    if SPEC.TIMES:
        row_times, earliest, latest = times_of(row_times_ptr, i, there, user)
        row_times = row_times[:, None]
        low += numbers.buckets - 1
        high += numbers.buckets - 1
    acc = tl.zeros((ROWS, BLOCK_DV), tl.float32)
    walk = keys_of(before + r_0, user, numbers, SPEC)
    walk = _share_of(walk, part * share, (part + 1) * share, SPEC.KEYS)
    top = tl.minimum(before + r_0, user.end)
    # fmt: off
    acc, low, high = _walk_pages(
        acc, q, i, top, row_times, earliest, latest, low, high, pages, strides, walk, walk.clear, user, tensors, numbers, SPEC, False)
    acc, low, high = _walk_pages(
        acc, q, i, top, row_times, earliest, latest, low, high, pages, strides, walk, walk.left + walk.right, user, tensors, numbers,
        SPEC, True)
    # fmt: on
    if SPEC.TARGETS:
        if part == 0:
            k = load_rows(own_k_ptr + at * own_k_strides[0] + h_wide * own_k_strides[1] + d[None, :], there, d, SPEC.D, True)
            v = load_rows(own_v_ptr + at * own_v_strides[0] + h_wide * own_v_strides[1] + dv[None, :], there, dv, SPEC.DV, True)
            w, _ = silu(own_scores(q, k, i, there, user, tensors, numbers, SPEC))
            acc += w[:, None] * v.to(tl.float32)
    mask = there[:, None] & (dv < SPEC.DV)[None, :]
    y_tile = y_ptr + (at * H + h) * SPEC.DV + dv[None, :]
    if SPEC.SPLIT:
        tl.store(y_tile + part.to(tl.int64) * total * H * SPEC.DV, acc, mask=mask)
    else:
        tl.store(y_tile, (acc * user.factor).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["B", "H", "total", "share"], do_not_specialize_on_alignment=["cu_ptr", "lengths_ptr"])
def _add_shares(
    sums_ptr, y_ptr, cu_ptr, lengths_ptr, B, H, total, share, scale, ROWS: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr
):  # fmt: skip
    """Adds up the shares of a tile of rows of a head."""
    h = tl.program_id(0) % H
    b, tile = packed_tile(tl.program_id(0) // H, cu_ptr, B, ROWS)
    row_0 = tl.load(cu_ptr + b).to(tl.int64)
    rows = (tl.load(cu_ptr + b + 1) - row_0).to(tl.int32)
    r = tile * ROWS + tl.arange(0, ROWS)
    dv = tl.arange(0, BLOCK_DV)
    mask = (r < rows)[:, None] & (dv < DV)[None, :]
    at = ((row_0 + r)[:, None] * H + h) * DV + dv[None, :]
    parts = tl.maximum(tl.cdiv(tl.load(lengths_ptr + b).to(tl.int32), share), 1)
    acc = tl.zeros((ROWS, BLOCK_DV), tl.float32)
    share_ptr = sums_ptr + at
    for _ in range(0, parts):
        acc += tl.load(share_ptr, mask=mask, other=0.0)
        share_ptr += total.to(tl.int64) * H * DV
    tl.store(y_ptr + at, (acc * scale).to(y_ptr.dtype.element_ty), mask=mask)


_start, _start_adding = Kernel(_paged), Kernel(_add_shares)


def forward(q: Tensor, given: Pages, problem: Problem) -> Tensor:
    """Returns y (total, H, Dv) in the dtype of q."""
    cache = given.cache
    (total, H, D), (size, _, Dv), B = q.shape, cache.v.shape[1:], cache.table.shape[0]
    y = q.new_empty((total, H, Dv))
    if not y.numel():
        return y
    kind = "few" if total <= FEW * B else "many"
    tile = (WIDE if q.dtype == torch.float32 else TILES[kind])[(max(D, Dv) > 64) + (max(D, Dv) > 128)]
    share, room = SHARES[kind], max(cache.table.shape[1] * size, 1)
    while triton.cdiv(room, share) * y.numel() * 4 > MOST_SUMS and share < room:
        share *= 2
    parts = triton.cdiv(room, share)
    k, v, q, own_k, own_v = (x if x is None or x.stride(-1) == 1 else x.contiguous() for x in (
        cache.k, cache.v, q, given.own_k, given.own_v))  # fmt: skip
    k_scale, v_scale, *scale_strides = cache.scales_and_strides()
    sums = y if parts == 1 else torch.empty((parts, *y.shape), dtype=torch.float32, device=q.device)
    own = tuple(q if x is None else x for x in (own_k, own_v))
    tensors = (given.position_table, given.time_table, given.edges, given.row_times, given.key_times)
    bounds = problem.mask.left, problem.mask.right, problem.mask.prefix
    flags = (
        *(n is not None for n in bounds), bool(problem.mask.chunks), False, own_k is not None, given.position_table is not None,
        False, given.time_table is not None,
    )  # fmt: skip
    cu, table, lengths = given.cu, cache.table.contiguous(), cache.lengths.contiguous()
    slots = (total // tile.rows + B) * H
    arguments = (
        q, sums, cu, lengths, table, k, v, k_scale, v_scale, *own, *(cu if x is None else x for x in tensors),
        *((x.stride(0), x.stride(1)) for x in (q, *own)), (*k.stride()[:2], *v.stride()[:2], *scale_strides), k.stride(2),
        v.stride(2), table.stride(0), B, H, total, share, numbers_of(given.position_table, given.time_table, problem),
    )  # fmt: skip
    constants = _constants(D, Dv, tile, flags, q.dtype == torch.float32, size, cache.k_scale is not None, parts > 1)
    _start((slots, parts, 1), arguments, constants)
    if parts > 1:
        slots = (total // FEW + B) * H
        _start_adding((slots, 1, 1), (sums, y, cu, lengths, B, H, total, share, problem.scale), _adds(Dv))
    return y


@cache
def _constants(
    D: int, Dv: int, tile: Tiles, flags: tuple[bool, ...], wide: bool, size: int, scaled: bool, split: bool
) -> dict[str, Any]:  # fmt: skip
    """The compile-time arguments: one dictionary per kind, by which a launch is recognised."""
    padded = (max(16, 1 << (dim - 1).bit_length()) for dim in (D, Dv))
    precision = "ieee" if wide else "tf32"
    spec = PagedShape(D, Dv, *padded, tile.rows, tile.keys, tile.stages, *flags, precision, size, scaled, split)
    return {"SPEC": spec, "num_warps": tile.warps}


@cache
def _adds(Dv: int) -> dict[str, Any]:
    return {"ROWS": FEW, "DV": Dv, "BLOCK_DV": max(16, 1 << (Dv - 1).bit_length())}
