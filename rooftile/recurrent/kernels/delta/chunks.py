"""The gated delta rule by chunks of CHUNK tokens: what each chunk needs but the state, then the walk from chunk to chunk.

With G_t the sum of exponents from the chunk's first token until t, and S the state before the chunk:

    M_ts = beta_t <k_t, k_s> exp(G_t - G_s) for s < t,  X = (1 + M)^-1
    P_ts = scale <q_t, k_s> exp(G_t - G_s) for s <= t              M, P: one program for each chunk and key head
    V' = X beta (V - exp(G) K S)
    Y = scale exp(G) Q S + P V'
    S <- exp(G_last) S + (exp(G_last - G) K)^T V'                  one for each sequence, value head and block of columns

Keys and queries enter the products as they come: their lengths, if they are divided by them, are factors of rows and columns.
Sums of exponents are in fp64, so that the difference of two keeps small exponents behind large ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooftile.recurrent.kernels.delta.inverse import CHUNK, product
from rooftile.recurrent.linear.kernels.tiles import head_rows, part_of, rows

# is added to the square of a key's length: rooftile.recurrent.delta.EPS
EPS = tl.constexpr(1e-6)


@triton.jit
def inverse_length(x, QK_NORM: tl.constexpr):
    """Computes what rows are multiplied by."""
    x = x.to(tl.float32)
    squares = tl.sum(x * x, 1)
    return tl.rsqrt(squares + EPS) if QK_NORM else squares * 0 + 1


@triton.jit
def decay_between(total):
    """Computes exp(G_t - G_s) for s <= t, and 0 for later s, where the exponent would be positive."""
    n = tl.arange(0, CHUNK)
    # halves of a sum in fp32 take half the registers of its square in fp64
    high = total.to(tl.float32)
    low = tl.where(tl.abs(high) < float("inf"), (total - high.to(tl.float64)).to(tl.float32), 0.0)
    apart = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    return tl.exp(tl.where(n[:, None] >= n[None, :], apart, float("-inf")))


# fmt: off
@triton.jit(do_not_specialize=["T", "B"])
def _prepare(
    q_ptr, k_ptr, g_ptr, beta_ptr, m_ptr, pairs_ptr, total_ptr, wide_beta_ptr, unit_ptr, factor_ptr, recall_ptr,
    left_ptr, reach_ptr, end_ptr, cu_ptr, q_strides, k_strides, g_strides, beta_strides, scale, T, B,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    QK_NORM: tl.constexpr, PACKED: tl.constexpr, HOW: tl.constexpr,
):
    # fmt: on
    """Writes M, P, G, exp(G_last), beta in fp32, and what else multiplies tokens, for the value heads of a chunk and key head.

    These are a key's inverse length, a query's times the scale (`unit`, `factor`), and with their exponentials those of keys that
    read the state before the chunk, of keys that write to the state after it, and of queries (`recall`, `left`, `reach`).
    They are 0 after a sequence's last token, but G, which has the last sum.
    """
    slot, head = tl.program_id(0), tl.program_id(1)
    b, length, first, start = part_of(slot, cu_ptr, T, B, CHUNK, PACKED)
    if start >= length:
        return
    n = tl.arange(0, CHUNK)
    t, batch = start + n, b.to(tl.int64)
    here = t < length
    keys, queries = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, CHUNK), tl.float32)
    squares, squares_q = tl.zeros((CHUNK,), tl.float32), tl.zeros((CHUNK,), tl.float32)
    for column in tl.static_range(0, D, BLOCK_D):
        d = column + tl.arange(0, BLOCK_D)
        k = head_rows(k_ptr, k_strides, batch, head, first, t, d, here, d < D)
        squares += tl.sum(k.to(tl.float32) * k, 1)
        keys += product(k, tl.trans(k), HOW)
        q = head_rows(q_ptr, q_strides, batch, head, first, t, d, here, d < D)
        squares_q += tl.sum(q.to(tl.float32) * q, 1)
        queries += product(q, tl.trans(k), HOW)
    unit = tl.where(here, tl.rsqrt(squares + EPS) if QK_NORM else squares * 0 + 1, 0.0)
    factor = tl.where(here, (tl.rsqrt(squares_q + EPS) if QK_NORM else squares_q * 0 + 1) * scale, 0.0)
    keys *= unit[:, None] * unit[None, :]
    queries *= factor[:, None] * unit[None, :]
    square = n[:, None] * CHUNK + n[None, :]
    for i in range(0, GROUP):
        h = head * GROUP + i
        chunk = slot.to(tl.int64) * HEADS + h
        g = tl.load(g_ptr + batch * g_strides[0] + (first + t) * g_strides[1] + h * g_strides[2], mask=here, other=0.0)
        total = tl.cumsum(g.to(tl.float64), 0)
        beta_place = beta_ptr + batch * beta_strides[0] + (first + t) * beta_strides[1] + h * beta_strides[2]
        beta = tl.load(beta_place, mask=here, other=0.0).to(tl.float32)
        # rows after the last token have its sum
        end = tl.sum(tl.where(n == CHUNK - 1, total, 0.0), 0)
        grown = tl.exp(total.to(tl.float32))
        row = chunk * CHUNK + n
        tl.store(total_ptr + row, total)
        tl.store(wide_beta_ptr + row, beta)
        tl.store(unit_ptr + row, unit)
        tl.store(factor_ptr + row, factor)
        tl.store(recall_ptr + row, grown * unit)
        tl.store(left_ptr + row, tl.exp((end - total).to(tl.float32)) * unit)
        tl.store(reach_ptr + row, grown * factor)
        tl.store(end_ptr + chunk, tl.exp(end.to(tl.float32)))
        decay = decay_between(total)
        tl.store(pairs_ptr + chunk * (CHUNK * CHUNK) + square, queries * decay)
        m = tl.where(n[:, None] > n[None, :], keys * decay * beta[:, None], 0.0)
        tl.store(m_ptr + chunk * (CHUNK * CHUNK) + square, m)


@triton.jit
def sequence_of(b, cu_ptr, T, PACKED: tl.constexpr):
    """Returns a sequence's tokens, the first of them for `head_rows`, its first token of all, and its first chunk of all."""
    if PACKED:
        first = tl.load(cu_ptr + b).to(tl.int64)
        return (tl.load(cu_ptr + b + 1).to(tl.int64) - first).to(tl.int32), first, first, first // CHUNK + b
    batch = b.to(tl.int64)
    return T, batch * 0, batch * T, batch * tl.cdiv(T, CHUNK)


