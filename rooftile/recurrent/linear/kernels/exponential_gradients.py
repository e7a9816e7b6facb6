"""The gradients of exponential features, chunk by chunk. With w = 1 / den, dN = w dO and u, the gradient of den, as in `gradients`:

    B_ij  = exp(m_j - M_i) (dN_i . v_j + u_i) for j <= i
    df(Q) = B f(K)   + exp(G - M_i) (dN S^T + u z^T)        S, z: the state before the chunk, relative to G
    df(K) = B^T f(Q) + exp(m_j - G') (V R^T + r)            R, r: its gradient after the chunk, relative to G'
    dV    = A^T dN   + exp(m_j - G') f(K) R
    dx    = sqrt(scale) (df * f) W - scale rowsum(df * f) x

The last sum is 0 for queries, as a factor of a row of A cancels. Every largest is a constant: no result depends on it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooftile.recurrent.linear.kernels.exponents import decayed, exponential, paired
from rooftile.recurrent.linear.kernels.tiles import head_rows, is_lost, lost_after, part_of


@triton.jit
def through(g, w_ptr, f, d, F: tl.constexpr, D: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """g W."""
    w = tl.load(w_ptr + f[:, None] * D + d[None, :], mask=(f < F)[:, None] & (d < D)[None, :], other=0.0)
    return tl.dot(g.to(DOT), w.to(DOT), input_precision=PRECISION)


# fmt: off
@triton.jit(do_not_specialize=["T", "B"])
def _exponential_queries(
    q_ptr, k_ptr, v_ptr, w_ptr, rest_ptr, do_ptr, weight_ptr, unit_ptr, dq_ptr, top_q_ptr, top_k_ptr,
    m_ptr, running_ptr, before_ptr, s_ptr, z_ptr, cu_ptr,
    q_strides, k_strides, v_strides, root, T, B,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_F: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    """dq of a chunk of a query head."""
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
    do = tl.load(do_ptr + row[:, None] * DV + e[None, :], mask=here[:, None] & (e < DV)[None, :], other=0.0)
    dn = (do.to(tl.float32) * tl.load(weight_ptr + row, mask=here, other=0.0)[:, None]).to(DOT)
    u = tl.load(unit_ptr + row, mask=here, other=0.0)
    past = tl.full((BLOCK,), 1.0, tl.float32)
    if CAUSAL:
        k = head_rows(k_ptr, k_strides, batch, hk, first, t, d, here, d < D)
        v = head_rows(v_ptr, v_strides, batch, hk, first, t, e, here, e < DV)
        top_k = tl.load(top_k_ptr + key, mask=here, other=0.0)
        m = tl.load(m_ptr + key, mask=here, other=0.0)
        before = tl.load(before_ptr + head)
        running = tl.maximum(before, tl.load(running_ptr + key, mask=here, other=0.0))
        past = decayed(before, running)
        da = tl.dot(dn, tl.trans(v.to(DOT)), input_precision=PRECISION) + u[:, None]
        da = paired(da, m, running, n[:, None] >= n[None, :]).to(DOT)
    dq = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    for f_0 in range(0, F, BLOCK_F):
        f = f_0 + tl.arange(0, BLOCK_F)
        s = tl.load(s_ptr + head * (F * DV) + f[:, None] * DV + e[None, :], mask=(f < F)[:, None] & (e < DV)[None, :], other=0.0)
        z = tl.load(z_ptr + head * F + f, mask=f < F, other=0.0)
        df = tl.dot(dn, tl.trans(s), input_precision=PRECISION) + u[:, None] * z[None, :]
        df = df * past[:, None]
        if CAUSAL:
            f_k = exponential(k, top_k, w_ptr, rest_ptr, f, d, root, F, D)
            df = tl.dot(da, f_k.to(DOT), df, input_precision=PRECISION)
        g = df * exponential(q, top_q, w_ptr, rest_ptr, f, d, root, F, D)
        dq += through(g, w_ptr, f, d, F, D, DOT, PRECISION)
    tl.store(dq_ptr + row[:, None] * D + d[None, :], (dq * root).to(dq_ptr.dtype.element_ty), mask=here[:, None] & (d < D)[None, :])


@triton.jit
def _pairs_of_head(
    q_ptr, do_ptr, weight_ptr, unit_ptr, top_q_ptr, q_strides, batch, first, place, t, d, e, here, v, m, running,
    h, H: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A query head's chunk, its largest projections, and B."""
    row = place * H + h
    q = head_rows(q_ptr, q_strides, batch, h, first, t, d, here, d < D)
    top = tl.load(top_q_ptr + row, mask=here, other=0.0)
    do = tl.load(do_ptr + row[:, None] * DV + e[None, :], mask=here[:, None] & (e < DV)[None, :], other=0.0)
    dn = do.to(tl.float32) * tl.load(weight_ptr + row, mask=here, other=0.0)[:, None]
    u = tl.load(unit_ptr + row, mask=here, other=0.0)
    da = tl.dot(dn.to(DOT), tl.trans(v), input_precision=PRECISION) + u[:, None]
    # a row past the end has no weight, and a key's factor there may be infinite
    return q, top, paired(da, m, running, (t[:, None] >= t[None, :]) & here[:, None]).to(DOT)


