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
def tile(
    source,
    strides,
    b,
    h,
    first,
    length,
    start,
    low,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    COPIES: tl.constexpr,
):
    """Loads (ROWS tokens from `start`, BLOCK columns from `low`) of a sequence and a head or group, zeros outside.

    The source is a descriptor (batch, head, token, column) where COPIES; else an address, with strides (batch, token, head).
    """
    if COPIES:
        found = source.load([b, h, start, low]).reshape(ROWS, BLOCK)
    else:
        t, column = start + tl.arange(0, ROWS), low + tl.arange(0, BLOCK)
        base = source + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[2] + first * strides[1]
        place = t.to(tl.int64)[:, None] * strides[1] + column[None, :]
        here = (t < length)[:, None]
        if WIDTH % BLOCK == 0:
            found = tl.load(base + place, mask=here, other=0.0)
        else:
            found = tl.load(base + place, mask=here & (column < WIDTH)[None, :], other=0.0)
    return found


@triton.jit
def square(
    source,
    cell,
    h,
    low_p,
    low_n,
    HEADS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COPIES: tl.constexpr,
):
    """Loads (BLOCK_P, BLOCK_N) numbers of the state of a chunk and a head, (cell, head, P, N), zeros outside."""
    if COPIES:
        found = source.load([cell.to(tl.int32), h, low_p, low_n]).reshape(BLOCK_P, BLOCK_N)
    else:
        p, s = low_p + tl.arange(0, BLOCK_P), low_n + tl.arange(0, BLOCK_N)
        place = (cell * HEADS + h) * P * N + p[:, None] * N + s[None, :]
        found = tl.load(source + place, mask=(p < P)[:, None] & (s < N)[None, :], other=0.0)
    return found


# fmt: off
@triton.jit(do_not_specialize=["T", "B", "size", "low", "high"])
def _steps(
    dt_ptr, bias_ptr, a_ptr, step_ptr, total_ptr, cu_ptr,
    dt_strides, T, B, size, slots, low, high,
    HEADS: tl.constexpr, SOFTPLUS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr,
    PACKED: tl.constexpr,
):
    # fmt: on
    """Writes each token's step, 0 past a sequence's end, and the sum of log2 of decays from its chunk's first token to it.

    A program has a chunk of BLOCK_H heads, which lie side by side in dt.
    """
    slot, chunk = tl.program_id(0) // (size // BLOCK), tl.program_id(0) % (size // BLOCK)
    b, length, first, start = part_of(slot, cu_ptr, T, B, size, PACKED)
    c = start + chunk * BLOCK
    if c >= length:
        return
    n, h = tl.arange(0, BLOCK), tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    head = h < HEADS
    here = head[:, None] & (c + n < length)[None, :]
    rate = tl.load(a_ptr + h, mask=head, other=0.0).to(tl.float32) * 1.4426950408889634
    base = dt_ptr + b.to(tl.int64) * dt_strides[0] + (first + c) * dt_strides[1]
    step = tl.load(base + n[None, :] * dt_strides[1] + h[:, None] * dt_strides[2], mask=here, other=0.0).to(tl.float32)
    if BIAS:
        step += tl.load(bias_ptr + h, mask=head, other=0.0).to(tl.float32)[:, None]
    if SOFTPLUS:
        step = softplus(step)
    # written so that a NaN stays
    step = tl.where(step < low, low, tl.where(step > high, high, step))
    step = tl.where(here, step, 0.0)
    place = (h.to(tl.int64) * slots + slot)[:, None] * size + chunk * BLOCK + n[None, :]
    tl.store(step_ptr + place, step, mask=head[:, None])
    # in fp64, so that small steps after large ones keep their bits until the sum is rounded once
    total = tl.cumsum(step.to(tl.float64) * rate[:, None], 1).to(tl.float32)
    tl.store(total_ptr + place, total, mask=head[:, None])


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
    n, begin = tl.arange(0, BLOCK), start + chunk * BLOCK
    if begin >= length:
        return
    rows = tile(c_ptr, c_strides, b, g, first, length, begin, 0, BLOCK, N, BLOCK_N, False).to(DOT)
    columns = tile(b_ptr, b_strides, b, g, first, length, begin, 0, BLOCK, N, BLOCK_N, False).to(DOT)
    cb = tl.dot(rows, tl.trans(columns), input_precision=PRECISION)
    own = ((slot * (size // BLOCK) + chunk).to(tl.int64) * GROUPS + g) * BLOCK * BLOCK
    tl.store(cb_ptr + own + n[:, None] * BLOCK + n[None, :], cb.to(cb_ptr.dtype.element_ty))
