"""The gated delta rule by chunks of CHUNK tokens: what each chunk adds, the states between chunks, and the outputs.

With G_t the sum of exponents from the chunk's first token until t, and S the state before the chunk:

    M_ts = beta_t <k_t, k_s> exp(G_t - G_s) for s < t,  X = (1 + M)^-1
    W = X (beta exp(G) K),  U = X (beta V)                         one program for each chunk and value head
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
# is added to the square of a key's length: rooftile.recurrent.delta.EPS
EPS = tl.constexpr(1e-6)


@triton.jit
def product(a, b, HOW: tl.constexpr):
    """Multiplies matrices with sums in fp32: "bf16" and "tf32" round the factors to that, "fp32" does not.

    "fp32" makes three products of the factors' upper and lower halves: Triton's own "tf32x3" spills on Hopper.
    """
    if HOW == "bf16":
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    a, b = a.to(tl.float32), b.to(tl.float32)
    if HOW == "tf32":
        return tl.dot(a, b, input_precision="tf32")
    high_a = (a.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    high_b = (b.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    found = tl.dot(a - high_a, high_b, input_precision="tf32")
    found = tl.dot(high_a, b - high_b, found, input_precision="tf32")
    return tl.dot(high_a, high_b, found, input_precision="tf32")


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


@triton.jit
def _blocks(row, column, SIZE: tl.constexpr, APART: tl.constexpr):
    """Places of the blocks of SIZE x SIZE numbers in a chunk's matrix that begin at (row, column) + p (APART, APART)."""
    p, i = tl.arange(0, CHUNK // APART), tl.arange(0, SIZE)
    rows, columns = row + p[:, None] * APART + i[None, :], column + p[:, None] * APART + i[None, :]
    return rows[:, :, None] * CHUNK + columns[:, None, :]


@triton.jit
def _twice(x, m, i, j, SIZE: tl.constexpr):
    """Goes from the inverses x of blocks of SIZE rows in 1 + m to the inverses of blocks of twice as many rows."""
    below = tl.where((i // (2 * SIZE) == j // (2 * SIZE)) & (i // SIZE > j // SIZE), m, 0.0)
    return x - product(x, product(below, x, "fp32"), "fp32")


@triton.jit
def _inverse_of_blocks(m):
    """Inverts 1 + m for strictly lower triangular blocks m (blocks, 16, 16)."""
    n = tl.arange(0, 16)
    i, j = n[None, :, None], n[None, None, :]
    x = tl.where(i == j, 1.0, 0.0) - tl.where((i // 2 == j // 2) & (i > j), m, 0.0)
    return _twice(_twice(_twice(x, m, i, j, 2), m, i, j, 4), m, i, j, 8)


@triton.jit
def _merge(x_ptr, SIZE: tl.constexpr):
    """Goes from inverses of blocks of SIZE rows, on the diagonal in memory, to inverses of blocks of twice as many rows."""
    below = x_ptr + _blocks(SIZE, 0, SIZE, 2 * SIZE)
    x = product(tl.load(below), tl.load(x_ptr + _blocks(0, 0, SIZE, 2 * SIZE)), "fp32")
    x = product(tl.load(x_ptr + _blocks(SIZE, SIZE, SIZE, 2 * SIZE)), x, "fp32")
    # all threads have read before one writes, and have written before one reads
    tl.debug_barrier()
    tl.store(below, -x)
    tl.debug_barrier()


# fmt: off
@triton.jit(do_not_specialize=["T", "B"])
def _prepare(
    k_ptr, v_ptr, g_ptr, beta_ptr, x_ptr, w_ptr, u_ptr, total_ptr, unit_ptr, cu_ptr, k_strides, v_strides, g_strides, beta_strides,
    T, B,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    QK_NORM: tl.constexpr, PACKED: tl.constexpr, HOW: tl.constexpr,
):
    # fmt: on
    """Writes X, W, U, G and what keys are multiplied by."""
    slot, h = tl.program_id(0), tl.program_id(1)
    b, length, first, start = part_of(slot, cu_ptr, T, B, CHUNK, PACKED)
    if start >= length:
        return
    n = tl.arange(0, CHUNK)
    t, batch = start + n, b.to(tl.int64)
    here = t < length
    g = tl.load(g_ptr + batch * g_strides[0] + (first + t) * g_strides[1] + h * g_strides[2], mask=here, other=0.0)
    total = tl.cumsum(g.to(tl.float64), 0)
    beta_place = beta_ptr + batch * beta_strides[0] + (first + t) * beta_strides[1] + h * beta_strides[2]
    beta = tl.load(beta_place, mask=here, other=0.0).to(tl.float32)
    m, squares = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK,), tl.float32)
    for column in range(0, D, BLOCK_D):
        d = column + tl.arange(0, BLOCK_D)
        k = head_rows(k_ptr, k_strides, batch, h // GROUP, first, t, d, here, d < D)
        squares += tl.sum(k.to(tl.float32) * k, 1)
        m += product(k, tl.trans(k), HOW)
    unit = tl.rsqrt(squares + EPS) if QK_NORM else squares * 0 + 1
    row = ((0 if PACKED else batch * T) + first + t) * HEADS + h
    tl.store(total_ptr + row, total, mask=here)
    tl.store(unit_ptr + row, unit, mask=here)
    m *= (beta * unit)[:, None] * unit[None, :] * decay_between(total)
    x_ptr += (slot.to(tl.int64) * HEADS + h) * (CHUNK * CHUNK)
    square = n[:, None] * CHUNK + n[None, :]
    tl.store(x_ptr + square, tl.where(n[:, None] > n[None, :], m, 0.0))
    tl.debug_barrier()
    diagonal = x_ptr + _blocks(0, 0, 16, 16)
    x = _inverse_of_blocks(tl.load(diagonal))
    tl.debug_barrier()
    tl.store(diagonal, x)
    tl.debug_barrier()
    _merge(x_ptr, 16)
    _merge(x_ptr, 32)
    x = tl.load(x_ptr + square)
    by_key, by_value = x * (beta * unit * tl.exp(total.to(tl.float32)))[None, :], x * beta[None, :]
    for column in range(0, D, BLOCK_D):
        d = column + tl.arange(0, BLOCK_D)
        k = head_rows(k_ptr, k_strides, batch, h // GROUP, first, t, d, here, d < D)
        tl.store(w_ptr + row[:, None] * D + d[None, :], product(by_key, k, HOW), mask=here[:, None] & (d < D)[None, :])
    for column in range(0, DV, BLOCK_V):
        e = column + tl.arange(0, BLOCK_V)
        v = head_rows(v_ptr, v_strides, batch, h, first, t, e, here, e < DV)
        tl.store(u_ptr + row[:, None] * DV + e[None, :], product(by_value, v, HOW), mask=here[:, None] & (e < DV)[None, :])


# fmt: off
@triton.jit(do_not_specialize=["T", "B"])
def _walk(
    k_ptr, w_ptr, u_ptr, states_ptr, total_ptr, unit_ptr, state_ptr, last_ptr, cu_ptr, k_strides, T, B,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    PACKED: tl.constexpr, HOW: tl.constexpr,
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
        new = u - product(w, state, HOW)
        tl.store(u_ptr + row[:, None] * DV + e[None, :], new, mask=there)
        end = tl.load(total_ptr + (begin + tl.minimum(start + CHUNK, length) - 1) * HEADS + h)
        total = tl.load(total_ptr + row, mask=here, other=float("inf"))
        factor = tl.exp((end - total).to(tl.float32)) * tl.load(unit_ptr + row, mask=here, other=0.0)
        k = head_rows(k_ptr, k_strides, batch, h // GROUP, first, t, d, here, d < D)
        state = state * tl.exp(end.to(tl.float32)) + product(tl.trans(k), new * factor[:, None], HOW)
        slot += 1
    tl.store(last_ptr + own + place, state, mask=inside)


# fmt: off
@triton.jit(do_not_specialize=["T", "B"])
def _outputs(
    q_ptr, k_ptr, v_ptr, states_ptr, total_ptr, unit_ptr, y_ptr, cu_ptr, q_strides, k_strides, scale, T, B,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    QK_NORM: tl.constexpr, PACKED: tl.constexpr, HOW: tl.constexpr,
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
    pairs = product(q, tl.trans(k), HOW) * unit[None, :] * decay_between(total)
    place = (slot.to(tl.int64) * HEADS + h) * (D * DV) + d[:, None] * DV + e[None, :]
    state = tl.load(states_ptr + place, mask=(d < D)[:, None] & (e < DV)[None, :], other=0.0)
    y = product(q, state, HOW) * tl.exp(total.to(tl.float32))[:, None]
    v = tl.load(v_ptr + row[:, None] * DV + e[None, :], mask=there, other=0.0)
    y = (y + product(pairs, v, HOW)) * factor[:, None]
    tl.store(y_ptr + row[:, None] * DV + e[None, :], y, mask=there)
