"""The outputs: each program walks a segment from the state that it starts with, chunk by chunk.

    A   = f(Q) f(K)^T under the causal mask
    den = f(Q) z + rowsum A
    O   = (f(Q) S + A V) / den
    S  += f(K)^T V,  z += colsum f(K)

Without a mask there is one state, of the whole sequence, and only its product remains. The exponentials of features are computed
from the tile; nothing of them is written to memory.

Katharopoulos et al., arXiv:2006.16236; chunks as in Hua et al., arXiv:2202.10447.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooftile.recurrent.linear.kernels.tiles import (
    EMPTY,
    SEGMENT,
    features,
    is_lost,
    lost_before,
    rows,
    segment_of,
    state,
    sum_of_state,
)


# fmt: off
@triton.jit(do_not_specialize=["T", "B"])
def _outputs(
    q_ptr, k_ptr, v_ptr, o_ptr, den_ptr, s_ptr, z_ptr, lost_ptr, cu_ptr,
    q_strides, k_strides, v_strides, T, B,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, FEATURE: tl.constexpr, CAUSAL: tl.constexpr, NORMALISE: tl.constexpr,
    PACKED: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    """A segment of a query head, BLOCK_V columns of its values: a tile of the state that stays in registers."""
    slot, h = tl.program_id(0), tl.program_id(1)
    hk = h // GROUP
    b, length, first, start = segment_of(slot, cu_ptr, T, B, PACKED)
    if start >= length:
        return
    batch = b.to(tl.int64)
    d, e, n = tl.arange(0, BLOCK_D), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, BLOCK)
    lower = n[:, None] >= n[None, :]
    head = (slot if CAUSAL else b).to(tl.int64) * HEADS + hk
    s = state(s_ptr, head, d, e, D, DV, CAUSAL)
    z = sum_of_state(z_ptr, head, d, D, DV, CAUSAL)
    careful = False
    if CAUSAL:
        careful = tl.load(lost_ptr + slot * HEADS + hk) != 0
    q_base = q_ptr + batch * q_strides[0] + h.to(tl.int64) * q_strides[2]
    k_base = k_ptr + batch * k_strides[0] + hk.to(tl.int64) * k_strides[2]
    v_base = v_ptr + batch * v_strides[0] + hk.to(tl.int64) * v_strides[2]
    for c in range(start, tl.minimum(start + SEGMENT, length), BLOCK):
        t = c + n
        here = t < length
        there = here[:, None] & (d < D)[None, :]
        f_q = features(rows(q_base, first, t, d, here, d < D, q_strides[1]), there, FEATURE)
        den = tl.sum(f_q * z[None, :], 1)
        o = tl.dot(f_q.to(DOT), s.to(DOT), input_precision=PRECISION)
        if CAUSAL:
            f_k = features(rows(k_base, first, t, d, here, d < D, k_strides[1]), there, FEATURE)
            v = rows(v_base, first, t, e, here, e < DV, v_strides[1])
            a = tl.dot(f_q.to(DOT), tl.trans(f_k.to(DOT)), input_precision=PRECISION)
            a = tl.where(lower, a, 0.0)
            den += tl.sum(a, 1)
            seen = v
            if careful:
                # a weight of 0 times NaN is NaN: rows before it must not see it
                o += lost_before(is_lost(v), n)
                seen = tl.where(is_lost(v), 0.0, v)
            o = tl.dot(a.to(DOT), seen.to(DOT), o, input_precision=PRECISION)
            s = tl.dot(tl.trans(f_k.to(DOT)), v.to(DOT), s, input_precision=PRECISION)
            z += tl.sum(f_k, 0)
        if NORMALISE:
            empty = tl.abs(den) < EMPTY
            o = tl.where(empty[:, None], 0.0, o / tl.where(empty, 1.0, den)[:, None])
        row = ((0 if PACKED else batch * T) + first + t) * (HEADS * GROUP) + h
        tl.store(den_ptr + row, den, mask=here & (tl.program_id(2) == 0))
        tl.store(o_ptr + row[:, None] * DV + e[None, :], o.to(o_ptr.dtype.element_ty), mask=here[:, None] & (e < DV)[None, :])
