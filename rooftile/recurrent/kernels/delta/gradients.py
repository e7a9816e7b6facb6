"""The gradients of the gated delta rule by chunks, with the letters of `chunks`; dS' is the gradient of the state after a chunk.

    dV' = P^T dY + exp(G_last - G) K dS',  dR = X^T dV'
    dS = exp(G_last) dS' + scale (exp(G) Q)^T dY - (beta exp(G) K)^T dR     one for each sequence, value head, block of columns
    dV = beta dR,  dM = -dR V'^T,  dP = dY V'^T                             one for each chunk and value head
    dQ = exp(G) dY S^T + (dP decay) K                                       one for each chunk and key head, which adds what
    dK = exp(G_last - G) V' dS'^T - beta exp(G) dR S^T + (dP decay)^T Q     its value heads give, one after the other
         + (beta dM decay) K + (beta dM decay)^T K

The gradient of G_t is what the exponents of row t give less what those of column t give; of g, the sum over later tokens of it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooftile.recurrent.kernels.delta.chunks import chunk_rows, decay_between, inverse_length, sequence_of
from rooftile.recurrent.kernels.delta.inverse import CHUNK, product
from rooftile.recurrent.linear.kernels.tiles import part_of


# fmt: off
@triton.jit(do_not_specialize=["T", "B"])
def _walk_back(
    q_ptr, k_ptr, beta_ptr, dy_ptr, x_ptr, pairs_ptr, recall_ptr, left_ptr, reach_ptr, end_ptr, dr_ptr, dstates_ptr,
    d_last_ptr, d_first_ptr, cu_ptr, q_strides, k_strides, T, B,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    HAS_LAST: tl.constexpr, KEEPS: tl.constexpr, PACKED: tl.constexpr, HOW: tl.constexpr,
):
    # fmt: on
    """Writes the gradient of the first state, and with KEEPS dR and the gradients of states after chunks."""
    b, h = tl.program_id(1), tl.program_id(2)
    batch = b.to(tl.int64)
    length, first, begin, slot = sequence_of(b, cu_ptr, T, PACKED)
    n, d, e = tl.arange(0, CHUNK), tl.arange(0, BLOCK_D), tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (d < D)[:, None] & (e < DV)[None, :]
    square, place = n[:, None] * CHUNK + n[None, :], n[:, None] * (HEADS * DV) + e[None, :]
    own = d[:, None] * DV + e[None, :]
    if HAS_LAST:
        state = tl.load(d_last_ptr + (batch * HEADS + h) * (D * DV) + own, mask=inside, other=0.0).to(tl.float32)
    else:
        state = tl.zeros((BLOCK_D, BLOCK_V), tl.float32)
    chunks = tl.cdiv(length, CHUNK)
    for i in range(0, chunks):
        start = (chunks - 1 - i) * CHUNK
        here = n < length - start
        there = here[:, None] & (e < DV)[None, :]
        chunk = (slot + chunks - 1 - i) * HEADS + h
        row = (begin + start) * HEADS + h
        dy = tl.load(dy_ptr + row * DV + place, mask=there, other=0.0)
        pairs = tl.load(pairs_ptr + chunk * (CHUNK * CHUNK) + square)
        k = chunk_rows(k_ptr, k_strides, batch, h // GROUP, first + start, d, here, d < D)
        x = tl.load(x_ptr + chunk * (CHUNK * CHUNK) + square)
        q = chunk_rows(q_ptr, q_strides, batch, h // GROUP, first + start, d, here, d < D)
        beta = tl.load(beta_ptr + chunk * CHUNK + n)
        recall = tl.load(recall_ptr + chunk * CHUNK + n)
        left = tl.load(left_ptr + chunk * CHUNK + n)
        reach = tl.load(reach_ptr + chunk * CHUNK + n)
        end = tl.load(end_ptr + chunk)
        if KEEPS:
            tl.store(dstates_ptr + chunk * (D * DV) + own, state, mask=inside)
        dr = product(tl.trans(pairs), dy, HOW) + product(k, state, HOW) * left[:, None]
        dr = product(tl.trans(x), dr, HOW)
        if KEEPS:
            tl.store(dr_ptr + row * DV + place, dr, mask=there)
        state = state * end + product(tl.trans(q), dy * reach[:, None], HOW)
        state -= product(tl.trans(k), dr * (beta * recall)[:, None], HOW)
    tl.store(d_first_ptr + (batch * HEADS + h) * (D * DV) + own, state, mask=inside)


@triton.jit
def _columns(ptr, e, here, HEADS: tl.constexpr, DV: tl.constexpr):
    """Loads columns e of a head's rows that lie one behind the other."""
    n = tl.arange(0, CHUNK)
    return tl.load(ptr + n[:, None] * (HEADS * DV) + e[None, :], mask=here[:, None] & (e < DV)[None, :], other=0.0)


