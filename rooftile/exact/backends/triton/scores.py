"""From the products of a tile of queries and keys to its scores, and dropout: shared by forward and backward.

Scores are in units of log2, so that an exponential is one multiply-add and one instruction. For fp32, and with a bias, they stay
natural: a row's lse, rounded once more in another unit, would cost as many bits as its magnitude has, and a bias of the smallest
number of its dtype would become -inf. Positions come as broadcastable tensors, one
along each axis of the tile, so the same code serves a tile and its transpose.
"""

import triton
import triton.language as tl

from rooftile.numerics import softmax

LOG2E, LN2 = tl.constexpr(softmax.LOG2E), tl.constexpr(softmax.LN2)


@triton.jit
def exponent(x, reference, factor, NATURAL: tl.constexpr):
    """x - reference in log2: x times factor and the reference in log2, or both natural."""
    if NATURAL:
        return (x - reference) * LOG2E
    return x * factor - reference


@triton.jit
def exponential(x, reference, factor, NATURAL: tl.constexpr):
    """exp(x - reference)."""
    return tl.exp2(exponent(x, reference, factor, NATURAL))


@triton.jit
def scaled_tanh(x, scale, softcap):
    """tanh(scale x / softcap), by one exponential that saturates at both ends."""
    return 1 - 2 / (tl.exp2(x * (2 * LOG2E * scale / softcap)) + 1)


@triton.jit
def add_bias(
    x, t, j, T, S, offset, bias_ptr, bias_stride_t, bias_stride_s, slope,
    BIAS: tl.constexpr, ALIBI: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Scores with bias and ALiBi added; t and j are a query's and a key's index, t + offset the query's position."""
    if BIAS:
        there = (t < T) & (j < S)
        x += tl.load(bias_ptr + t * bias_stride_t + j * bias_stride_s, mask=there, other=0.0).to(tl.float32) * UNIT
    if ALIBI:
        x -= tl.abs(t + offset - j).to(tl.float32) * (slope * UNIT)
    return x


@triton.jit
def dropout_mask(seed, threshold, b, h, t, j):
    """Returns which weights dropout keeps, by Philox4x32-10 on the counter (column, row, head, batch), keyed by the seed."""
    zero = (t * 0 + j * 0).to(tl.uint32)
    bits, _, _, _ = tl.philox(
        seed, zero + j.to(tl.uint32), zero + t.to(tl.uint32), zero + h.to(tl.uint32), zero + b.to(tl.uint32)
    )
    return bits >= threshold.to(tl.uint32, bitcast=True)


@triton.jit
def zero_non_finite(x):
    """x with 0 for each NaN and infinity."""
    return tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0).to(x.dtype)


@triton.jit
def nan_if_non_finite(x, axis: tl.constexpr):
    """NaN where x holds a NaN or an infinity anywhere along an axis, else 0."""
    bad = tl.where(tl.abs(x.to(tl.float32)) < float("inf"), 0, 1)
    return tl.where(tl.max(bad, axis) > 0, float("nan"), 0.0)
