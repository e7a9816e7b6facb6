"""Parts of the convolution's kernels: the inputs before a part, its weights, and the gradient of a sum before the activation."""

from __future__ import annotations

import triton
import triton.language as tl

# tokens whose inputs are loaded together
TOKENS = tl.constexpr(8)


@triton.jit
def slot_of(W: tl.constexpr, BLOCK_W: tl.constexpr):
    """Returns a program's part of the tokens and block of channels: neighbours share tokens, whose channels lie side by side."""
    blocks: tl.constexpr = (W + BLOCK_W - 1) // BLOCK_W
    return tl.program_id(0) // blocks, tl.program_id(0) % blocks


@triton.jit
def row_of(base, first, t, stride, w, there):
    """Loads the channels w of token t of a sequence where it is there, and 0 elsewhere."""
    return tl.load(base + (first + t) * stride + w, mask=there, other=0.0)


@triton.jit
def inputs_before(x_base, tail_base, first, start, w, W: tl.constexpr, K: tl.constexpr, x_stride):
    """Returns the K - 1 inputs before token `start`, oldest first: of the sequence, or before its first token of the tail."""
    window = ()
    for k in tl.static_range(K - 1):
        t = start - (K - 1) + k
        x = row_of(x_base, first, t, x_stride, w, (w < W) & (t >= 0)).to(tl.float32)
        if t < 0:
            x = tl.load(tail_base + w.to(tl.int64) * (K - 1) + t + K - 1, mask=w < W, other=0.0).to(tl.float32)
        window = window + (x,)
    return window


@triton.jit
def taps(weight_ptr, bias_ptr, w, W: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Returns the K weights of each channel, and its bias or 0, in fp32."""
    weights = ()
    for k in tl.static_range(K):
        weights = weights + (tl.load(weight_ptr + w * K + k, mask=w < W, other=0.0).to(tl.float32),)
    bias = tl.zeros(w.shape, tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + w, mask=w < W, other=0.0).to(tl.float32)
    return weights, bias


@triton.jit
def gradient_of_sum(window, weights, bias, dy, K: tl.constexpr, SILU: tl.constexpr):
    """Returns the gradient of the sum over a window, which the activation reads, from the gradient of its result."""
    g = dy.to(tl.float32)
    if SILU:
        y = bias
        for k in tl.static_range(K):
            y += window[k] * weights[k]
        s = 1 / (1 + tl.exp(-y))
        g *= s * (1 + y * (1 - s))
    return g
