"""Adds up again the weights of rows whose lse is far from 0: its rounding has lost a part of them.

The weights of a row whose scores share a large offset, computed from its lse alone, would add up to any number: lse = m + log l is one
rounded number, and beyond the last bits of m nothing is left of log l. The backward adds such rows' weights up again, and divides by the
sum:

    rest = log2 sum_j exp(x_ij - lse_i)       the sink included
    P    = exp(x_ij - lse_i) / 2^rest
    D    = sum_j P dP - dL                    in place of dO . O - dL

x - lse is exact there. So the weights hold at any offset, as far as fp32 holds the scores themselves. D comes from the same weights: the
last bits of such scores weigh much, another product's have others, and sum_j P (dP - D) must be 0 to cancel what all keys share.
"""

import triton
import triton.language as tl

from rooftile.exact.backends.device.listed import first_of_listed
from rooftile.exact.backends.triton.scores import LOG2E, drop, exponent, load_rows, score, seen


@triton.jit
def is_far(lse, FAR: tl.constexpr):
    """Whether the rounding of lse would show in a row's weights. A row without keys has an infinite lse and is not far."""
    return (tl.abs(lse) > FAR) & (tl.abs(lse) < float("inf"))


# fmt: off
@triton.jit
def sum_far_rows(
    q, do, lse, t, start, tiles, k_ptr, v_ptr, k_stride_s, v_stride_s, sink, scoring, blocks,
    SPEC: tl.constexpr, BLOCK_S: tl.constexpr,
):
    # fmt: on
    """log2 of the sum of exp(x - lse) for a tile of queries, and sum P dP; over `tiles` tiles of keys from `start`, or a list."""
    UNIT: tl.constexpr = 1.0 if SPEC.NATURAL else LOG2E
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, SPEC.BLOCK_D)
    dv = tl.arange(0, SPEC.BLOCK_DV)
    m = tl.full(lse.shape, float("-inf"), tl.float32)
    l = tl.zeros(lse.shape, tl.float32)
    total = tl.zeros(lse.shape, tl.float32)
    if SPEC.SINKS:
        m = exponent(tl.zeros(lse.shape, tl.float32) + sink * UNIT, lse, 1.0, SPEC.NATURAL)
        m = tl.where(m == m, m, float("-inf"))
        l = tl.where(m > float("-inf"), 1.0, 0.0)
    for n in tl.range(0, tiles, num_stages=1):
        if SPEC.BLOCKS:
            j_0 = first_of_listed(n, blocks.entries, scoring.S, SPEC.LIST_S, BLOCK_S, 1)
        else:
            j_0 = start + n * BLOCK_S
        j = j_0 + s
        there = j < scoring.S
        k_tile = k_ptr + tl.cast(j_0, tl.int64) * k_stride_s + s[:, None] * k_stride_s + d[None, :]
        k = load_rows(k_tile, there, d, SPEC.D, True)
        x = tl.dot(q, tl.trans(k), input_precision=SPEC.PRECISION)
        x, _ = score(x, t[:, None], j[None, :], scoring, SPEC)
        sees = seen(t[:, None], j[None, :], n, scoring, blocks, SPEC, BLOCK_S)
        e = tl.where(sees, exponent(x, lse[:, None], scoring.factor, SPEC.NATURAL), float("-inf"))
        m_new = tl.maximum(m, tl.max(e, 1))
        pivot = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(e - pivot[:, None])
        v_tile = v_ptr + tl.cast(j_0, tl.int64) * v_stride_s + s[:, None] * v_stride_s + dv[None, :]
        v = load_rows(v_tile, there, dv, SPEC.DV, True)
        dp = tl.where(sees, tl.dot(do, tl.trans(v), input_precision=SPEC.PRECISION), 0.0)
        if SPEC.DROPOUT:
            dp = drop(dp, t[:, None], j[None, :], scoring)
        alpha = tl.exp2(m - pivot)
        l = l * alpha + tl.sum(p, 1)
        total = total * alpha + tl.sum(p * dp, 1)
        m = m_new
    return m + tl.log2(l), total / l
