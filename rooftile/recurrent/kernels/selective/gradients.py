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
from rooftile.recurrent.kernels.selective.tiles import by_channel, channels, rates_of, row, steps, sums_over_channels, token
from rooftile.recurrent.linear.kernels.tiles import part_of

LN_2 = tl.constexpr(0.6931471805599453)


# fmt: off
@triton.jit(do_not_specialize=["T", "B", "apart"])
def _chunk_adjoints(
    dy_ptr, dt_ptr, C_ptr, z_ptr, rates_ptr, bias_ptr, part_ptr, total_ptr, cu_ptr, dt_strides, C_strides, z_strides, T, B, apart,
    W: tl.constexpr, N: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, TOKENS: tl.constexpr,
    TOTAL: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_Z: tl.constexpr, PACKED: tl.constexpr,
):
    # fmt: on
    """Writes r (N, W) before a chunk as its own tokens leave it, and with TOTAL the sum of its steps (W,)."""
    slot = tl.program_id(0)
    b, length, first, start = part_of(slot, cu_ptr, T, B, CHUNK, PACKED)
    if start >= length:
        return
    n, w, b = tl.arange(0, BLOCK_N), channels(apart, BLOCK_W), b.to(tl.int64)
    in_n, in_w = n < N, w < W
    inside = in_n[:, None] & in_w[None, :]
    bias = by_channel(bias_ptr, w, W, HAS_BIAS)
    rates = rates_of(rates_ptr, n, w, N, W)
    row = first + start
    dt_ptr += b * dt_strides[0] + row * dt_strides[1] + w
    C_ptr += b * C_strides[0] + row * C_strides[1] + n
    z_ptr += b * z_strides[0] + row * z_strides[1] + w
    dy_ptr += ((0 if PACKED else b * T) + row) * W + w
    r, total = tl.zeros((BLOCK_N, BLOCK_W), tl.float32), tl.zeros((BLOCK_W,), tl.float32)
    # the last token comes first
    count = tl.minimum(CHUNK, length - start)
    for number in range(0, tl.cdiv(count, TOKENS)):
        for k in tl.static_range(TOKENS):
            t, here = token(count - 1 - number * TOKENS - k, count)
            raw = tl.load(dt_ptr + t * dt_strides[1], mask=in_w, other=0.0).to(tl.float32) + bias
            dt = steps(raw, in_w & here, SOFTPLUS)
            if TOTAL:
                total += dt
            dy = tl.load(dy_ptr + t * W, mask=in_w & here, other=0.0).to(tl.float32)
            if HAS_Z:
                dy *= silu(tl.load(z_ptr + t * z_strides[1], mask=in_w & here, other=0.0).to(tl.float32))
            read = tl.load(C_ptr + t * C_strides[1], mask=in_n, other=0.0)
            r = tl.exp2(dt[None, :] * rates) * (r + dy[None, :] * read[:, None])
    tl.store(part_ptr + (slot.to(tl.int64) * N + n[:, None]) * W + w[None, :], r, mask=inside)
    if TOTAL:
        tl.store(total_ptr + slot.to(tl.int64) * W + w, total, mask=in_w)