# fmt: off
@triton.jit(do_not_specialize=["T", "B"])
def _exponential_keys(
    q_ptr, k_ptr, v_ptr, w_ptr, rest_ptr, do_ptr, weight_ptr, unit_ptr, dk_ptr, top_q_ptr, top_k_ptr,
    m_ptr, running_ptr, before_ptr, peak_ptr, last_m_ptr, r_ptr, u_ptr, cu_ptr,
    q_strides, k_strides, v_strides, root, T, B,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_F: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    """dk of a chunk of a key head, summed over the query heads of its group."""
    slot, hk = tl.program_id(0), tl.program_id(1)
    b, length, first, start = part_of(slot, cu_ptr, T, B, BLOCK, PACKED)
    if start >= length:
        return
    batch = b.to(tl.int64)
    n, d, e = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    t = start + n
    here = t < length
    place = (0 if PACKED else batch * T) + first + t
    key = place * HEADS + hk
    head = (slot if CAUSAL else b).to(tl.int64) * HEADS + hk
    k = head_rows(k_ptr, k_strides, batch, hk, first, t, d, here, d < D)
    v = head_rows(v_ptr, v_strides, batch, hk, first, t, e, here, e < DV).to(DOT)
    top_k = tl.load(top_k_ptr + key, mask=here, other=0.0)
    m = tl.load(m_ptr + key, mask=here, other=0.0)
    if CAUSAL:
        before = tl.load(before_ptr + head)
        running = tl.maximum(before, tl.load(running_ptr + key, mask=here, other=0.0))
        after = tl.maximum(before, tl.load(peak_ptr + head))
    else:
        after = tl.load(last_m_ptr + head)
    future = tl.exp(m - after)
    if CAUSAL and GROUP == 1:
        q, top_q, da = _pairs_of_head(
            q_ptr, do_ptr, weight_ptr, unit_ptr, top_q_ptr, q_strides, batch, first, place, t, d, e, here, v, m, running,
            hk, HEADS, D, DV, DOT, PRECISION,
        )
    dk = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for f_0 in range(0, F, BLOCK_F):
        f = f_0 + tl.arange(0, BLOCK_F)
        r = tl.load(r_ptr + head * (F * DV) + f[:, None] * DV + e[None, :], mask=(f < F)[:, None] & (e < DV)[None, :], other=0.0)
        df = tl.dot(v, tl.trans(r), input_precision=PRECISION)
        df = (df + tl.load(u_ptr + head * F + f, mask=f < F, other=0.0)[None, :]) * future[:, None]
        if CAUSAL and GROUP == 1:
            f_q = exponential(q, top_q, w_ptr, rest_ptr, f, d, root, F, D)
            df = tl.dot(tl.trans(da), f_q.to(DOT), df, input_precision=PRECISION)
        g = df * exponential(k, top_k, w_ptr, rest_ptr, f, d, root, F, D)
        total += tl.sum(g, 1)
        dk += through(g, w_ptr, f, d, F, D, DOT, PRECISION)
    if CAUSAL and GROUP > 1:
        for i in range(0, GROUP):
            q, top_q, da = _pairs_of_head(
                q_ptr, do_ptr, weight_ptr, unit_ptr, top_q_ptr, q_strides, batch, first, place, t, d, e, here,
                v, m, running, hk * GROUP + i, HEADS * GROUP, D, DV, DOT, PRECISION,
            )
            for f_0 in range(0, F, BLOCK_F):
                f = f_0 + tl.arange(0, BLOCK_F)
                f_q = exponential(q, top_q, w_ptr, rest_ptr, f, d, root, F, D)
                df = tl.dot(tl.trans(da), f_q.to(DOT), input_precision=PRECISION)
                g = df * exponential(k, top_k, w_ptr, rest_ptr, f, d, root, F, D)
                total += tl.sum(g, 1)
                dk += through(g, w_ptr, f, d, F, D, DOT, PRECISION)
    dk = root * (dk - (root * total)[:, None] * k.to(tl.float32))
    tl.store(dk_ptr + key[:, None] * D + d[None, :], dk.to(dk_ptr.dtype.element_ty), mask=here[:, None] & (d < D)[None, :])


# fmt: off
@triton.jit(do_not_specialize=["T", "B"])
def _exponential_values(
    q_ptr, k_ptr, w_ptr, rest_ptr, do_ptr, weight_ptr, dv_ptr, top_q_ptr, top_k_ptr, m_ptr, running_ptr, before_ptr,
    peak_ptr, last_m_ptr, r_ptr, cu_ptr,
    q_strides, k_strides, root, T, B,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_F: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    """dv of a chunk of a key head, summed over the query heads of its group."""
    slot, hk = tl.program_id(0), tl.program_id(1)
    b, length, first, start = part_of(slot, cu_ptr, T, B, BLOCK, PACKED)
    if start >= length:
        return
    batch = b.to(tl.int64)
    n, d, e = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    t = start + n
    here = t < length
    place = (0 if PACKED else batch * T) + first + t
    key = place * HEADS + hk
    head = (slot if CAUSAL else b).to(tl.int64) * HEADS + hk
    k = head_rows(k_ptr, k_strides, batch, hk, first, t, d, here, d < D)
    top_k = tl.load(top_k_ptr + key, mask=here, other=0.0)
    m = tl.load(m_ptr + key, mask=here, other=0.0)
    if CAUSAL:
        before = tl.load(before_ptr + head)
        running = tl.maximum(before, tl.load(running_ptr + key, mask=here, other=0.0))
        after = tl.maximum(before, tl.load(peak_ptr + head))
    else:
        after = tl.load(last_m_ptr + head)
    dv = tl.zeros((BLOCK, BLOCK_V), tl.float32)
    a = tl.zeros((BLOCK, BLOCK), tl.float32)
    if CAUSAL and GROUP == 1:
        q = head_rows(q_ptr, q_strides, batch, hk, first, t, d, here, d < D)
        top_q = tl.load(top_q_ptr + key, mask=here, other=0.0)
    for f_0 in range(0, F, BLOCK_F):
        f = f_0 + tl.arange(0, BLOCK_F)
        r = tl.load(r_ptr + head * (F * DV) + f[:, None] * DV + e[None, :], mask=(f < F)[:, None] & (e < DV)[None, :], other=0.0)
        f_k = exponential(k, top_k, w_ptr, rest_ptr, f, d, root, F, D).to(DOT)
        dv = tl.dot(f_k, r, dv, input_precision=PRECISION)
        if CAUSAL and GROUP == 1:
            f_q = exponential(q, top_q, w_ptr, rest_ptr, f, d, root, F, D).to(DOT)
            a = tl.dot(f_q, tl.trans(f_k), a, input_precision=PRECISION)
    dv = dv * tl.exp(m - after)[:, None]
    if CAUSAL:
        for i in range(0, GROUP):
            h = hk * GROUP + i
            row = place * (HEADS * GROUP) + h
            if GROUP > 1:
                q = head_rows(q_ptr, q_strides, batch, h, first, t, d, here, d < D)
                top_q = tl.load(top_q_ptr + row, mask=here, other=0.0)
                a = tl.zeros((BLOCK, BLOCK), tl.float32)
                for f_0 in range(0, F, BLOCK_F):
                    f = f_0 + tl.arange(0, BLOCK_F)
                    f_k = exponential(k, top_k, w_ptr, rest_ptr, f, d, root, F, D).to(DOT)
                    f_q = exponential(q, top_q, w_ptr, rest_ptr, f, d, root, F, D).to(DOT)
                    a = tl.dot(f_q, tl.trans(f_k), a, input_precision=PRECISION)
            a = paired(a, m, running, (n[:, None] >= n[None, :]) & here[:, None])
            do = tl.load(do_ptr + row[:, None] * DV + e[None, :], mask=here[:, None] & (e < DV)[None, :], other=0.0)
            dn = do.to(tl.float32) * tl.load(weight_ptr + row, mask=here, other=0.0)[:, None]
            # a row with a NaN reaches its own and earlier keys: 0 times NaN must not reach later ones
            dv += lost_after(tl.max(is_lost(dn).to(tl.int32), 1) > 0, n)[:, None]
            dn = tl.where(is_lost(dn), 0.0, dn)
            dv = tl.dot(tl.trans(a.to(DOT)), dn.to(DOT), dv, input_precision=PRECISION)
    tl.store(dv_ptr + key[:, None] * DV + e[None, :], dv.to(dv_ptr.dtype.element_ty), mask=here[:, None] & (e < DV)[None, :])
