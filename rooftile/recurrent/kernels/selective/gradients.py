"""The gradients of the selective scan by chunks: r is what the tokens after a state leave as its gradient.

    s_t = C_t dy_t + r_{t+1},  r_t = exp(dt_t A) s_t
    dB_t = sum of s_t dt_t x_t and dC_t = sum of dy_t h_t over channels,  dx_t = dt_t <s_t, B_t> + D dy_t
    d dt_t = x_t <s_t, B_t> + sum of A s_t exp(dt_t A) h_{t-1},  dA = sum of dt_t s_t exp(dt_t A) h_{t-1}

The states before all chunks are found as in the forward, and r behind all chunks in the same way from the last chunk to the first.
A program then walks a chunk once to find the state before each tile of TOKENS tokens, and goes back from tile to tile. Sums over
tokens are made for each chunk, sums over channels for each block; both kinds are added afterwards.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooftile.recurrent.kernels.parts import silu
from rooftile.recurrent.kernels.selective.tiles import (
    by_channel,
    channels,
    column,
    decays,
    row,
    states_before,
    states_behind,
    steps,
    tile,
)
from rooftile.recurrent.linear.kernels.tiles import part_of

LN_2 = tl.constexpr(0.6931471805599453)


# fmt: off
@triton.jit(do_not_specialize=["T", "B", "apart"])
def _chunk_adjoints(
    dy_ptr, dt_ptr, C_ptr, z_ptr, rates_ptr, bias_ptr, part_ptr, cu_ptr, dt_strides, C_strides, z_strides, T, B, apart,
    W: tl.constexpr, N: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
    SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_Z: tl.constexpr, PACKED: tl.constexpr,
):
    # fmt: on
    """Writes r (N, W) before a chunk as its own tokens leave it."""
    slot = tl.program_id(0)
    b, length, first, start = part_of(slot, cu_ptr, T, B, CHUNK, PACKED)
    if start >= length:
        return
    n, w, b = tl.arange(0, BLOCK_N), channels(apart, BLOCK_W), b.to(tl.int64)
    in_n, in_w = n < N, w < W
    inside = in_n[:, None] & in_w[None, :]
    bias = by_channel(bias_ptr, w, W, HAS_BIAS)
    rates = tl.load(rates_ptr + n[:, None] * W + w[None, :], mask=inside, other=0.0)
    # the last token comes first
    count = tl.minimum(CHUNK, length - start)
    row = first + start + count - 1
    dt_ptr += b * dt_strides[0] + row * dt_strides[1] + w
    C_ptr += b * C_strides[0] + row * C_strides[1] + n
    z_ptr += b * z_strides[0] + row * z_strides[1] + w
    dy_ptr += ((0 if PACKED else b * T) + row) * W + w
    r = tl.zeros((BLOCK_N, BLOCK_W), tl.float32)
    for _ in range(0, count):
        dt = steps(tl.load(dt_ptr, mask=in_w, other=0.0).to(tl.float32) + bias, in_w, SOFTPLUS)
        dy = tl.load(dy_ptr, mask=in_w, other=0.0).to(tl.float32)
        if HAS_Z:
            dy *= silu(tl.load(z_ptr, mask=in_w, other=0.0).to(tl.float32))
            z_ptr -= z_strides[1]
        read = tl.load(C_ptr, mask=in_n, other=0.0).to(tl.float32)
        r = tl.exp2(dt[None, :] * rates) * (r + dy[None, :] * read[:, None])
        dy_ptr -= W
        dt_ptr -= dt_strides[1]
        C_ptr -= C_strides[1]
    tl.store(part_ptr + (slot.to(tl.int64) * N + n[:, None]) * W + w[None, :], r, mask=inside)


@triton.jit
def _start_of(part_ptr, starts_ptr, number, N: tl.constexpr, W: tl.constexpr):
    """Returns where the states (N, W) before a tile are; the states before the first tile lie before the chunk."""
    if number == 0:
        found = part_ptr
    else:
        found = starts_ptr + (number - 1) * (N * W)
    return found


# fmt: off
@triton.jit(do_not_specialize=["T", "B", "apart"])
def _gradients(
    dy_ptr, x_ptr, dt_ptr, B_ptr, C_ptr, z_ptr, rates_ptr, D_ptr, bias_ptr, part_ptr, adjoint_ptr, starts_ptr,
    dx_ptr, ddt_ptr, dB_ptr, dC_ptr, dz_ptr, dA_ptr, dD_ptr, dbias_ptr, cu_ptr,
    x_strides, dt_strides, B_strides, C_strides, z_strides, T, B, apart,
    W: tl.constexpr, N: tl.constexpr, BLOCK_W: tl.constexpr, CHUNK: tl.constexpr, TOKENS: tl.constexpr,
    SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr, PACKED: tl.constexpr,
):
    # fmt: on
    """Writes the gradients of a chunk's tokens; dB and dC of a block of channels; dA, dD and d(dt_bias) of a chunk."""
    slot = tl.program_id(0)
    b, length, first, start = part_of(slot, cu_ptr, T, B, CHUNK, PACKED)
    if start >= length:
        return
    t, w, b = tl.arange(0, TOKENS), channels(apart, BLOCK_W), b.to(tl.int64)
    bias, skip = by_channel(bias_ptr, w, W, HAS_BIAS), by_channel(D_ptr, w, W, HAS_D)
    tiles = tl.cdiv(tl.minimum(CHUNK, length - start), TOKENS)
    part_ptr += slot.to(tl.int64) * N * W
    starts_ptr += slot.to(tl.int64) * (CHUNK // TOKENS) * N * W
    for number in range(0, tiles - 1):
        here, rows = start + number * TOKENS + t < length, first + start + number * TOKENS + t
        inside = here[:, None] & (w < W)[None, :]
        dt = steps(tile(dt_ptr, dt_strides, b, rows, w, inside) + bias[None, :], inside, SOFTPLUS)
        moved = dt * tile(x_ptr, x_strides, b, rows, w, inside)
        known_ptr = _start_of(part_ptr, starts_ptr, number, N, W)
        for i in range(0, N):
            a = decays(dt, tl.load(rates_ptr + i * W + w, mask=w < W, other=0.0), here)
            state = moved * column(B_ptr, B_strides, b, rows, i, here)[:, None]
            state += a * states_before(a, state, tl.load(known_ptr + i * W + w, mask=w < W, other=0.0), t)
            next_ptr = _start_of(part_ptr, starts_ptr, number + 1, N, W)
            tl.store(next_ptr + i * W + w, row(state, t, TOKENS - 1), mask=w < W)
    # the states are written before they are read
    tl.debug_barrier()
    n_place = slot.to(tl.int64) * N
    dD, dbias = tl.zeros((BLOCK_W,), tl.float32), tl.zeros((BLOCK_W,), tl.float32)
    for back in range(0, tiles):
        number = tiles - 1 - back
        begin = start + number * TOKENS
        here, rows = begin + t < length, first + begin + t
        inside, every = here[:, None] & (w < W)[None, :], (0 if PACKED else b * T) + rows
        own = every[:, None] * W + w[None, :]
        raw = tile(dt_ptr, dt_strides, b, rows, w, inside) + bias[None, :]
        dt, x = steps(raw, inside, SOFTPLUS), tile(x_ptr, x_strides, b, rows, w, inside)
        dy = tl.load(dy_ptr + own, mask=inside, other=0.0).to(tl.float32)
        if HAS_Z:
            z = tile(z_ptr, z_strides, b, rows, w, inside)
            dy *= silu(z)
        y, moved = skip[None, :] * x, dt * x
        written, ddt = tl.zeros((TOKENS, BLOCK_W), tl.float32), tl.zeros((TOKENS, BLOCK_W), tl.float32)
        known_ptr = _start_of(part_ptr, starts_ptr, number, N, W)
        out = (tl.program_id(1) * (T if PACKED else B.to(tl.int64) * T) + every) * N
        for i in range(0, N):
            rate = tl.load(rates_ptr + i * W + w, mask=w < W, other=0.0)
            a, of_B = decays(dt, rate, here), column(B_ptr, B_strides, b, rows, i, here)[:, None]
            kept = a * states_before(a, moved * of_B, tl.load(known_ptr + i * W + w, mask=w < W, other=0.0), t)
            state_i, of_C = kept + moved * of_B, column(C_ptr, C_strides, b, rows, i, here)[:, None]
            tl.store(dC_ptr + out + i, tl.sum(dy * state_i, 1), mask=here)
            y += state_i * of_C
            s = dy * of_C
            # r and the sum of dA wait in memory, where a thread finds what it has written
            place = (n_place + i) * W + w
            later, r = states_behind(a, a * s, tl.load(adjoint_ptr + place, mask=w < W, other=0.0), t, TOKENS)
            tl.store(adjoint_ptr + place, r, mask=w < W)
            s += later
            tl.store(dB_ptr + out + i, tl.sum(s * moved, 1), mask=here)
            written += s * of_B
            kept *= s
            ddt += kept * (rate * LN_2)[None, :]
            dA = tl.load(dA_ptr + place, mask=w < W, other=0.0) + tl.sum(dt * kept, 0)
            tl.store(dA_ptr + place, dA, mask=w < W)
        if HAS_Z:
            z = tile(z_ptr, z_strides, b, rows, w, inside)
            gate = 1 / (1 + tl.exp(-z))
            dout = tl.load(dy_ptr + own, mask=inside, other=0.0).to(tl.float32)
            dz = dout * y * gate * (1 + z * (1 - gate))
            tl.store(dz_ptr + own, dz.to(dz_ptr.dtype.element_ty), mask=inside)
        dx = dt * written + skip[None, :] * dy
        tl.store(dx_ptr + own, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        ddt += x * written
        if SOFTPLUS:
            ddt *= 1 / (1 + tl.exp(-raw))
        ddt = tl.where(inside, ddt, 0.0)
        tl.store(ddt_ptr + own, ddt.to(ddt_ptr.dtype.element_ty), mask=inside)
        dbias += tl.sum(ddt, 0)
        dD += tl.sum(dy * x, 0)
    tl.store(dD_ptr + slot.to(tl.int64) * W + w, dD, mask=w < W)
    tl.store(dbias_ptr + slot.to(tl.int64) * W + w, dbias, mask=w < W)
