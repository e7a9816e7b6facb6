"""The recurrence of exponential features, forward: f(y) = exp(W y - |y|^2 / 2), with y = sqrt(scale) x.

A sequence is cut into chunks of BLOCK tokens, each with the state before it. With the largest exponent m_j of each key, the largest
until token i in its chunk, M_i, and G, the largest before the chunk (-inf if there is none):

    exponents   top_i = max_f W x_i;  m_j = top_j - |y_j|^2 / 2;  the largest until each token of a chunk
    sums        P = sum_j exp(m_j - peak) f_j v_j^T                       peak: the largest of the chunk
    scan        G' = max(G, peak);  S' = exp(G - G') S + exp(peak - G') P
    outputs     A_ij = exp(m_j - M_i) f_i . f_j for j <= i;  O = (exp(G - M_i) f_i S + A V) / den      M_i: not below G

Here f_i is exp(W x_i - top_i), which is at most 1, as every other factor is. They are computed from tiles of x and W, a few columns
of the state at a time, and not written to memory. A row of A and its factors know nothing of later keys.

A key with a NaN has m_j = inf and f_j = 0: its factors are inf - inf, NaN, in all rows from its own on, and 0 before.

Choromanski et al., Rethinking Attention with Performers, arXiv:2009.14794.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooftile.recurrent.linear.kernels.exponents import decayed, exponential, paired
from rooftile.recurrent.linear.kernels.tiles import EMPTY, head_rows, is_lost, lost_before, part_of


# fmt: off
@triton.jit(do_not_specialize=["T", "B"])
def _exponential_sums(
    x_ptr, y_ptr, w_ptr, rest_ptr, top_ptr, m_ptr, running_ptr, before_ptr, weight_ptr, unit_ptr, part_ptr, peak_ptr, cu_ptr,
    x_strides, y_strides, root, T, B,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_F: tl.constexpr, WEIGHTED: tl.constexpr, CAUSAL: tl.constexpr,
    PACKED: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    """P (F, DV) and p (F) of a chunk and a key head, BLOCK_F of its features, and the chunk's largest exponent.

    WEIGHTED: the sums over queries of a group and the gradients of their rows, relative to the largest before the chunk.
    """
    slot, hk = tl.program_id(0), tl.program_id(1)
    b, length, first, start = part_of(slot, cu_ptr, T, B, BLOCK, PACKED)
    if start >= length:
        return
    batch = b.to(tl.int64)
    n, d, e = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    f = tl.program_id(2) * BLOCK_F + tl.arange(0, BLOCK_F)
    t = start + n
    here = t < length
    place = (0 if PACKED else batch * T) + first + t
    own = slot.to(tl.int64) * HEADS + hk
    s = tl.zeros((BLOCK_F, BLOCK_V), tl.float32)
    z = tl.zeros((BLOCK_F,), tl.float32)
    factor = tl.where(here, 1.0, 0.0)
    if WEIGHTED:
        if CAUSAL:
            before = tl.load(before_ptr + own)
            running = tl.load(running_ptr + place * HEADS + hk, mask=here, other=0.0)
            factor = tl.where(here, decayed(before, tl.maximum(before, running)), 0.0)
    else:
        m = tl.load(m_ptr + place * HEADS + hk, mask=here, other=float("-inf"))
        peak = tl.max(m, 0)
        factor = tl.where(here, tl.exp(m - peak), 0.0)
        tl.store(peak_ptr + own, peak, mask=tl.program_id(2) == 0)
    for g in range(0, GROUP):
        h = hk * GROUP + g
        x = head_rows(x_ptr, x_strides, batch, h, first, t, d, here, d < D)
        y = head_rows(y_ptr, y_strides, batch, h, first, t, e, here, e < DV)
        row = place * (HEADS * GROUP) + h
        top = tl.load(top_ptr + row, mask=here, other=0.0)
        f_x = exponential(x, top, w_ptr, rest_ptr, f, d, root, F, D) * factor[:, None]
        if WEIGHTED:
            y = y.to(tl.float32) * tl.load(weight_ptr + row, mask=here, other=0.0)[:, None]
            z += tl.sum(f_x * tl.load(unit_ptr + row, mask=here, other=0.0)[:, None], 0)
        else:
            z += tl.sum(f_x, 0)
        s = tl.dot(tl.trans(f_x.to(DOT)), y.to(DOT), s, input_precision=PRECISION)
    part = part_ptr + own * (F * DV + F)
    tl.store(part + f[:, None] * DV + e[None, :], s, mask=(f < F)[:, None] & (e < DV)[None, :])
    tl.store(part + F * DV + f, z, mask=f < F)


# fmt: off
@triton.jit(do_not_specialize=["T", "B"])
def _exponential_scan(
    part_ptr, peak_ptr, before_ptr, s_ptr, z_ptr, first_s_ptr, first_z_ptr, first_m_ptr, last_s_ptr, last_z_ptr, last_m_ptr,
    cu_ptr, T, B,
    HEADS: tl.constexpr, SUMS: tl.constexpr, F: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, REVERSE: tl.constexpr,
    CAUSAL: tl.constexpr, PACKED: tl.constexpr,
):
    # fmt: on
    """Writes the state before each chunk, S in the dtype of the products that read it, the largest before it, and the last state.

    REVERSE: the sums over later chunks, relative to the largest after the chunk; reads the largest before it.
    """
    b, hk = tl.program_id(1), tl.program_id(2)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_s, in_z = n < SUMS, (n >= SUMS) & (n < SUMS + F)
    if PACKED:
        begin = tl.load(cu_ptr + b).to(tl.int32)
        slot = begin // CHUNK + b
        chunks = tl.cdiv(tl.load(cu_ptr + b + 1).to(tl.int32) - begin, CHUNK)
    else:
        chunks = tl.cdiv(T, CHUNK)
        slot = b * chunks
    head = b.to(tl.int64) * HEADS + hk
    state = tl.load(first_s_ptr + head * SUMS + n, mask=in_s, other=0.0)
    state += tl.load(first_z_ptr + head * F + n - SUMS, mask=in_z, other=0.0)
    largest = tl.load(first_m_ptr + head)
    # copies of the next sums run while a sum is added
    for i in tl.range(0, chunks, num_stages=4):
        own = (slot + (chunks - 1 - i if REVERSE else i)).to(tl.int64) * HEADS + hk
        part = tl.load(part_ptr + own * (SUMS + F) + n, mask=n < SUMS + F, other=0.0)
        tl.store(s_ptr + own * SUMS + n, state.to(s_ptr.dtype.element_ty), mask=in_s)
        tl.store(z_ptr + own * F + n - SUMS, state, mask=in_z)
        if REVERSE:
            if CAUSAL:
                before = tl.load(before_ptr + own)
                state = state * decayed(before, tl.maximum(before, tl.load(peak_ptr + own)))
            state += part
        else:
            peak = tl.load(peak_ptr + own)
            tl.store(before_ptr + own, largest, mask=tl.program_id(0) == 0)
            after = tl.maximum(largest, peak)
            state = state * decayed(largest, after) + part * tl.exp(peak - after)
            largest = after
    tl.store(last_s_ptr + head * SUMS + n, state, mask=in_s)
    tl.store(last_z_ptr + head * F + n - SUMS, state, mask=in_z)
    if not REVERSE:
        tl.store(last_m_ptr + head, largest, mask=tl.program_id(0) == 0)


# fmt: off
@triton.jit(do_not_specialize=["T", "B"])
def _exponential_outputs(
    q_ptr, k_ptr, v_ptr, w_ptr, rest_ptr, o_ptr, den_ptr, top_q_ptr, top_k_ptr, m_ptr, running_ptr, before_ptr,
    s_ptr, z_ptr, cu_ptr,
    q_strides, k_strides, v_strides, root, T, B,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_F: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    """A chunk of a query head."""
    slot, h = tl.program_id(0), tl.program_id(1)
    hk = h // GROUP
    b, length, first, start = part_of(slot, cu_ptr, T, B, BLOCK, PACKED)
    if start >= length:
        return
    batch = b.to(tl.int64)
    n, d, e = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    t = start + n
    here = t < length
    place = (0 if PACKED else batch * T) + first + t
    row, key = place * (HEADS * GROUP) + h, place * HEADS + hk
    head = (slot if CAUSAL else b).to(tl.int64) * HEADS + hk
    q = head_rows(q_ptr, q_strides, batch, h, first, t, d, here, d < D)
    top_q = tl.load(top_q_ptr + row, mask=here, other=0.0)
    o = tl.zeros((BLOCK, BLOCK_V), tl.float32)
    den = tl.zeros((BLOCK,), tl.float32)
    if CAUSAL:
        k = head_rows(k_ptr, k_strides, batch, hk, first, t, d, here, d < D)
        top_k = tl.load(top_k_ptr + key, mask=here, other=0.0)
        a = tl.zeros((BLOCK, BLOCK), tl.float32)
    for f_0 in range(0, F, BLOCK_F):
        f = f_0 + tl.arange(0, BLOCK_F)
        f_q = exponential(q, top_q, w_ptr, rest_ptr, f, d, root, F, D)
        s = tl.load(s_ptr + head * (F * DV) + f[:, None] * DV + e[None, :], mask=(f < F)[:, None] & (e < DV)[None, :], other=0.0)
        den += tl.sum(f_q * tl.load(z_ptr + head * F + f, mask=f < F, other=0.0)[None, :], 1)
        o = tl.dot(f_q.to(DOT), s, o, input_precision=PRECISION)
        if CAUSAL:
            f_k = exponential(k, top_k, w_ptr, rest_ptr, f, d, root, F, D)
            a = tl.dot(f_q.to(DOT), tl.trans(f_k.to(DOT)), a, input_precision=PRECISION)
    if CAUSAL:
        before = tl.load(before_ptr + head)
        running = tl.maximum(before, tl.load(running_ptr + key, mask=here, other=0.0))
        m = tl.load(m_ptr + key, mask=here, other=0.0)
        past = decayed(before, running)
        a = paired(a, m, running, n[:, None] >= n[None, :])
        v = head_rows(v_ptr, v_strides, batch, hk, first, t, e, here, e < DV)
        # a weight of 0 times NaN is NaN: rows before it must not see it
        o = o * past[:, None] + lost_before(is_lost(v), n)
        o = tl.dot(a.to(DOT), tl.where(is_lost(v), 0.0, v).to(DOT), o, input_precision=PRECISION)
        den = den * past + tl.sum(a, 1)
    den = tl.where(is_lost(top_q), float("nan"), den)
    empty = tl.abs(den) < EMPTY
    o = tl.where(empty[:, None], 0.0, o / tl.where(empty, 1.0, den)[:, None])
    tl.store(den_ptr + row, den, mask=here)
    tl.store(o_ptr + row[:, None] * DV + e[None, :], o.to(o_ptr.dtype.element_ty), mask=here[:, None] & (e < DV)[None, :])
