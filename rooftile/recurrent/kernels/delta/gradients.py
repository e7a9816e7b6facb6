"""The gradients of the gated delta rule by chunks, with the letters of `chunks`; dS' is the gradient of the state after a chunk.

    P_ts = <q_t, k_s> exp(G_t - G_s) for s <= t
    dV' = P^T dY + exp(G_last - G) K dS'                            P^T dY: one program for each chunk and value head
    dS = exp(G_last) dS' + (exp(G) Q)^T dY - W^T dV'                one for each sequence, value head and block of columns
    dR = X^T dV',  dV = beta dR,  dM = -dR V'^T,  dP = dY V'^T      one for each chunk and key head, which adds what the value
    dQ = exp(G) dY S^T + (dP decay) K                               heads of its key head give, one after the other
    dK = exp(G_last - G) V' dS'^T - beta exp(G) dR S^T + (dP decay)^T Q + (beta dM decay) K + (beta dM decay)^T K

The gradient of G_t is what the exponents of row t give less what those of column t give; of g, the sum over later tokens of it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooftile.recurrent.kernels.delta.chunks import CHUNK, decay_between, inverse_length, product
from rooftile.recurrent.linear.kernels.tiles import head_rows, part_of


# fmt: off
@triton.jit(do_not_specialize=["T", "B"])
def _through_outputs(
    q_ptr, k_ptr, dy_ptr, total_ptr, unit_ptr, factor_ptr, dnew_ptr, cu_ptr, q_strides, k_strides, scale, T, B,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    QK_NORM: tl.constexpr, PACKED: tl.constexpr, HOW: tl.constexpr,
):
    # fmt: on
    """Writes P^T dY, and what queries are multiplied by."""
    slot, h = tl.program_id(0), tl.program_id(1)
    b, length, first, start = part_of(slot, cu_ptr, T, B, CHUNK, PACKED)
    if start >= length:
        return
    t, batch = start + tl.arange(0, CHUNK), b.to(tl.int64)
    here, d = t < length, tl.arange(0, BLOCK_D)
    begin = (0 if PACKED else batch * T) + first
    row = (begin + t) * HEADS + h
    # rows after the last token have its sum, so that no exponent is positive
    total = tl.load(total_ptr + (begin + tl.minimum(t, length - 1)) * HEADS + h)
    unit = tl.load(unit_ptr + row, mask=here, other=0.0)
    q = head_rows(q_ptr, q_strides, batch, h // GROUP, first, t, d, here, d < D)
    k = head_rows(k_ptr, k_strides, batch, h // GROUP, first, t, d, here, d < D)
    factor = inverse_length(q, QK_NORM) * scale
    tl.store(factor_ptr + row, factor, mask=here)
    pairs = product(q, tl.trans(k), HOW) * factor[:, None] * unit[None, :] * decay_between(total)
    pairs = tl.trans(pairs)
    for column in range(0, DV, BLOCK_V):
        e = column + tl.arange(0, BLOCK_V)
        place, there = row[:, None] * DV + e[None, :], here[:, None] & (e < DV)[None, :]
        dy = tl.load(dy_ptr + place, mask=there, other=0.0)
        tl.store(dnew_ptr + place, product(pairs, dy, HOW), mask=there)


# fmt: off
@triton.jit(do_not_specialize=["T", "B"])
def _walk_back(
    q_ptr, k_ptr, w_ptr, dy_ptr, dnew_ptr, dstates_ptr, total_ptr, unit_ptr, factor_ptr, d_last_ptr, d_first_ptr, cu_ptr,
    q_strides, k_strides, T, B,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    HAS_LAST: tl.constexpr, PACKED: tl.constexpr, HOW: tl.constexpr,
):
    # fmt: on
    """Writes the gradients of the state after each chunk and of the first one, and dV' in the place of P^T dY."""
    b, h = tl.program_id(1), tl.program_id(2)
    batch = b.to(tl.int64)
    if PACKED:
        first = tl.load(cu_ptr + b).to(tl.int64)
        length = (tl.load(cu_ptr + b + 1).to(tl.int64) - first).to(tl.int32)
        slot = first // CHUNK + b
        begin = first
    else:
        first, length = batch * 0, T
        slot = batch * tl.cdiv(T, CHUNK)
        begin = batch * T
    d, e = tl.arange(0, BLOCK_D), tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (d < D)[:, None] & (e < DV)[None, :]
    place = d[:, None] * DV + e[None, :]
    own = (batch * HEADS + h) * (D * DV)
    if HAS_LAST:
        state = tl.load(d_last_ptr + own + place, mask=inside, other=0.0).to(tl.float32)
    else:
        state = tl.zeros((BLOCK_D, BLOCK_V), tl.float32)
    chunks = tl.cdiv(length, CHUNK)
    for i in range(0, chunks):
        chunk = chunks - 1 - i
        start = chunk * CHUNK
        t = start + tl.arange(0, CHUNK)
        here = t < length
        row = (begin + t) * HEADS + h
        tl.store(dstates_ptr + ((slot + chunk) * HEADS + h) * (D * DV) + place, state, mask=inside)
        there = here[:, None] & (e < DV)[None, :]
        end = tl.load(total_ptr + (begin + tl.minimum(start + CHUNK, length) - 1) * HEADS + h)
        total = tl.load(total_ptr + row, mask=here, other=float("inf"))
        k = head_rows(k_ptr, k_strides, batch, h // GROUP, first, t, d, here, d < D)
        left = tl.exp((end - total).to(tl.float32)) * tl.load(unit_ptr + row, mask=here, other=0.0)
        dnew = tl.load(dnew_ptr + row[:, None] * DV + e[None, :], mask=there, other=0.0)
        dnew = dnew + product(k, state, HOW) * left[:, None]
        tl.store(dnew_ptr + row[:, None] * DV + e[None, :], dnew, mask=there)
        q = head_rows(q_ptr, q_strides, batch, h // GROUP, first, t, d, here, d < D)
        dy = tl.load(dy_ptr + row[:, None] * DV + e[None, :], mask=there, other=0.0)
        grown = tl.exp(tl.where(here, total, 0.0).to(tl.float32)) * tl.load(factor_ptr + row, mask=here, other=0.0)
        w = tl.load(w_ptr + row[:, None] * D + d[None, :], mask=here[:, None] & (d < D)[None, :], other=0.0)
        state = state * tl.exp(end.to(tl.float32)) + product(tl.trans(q), dy * grown[:, None], HOW)
        state = state - product(tl.trans(w), dnew, HOW)
    tl.store(d_first_ptr + own + place, state, mask=inside)


@triton.jit
def _columns(ptr, row, e, here, DV: tl.constexpr):
    """Loads columns e of rows that lie one behind the other."""
    return tl.load(ptr + row[:, None] * DV + e[None, :], mask=here[:, None] & (e < DV)[None, :], other=0.0)


@triton.jit
def _state(ptr, chunk, d, e, D: tl.constexpr, DV: tl.constexpr):
    """Loads columns e of a chunk's state."""
    place = chunk * (D * DV) + d[:, None] * DV + e[None, :]
    return tl.load(ptr + place, mask=(d < D)[:, None] & (e < DV)[None, :], other=0.0)


@triton.jit
def _unscaled(dx, x, unit, QK_NORM: tl.constexpr):
    """Returns the gradient of x from the gradient of `x unit`."""
    if QK_NORM:
        x = x.to(tl.float32) * unit[:, None]
        dx -= x * tl.sum(x * dx, 1)[:, None]
    return dx * unit[:, None]


# fmt: off
@triton.jit(do_not_specialize=["T", "B"])
def _pair_gradients(
    q_ptr, k_ptr, v_ptr, beta_ptr, dy_ptr, x_ptr, new_ptr, dnew_ptr, total_ptr, unit_ptr, factor_ptr, by_key_ptr,
    by_both_ptr, part_ptr, own_ptr, dv_ptr, cu_ptr, q_strides, k_strides, v_strides, beta_strides, T, B,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    PACKED: tl.constexpr, HOW: tl.constexpr,
):
    # fmt: on
    """Writes dV, dR in the place of dV', what multiplies K in dQ, K and Q in dK, and what pairs of tokens add to dG and dbeta."""
    slot, h = tl.program_id(0), tl.program_id(1)
    b, length, first, start = part_of(slot, cu_ptr, T, B, CHUNK, PACKED)
    if start >= length:
        return
    n = tl.arange(0, CHUNK)
    t, batch = start + n, b.to(tl.int64)
    STEP: tl.constexpr = min(BLOCK_D, 32)
    here = t < length
    begin = (0 if PACKED else batch * T) + first
    row = (begin + t) * HEADS + h
    square = (slot.to(tl.int64) * HEADS + h) * (CHUNK * CHUNK) + n[:, None] * CHUNK + n[None, :]
    beta_place = beta_ptr + batch * beta_strides[0] + (first + t) * beta_strides[1] + h * beta_strides[2]
    beta = tl.load(beta_place, mask=here, other=0.0).to(tl.float32)
    system, pairs = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, CHUNK), tl.float32)
    dbeta = tl.zeros((CHUNK,), tl.float32)
    for column in range(0, DV, BLOCK_V):
        e = column + tl.arange(0, BLOCK_V)
        x = tl.load(x_ptr + square)
        dr = product(tl.trans(x), _columns(dnew_ptr, row, e, here, DV), HOW)
        dbeta += tl.sum(dr * head_rows(v_ptr, v_strides, batch, h, first, t, e, here, e < DV), 1)
        place, there = row[:, None] * DV + e[None, :], here[:, None] & (e < DV)[None, :]
        tl.store(dnew_ptr + place, dr, mask=there)
        tl.store(dv_ptr + place, dr * beta[:, None], mask=there)
        new = _columns(new_ptr, row, e, here, DV)
        system -= product(dr, tl.trans(new), HOW)
        pairs += product(_columns(dy_ptr, row, e, here, DV), tl.trans(new), HOW)
    # rows after the last token have its sum, so that no exponent is positive
    decay = decay_between(tl.load(total_ptr + (begin + tl.minimum(t, length - 1)) * HEADS + h))
    pairs *= decay
    system = tl.where(n[:, None] > n[None, :], system, 0.0) * decay
    factor = tl.load(factor_ptr + row, mask=here, other=0.0)
    unit = tl.load(unit_ptr + row, mask=here, other=0.0)
    chunk = slot.to(tl.int64) * HEADS + h
    tl.store(by_key_ptr + chunk * (CHUNK * CHUNK) + n[:, None] * CHUNK + n[None, :], pairs * unit[None, :])
    place = by_both_ptr + chunk * (2 * CHUNK * CHUNK) + n[:, None] * (2 * CHUNK) + n[None, :]
    written = system * beta[:, None]
    tl.store(place, written * unit[None, :] + tl.trans(written * unit[:, None]))
    tl.store(place + CHUNK, tl.trans(pairs * factor[:, None]))
    keys, queries = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, CHUNK), tl.float32)
    for column in range(0, D, STEP):
        d = column + tl.arange(0, STEP)
        k = head_rows(k_ptr, k_strides, batch, h // GROUP, first, t, d, here, d < D)
        keys += product(k, tl.trans(k), HOW)
        q = head_rows(q_ptr, q_strides, batch, h // GROUP, first, t, d, here, d < D)
        queries += product(q, tl.trans(k), HOW)
    apart = keys * unit[:, None] * unit[None, :] * system
    tl.store(own_ptr + row, dbeta + tl.sum(apart, 1), mask=here)
    apart = apart * beta[:, None] + queries * factor[:, None] * unit[None, :] * pairs
    tl.store(part_ptr + row, tl.sum(apart, 1) - tl.sum(apart, 0), mask=here)


# fmt: off
@triton.jit(do_not_specialize=["T", "B"])
def _query_gradients(
    q_ptr, k_ptr, dy_ptr, states_ptr, total_ptr, factor_ptr, by_key_ptr, part_ptr, dq_ptr, cu_ptr,
    q_strides, k_strides, scale, T, B,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    QK_NORM: tl.constexpr, PACKED: tl.constexpr, HOW: tl.constexpr,
):
    # fmt: on
    """Writes dQ of a chunk and key head, and adds to dG of its value heads."""
    slot, head = tl.program_id(0), tl.program_id(1)
    b, length, first, start = part_of(slot, cu_ptr, T, B, CHUNK, PACKED)
    if start >= length:
        return
    n = tl.arange(0, CHUNK)
    t, batch, d = start + n, b.to(tl.int64), tl.arange(0, BLOCK_D)
    here = t < length
    begin = (0 if PACKED else batch * T) + first
    dq = tl.zeros((CHUNK, BLOCK_D), tl.float32)
    for i in range(0, GROUP):
        h = head * GROUP + i
        row, chunk = (begin + t) * HEADS + h, slot.to(tl.int64) * HEADS + h
        grown = tl.exp(tl.load(total_ptr + row, mask=here, other=0.0).to(tl.float32))
        q = head_rows(q_ptr, q_strides, batch, head, first, t, d, here, d < D)
        part = tl.zeros((CHUNK,), tl.float32)
        for column in range(0, DV, BLOCK_V):
            e = column + tl.arange(0, BLOCK_V)
            dy, state = _columns(dy_ptr, row, e, here, DV), _state(states_ptr, chunk, d, e, D, DV)
            part += tl.sum(product(q, state, HOW) * dy, 1)
            dq += product(dy * grown[:, None], tl.trans(state), HOW)
        part *= grown * tl.load(factor_ptr + row, mask=here, other=0.0)
        tl.store(part_ptr + row, tl.load(part_ptr + row, mask=here, other=0.0) + part, mask=here)
        pairs = tl.load(by_key_ptr + chunk * (CHUNK * CHUNK) + n[:, None] * CHUNK + n[None, :])
        dq += product(pairs, head_rows(k_ptr, k_strides, batch, head, first, t, d, here, d < D), HOW)
    q = head_rows(q_ptr, q_strides, batch, head, first, t, d, here, d < D)
    dq = _unscaled(dq * scale, q, inverse_length(q, QK_NORM), QK_NORM)
    place = ((begin + t) * (HEADS // GROUP) + head)[:, None] * D + d[None, :]
    tl.store(dq_ptr + place, dq, mask=here[:, None] & (d < D)[None, :])


# fmt: off
@triton.jit(do_not_specialize=["T", "B"])
def _key_gradients(
    q_ptr, k_ptr, beta_ptr, new_ptr, dr_ptr, states_ptr, dstates_ptr, total_ptr, unit_ptr, by_both_ptr,
    part_ptr, own_ptr, dk_ptr, dg_ptr, dbeta_ptr, cu_ptr, q_strides, k_strides, beta_strides, T, B,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    QK_NORM: tl.constexpr, PACKED: tl.constexpr, HOW: tl.constexpr,
):
    # fmt: on
    """Writes dK of a chunk and key head, and dg and dbeta of its value heads."""
    slot, head = tl.program_id(0), tl.program_id(1)
    b, length, first, start = part_of(slot, cu_ptr, T, B, CHUNK, PACKED)
    if start >= length:
        return
    n = tl.arange(0, CHUNK)
    t, batch, d = start + n, b.to(tl.int64), tl.arange(0, BLOCK_D)
    here = t < length
    begin = (0 if PACKED else batch * T) + first
    dk = tl.zeros((CHUNK, BLOCK_D), tl.float32)
    for i in range(0, GROUP):
        h = head * GROUP + i
        row, chunk = (begin + t) * HEADS + h, slot.to(tl.int64) * HEADS + h
        total = tl.load(total_ptr + (begin + tl.minimum(t, length - 1)) * HEADS + h)
        end = tl.load(total_ptr + (begin + tl.minimum(start + CHUNK, length) - 1) * HEADS + h)
        beta_place = beta_ptr + batch * beta_strides[0] + (first + t) * beta_strides[1] + h * beta_strides[2]
        beta = tl.load(beta_place, mask=here, other=0.0).to(tl.float32)
        unit = tl.load(unit_ptr + row, mask=here, other=0.0)
        left, grown = tl.exp((end - total).to(tl.float32)), tl.exp(total.to(tl.float32))
        kept = tl.zeros((BLOCK_D,), tl.float32)
        for column in range(0, DV, 16):
            e = column + tl.arange(0, 16)
            state = _state(states_ptr, chunk, d, e, D, DV).to(tl.float32)
            kept += tl.sum(state * _state(dstates_ptr, chunk, d, e, D, DV), 1)
        at_end = tl.exp(end.to(tl.float32)) * tl.sum(kept, 0)
        k = head_rows(k_ptr, k_strides, batch, head, first, t, d, here, d < D)
        # through the state after the chunk, then through the state before it
        own = tl.zeros((CHUNK, BLOCK_D), tl.float32)
        for column in range(0, DV, BLOCK_V):
            e = column + tl.arange(0, BLOCK_V)
            new = _columns(new_ptr, row, e, here, DV)
            own += product(new, tl.trans(_state(dstates_ptr, chunk, d, e, D, DV)), HOW)
        own *= left[:, None]
        moved = tl.sum(own * k, 1) * unit
        dk += own
        own = tl.zeros((CHUNK, BLOCK_D), tl.float32)
        for column in range(0, DV, BLOCK_V):
            e = column + tl.arange(0, BLOCK_V)
            dr = _columns(dr_ptr, row, e, here, DV)
            own += product(dr, tl.trans(_state(states_ptr, chunk, d, e, D, DV)), HOW)
        own *= grown[:, None]
        recalled = tl.sum(own * k, 1) * unit
        dk -= own * beta[:, None]
        part = tl.load(part_ptr + row, mask=here, other=0.0) - moved - recalled * beta
        at_end += tl.sum(moved, 0)
        tl.store(dbeta_ptr + row, tl.load(own_ptr + row, mask=here, other=0.0) - recalled, mask=here)
        tl.store(dg_ptr + row, tl.cumsum(part, 0, reverse=True) + at_end, mask=here)
        # few tokens at once need few registers
        for token in range(0, CHUNK, 32):
            columns = token + tl.arange(0, 32)
            s = start + columns
            place = by_both_ptr + chunk * (2 * CHUNK * CHUNK) + n[:, None] * (2 * CHUNK) + columns[None, :]
            dk += product(tl.load(place), head_rows(k_ptr, k_strides, batch, head, first, s, d, s < length, d < D), HOW)
            rows = head_rows(q_ptr, q_strides, batch, head, first, s, d, s < length, d < D)
            dk += product(tl.load(place + CHUNK), rows, HOW)
    k = head_rows(k_ptr, k_strides, batch, head, first, t, d, here, d < D)
    unit = tl.load(unit_ptr + (begin + t) * HEADS + head * GROUP, mask=here, other=0.0)
    place = ((begin + t) * (HEADS // GROUP) + head)[:, None] * D + d[None, :]
    tl.store(dk_ptr + place, _unscaled(dk, k, unit, QK_NORM), mask=here[:, None] & (d < D)[None, :])
