"""The gradients of the causal convolution, in one walk over a part's tokens and the K - 1 after them.

An input is read by K sums, whose gradients g are made again from the inputs:

    g_t = act'(y_t) dy_t    dx_t = sum over j of g_(t + j) w_(K - 1 - j)    dw_k = sum over t of g_t x_(t - K + 1 + k)

So x and dy are read and dx is written once. The sums of the weight's gradient are made for PART tokens each, and added in a fixed
order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooftile.recurrent.kernels.convolution_parts import gradient_of_sum, inputs_before, row_of, slot_of, taps
from rooftile.recurrent.linear.kernels.tiles import part_of

# tokens whose inputs are loaded together
TOKENS = tl.constexpr(4)


# fmt: off
@triton.jit(do_not_specialize=["T", "B"])
def _gradients(
    x_ptr, dy_ptr, weight_ptr, bias_ptr, tail_ptr, d_last_ptr, dx_ptr, part_ptr, cu_ptr, x_strides, T, B,
    W: tl.constexpr, K: tl.constexpr, BLOCK_W: tl.constexpr, PART: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr,
    PACKED: tl.constexpr,
):
    # fmt: on
    """Writes the gradients of a part's inputs, and for its sums the gradients (K, W) of the weight, and in row K of the bias."""
    slot, block = slot_of(W, BLOCK_W)
    b, length, first, start = part_of(slot, cu_ptr, T, B, PART, PACKED)
    if start >= length:
        return
    w = block * BLOCK_W + tl.arange(0, BLOCK_W)
    inside = w < W
    b = b.to(tl.int64)
    x_base, row = x_ptr + b * x_strides[0], (0 if PACKED else b * T) + first
    last_base = d_last_ptr + (b * W + w) * (K - 1)
    weights, bias = taps(weight_ptr, bias_ptr, w, W, K, HAS_BIAS)
    window = inputs_before(x_base, tail_ptr + b * W * (K - 1), first, start, w, W, K, x_strides[1])
    # the gradients of the last K sums, and the sums over tokens
    recent, totals = (), ()
    for k in tl.static_range(K):
        recent = recent + (tl.zeros((BLOCK_W,), tl.float32),)
        totals = totals + (tl.zeros((BLOCK_W,), tl.float32),)
    total = tl.zeros((BLOCK_W,), tl.float32)
    end = tl.minimum(start + PART, length)
    for c in range(start, end + K - 1, TOKENS):
        rows, grads = (), ()
        for i in tl.static_range(TOKENS):
            there = inside & (c + i < length)
            rows = rows + (row_of(x_base, first, c + i, x_strides[1], w, there),)
            grads = grads + (row_of(dy_ptr, row, c + i, W, w, there),)
        for i in tl.static_range(TOKENS):
            t = c + i
            window = window + (rows[i].to(tl.float32),)
            g = gradient_of_sum(window, weights, bias, grads[i], K, SILU)
            # behind the last token no gradient counts, whatever a NaN in the window makes of 0
            g = tl.where(inside & (t < length), g, 0.0)
            recent = recent[1:] + (g,)
            own = tl.where(t < end, g, 0.0)
            total += own
            more = ()
            for k in tl.static_range(K):
                more = more + (totals[k] + tl.where(t < end, g * window[k], 0.0),)
            totals = more
            window = window[1:]
            # the oldest of the K sums is the first that reads input t - K + 1
            dx = recent[0] * weights[K - 1]
            for j in tl.static_range(1, K):
                dx += recent[j] * weights[K - 1 - j]
            s = t - (K - 1)
            wanted = inside & (s >= start) & (s < end)
            if s >= length - (K - 1):
                dx += tl.load(last_base + s - length + K - 1, mask=wanted, other=0.0).to(tl.float32)
            tl.store(dx_ptr + (row + s) * W + w, dx.to(dx_ptr.dtype.element_ty), mask=wanted)
    place = part_ptr + slot.to(tl.int64) * (K + 1) * W + w
    for k in tl.static_range(K):
        tl.store(place + k * W, totals[k], mask=inside)
    tl.store(place + K * W, total, mask=inside)


# fmt: off
@triton.jit(do_not_specialize=["T"])
def _tail_gradients(
    x_ptr, dy_ptr, weight_ptr, bias_ptr, tail_ptr, d_last_ptr, d_tail_ptr, cu_ptr, x_strides, T,
    W: tl.constexpr, K: tl.constexpr, BLOCK_W: tl.constexpr, PART: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr,
    PACKED: tl.constexpr,
):
    # fmt: on
    """Writes the gradients of the K - 1 inputs before a sequence."""
    b = tl.program_id(0).to(tl.int64)
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    inside = w < W
    first, length = b * 0, b * 0 + T
    if PACKED:
        first = tl.load(cu_ptr + b).to(tl.int64)
        length = tl.load(cu_ptr + b + 1).to(tl.int64) - first
    x_base, row = x_ptr + b * x_strides[0], (0 if PACKED else b * T) + first
    weights, bias = taps(weight_ptr, bias_ptr, w, W, K, HAS_BIAS)
    window = inputs_before(x_base, tail_ptr + b * W * (K - 1), first, 0, w, W, K, x_strides[1])
    grads = ()
    for t in tl.static_range(K - 1):
        there = inside & (t < length)
        window = window + (row_of(x_base, first, t, x_strides[1], w, there).to(tl.float32),)
        g = gradient_of_sum(window, weights, bias, row_of(dy_ptr, row, t, W, w, there), K, SILU)
        grads = grads + (tl.where(there, g, 0.0),)
        window = window[1:]
    own = (b * W + w) * (K - 1)
    for m in tl.static_range(K - 1):
        d = tl.zeros((BLOCK_W,), tl.float32)
        # input m is read by sum t with weight m - t
        for t in tl.static_range(K - 1):
            if t <= m:
                d += grads[t] * weights[m - t]
        d += tl.load(d_last_ptr + own + m - length, mask=inside & (m >= length), other=0.0).to(tl.float32)
        tl.store(d_tail_ptr + own + m, d.to(d_tail_ptr.dtype.element_ty), mask=inside)
