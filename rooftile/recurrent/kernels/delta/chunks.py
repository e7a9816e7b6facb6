"""The gated delta rule by chunks of CHUNK tokens: what each chunk adds, the states between chunks, and the outputs.

With G_t the sum of exponents from the chunk's first token until t, and S the state before the chunk:

    M_ts = beta_t <k_t, k_s> exp(G_t - G_s) for s < t,  X = (1 + M)^-1
    W = X (beta exp(G) K),  U = X (beta V)                    one program for each chunk and value head
    V' = U - W S,  S <- exp(G_last) S + (exp(G_last - G) K)^T V'   one for each sequence, value head and block of columns
    Y = scale (exp(G) Q S + (Q K^T exp(G_t - G_s), s <= t) V')     one for each chunk, value head and block of columns

Keys and queries enter the products as they come: their lengths, if they are divided by them, are factors of rows and columns.
Sums of exponents are in fp64, so that the difference of two keeps small exponents behind large ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooftile.recurrent.linear.kernels.tiles import head_rows, part_of

# tokens of a chunk
CHUNK = tl.constexpr(64)
# the diagonal blocks of the system that are inverted row by row, and how many a chunk has
_BLOCK = tl.constexpr(16)
_BLOCKS = tl.constexpr(4)
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
    apart = (total[:, None] - total[None, :]).to(tl.float32)
    return tl.exp(tl.where(n[:, None] >= n[None, :], apart, float("-inf")))


@triton.jit
def inverse(m, EXACT: tl.constexpr):
    """Inverts 1 + m for a strictly lower triangular m (CHUNK, CHUNK), in fp32.

    With D the blocks of 1 + m on the diagonal, 1 + m = D (1 + N), and N^4 = 0, since N lies below the blocks.
    """
    n = tl.arange(0, CHUNK)
    same = (n // _BLOCK)[:, None] == (n // _BLOCK)[None, :]
    one = tl.where(n[:, None] == n[None, :], 1.0, 0.0)
    # (block, row, column)
    blocks = tl.sum(tl.reshape(tl.where(same, m, 0.0), (_BLOCKS, _BLOCK, _BLOCKS, _BLOCK)), 2)
    i = tl.arange(0, _BLOCK)
    x = tl.zeros((_BLOCKS, _BLOCK, _BLOCK), tl.float32) + tl.where(i[:, None] == i[None, :], 1.0, 0.0)[None]
    for row in range(1, _BLOCK):
        # by the number of the column, so that it weighs the rows of x
        weight = tl.sum(tl.where((i == row)[None, :, None], blocks, 0.0), 1)
        due = tl.sum(weight[:, :, None] * x, 1)
        x = tl.where((i == row)[None, :, None], x - due[:, None, :], x)
    b = tl.arange(0, _BLOCKS)
    places = b[:, None, None, None] == b[None, None, :, None]
    d = tl.reshape(tl.where(places, x[:, :, None, :], 0.0), (CHUNK, CHUNK))
    below = tl.dot(d, tl.where(same, 0.0, m), input_precision=EXACT)
    square = tl.dot(below, below, input_precision=EXACT)
    return tl.dot(tl.dot(one - below, one + square, input_precision=EXACT), d, input_precision=EXACT)


# fmt: off
@triton.jit(do_not_specialize=["T", "B"])
def _prepare(
    k_ptr, v_ptr, g_ptr, beta_ptr, w_ptr, u_ptr, total_ptr, unit_ptr, cu_ptr,
    k_strides, v_strides, g_strides, beta_strides, T, B,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    QK_NORM: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):
    # fmt: on
    """Writes W, U, G and what keys are multiplied by."""
    slot, h = tl.program_id(0), tl.program_id(1)
    b, length, first, start = part_of(slot, cu_ptr, T, B, CHUNK, PACKED)
    if start >= length:
        return
    t, batch = start + tl.arange(0, CHUNK), b.to(tl.int64)
    here = t < length
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    g = tl.load(g_ptr + batch * g_strides[0] + (first + t) * g_strides[1] + h * g_strides[2], mask=here, other=0.0)
    total = tl.cumsum(g.to(tl.float64), 0)
    beta_place = beta_ptr + batch * beta_strides[0] + (first + t) * beta_strides[1] + h * beta_strides[2]
    beta = tl.load(beta_place, mask=here, other=0.0).to(tl.float32)
    k = head_rows(k_ptr, k_strides, batch, h // GROUP, first, t, d, here, d < D)
    unit = inverse_length(k, QK_NORM)
    row = ((0 if PACKED else batch * T) + first + t) * HEADS + h
    tl.store(total_ptr + row, total, mask=here)
    tl.store(unit_ptr + row, unit, mask=here)
    k = k.to(DOT)
    m = tl.dot(k, tl.trans(k), input_precision=PRECISION) * (beta * unit)[:, None] * unit[None, :] * decay_between(total)
    n = tl.arange(0, CHUNK)
    x = inverse(tl.where(n[:, None] > n[None, :], m, 0.0), EXACT)
    by_key = x * (beta * unit * tl.exp(total.to(tl.float32)))[None, :]
    w = tl.dot(by_key.to(DOT), k, input_precision=PRECISION)
    tl.store(w_ptr + row[:, None] * D + d[None, :], w, mask=here[:, None] & (d < D)[None, :])
    v = head_rows(v_ptr, v_strides, batch, h, first, t, e, here, e < DV)
    u = tl.dot((x * beta[None, :]).to(DOT), v.to(DOT), input_precision=PRECISION)
    tl.store(u_ptr + row[:, None] * DV + e[None, :], u, mask=here[:, None] & (e < DV)[None, :])


# fmt: off
@triton.jit(do_not_specialize=["T", "B"])
def _walk(
    k_ptr, w_ptr, u_ptr, states_ptr, total_ptr, unit_ptr, state_ptr, last_ptr, cu_ptr, k_strides, T, B,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    PACKED: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    """Writes the state before each chunk and the last one, and V' in the place of U."""
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
    state = tl.load(state_ptr + own + place, mask=inside, other=0.0)
    for start in range(0, length, CHUNK):
        t = start + tl.arange(0, CHUNK)
        here = t < length
        row = (begin + t) * HEADS + h
        tl.store(states_ptr + (slot * HEADS + h) * (D * DV) + place, state, mask=inside)
        w = tl.load(w_ptr + row[:, None] * D + d[None, :], mask=here[:, None] & (d < D)[None, :], other=0.0)
        there = here[:, None] & (e < DV)[None, :]
        u = tl.load(u_ptr + row[:, None] * DV + e[None, :], mask=there, other=0.0)
        new = u - tl.dot(w.to(DOT), state.to(DOT), input_precision=PRECISION)
        tl.store(u_ptr + row[:, None] * DV + e[None, :], new, mask=there)
        end = tl.load(total_ptr + (begin + tl.minimum(start + CHUNK, length) - 1) * HEADS + h)
        total = tl.load(total_ptr + row, mask=here, other=float("inf"))
        factor = tl.exp((end - total).to(tl.float32)) * tl.load(unit_ptr + row, mask=here, other=0.0)
        k = head_rows(k_ptr, k_strides, batch, h // GROUP, first, t, d, here, d < D)
        new = (new * factor[:, None]).to(DOT)
        state *= tl.exp(end.to(tl.float32))
        state = tl.dot(tl.trans(k.to(DOT)), new, state, input_precision=PRECISION)
        slot += 1
    tl.store(last_ptr + own + place, state, mask=inside)


# fmt: off
@triton.jit(do_not_specialize=["T", "B"])
def _outputs(
    q_ptr, k_ptr, v_ptr, states_ptr, total_ptr, unit_ptr, y_ptr, cu_ptr, q_strides, k_strides, scale, T, B,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    QK_NORM: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    """Writes the outputs of a chunk from V' and the state before it."""
    slot, h = tl.program_id(0), tl.program_id(1)
    b, length, first, start = part_of(slot, cu_ptr, T, B, CHUNK, PACKED)
    if start >= length:
        return
    t, batch = start + tl.arange(0, CHUNK), b.to(tl.int64)
    here = t < length
    d, e = tl.arange(0, BLOCK_D), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    row = ((0 if PACKED else batch * T) + first + t) * HEADS + h
    there = here[:, None] & (e < DV)[None, :]
    # rows after the last token have its sum, so that no exponent is positive
    last = (0 if PACKED else batch * T) + first + tl.minimum(t, length - 1)
    total = tl.load(total_ptr + last * HEADS + h)
    unit = tl.load(unit_ptr + row, mask=here, other=0.0)
    q = head_rows(q_ptr, q_strides, batch, h // GROUP, first, t, d, here, d < D)
    k = head_rows(k_ptr, k_strides, batch, h // GROUP, first, t, d, here, d < D)
    factor = inverse_length(q, QK_NORM) * scale
    q = q.to(DOT)
    pairs = tl.dot(q, tl.trans(k.to(DOT)), input_precision=PRECISION) * unit[None, :] * decay_between(total)
    place = (slot.to(tl.int64) * HEADS + h) * (D * DV) + d[:, None] * DV + e[None, :]
    state = tl.load(states_ptr + place, mask=(d < D)[:, None] & (e < DV)[None, :], other=0.0)
    y = tl.dot(q, state.to(DOT), input_precision=PRECISION) * tl.exp(total.to(tl.float32))[:, None]
    v = tl.load(v_ptr + row[:, None] * DV + e[None, :], mask=there, other=0.0)
    y = tl.dot(pairs.to(DOT), v.to(DOT), y, input_precision=PRECISION) * factor[:, None]
    tl.store(y_ptr + row[:, None] * DV + e[None, :], y, mask=there)
