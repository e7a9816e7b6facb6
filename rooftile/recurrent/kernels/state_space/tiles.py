"""Parts that the kernels of the state-space model share: a program's segment, and steps with the sums of exponents.

A sequence is cut into segments of `size` tokens, a multiple of BLOCK, which are walked in chunks of BLOCK tokens. Segments have
slots (`part_of`). What belongs to a token, such as its step, is kept at slot * size + its place in the segment.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooftile.recurrent.kernels.parts import softplus
from rooftile.recurrent.linear.kernels.tiles import part_of


@triton.jit
def tile(ptr, strides, b, h, first, t, column, here, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Loads (tokens t, columns below WIDTH) of a sequence and a head or group, zeros outside; strides are (batch, token, head)."""
    base = ptr + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[2] + first * strides[1]
    place = t.to(tl.int64)[:, None] * strides[1] + column[None, :]
    if WIDTH % BLOCK == 0:
        return tl.load(base + place, mask=here[:, None], other=0.0)
    return tl.load(base + place, mask=here[:, None] & (column < WIDTH)[None, :], other=0.0)


# fmt: off
@triton.jit(do_not_specialize=["T", "B", "size", "low", "high"])
def _steps(
    dt_ptr, bias_ptr, a_ptr, step_ptr, total_ptr, cu_ptr,
    dt_strides, T, B, size, slots, low, high,
    SOFTPLUS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr,
):
    # fmt: on
    """Writes each token's step, 0 past a sequence's end, and the sum of log2 of decays from its chunk's first token to it."""
    slot, h = tl.program_id(0), tl.program_id(1)
    b, length, first, start = part_of(slot, cu_ptr, T, B, size, PACKED)
    if start >= length:
        return
    n = tl.arange(0, BLOCK)
    rate = tl.load(a_ptr + h).to(tl.float32) * 1.4426950408889634
    place = (h.to(tl.int64) * slots + slot) * size + n
    for c in range(start, tl.minimum(start + size, length), BLOCK):
        here = c + n < length
        from_dt = b.to(tl.int64) * dt_strides[0] + (first + c + n) * dt_strides[1] + h * dt_strides[2]
        step = tl.load(dt_ptr + from_dt, mask=here, other=0.0).to(tl.float32)
        if BIAS:
            step += tl.load(bias_ptr + h).to(tl.float32)
        if SOFTPLUS:
            step = softplus(step)
        # written so that a NaN stays
        step = tl.where(step < low, low, tl.where(step > high, high, step))
        step = tl.where(here, step, 0.0)
        tl.store(step_ptr + place + (c - start), step)
        # in fp64, so that small steps after large ones keep their bits until the sum is rounded once
        tl.store(total_ptr + place + (c - start), tl.cumsum(step.to(tl.float64) * rate, 0).to(tl.float32))


# fmt: off
@triton.jit(do_not_specialize=["T", "B", "size"])
def _products(
    b_ptr, c_ptr, cb_ptr, cu_ptr,
    b_strides, c_strides, T, B, size,
    GROUPS: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, PACKED: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    """Writes C B^T of each chunk and group, (slots, chunks, groups, BLOCK, BLOCK)."""
    slot, chunk, g = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, length, first, start = part_of(slot, cu_ptr, T, B, size, PACKED)
    n, s = tl.arange(0, BLOCK), tl.arange(0, BLOCK_N)
    t = start + chunk * BLOCK + n
    if start + chunk * BLOCK >= length:
        return
    here = t < length
    rows = tile(c_ptr, c_strides, b, g, first, t, s, here, N, BLOCK_N).to(DOT)
    columns = tile(b_ptr, b_strides, b, g, first, t, s, here, N, BLOCK_N).to(DOT)
    cb = tl.dot(rows, tl.trans(columns), input_precision=PRECISION)
    own = ((slot * (size // BLOCK) + chunk).to(tl.int64) * GROUPS + g) * BLOCK * BLOCK
    tl.store(cb_ptr + own + n[:, None] * BLOCK + n[None, :], cb.to(cb_ptr.dtype.element_ty))
