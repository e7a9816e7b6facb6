"""The gradients of steps, of A and of the bias, from what `gradients.py` found for each token of a head."""

from __future__ import annotations

import triton
import triton.language as tl

from rooftile.recurrent.kernels.parts import softplus
from rooftile.recurrent.linear.kernels.tiles import part_of


# fmt: off
@triton.jit(do_not_specialize=["T", "B", "size", "slots", "low", "high"])
def _step_gradients(
    dt_ptr, bias_ptr, a_ptr, step_ptr, to_step_ptr, own_ptr, later_ptr, read_ptr, moved_ptr, through_ptr,
    d_dt_ptr, d_a_ptr, d_bias_ptr, cu_ptr,
    dt_strides, T, B, size, slots, low, high,
    HEADS: tl.constexpr, PARTS: tl.constexpr, STRIPES: tl.constexpr, PARTS_N: tl.constexpr, SOFTPLUS: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, THROUGH_ROWS: tl.constexpr, PACKED: tl.constexpr,
):
    # fmt: on
    """Writes the gradient of dt of a chunk and BLOCK_H heads, and what it adds to the gradients of A and of the bias.

    What goes through a chunk is one number, or with THROUGH_ROWS one for each of BLOCK rows of a state.
    """
    cell = tl.program_id(0)
    slot, chunk = cell // (size // BLOCK), cell % (size // BLOCK)
    sequence, length, first, start = part_of(slot, cu_ptr, T, B, size, PACKED)
    c = start + chunk * BLOCK
    if c >= length:
        return
    n, h = tl.arange(0, BLOCK)[None, :], tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    head, heads = h < HEADS, tl.where(h < HEADS, h, 0).to(tl.int64)[:, None]
    there, here = head[:, None], head[:, None] & (c + n < length)
    d_log, to_step = tl.zeros((BLOCK_H, BLOCK), tl.float32), tl.zeros((BLOCK_H, BLOCK), tl.float32)
    rows, before = tl.zeros((BLOCK_H, BLOCK), tl.float32), tl.zeros((BLOCK_H, BLOCK), tl.float32)
    through = tl.zeros((BLOCK_H, 1), tl.float32)
    for part in tl.static_range(PARTS):
        place = ((heads * PARTS + part) * slots + slot) * size + chunk * BLOCK
        to_step += tl.load(to_step_ptr + place + n, mask=there, other=0.0)
        d_log += tl.load(own_ptr + place + n, mask=there, other=0.0)
        for stripe in tl.static_range(STRIPES - 1):
            after = n >= (stripe + 1) * (BLOCK // STRIPES)
            other = place + stripe * (HEADS * PARTS) * (size * (slot * 0 + slots).to(tl.int64))
            later = tl.cumsum(tl.load(later_ptr + other + n, mask=there & after, other=0.0), 1, reverse=True)
            d_log += tl.where(after, later, 0.0)
    for part in tl.static_range(PARTS * PARTS_N):
        place = ((heads * PARTS * PARTS_N + part) * slots + slot) * size + chunk * BLOCK
        rows += tl.load(read_ptr + place + n, mask=there, other=0.0)
        to_step += tl.load(moved_ptr + place + n, mask=there, other=0.0)
        # the one before it
        before += tl.load(moved_ptr + place + n - 1, mask=there & (n > 0), other=0.0)
        if THROUGH_ROWS:
            through += tl.sum(tl.load(through_ptr + place + n, mask=there, other=0.0), 1)[:, None]
        else:
            through += tl.load(through_ptr + place // BLOCK, mask=there, other=0.0)
    place = (heads * slots + slot) * size + chunk * BLOCK + n
    step = tl.load(step_ptr + place, mask=there, other=0.0)
    before *= tl.load(step_ptr + place - 1, mask=there & (n > 0), other=0.0)
    # rows from a token on, and tokens before it, pass over its exponent
    d_log += tl.cumsum(rows, 1, reverse=True) + tl.cumsum(before, 1) + through
    d_log = tl.where(here, d_log, 0.0)
    d_step = to_step + d_log * tl.load(a_ptr + h, mask=head, other=0.0).to(tl.float32)[:, None]
    place = sequence.to(tl.int64) * dt_strides[0] + (first + c + n) * dt_strides[1] + h[:, None] * dt_strides[2]
    raw = tl.load(dt_ptr + place, mask=here, other=0.0).to(tl.float32)
    if BIAS:
        raw += tl.load(bias_ptr + h, mask=head, other=0.0).to(tl.float32)[:, None]
    if SOFTPLUS:
        free = softplus(raw)
        d_step *= 1 / (1 + tl.exp(-raw))
    else:
        free = raw
    # written so that a NaN stays; a step on a limit has a gradient
    d_step = tl.where((free < low) | (free > high), 0.0, d_step)
    d_step = tl.where(here, d_step, 0.0)
    row = (sequence.to(tl.int64) * T if not PACKED else 0) + first + c + n
    tl.store(d_dt_ptr + row * HEADS + h[:, None], d_step.to(d_dt_ptr.dtype.element_ty), mask=here)
    tl.store(d_a_ptr + cell * HEADS + h, tl.sum(d_log * step, 1), mask=head)
    tl.store(d_bias_ptr + cell * HEADS + h, tl.sum(d_step, 1), mask=head)
