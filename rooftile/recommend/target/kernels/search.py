"""A search in Triton: a program owns a tile of candidates, walks the user's events, and keeps the k best of each.

A pair is one integer of 64 bits: the score as an integer of the same order above, the event's place below. All differ, so the
largest are the best scores and of equal ones the latest. A pair that is better than the k-th best so far waits in a buffer. A full
buffer is sorted and meets the best, which are sorted the other way: the larger of each two are the best of both, and a merge sorts
them again. In the walk, from the latest event on, a better pair is more and more rare: N events sort some 1 + ln(N / k) times, not
N / k times.
No more than a tile of scores is ever held.
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
from rooftile.recommend.target.search.problem import KINDS, Search
from rooftile.runtime.launch import Kernel

HIDDEN = tl.constexpr(-(2**63))
ROWS = 16


class Shape(NamedTuple):
    """The compile-time configuration: the argument SPEC."""

    KIND: int  # its place in KINDS
    D: int  # features, or words of a hash
    BLOCK_D: int  # features of a product, some of them at a time, so that many events fit
    ROWS: int
    KEYS: int  # events per tile, and how many are kept: a power of two
    SUMMED: bool  # scores are summed over heads
    BIAS: bool
    PRECISION: str


@triton.jit
def _ordered(x):
    """Integers in the order of fp32 numbers: zeros are equal, NaN is the largest."""
    x = tl.where(x == 0.0, 0.0, x)
    bits = tl.where(x != x, 0x7FC00000, x.to(tl.int32, bitcast=True))
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _ones(x):
    """The number of bits that are set, of int32."""
    x = x.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


# fmt: off
@triton.jit
def _scores(
    x, q_ptr, keys_ptr, bias_ptr, rows, at, h, group, there, present, q_strides, k_strides, bias_strides, scale, SPEC: tl.constexpr,
):
    # fmt: on
    """Adds a head's scores of a tile of pairs, or takes off its differing bits."""
    q_ptr += h.to(tl.int64) * q_strides[1]
    keys_ptr += (h // group).to(tl.int64) * k_strides[1]
    if SPEC.KIND == 0:
        product = tl.zeros_like(x)
        for d_0 in range(0, SPEC.D, SPEC.BLOCK_D):
            d = d_0 + tl.arange(0, SPEC.BLOCK_D)
            q = load_rows(q_ptr + rows[:, None] * q_strides[0] + d[None, :], there, d, SPEC.D, True)
            keys = load_rows(keys_ptr + at[:, None] * k_strides[0] + d[None, :], present, d, SPEC.D, True)
            product = tl.dot(q, tl.trans(keys), product, input_precision=SPEC.PRECISION)
        x += product * scale
        if SPEC.BIAS:
            bias = tl.load(bias_ptr + at * bias_strides[0] + h.to(tl.int64) * bias_strides[1], mask=present, other=0.0)
            x += bias.to(tl.float32)[None, :]
    else:
        for w in range(SPEC.D):
            q = tl.load(q_ptr + rows * q_strides[0] + w, mask=there, other=0)
            keys = tl.load(keys_ptr + at * k_strides[0] + w, mask=present, other=0)
            if SPEC.KIND == 1:
                x -= _ones(q[:, None] ^ keys[None, :])
            else:
                x += (q[:, None] == keys[None, :]).to(tl.int32)
    return x


@triton.jit
def _with_buffer(best, buffer, count, SPEC: tl.constexpr):
    """The best pairs and those that wait in the buffer, `count` of each candidate: the best of both, falling."""
    s = tl.arange(0, SPEC.KEYS)
    # other threads wrote the buffer, and write it again when all have read it
    tl.debug_barrier()
    waiting = tl.load(buffer + s[None, :], mask=s[None, :] < count[:, None], other=HIDDEN)
    tl.debug_barrier()
    return tl.bitonic_merge(tl.maximum(best, tl.sort(waiting)), descending=True)


# fmt: off
@triton.jit(do_not_specialize=["B", "H", "heads", "k", "group"])
def _search(
    q_ptr, keys_ptr, bias_ptr, cu_q_ptr, cu_ptr, found_ptr, buffer_ptr, q_strides, k_strides, bias_strides, B, H, heads, k, group,
    scale, SPEC: tl.constexpr,
):
    # fmt: on
    ROWS: tl.constexpr = SPEC.ROWS
    KEYS: tl.constexpr = SPEC.KEYS
    first_head = tl.program_id(0) % heads
    b, tile = packed_tile(tl.program_id(0) // heads, cu_q_ptr, B, SPEC.ROWS)
    row_0 = tl.load(cu_q_ptr + b).to(tl.int64)
    candidates = (tl.load(cu_q_ptr + b + 1) - row_0).to(tl.int32)
    if tile * SPEC.ROWS >= candidates:
        return
    key_0 = tl.load(cu_ptr + b).to(tl.int64)
    n = (tl.load(cu_ptr + b + 1) - key_0).to(tl.int32)
    i = tile * SPEC.ROWS + tl.arange(0, SPEC.ROWS)
    there = i < candidates
    rows = row_0 + i.to(tl.int64)
    s = tl.arange(0, SPEC.KEYS)
    # a row of the buffer for each candidate of each program
    buffer = buffer_ptr + (tl.program_id(0).to(tl.int64) * SPEC.ROWS + tl.arange(0, SPEC.ROWS))[:, None] * SPEC.KEYS
    best = tl.full((ROWS, KEYS), HIDDEN, tl.int64)
    lowest = tl.full((ROWS,), HIDDEN, tl.int64)
    count = tl.zeros((ROWS,), tl.int32)
    tiles = tl.cdiv(n, SPEC.KEYS)
    for t in range(0, tiles):
        # from the latest event, so that an equal one that comes later in the walk is not better
        j = (tiles - 1 - t) * SPEC.KEYS + s
        present = j < n
        at = key_0 + j.to(tl.int64)
        x = tl.zeros((ROWS, KEYS), tl.float32 if SPEC.KIND == 0 else tl.int32)
        if SPEC.SUMMED:
            for h in range(H):
                x = _scores(x, q_ptr, keys_ptr, bias_ptr, rows, at, first_head + h, group, there, present, q_strides, k_strides, bias_strides, scale, SPEC)
        else:
            x = _scores(x, q_ptr, keys_ptr, bias_ptr, rows, at, first_head, group, there, present, q_strides, k_strides, bias_strides, scale, SPEC)
        if SPEC.KIND == 0:
            high = _ordered(x)
            seen = present[None, :] & (x != float("-inf"))
        else:
            high = x
            seen = present[None, :] & ((x > 0) if SPEC.KIND == 2 else (x <= 0))
        ranks = tl.where(seen & there[:, None], (high.to(tl.int64) << 32) | j.to(tl.int64)[None, :], HIDDEN)
        better = ranks > lowest[:, None]
        more = tl.sum(better.to(tl.int32), 1)
        if tl.max(count + more, 0) > SPEC.KEYS:
            best = _with_buffer(best, buffer, count, SPEC)
            # the k-th best, which is no more than kept
            lowest = tl.max(tl.where(s[None, :] == k - 1, best, HIDDEN), 1)
            better = ranks > lowest[:, None]
            more = tl.sum(better.to(tl.int32), 1)
            count = 0 * count
        place = count[:, None] + tl.cumsum(better.to(tl.int32), 1) - 1
        tl.store(buffer + place, ranks, mask=better)
        count += more
    best = _with_buffer(best, buffer, count, SPEC)
    places = tl.where(best == HIDDEN, -1, best & 0xFFFFFFFF).to(tl.int32)
    found = found_ptr + (rows[:, None] * heads + first_head) * k + s[None, :]
    tl.store(found, places, mask=there[:, None] & (s < k)[None, :])


_start = Kernel(_search)


def search(given: Search) -> Tensor:
    """Returns the events that are chosen, (total_q, 1|H, k) int32: places in the user's history, the best first, -1 for none."""
    q, keys, bias = given.q, given.keys, given.bias
    q, keys = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, keys))
    total, H = q.shape[:2]
    found = torch.empty((total, given.heads, given.k), dtype=torch.int32, device=q.device)
    if found.numel():
        bias_strides = (0, 0) if bias is None else (bias.stride(0), 0 if bias.shape[1] == 1 else bias.stride(1))
        B = given.cu.shape[0] - 1
        wide = q.element_size() == 4
        constants = _constants(KINDS.index(given.kind), q.shape[2], given.k, not given.per_head and H > 1, bias is not None, wide)
        programs = (total // ROWS + B) * given.heads
        buffer = torch.empty((programs, ROWS, constants["SPEC"].KEYS), dtype=torch.int64, device=q.device)
        offsets = given.cu_q.contiguous(), given.cu.contiguous()
        tensors = (q, keys, given.cu if bias is None else bias, *offsets, found, buffer)
        strides = ((q.stride(0), q.stride(1)), (keys.stride(0), keys.stride(1)), bias_strides)
        numbers = (B, H, given.heads, given.k, H // keys.shape[1], given.scale)
        _start((programs, 1, 1), (*tensors, *strides, *numbers), constants)
    return found


@cache
def _constants(kind: int, D: int, k: int, summed: bool, bias: bool, wide: bool) -> dict[str, Any]:
    """The compile-time arguments: one dictionary per kind, by which a launch is recognised."""
    keys = max(64, 1 << (k - 1).bit_length())
    block = min(max(16, 1 << (D - 1).bit_length()), 64 if wide else 128)
    spec = Shape(kind, D, block, ROWS, keys, summed, bias, "ieee" if wide else "tf32")
    return {"SPEC": spec, "num_warps": 4 if keys <= 128 and not wide else 8}