# fmt: off
@triton.jit(do_not_specialize=["T", "B", "apart"])
def _gradients(
    dy_ptr, x_ptr, dt_ptr, B_ptr, C_ptr, z_ptr, rates_ptr, D_ptr, bias_ptr, part_ptr, adjoint_ptr, starts_ptr,
    dx_ptr, ddt_ptr, sums_ptr, dz_ptr, dA_ptr, dD_ptr, dbias_ptr, cu_ptr,
    x_strides, dt_strides, B_strides, C_strides, z_strides, T, B, apart,
    W: tl.constexpr, N: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, TOKENS: tl.constexpr,
    SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr, PACKED: tl.constexpr,
):
    # fmt: on
    """Writes the gradients of a chunk's tokens; dB and dC of a block of channels; dA, dD and d(dt_bias) of a chunk."""
    slot = tl.program_id(0)
    b, length, first, start = part_of(slot, cu_ptr, T, B, CHUNK, PACKED)
    if start >= length:
        return
    n, w, lane, b = tl.arange(0, BLOCK_N), channels(apart, BLOCK_W), tl.arange(0, BLOCK_W), b.to(tl.int64)
    in_n, in_w = n < N, w < W
    inside, place = in_n[:, None] & in_w[None, :], n[:, None] * W + w[None, :]
    bias, skip = by_channel(bias_ptr, w, W, HAS_BIAS), by_channel(D_ptr, w, W, HAS_D)
    rates = rates_of(rates_ptr, n, w, N, W)
    part = slot.to(tl.int64) * N * W
    starts_ptr += part * (CHUNK // TOKENS)
    begin = first + start
    x_ptr += b * x_strides[0] + begin * x_strides[1] + w
    dt_ptr += b * dt_strides[0] + begin * dt_strides[1] + w
    B_ptr += b * B_strides[0] + begin * B_strides[1] + n
    C_ptr += b * C_strides[0] + begin * C_strides[1] + n
    z_ptr += b * z_strides[0] + begin * z_strides[1] + w
    begin += 0 if PACKED else b * T
    dy_ptr += begin * W + w
    dx_ptr += begin * W + w
    ddt_ptr += begin * W + w
    dz_ptr += begin * W + w
    sums_ptr += (tl.program_id(1) * (T if PACKED else B.to(tl.int64) * T) + begin) * (2 * BLOCK_N)
    sums_ptr += lane * (2 * BLOCK_N) // BLOCK_W
    # fewer rows than channels: some channels know the same sum
    owner = lane * (2 * BLOCK_N) % BLOCK_W == 0
    state = tl.load(part_ptr + part + place, mask=inside, other=0.0)
    count = tl.minimum(CHUNK, length - start)
    tiles = tl.cdiv(count, TOKENS)
    for number in range(0, tiles):
        tl.store(starts_ptr + number * (N * W) + place, state, mask=inside)
        for k in tl.static_range(TOKENS):
            t, _ = token(number * TOKENS + k, count)
            dt = steps(tl.load(dt_ptr + t * dt_strides[1], mask=in_w, other=0.0).to(tl.float32) + bias, in_w, SOFTPLUS)
            x = tl.load(x_ptr + t * x_strides[1], mask=in_w, other=0.0).to(tl.float32)
            own = tl.load(B_ptr + t * B_strides[1], mask=in_n, other=0.0)
            state = tl.exp2(dt[None, :] * rates) * state + (dt * x)[None, :] * own[:, None]
    # the states are written before they are read
    tl.debug_barrier()
    dD, dbias = tl.zeros((BLOCK_W,), tl.float32), tl.zeros((BLOCK_W,), tl.float32)
    dA = tl.zeros((BLOCK_N, BLOCK_W), tl.float32)
    r = tl.load(adjoint_ptr + part + place, mask=inside, other=0.0)
    for back in range(0, tiles):
        number = tiles - 1 - back
        states = (tl.load(starts_ptr + number * (N * W) + place, mask=inside, other=0.0),)
        for k in tl.static_range(TOKENS):
            t, here = token(number * TOKENS + k, count)
            raw = tl.load(dt_ptr + t * dt_strides[1], mask=in_w, other=0.0).to(tl.float32) + bias
            dt = steps(raw, in_w & here, SOFTPLUS)
            x = tl.load(x_ptr + t * x_strides[1], mask=in_w, other=0.0).to(tl.float32)
            own = tl.load(B_ptr + t * B_strides[1], mask=in_n, other=0.0)
            states = states + (tl.exp2(dt[None, :] * rates) * states[k] + (dt * x)[None, :] * own[:, None],)
        for k in tl.static_range(TOKENS - 1, -1, -1):
            t, here = token(number * TOKENS + k, count)
            raw = tl.load(dt_ptr + t * dt_strides[1], mask=in_w, other=0.0).to(tl.float32) + bias
            dt = steps(raw, in_w & here, SOFTPLUS)
            x = tl.load(x_ptr + t * x_strides[1], mask=in_w & here, other=0.0).to(tl.float32)
            own = tl.load(B_ptr + t * B_strides[1], mask=in_n, other=0.0)
            read = tl.load(C_ptr + t * C_strides[1], mask=in_n, other=0.0)
            dy = tl.load(dy_ptr + t * W, mask=in_w & here, other=0.0).to(tl.float32)
            if HAS_Z:
                z = tl.load(z_ptr + t * z_strides[1], mask=in_w & here, other=0.0).to(tl.float32)
                gate = 1 / (1 + tl.exp(-z))
                y = tl.sum(states[k + 1] * read[:, None], 0) + skip * x
                dz = dy * y * gate * (1 + z * (1 - gate))
                tl.store(dz_ptr + t * W, dz.to(dz_ptr.dtype.element_ty), mask=in_w & here)
                dy *= z * gate
            a = tl.exp2(dt[None, :] * rates)
            s = dy[None, :] * read[:, None] + r
            r = a * s
            written = tl.sum(s * own[:, None], 0)
            kept = r * states[k]
            dA += dt[None, :] * kept
            ddt = tl.sum(kept * rates, 0) * LN_2 + x * written
            if SOFTPLUS:
                ddt *= 1 / (1 + tl.exp(-raw))
            ddt = tl.where(in_w & here, ddt, 0.0)
            tl.store(ddt_ptr + t * W, ddt.to(ddt_ptr.dtype.element_ty), mask=in_w & here)
            dx = dt * written + skip * dy
            tl.store(dx_ptr + t * W, dx.to(dx_ptr.dtype.element_ty), mask=in_w & here)
            dbias += ddt
            dD += dy * x
            to_B, to_C = (dt * x)[None, :] * s, dy[None, :] * states[k + 1]
            sums = ()
            for i in tl.static_range(BLOCK_N):
                sums = sums + (row(to_B, n, i),)
            for i in tl.static_range(BLOCK_N):
                sums = sums + (row(to_C, n, i),)
            sums = sums_over_channels(sums, lane, 2 * BLOCK_N, BLOCK_W)
            for i in tl.static_range((2 * BLOCK_N + BLOCK_W - 1) // BLOCK_W):
                tl.store(sums_ptr + t * (2 * BLOCK_N) + i, sums[i], mask=owner & here)
    tl.store(dA_ptr + part + place, dA, mask=inside)
    tl.store(dD_ptr + slot.to(tl.int64) * W + w, dD, mask=in_w)
    tl.store(dbias_ptr + slot.to(tl.int64) * W + w, dbias, mask=in_w)
