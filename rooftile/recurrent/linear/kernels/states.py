"""The states that segments start from: each segment's sum by itself, then a scan over segments.

    P_s = sum_{t in s} f(x_t) (w_t y_t)^T,  p_s = sum_{t in s} u_t f(x_t)
    S_s = S_0 + sum_{r < s} P_r             (from the last segment backwards: the gradients' sums)

Forward x, y are keys and values and w, u are 1. Backward x, y are queries and gradients of outputs, w_t = 1 / den_t and u_t is the
gradient of den_t, summed over the query heads of a group. A decay would multiply S_s on its way to S_{s+1} in the scan, and
within a segment the sum so far.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooftile.recurrent.linear.kernels.tiles import SEGMENT, features, rows, segment_of


# fmt: off
@triton.jit(do_not_specialize=["T", "B"])
def _segment_sums(
    x_ptr, y_ptr, weight_ptr, unit_ptr, part_ptr, lost_ptr, cu_ptr,
    x_strides, y_strides, T, B,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, FEATURE: tl.constexpr, WEIGHTED: tl.constexpr, PACKED: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    """Writes P (D, DV) and p (D) of a segment and a key head, and whether anything in it is NaN or infinite."""
    slot, hk = tl.program_id(0), tl.program_id(1)
    b, length, first, start = segment_of(slot, cu_ptr, T, B, PACKED)
    if start >= length:
        return
    d, e, n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V), tl.arange(0, BLOCK)
    s = tl.zeros((BLOCK_D, BLOCK_V), tl.float32)
    z = tl.zeros((BLOCK_D,), tl.float32)
    for i in range(0, GROUP):
        h = hk * GROUP + i
        x_base = x_ptr + b.to(tl.int64) * x_strides[0] + h.to(tl.int64) * x_strides[2]
        y_base = y_ptr + b.to(tl.int64) * y_strides[0] + h.to(tl.int64) * y_strides[2]
        for c in range(start, tl.minimum(start + SEGMENT, length), BLOCK):
            t = c + n
            here = t < length
            x = rows(x_base, first, t, d, here, d < D, x_strides[1])
            f = features(x, here[:, None] & (d < D)[None, :], FEATURE)
            y = rows(y_base, first, t, e, here, e < DV, y_strides[1])
            if WEIGHTED:
                # (batch, tokens, heads) is contiguous; a packed batch is one
                row = ((0 if PACKED else b.to(tl.int64) * T) + first + t) * (HEADS * GROUP) + h
                y = y.to(tl.float32) * tl.load(weight_ptr + row, mask=here, other=0.0)[:, None]
                z += tl.sum(f * tl.load(unit_ptr + row, mask=here, other=0.0)[:, None], 0)
            else:
                z += tl.sum(f, 0)
            s = tl.dot(tl.trans(f.to(DOT)), y.to(DOT), s, input_precision=PRECISION)
    part = part_ptr + (slot.to(tl.int64) * HEADS + hk) * (D * DV + D)
    tl.store(part + d[:, None] * DV + e[None, :], s, mask=(d < D)[:, None] & (e < DV)[None, :])
    tl.store(part + D * DV + d, z, mask=d < D)
    size = tl.sum(tl.sum(tl.abs(s), 1), 0) + tl.sum(tl.abs(z), 0)
    tl.store(lost_ptr + slot * HEADS + hk, ((size < float("inf")) == 0).to(tl.int32))


# fmt: off
@triton.jit(do_not_specialize=["T", "B"])
def _scan(
    part_ptr, first_s_ptr, first_z_ptr, last_s_ptr, last_z_ptr, cu_ptr, T, B,
    HEADS: tl.constexpr, SUMS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, REVERSE: tl.constexpr, PACKED: tl.constexpr,
):
    # fmt: on
    """Replaces the sum of each segment by the state before it (REVERSE: after it), and writes the last one.

    SUMS = D DV numbers of S, and D of z follow.
    """
    b, hk = tl.program_id(1), tl.program_id(2)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_s, in_z = n < SUMS, (n >= SUMS) & (n < SUMS + D)
    if PACKED:
        begin = tl.load(cu_ptr + b).to(tl.int32)
        slot = begin // SEGMENT + b
        segments = tl.cdiv(tl.load(cu_ptr + b + 1).to(tl.int32) - begin, SEGMENT)
    else:
        segments = tl.cdiv(T, SEGMENT)
        slot = b * segments
    head = (b * HEADS + hk).to(tl.int64)
    state = tl.load(first_s_ptr + head * SUMS + n, mask=in_s, other=0.0)
    state += tl.load(first_z_ptr + head * D + n - SUMS, mask=in_z, other=0.0)
    for i in range(0, segments):
        here = slot + (segments - 1 - i if REVERSE else i)
        place = part_ptr + (here.to(tl.int64) * HEADS + hk) * (SUMS + D) + n
        part = tl.load(place, mask=n < SUMS + D, other=0.0)
        tl.store(place, state, mask=n < SUMS + D)
        state += part
    tl.store(last_s_ptr + head * SUMS + n, state, mask=in_s)
    tl.store(last_z_ptr + head * D + n - SUMS, state, mask=in_z)
