"""The outputs: a program walks a segment of a head from the state that it starts with, which stays on the chip.

With the steps d, and e_t the sum of exponents from the chunk's beginning to token t:

    W_ts = (C B^T)_ts exp(e_t - e_s) d_s    for s <= t
    Y    = exp(e_t) C S^T + W X + D X
    S   <- exp(e_last) S + (d_s exp(e_last - e_s) X)^T B

The exponents are masked before the exponential. Where one segment is a whole sequence, nothing runs but this kernel; else
`states.py` has the states that segments start with.

Dao and Gu, arXiv:2405.21060.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooftile.recurrent.kernels.parts import silu
from rooftile.recurrent.kernels.state_space.tiles import tile
from rooftile.recurrent.linear.kernels.tiles import part_of


@triton.jit
def carried(state, x, b, step, total, end, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """Returns the state (N, P) after a chunk."""
    weighted = (x.to(tl.float32) * (step * tl.exp2(end - total))[:, None]).to(DOT)
    return tl.dot(tl.trans(b.to(DOT)), weighted, state * tl.exp2(end), input_precision=PRECISION)


# fmt: off
@triton.jit(do_not_specialize=["T", "B", "size"])
def _outputs(
    x_ptr, b_ptr, c_ptr, y_ptr, z_ptr, d_ptr, cb_ptr, step_ptr, total_ptr, start_ptr, last_ptr, cu_ptr,
    x_strides, b_strides, c_strides, z_strides, d_strides, T, B, size, slots,
    HEADS: tl.constexpr, SHARE: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr, GATED: tl.constexpr, SKIP: tl.constexpr, WHOLE: tl.constexpr, PACKED: tl.constexpr,
    COPIES: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    """Writes y of a segment and a head's columns, and the last state where a sequence ends. WHOLE: a segment is a sequence."""
    slot, h, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence, length, first, start = part_of(slot, cu_ptr, T, B, size, PACKED)
    if start >= length:
        return
    n, s, p = tl.arange(0, BLOCK), tl.arange(0, BLOCK_N), part * BLOCK_P + tl.arange(0, BLOCK_P)
    square = (p < P)[:, None] & (s < N)[None, :]
    of_state = p[:, None] * N + s[None, :]
    origin = sequence if WHOLE else slot
    state = tl.trans(tl.load(start_ptr + (origin.to(tl.int64) * HEADS + h) * P * N + of_state, mask=square, other=0.0))
    place = (h.to(tl.int64) * slots + slot) * size
    if SKIP:
        skip = tl.load(d_ptr + h * d_strides[0] + p * d_strides[1], mask=p < P, other=0.0).to(tl.float32)
    lower = n[:, None] >= n[None, :]
    groups: tl.constexpr = HEADS // SHARE
    cb_ptr += (slot * (size // BLOCK)).to(tl.int64) * groups * BLOCK * BLOCK + (h // SHARE) * BLOCK * BLOCK
    if not COPIES:
        y_base = y_ptr + ((sequence.to(tl.int64) * T if not PACKED else 0) + first) * HEADS * P + h * P
    for c in range(0, tl.minimum(size, length - start), BLOCK):
        step, total = tl.load(step_ptr + place + c + n), tl.load(total_ptr + place + c + n)
        end = tl.load(total_ptr + place + c + BLOCK - 1)
        x = tile(x_ptr, x_strides, sequence, h, first, length, start + c, part * BLOCK_P, BLOCK, P, BLOCK_P, COPIES)
        b = tile(b_ptr, b_strides, sequence, h // SHARE, first, length, start + c, 0, BLOCK, N, BLOCK_N, COPIES)
        rows = tile(c_ptr, c_strides, sequence, h // SHARE, first, length, start + c, 0, BLOCK, N, BLOCK_N, COPIES)
        y = tl.dot(rows.to(DOT), state.to(DOT), input_precision=PRECISION) * tl.exp2(total)[:, None]
        products = tl.load(cb_ptr + c * (groups * BLOCK) + n[:, None] * BLOCK + n[None, :])
        decay = tl.exp2(tl.where(lower, total[:, None] - total[None, :], float("-inf")))
        weights = products.to(tl.float32) * decay * step[None, :]
        y = tl.dot(weights.to(DOT), x.to(DOT), y, input_precision=PRECISION)
        if SKIP:
            y += skip[None, :] * x.to(tl.float32)
        if GATED:
            z = tile(z_ptr, z_strides, sequence, h, first, length, start + c, part * BLOCK_P, BLOCK, P, BLOCK_P, False)
            y *= silu(z.to(tl.float32))
        if COPIES:
            y_ptr.store([sequence, h, start + c, part * BLOCK_P], y.to(y_ptr.dtype).reshape(1, 1, BLOCK, BLOCK_P))
        else:
            t = start + c + n
            to = t.to(tl.int64)[:, None] * (HEADS * P) + p[None, :]
            tl.store(y_base + to, y.to(y_ptr.dtype.element_ty), mask=(t < length)[:, None] & (p < P)[None, :])
        state = carried(state, x, b, step, total, end, DOT, PRECISION)
    if start + size >= length:
        tl.store(last_ptr + (sequence.to(tl.int64) * HEADS + h) * P * N + of_state, tl.trans(state), mask=square)