@triton.jit
def _unscaled(dx, x, unit, QK_NORM: tl.constexpr):
    """Takes out of the gradient of x, which is multiplied by its inverse length, what would change the length."""
    if QK_NORM:
        x = x.to(tl.float32) * unit[:, None]
        dx -= x * tl.sum(x * dx, 1)[:, None]
    return dx


# fmt: off
@triton.jit(do_not_specialize=["T", "B"])
def _pair_gradients(
    q_ptr, k_ptr, v_ptr, beta_ptr, dy_ptr, new_ptr, dr_ptr, total_ptr, unit_ptr, factor_ptr, by_key_ptr, by_both_ptr,
    part_ptr, own_ptr, dv_ptr, cu_ptr, q_strides, k_strides, v_strides, T, B,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    PACKED: tl.constexpr, HOW: tl.constexpr,
):
    # fmt: on
    """Writes dV, what multiplies K in dQ and dK (the first also Q in dK), and what pairs of tokens add to dG and dbeta."""
    slot, h = tl.program_id(0), tl.program_id(1)
    b, length, first, start = part_of(slot, cu_ptr, T, B, CHUNK, PACKED)
    if start >= length:
        return
    STEP: tl.constexpr = min(BLOCK_D, 32)
    n, batch = tl.arange(0, CHUNK), b.to(tl.int64)
    here = n < length - start
    first += start
    row, chunk = ((0 if PACKED else batch * T) + first) * HEADS + h, slot.to(tl.int64) * HEADS + h
    beta = tl.load(beta_ptr + chunk * CHUNK + n)
    system, pairs = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, CHUNK), tl.float32)
    dbeta = tl.zeros((CHUNK,), tl.float32)
    for column in range(0, DV, BLOCK_V):
        e = column + tl.arange(0, BLOCK_V)
        dr, new = _columns(dr_ptr + row * DV, e, here, HEADS, DV), _columns(new_ptr + row * DV, e, here, HEADS, DV)
        dbeta += tl.sum(dr.to(tl.float32) * chunk_rows(v_ptr, v_strides, batch, h, first, e, here, e < DV), 1)
        place = row * DV + n[:, None] * (HEADS * DV) + e[None, :]
        tl.store(dv_ptr + place, dr * beta[:, None], mask=here[:, None] & (e < DV)[None, :])
        system -= product(dr, tl.trans(new), HOW)
        pairs += product(_columns(dy_ptr + row * DV, e, here, HEADS, DV), tl.trans(new), HOW)
    decay = decay_between(tl.load(total_ptr + chunk * CHUNK + n))
    unit = tl.load(unit_ptr + chunk * CHUNK + n)
    pairs *= decay * tl.load(factor_ptr + chunk * CHUNK + n)[:, None] * unit[None, :]
    system = tl.where(n[:, None] > n[None, :], system, 0.0) * decay
    square = chunk * (CHUNK * CHUNK) + n[:, None] * CHUNK + n[None, :]
    tl.store(by_key_ptr + square, pairs)
    written = system * beta[:, None]
    tl.store(by_both_ptr + square, (written + tl.trans(written)) * unit[None, :])
    keys, queries = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, CHUNK), tl.float32)
    for column in range(0, D, STEP):
        d = column + tl.arange(0, STEP)
        k = chunk_rows(k_ptr, k_strides, batch, h // GROUP, first, d, here, d < D)
        keys += product(k, tl.trans(k), HOW)
        q = chunk_rows(q_ptr, q_strides, batch, h // GROUP, first, d, here, d < D)
        queries += product(q, tl.trans(k), HOW)
    apart = keys * unit[:, None] * unit[None, :] * system
    tl.store(own_ptr + chunk * CHUNK + n, dbeta + tl.sum(apart, 1), mask=here)
    apart = apart * beta[:, None] + queries * pairs
    tl.store(part_ptr + chunk * CHUNK + n, tl.sum(apart, 1) - tl.sum(apart, 0), mask=here)


@triton.jit
def _state(ptr, d, e, D: tl.constexpr, DV: tl.constexpr):
    """Loads columns e of a chunk's state."""
    return tl.load(ptr + d[:, None] * DV + e[None, :], mask=(d < D)[:, None] & (e < DV)[None, :], other=0.0)


# fmt: off
@triton.jit(do_not_specialize=["T", "B"])
def _query_gradients(
    q_ptr, k_ptr, dy_ptr, states_ptr, reach_ptr, by_key_ptr, part_ptr, dq_ptr, cu_ptr, q_strides, k_strides, T, B,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    QK_NORM: tl.constexpr, PACKED: tl.constexpr, HOW: tl.constexpr,
):
    # fmt: on
    """Writes dQ of a chunk and key head, and adds to dG of its value heads."""
    slot, head = tl.program_id(0), tl.program_id(1)
    b, length, first, start = part_of(slot, cu_ptr, T, B, CHUNK, PACKED)
    if start >= length:
        return
    n, d, batch = tl.arange(0, CHUNK), tl.arange(0, BLOCK_D), b.to(tl.int64)
    here = n < length - start
    first += start
    begin = (0 if PACKED else batch * T) + first
    square = n[:, None] * CHUNK + n[None, :]
    dq = tl.zeros((CHUNK, BLOCK_D), tl.float32)
    for i in range(0, GROUP):
        h = head * GROUP + i
        row, chunk = begin * HEADS + h, slot.to(tl.int64) * HEADS + h
        own = tl.zeros((CHUNK, BLOCK_D), tl.float32)
        for column in range(0, DV, BLOCK_V):
            e = column + tl.arange(0, BLOCK_V)
            dy = _columns(dy_ptr + row * DV, e, here, HEADS, DV)
            own += product(dy, tl.trans(_state(states_ptr + chunk * (D * DV), d, e, D, DV)), HOW)
        own *= tl.load(reach_ptr + chunk * CHUNK + n)[:, None]
        place = part_ptr + chunk * CHUNK + n
        part = tl.sum(own * chunk_rows(q_ptr, q_strides, batch, head, first, d, here, d < D), 1)
        tl.store(place, tl.load(place, mask=here, other=0.0) + part, mask=here)
        dq += own
        pairs = tl.load(by_key_ptr + chunk * (CHUNK * CHUNK) + square)
        dq += product(pairs, chunk_rows(k_ptr, k_strides, batch, head, first, d, here, d < D), HOW)
    q = chunk_rows(q_ptr, q_strides, batch, head, first, d, here, d < D)
    place = (begin * (HEADS // GROUP) + head) * D + n[:, None] * (HEADS // GROUP * D) + d[None, :]
    dq = _unscaled(dq, q, inverse_length(q, QK_NORM), QK_NORM)
    tl.store(dq_ptr + place, dq, mask=here[:, None] & (d < D)[None, :])


# fmt: off
@triton.jit(do_not_specialize=["T", "B"])
def _key_gradients(
    q_ptr, k_ptr, beta_ptr, new_ptr, dr_ptr, states_ptr, dstates_ptr, unit_ptr, recall_ptr, left_ptr, end_ptr, by_key_ptr,
    by_both_ptr, part_ptr, own_ptr, dk_ptr, dg_ptr, dbeta_ptr, cu_ptr, q_strides, k_strides, T, B,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    QK_NORM: tl.constexpr, PACKED: tl.constexpr, HOW: tl.constexpr,
):
    # fmt: on
    """Writes dK of a chunk and key head, and dg and dbeta of its value heads."""
    slot, head = tl.program_id(0), tl.program_id(1)
    b, length, first, start = part_of(slot, cu_ptr, T, B, CHUNK, PACKED)
    if start >= length:
        return
    n, d, batch = tl.arange(0, CHUNK), tl.arange(0, BLOCK_D), b.to(tl.int64)
    here = n < length - start
    first += start
    begin = (0 if PACKED else batch * T) + first
    square = n[:, None] * CHUNK + n[None, :]
    dk = tl.zeros((CHUNK, BLOCK_D), tl.float32)
    for i in range(0, GROUP):
        h = head * GROUP + i
        row, chunk = begin * HEADS + h, slot.to(tl.int64) * HEADS + h
        beta = tl.load(beta_ptr + chunk * CHUNK + n)
        kept = tl.zeros((BLOCK_D,), tl.float32)
        for column in range(0, DV, 16):
            e = column + tl.arange(0, 16)
            state = _state(states_ptr + chunk * (D * DV), d, e, D, DV).to(tl.float32)
            kept += tl.sum(state * _state(dstates_ptr + chunk * (D * DV), d, e, D, DV), 1)
        # through the state after the chunk, then through the state before it
        own = tl.zeros((CHUNK, BLOCK_D), tl.float32)
        for column in range(0, DV, BLOCK_V):
            e = column + tl.arange(0, BLOCK_V)
            dstate = _state(dstates_ptr + chunk * (D * DV), d, e, D, DV)
            own += product(_columns(new_ptr + row * DV, e, here, HEADS, DV), tl.trans(dstate), HOW)
        own *= tl.load(left_ptr + chunk * CHUNK + n)[:, None]
        moved = tl.sum(own * chunk_rows(k_ptr, k_strides, batch, head, first, d, here, d < D), 1)
        dk += own
        own = tl.zeros((CHUNK, BLOCK_D), tl.float32)
        for column in range(0, DV, BLOCK_V):
            e = column + tl.arange(0, BLOCK_V)
            dr = _columns(dr_ptr + row * DV, e, here, HEADS, DV)
            own += product(dr, tl.trans(_state(states_ptr + chunk * (D * DV), d, e, D, DV)), HOW)
        own *= tl.load(recall_ptr + chunk * CHUNK + n)[:, None]
        recalled = tl.sum(own * chunk_rows(k_ptr, k_strides, batch, head, first, d, here, d < D), 1)
        dk -= own * beta[:, None]
        part = tl.load(part_ptr + chunk * CHUNK + n, mask=here, other=0.0) - moved - recalled * beta
        at_end = tl.load(end_ptr + chunk) * tl.sum(kept, 0) + tl.sum(moved, 0)
        dbeta = tl.load(own_ptr + chunk * CHUNK + n, mask=here, other=0.0) - recalled
        tl.store(dbeta_ptr + row + n * HEADS, dbeta, mask=here)
        tl.store(dg_ptr + row + n * HEADS, tl.cumsum(part, 0, reverse=True) + at_end, mask=here)
        pairs = tl.trans(tl.load(by_key_ptr + chunk * (CHUNK * CHUNK) + square))
        dk += product(pairs, chunk_rows(q_ptr, q_strides, batch, head, first, d, here, d < D), HOW)
        system = tl.load(by_both_ptr + chunk * (CHUNK * CHUNK) + square)
        # the factor is outside, since Triton gives two groups of warps the same rows where one product is added to another
        unit = tl.load(unit_ptr + chunk * CHUNK + n)
        dk += product(system, chunk_rows(k_ptr, k_strides, batch, head, first, d, here, d < D), HOW) * unit[:, None]
    k = chunk_rows(k_ptr, k_strides, batch, head, first, d, here, d < D)
    unit = tl.load(unit_ptr + (slot.to(tl.int64) * HEADS + head * GROUP) * CHUNK + n)
    place = (begin * (HEADS // GROUP) + head) * D + n[:, None] * (HEADS // GROUP * D) + d[None, :]
    tl.store(dk_ptr + place, _unscaled(dk, k, unit, QK_NORM), mask=here[:, None] & (d < D)[None, :])
