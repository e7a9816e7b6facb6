"""Parts that the kernels of the recurrence share: the segment of a program, the features of a tile, and what is lost in one.

A sequence is cut into segments of SEGMENT tokens, which are walked in chunks of BLOCK. Segments have slots: the segments of a dense batch
stand side by side; sequence b of a packed one owns the slots from cu[b] // SEGMENT + b on, which is never fewer than it has.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from rooftile.runtime.devices import capability

# tokens per segment: its sum of states costs as many bytes as 256 tokens of bf16, and a text of 16k gives 16 programs per head
SEGMENT = tl.constexpr(1024)
# a sum of weights below this counts as zero: rooftile.recurrent.linear.by_chunks.EMPTY
EMPTY = tl.constexpr(2.0**-110)


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether products run on wgmma; the interpreter takes the same tiles."""
    return device.type != "cuda" or capability(device) >= (9, 0)


@triton.jit
def segment_of(slot, cu_ptr, T, B, PACKED: tl.constexpr):
    """A slot's sequence, its number of tokens, its first token in memory, and the slot's first token in the sequence."""
    return part_of(slot, cu_ptr, T, B, SEGMENT, PACKED)


@triton.jit
def part_of(slot, cu_ptr, T, B, size, PACKED: tl.constexpr):
    """The same for sequences that are cut into parts of `size` tokens, known when compiled or not."""
    if PACKED:
        # a tensor, where B is 1 as well
        low, high = slot * 0, slot * 0 + B
        while high - low > 1:
            middle = (low + high) // 2
            if tl.load(cu_ptr + middle).to(tl.int32) // size + middle <= slot:
                low = middle
            else:
                high = middle
        first = tl.load(cu_ptr + low).to(tl.int64)
        length = (tl.load(cu_ptr + low + 1).to(tl.int64) - first).to(tl.int32)
        return low, length, first, (slot - ((first // size).to(tl.int32) + low)) * size
    segments = tl.cdiv(T, size)
    return slot // segments, T, (slot * 0).to(tl.int64), (slot % segments) * size


@triton.jit
def rows(ptr, first, t, column, here, wide, stride):
    """A tile (BLOCK, columns) of tokens t of a sequence; zeros outside."""
    place = (first + t)[:, None] * stride + column[None, :]
    return tl.load(ptr + place, mask=here[:, None] & wide[None, :], other=0.0)


@triton.jit
def head_rows(ptr, strides, batch, h, first, t, column, here, wide):
    """Loads a tile of tokens t of a head, as `rows` does; strides are (batch, token, head)."""
    return rows(ptr + batch * strides[0] + h.to(tl.int64) * strides[2], first, t, column, here, wide, strides[1])


@triton.jit
def state(s_ptr, head, d, e, D: tl.constexpr, DV: tl.constexpr, CAUSAL: tl.constexpr):
    """Loads rows d and columns e of S. Under the mask each slot has its state, S before z; without it each sequence has one."""
    step: tl.constexpr = D * DV + D if CAUSAL else D * DV
    return tl.load(s_ptr + head * step + d[:, None] * DV + e[None, :], mask=(d < D)[:, None] & (e < DV)[None, :], other=0.0)


@triton.jit
def sum_of_state(z_ptr, head, d, D: tl.constexpr, DV: tl.constexpr, CAUSAL: tl.constexpr):
    """Loads rows d of z, which lies behind S or, without the mask, by itself."""
    step: tl.constexpr = D * DV + D if CAUSAL else D
    return tl.load(z_ptr + head * step + d, mask=d < D, other=0.0)


@triton.jit
def features(x, there, FEATURE: tl.constexpr):
    """f(x) in fp32, and 0 outside `there`."""
    x = x.to(tl.float32)
    if FEATURE == "elu":
        x = tl.where(x > 0, x + 1, tl.exp(tl.where(x > 0, 0.0, x)))
    elif FEATURE == "relu":
        # written so that a NaN stays
        x = tl.where(x <= 0, 0.0, x)
    else:
        tl.static_assert(FEATURE == "identity")
    return tl.where(there, x, 0.0)


@triton.jit
def slope(x, FEATURE: tl.constexpr):
    """The derivative of f at x."""
    x = x.to(tl.float32)
    if FEATURE == "elu":
        return tl.where(x > 0, 1.0, tl.exp(tl.where(x > 0, 0.0, x)))
    if FEATURE == "relu":
        return tl.where(x > 0, 1.0, 0.0)
    return tl.full(x.shape, 1.0, tl.float32)


@triton.jit
def is_lost(x):
    """Marks NaN and infinity."""
    return (tl.abs(x) < float("inf")) == 0


@triton.jit
def lost_before(lost, n):
    """NaN in the rows of each column from its first lost one on, and 0 before; n numbers the rows."""
    first = tl.min(tl.where(lost, n[:, None], 1 << 30), 0)
    return tl.where(n[:, None] >= first[None, :], float("nan"), 0.0)


@triton.jit
def lost_after(lost, n):
    """NaN in the rows until the last lost one, (BLOCK,), and 0 after it."""
    return tl.where(n <= tl.max(tl.where(lost, n, -1), 0), float("nan"), 0.0)
