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
from rooftile.recurrent.kernels.selective.tiles import (
    advance,
    by_channel,
    channels,
    column,
    decays,
    row,
    states_before,
    steps,
    tile,
)
from rooftile.recurrent.linear.kernels.tiles import part_of


# fmt: off
@triton.jit(do_not_specialize=["T", "B", "apart"])
def _chunk_states(
    x_ptr, dt_ptr, B_ptr, rates_ptr, bias_ptr, part_ptr, total_ptr, cu_ptr, x_strides, dt_strides, B_strides, T, B, apart,
    W: tl.constexpr, N: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, TOKENS: tl.constexpr,
    SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr, PACKED: tl.constexpr,
):
    # fmt: on
    """Writes the state (N, W) that a chunk alone leaves, and the sum of its steps (W,)."""
    slot = tl.program_id(0)
    b, length, first, start = part_of(slot, cu_ptr, T, B, CHUNK, PACKED)
    if start >= length:
        return
    n, t, w, b = tl.arange(0, BLOCK_N), tl.arange(0, TOKENS), channels(apart, BLOCK_W), b.to(tl.int64)
    bias = by_channel(bias_ptr, w, W, HAS_BIAS)
    state, total = tl.zeros((BLOCK_N, BLOCK_W), tl.float32), tl.zeros((BLOCK_W,), tl.float32)
    for begin in range(start, tl.minimum(start + CHUNK, length), TOKENS):
        here, rows = begin + t < length, first + begin + t
        inside = here[:, None] & (w < W)[None, :]
        dt = steps(tile(dt_ptr, dt_strides, b, rows, w, inside) + bias[None, :], inside, SOFTPLUS)
        moved = dt * tile(x_ptr, x_strides, b, rows, w, inside)
        state = advance(state, dt, moved, rates_ptr, B_ptr, B_strides, b, rows, t, n, w, here, W, N, TOKENS, False)
        total += tl.sum(dt, 0)
    place = (slot.to(tl.int64) * N + n[:, None]) * W + w[None, :]
    tl.store(part_ptr + place, state, mask=(n < N)[:, None] & (w < W)[None, :])
    tl.store(total_ptr + slot.to(tl.int64) * W + w, total, mask=w < W)


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
    W: tl.constexpr, N: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, TOKENS: tl.constexpr,
    SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr, PACKED: tl.constexpr,
):
    # fmt: on
    """Walks a chunk from the state before it."""
    slot = tl.program_id(0)
    b, length, first, start = part_of(slot, cu_ptr, T, B, CHUNK, PACKED)
    if start >= length:
        return
    n, t, w, b = tl.arange(0, BLOCK_N), tl.arange(0, TOKENS), channels(apart, BLOCK_W), b.to(tl.int64)
    bias, skip = by_channel(bias_ptr, w, W, HAS_BIAS), by_channel(D_ptr, w, W, HAS_D)
    place = (slot.to(tl.int64) * N + n[:, None]) * W + w[None, :]
    state = tl.load(part_ptr + place, mask=(n < N)[:, None] & (w < W)[None, :], other=0.0)
    for begin in range(start, tl.minimum(start + CHUNK, length), TOKENS):
        here, rows = begin + t < length, first + begin + t
        inside = here[:, None] & (w < W)[None, :]
        dt = steps(tile(dt_ptr, dt_strides, b, rows, w, inside) + bias[None, :], inside, SOFTPLUS)
        x = tile(x_ptr, x_strides, b, rows, w, inside)
        moved, y = dt * x, skip[None, :] * x
        for i in tl.static_range(N):
            a = decays(dt, tl.load(rates_ptr + i * W + w, mask=w < W, other=0.0), here)
            own = moved * column(B_ptr, B_strides, b, rows, i, here)[:, None]
            own += a * states_before(a, own, row(state, n, i), t)
            y += own * column(C_ptr, C_strides, b, rows, i, here)[:, None]
            state = tl.where((n == i)[:, None], row(own, t, TOKENS - 1)[None, :], state)
        if HAS_Z:
            y *= silu(tile(z_ptr, z_strides, b, rows, w, inside))
        every = ((0 if PACKED else b * T) + rows)[:, None] * W + w[None, :]
        tl.store(y_ptr + every, y.to(y_ptr.dtype.element_ty), mask=inside)
