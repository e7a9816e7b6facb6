"""The gradients of the causal convolution: first of the sums before the activation, in fp32, then of what they add up.

The sums over tokens of the weight's gradient are made for PART tokens each, and added in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooftile.recurrent.kernels.parts import TOKENS, inputs
from rooftile.recurrent.linear.kernels.tiles import part_of

# tokens of a program that sums the weight's gradient
PART = tl.constexpr(128)


# fmt: off
@triton.jit(do_not_specialize=["T", "B"])
def _sum_gradients(
    x_ptr, dy_ptr, weight_ptr, bias_ptr, tail_ptr, g_ptr, part_ptr, cu_ptr, x_strides, T, B,
    W: tl.constexpr, K: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_K: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr,
    PACKED: tl.constexpr,
):
    # fmt: on
    """Writes the gradients of the sums, and for PART tokens the gradients (K, W) of the weight, and in row K of the bias."""
    slot = tl.program_id(0)
    b, length, first, start = part_of(slot, cu_ptr, T, B, PART, PACKED)
    if start >= length:
        return
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    rows = tl.arange(0, BLOCK_K)
    b = b.to(tl.int64)
    x_base, tail_base = x_ptr + b * x_strides[0], tail_ptr + b * W * (K - 1)
    total = tl.zeros((BLOCK_K, BLOCK_W), tl.float32)
    for c in range(start, tl.minimum(start + PART, length), TOKENS):
        t = c + tl.arange(0, TOKENS)
        here = t < length
        row = (0 if PACKED else b * T) + first + t
        place, inside = row[:, None] * W + w[None, :], here[:, None] & (w < W)[None, :]
        g = tl.load(dy_ptr + place, mask=inside, other=0.0).to(tl.float32)
        if SILU:
            y = tl.zeros((TOKENS, BLOCK_W), tl.float32)
            for k in tl.static_range(K):
                x = inputs(x_base, tail_base, first, t - (K - 1) + k, w, here, W, K, x_strides[1], c)
                y += x * tl.load(weight_ptr + w * K + k, mask=w < W, other=0.0).to(tl.float32)[None, :]
            if HAS_BIAS:
                y += tl.load(bias_ptr + w, mask=w < W, other=0.0).to(tl.float32)[None, :]
            s = 1 / (1 + tl.exp(-y))
            g *= s * (1 + y * (1 - s))
        tl.store(g_ptr + place, g, mask=inside)
        g = tl.where(inside, g, 0.0)
        for k in tl.static_range(K):
            x = inputs(x_base, tail_base, first, t - (K - 1) + k, w, here, W, K, x_strides[1], c)
            total += tl.where((rows == k)[:, None], tl.sum(g * x, 0)[None, :], 0.0)
        total += tl.where((rows == K)[:, None], tl.sum(g, 0)[None, :], 0.0)
    place = (slot.to(tl.int64) * (K + 1) + rows)[:, None] * W + w[None, :]
    tl.store(part_ptr + place, total, mask=(rows <= K)[:, None] & (w < W)[None, :])


# fmt: off
@triton.jit(do_not_specialize=["T", "B"])
def _input_gradients(
    g_ptr, weight_ptr, d_last_ptr, dx_ptr, cu_ptr, T, B,
    W: tl.constexpr, K: tl.constexpr, BLOCK_W: tl.constexpr, PACKED: tl.constexpr,
):
    # fmt: on
    """Writes the gradients of a tile of inputs: each is read by K sums, and the last ones by the next tail."""
    b, length, first, start = part_of(tl.program_id(0), cu_ptr, T, B, TOKENS, PACKED)
    if start >= length:
        return
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    b = b.to(tl.int64)
    t = start + tl.arange(0, TOKENS)
    row = (0 if PACKED else b * T) + first + t
    dx = tl.zeros((TOKENS, BLOCK_W), tl.float32)
    for j in tl.static_range(K):
        inside = (t + j < length)[:, None] & (w < W)[None, :]
        g = tl.load(g_ptr + (row + j)[:, None] * W + w[None, :], mask=inside, other=0.0)
        dx += g * tl.load(weight_ptr + w * K + K - 1 - j, mask=w < W, other=0.0).to(tl.float32)[None, :]
    inside = (t < length)[:, None] & (w < W)[None, :]
    if start + TOKENS > length - (K - 1):
        m = t - length + K - 1
        place = d_last_ptr + (b * W + w)[None, :] * (K - 1) + m[:, None]
        dx += tl.load(place, mask=inside & (m >= 0)[:, None], other=0.0).to(tl.float32)
    tl.store(dx_ptr + row[:, None] * W + w[None, :], dx.to(dx_ptr.dtype.element_ty), mask=inside)


# fmt: off
@triton.jit(do_not_specialize=["T"])
def _tail_gradients(
    g_ptr, weight_ptr, d_last_ptr, d_tail_ptr, cu_ptr, T,
    W: tl.constexpr, K: tl.constexpr, BLOCK_W: tl.constexpr, PACKED: tl.constexpr,
):
    # fmt: on
    """Writes the gradients of the K - 1 inputs before a sequence."""
    b = tl.program_id(0).to(tl.int64)
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    first, length = b * T, b * 0 + T
    if PACKED:
        first = tl.load(cu_ptr + b).to(tl.int64)
        length = tl.load(cu_ptr + b + 1).to(tl.int64) - first
    own = (b * W + w) * (K - 1)
    for m in tl.static_range(K - 1):
        d = tl.zeros((BLOCK_W,), tl.float32)
        # input m is read by sum t with weight m - t
        for t in tl.static_range(K - 1):
            if t <= m:
                g = tl.load(g_ptr + (first + t) * W + w, mask=(w < W) & (t < length), other=0.0)
                d += g * tl.load(weight_ptr + w * K + m - t, mask=w < W, other=0.0).to(tl.float32)
        d += tl.load(d_last_ptr + own + m - length, mask=(w < W) & (m >= length), other=0.0).to(tl.float32)
        tl.store(d_tail_ptr + own + m, d.to(d_tail_ptr.dtype.element_ty), mask=w < W)
