"""The selective scan by chunks, so that one sequence fills a chip:

    _chunk_states  walks each chunk from a state of zeros, and sums its steps
    _scan          goes from chunk to chunk: S = exp(A sum of dt) S + what the chunk adds; leaves the state before each chunk
    _outputs       walks each chunk from this state, and writes y

A chunk's states lie in memory as (N, W), in fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooftile.recurrent.kernels.parts import silu
from rooftile.recurrent.kernels.selective.tiles import by_channel, channels, steps
from rooftile.recurrent.linear.kernels.tiles import part_of


# fmt: off
@triton.jit(do_not_specialize=["T", "B", "apart"])
def _chunk_states(
    x_ptr, dt_ptr, B_ptr, rates_ptr, bias_ptr, part_ptr, total_ptr, cu_ptr, x_strides, dt_strides, B_strides, T, B, apart,
    W: tl.constexpr, N: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
    SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr, PACKED: tl.constexpr,
):
    # fmt: on
    """Writes the state (N, W) that a chunk alone leaves, and the sum of its steps (W,)."""
    slot = tl.program_id(0)
    b, length, first, start = part_of(slot, cu_ptr, T, B, CHUNK, PACKED)
    if start >= length:
        return
    n, w, b = tl.arange(0, BLOCK_N), channels(apart, BLOCK_W), b.to(tl.int64)
    in_n, in_w = n < N, w < W
    inside = in_n[:, None] & in_w[None, :]
    bias = by_channel(bias_ptr, w, W, HAS_BIAS)
    rates = tl.load(rates_ptr + n[:, None] * W + w[None, :], mask=inside, other=0.0)
    row = first + start
    x_ptr += b * x_strides[0] + row * x_strides[1] + w
    dt_ptr += b * dt_strides[0] + row * dt_strides[1] + w
    B_ptr += b * B_strides[0] + row * B_strides[1] + n
    state, total = tl.zeros((BLOCK_N, BLOCK_W), tl.float32), tl.zeros((BLOCK_W,), tl.float32)
    for _ in range(0, tl.minimum(CHUNK, length - start)):
        dt = steps(tl.load(dt_ptr, mask=in_w, other=0.0).to(tl.float32) + bias, in_w, SOFTPLUS)
        moved = dt * tl.load(x_ptr, mask=in_w, other=0.0).to(tl.float32)
        own = tl.load(B_ptr, mask=in_n, other=0.0).to(tl.float32)
        state = tl.exp2(dt[None, :] * rates) * state + moved[None, :] * own[:, None]
        total += dt
        x_ptr += x_strides[1]
        dt_ptr += dt_strides[1]
        B_ptr += B_strides[1]
    tl.store(part_ptr + (slot.to(tl.int64) * N + n[:, None]) * W + w[None, :], state, mask=inside)
    tl.store(total_ptr + slot.to(tl.int64) * W + w, total, mask=in_w)


# fmt: off
@triton.jit(do_not_specialize=["T"])
def _scan(
    part_ptr, total_ptr, rates_ptr, first_ptr, last_ptr, cu_ptr, T,
    W: tl.constexpr, N: tl.constexpr, BLOCK_W: tl.constexpr, CHUNK: tl.constexpr, HAS_FIRST: tl.constexpr, REVERSE: tl.constexpr,
    PACKED: tl.constexpr,
):
    # fmt: on
    """Replaces what each chunk leaves by the state before it, and writes the last state (W, N); with REVERSE from the last chunk."""
    b, n = tl.program_id(0), tl.program_id(2)
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    inside = w < W
    rate = tl.load(rates_ptr + n * W + w, mask=inside, other=0.0)
    if PACKED:
        begin = tl.load(cu_ptr + b).to(tl.int32)
        slot = begin // CHUNK + b
        chunks = tl.cdiv(tl.load(cu_ptr + b + 1).to(tl.int32) - begin, CHUNK)
    else:
        chunks = tl.cdiv(T, CHUNK)
        slot = b * chunks
    own = b.to(tl.int64) * W * N + w * N + n
    state = tl.zeros((BLOCK_W,), tl.float32)
    if HAS_FIRST:
        state = tl.load(first_ptr + own, mask=inside, other=0.0).to(tl.float32)
    for i in range(0, chunks):
        here = (slot + (chunks - 1 - i if REVERSE else i)).to(tl.int64)
        place = part_ptr + (here * N + n) * W + w
        part = tl.load(place, mask=inside, other=0.0)
        total = tl.load(total_ptr + here * W + w, mask=inside, other=0.0)
        tl.store(place, state, mask=inside)
        state = tl.exp2(total * rate) * state + part
    tl.store(last_ptr + own, state, mask=inside)


# fmt: off
@triton.jit(do_not_specialize=["T", "B", "apart"])
def _outputs(
    x_ptr, dt_ptr, B_ptr, C_ptr, z_ptr, rates_ptr, D_ptr, bias_ptr, part_ptr, y_ptr, cu_ptr,
    x_strides, dt_strides, B_strides, C_strides, z_strides, T, B, apart,
    W: tl.constexpr, N: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
    SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr, PACKED: tl.constexpr,
):
    # fmt: on
    """Walks a chunk from the state before it."""
    slot = tl.program_id(0)
    b, length, first, start = part_of(slot, cu_ptr, T, B, CHUNK, PACKED)
    if start >= length:
        return
    n, w, b = tl.arange(0, BLOCK_N), channels(apart, BLOCK_W), b.to(tl.int64)
    in_n, in_w = n < N, w < W
    inside = in_n[:, None] & in_w[None, :]
    bias, skip = by_channel(bias_ptr, w, W, HAS_BIAS), by_channel(D_ptr, w, W, HAS_D)
    rates = tl.load(rates_ptr + n[:, None] * W + w[None, :], mask=inside, other=0.0)
    row = first + start
    x_ptr += b * x_strides[0] + row * x_strides[1] + w
    dt_ptr += b * dt_strides[0] + row * dt_strides[1] + w
    B_ptr += b * B_strides[0] + row * B_strides[1] + n
    C_ptr += b * C_strides[0] + row * C_strides[1] + n
    z_ptr += b * z_strides[0] + row * z_strides[1] + w
    y_ptr += ((0 if PACKED else b * T) + row) * W + w
    state = tl.load(part_ptr + (slot.to(tl.int64) * N + n[:, None]) * W + w[None, :], mask=inside, other=0.0)
    count = tl.minimum(CHUNK, length - start)
    # a token is read before the one in front of it is written: no load may go ahead of a store by itself
    dt, x = tl.load(dt_ptr, mask=in_w, other=0.0), tl.load(x_ptr, mask=in_w, other=0.0)
    own, read = tl.load(B_ptr, mask=in_n, other=0.0), tl.load(C_ptr, mask=in_n, other=0.0)
    z = tl.load(z_ptr, mask=in_w, other=0.0)
    for t in range(0, count):
        more = t + 1 < count
        x_ptr += x_strides[1]
        dt_ptr += dt_strides[1]
        B_ptr += B_strides[1]
        C_ptr += C_strides[1]
        next_dt, next_x = tl.load(dt_ptr, mask=in_w & more, other=0.0), tl.load(x_ptr, mask=in_w & more, other=0.0)
        next_own, next_read = tl.load(B_ptr, mask=in_n & more, other=0.0), tl.load(C_ptr, mask=in_n & more, other=0.0)
        next_z = z
        if HAS_Z:
            z_ptr += z_strides[1]
            next_z = tl.load(z_ptr, mask=in_w & more, other=0.0)
        step, moved = steps(dt.to(tl.float32) + bias, in_w, SOFTPLUS), x.to(tl.float32)
        state = tl.exp2(step[None, :] * rates) * state + (step * moved)[None, :] * own.to(tl.float32)[:, None]
        y = tl.sum(state * read.to(tl.float32)[:, None], 0)
        if HAS_D:
            y += skip * moved
        if HAS_Z:
            y *= silu(z.to(tl.float32))
        tl.store(y_ptr, y.to(y_ptr.dtype.element_ty), mask=in_w)
        y_ptr += W
        dt, x, own, read, z = next_dt, next_x, next_own, next_read, next_z