@triton.jit
def chunk_rows(ptr, strides, batch, h, first, column, here, wide):
    """Loads columns of the tokens of a head from `first` on; places in a chunk have 32 bits, which take half the registers."""
    ptr += batch * strides[0] + h.to(tl.int64) * strides[2] + first * strides[1]
    return rows(ptr, 0, tl.arange(0, CHUNK), column, here, wide, strides[1])


# fmt: off
@triton.jit(do_not_specialize=["T", "B"])
def _walk(
    q_ptr, k_ptr, v_ptr, beta_ptr, x_ptr, pairs_ptr, recall_ptr, left_ptr, reach_ptr, end_ptr, states_ptr, new_ptr, y_ptr,
    state_ptr, last_ptr, cu_ptr, q_strides, k_strides, v_strides, T, B,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    OUTPUTS: tl.constexpr, KEEPS: tl.constexpr, PACKED: tl.constexpr, HOW: tl.constexpr,
):
    # fmt: on
    """Writes the last state, and outputs, or V' and the state before each chunk."""
    b, h = tl.program_id(1), tl.program_id(2)
    batch = b.to(tl.int64)
    length, first, begin, slot = sequence_of(b, cu_ptr, T, PACKED)
    n, d, e = tl.arange(0, CHUNK), tl.arange(0, BLOCK_D), tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (d < D)[:, None] & (e < DV)[None, :]
    square, place = n[:, None] * CHUNK + n[None, :], n[:, None] * (HEADS * DV) + e[None, :]
    own = d[:, None] * DV + e[None, :]
    state = tl.load(state_ptr + (batch * HEADS + h) * (D * DV) + own, mask=inside, other=0.0)
    for start in range(0, length, CHUNK):
        here = n < length - start
        there = here[:, None] & (e < DV)[None, :]
        chunk = (slot + start // CHUNK) * HEADS + h
        row = (begin + start) * HEADS + h
        v = chunk_rows(v_ptr, v_strides, batch, h, first + start, e, here, e < DV)
        k = chunk_rows(k_ptr, k_strides, batch, h // GROUP, first + start, d, here, d < D)
        x = tl.load(x_ptr + chunk * (CHUNK * CHUNK) + square)
        beta = tl.load(beta_ptr + chunk * CHUNK + n)
        recall = tl.load(recall_ptr + chunk * CHUNK + n)
        left = tl.load(left_ptr + chunk * CHUNK + n)
        reach = tl.load(reach_ptr + chunk * CHUNK + n) if OUTPUTS else left
        end = tl.load(end_ptr + chunk)
        new = (v - product(k, state, HOW) * recall[:, None]) * beta[:, None]
        new = product(x, new, HOW)
        if OUTPUTS:
            q = chunk_rows(q_ptr, q_strides, batch, h // GROUP, first + start, d, here, d < D)
            pairs = tl.load(pairs_ptr + chunk * (CHUNK * CHUNK) + square)
            y = product(q, state, HOW) * reach[:, None] + product(pairs, new, HOW)
            tl.store(y_ptr + row * DV + place, y, mask=there)
        elif KEEPS:
            tl.store(new_ptr + row * DV + place, new, mask=there)
            tl.store(states_ptr + chunk * (D * DV) + own, state, mask=inside)
        state = state * end + product(tl.trans(k), new * left[:, None], HOW)
    tl.store(last_ptr + (batch * HEADS + h) * (D * DV) + own, state, mask=inside)
