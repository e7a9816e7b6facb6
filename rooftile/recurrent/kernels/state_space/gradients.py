"""The gradients of a chunk, for the heads of a group one after another.

With the names of `outputs.py`, S the state before the chunk, Q the gradient of the state after it, G that of y before the gate,
L_ts = exp(e_t - e_s) for s <= t, and M_ts = (G X^T)_ts (C B^T)_ts L_ts:

    dX       = d (((C B^T) L)^T G + exp(e_last - e) B Q^T) + D G
    d(C B^T) = sum over heads of (G X^T) L d_s
    dC       = sum over heads of exp(e) G S, + d(C B^T) B
    dB       = sum over heads of d exp(e_last - e) X Q, + d(C B^T)^T C
    dd_s     = sum_t M_ts + exp(e_last - e_s) <X_s Q, B_s>

The gradient of the exponent of token r, log a_r, sums what passes over it: pairs s < r <= t of the chunk, rows t >= r that read S,
tokens s < r that reach Q, and what goes through, exp(e_last) <S, Q>. Only the pairs are a difference of two sums, of rows and of
columns of one and the same M without its diagonal, in fp32: a difference of sums of rounded products would lose the gradient of A
where decays are strong. `_step_gradients` adds them up.

Why it is cut so: a chunk's 64 tokens of a head take 6 times 2 x 64 x 64 x 128 FLOPs and read x, G, S and Q once. One program
goes through a share of a group's heads, so that dC, dB and d(C B^T) are sums on the chip; a program for each head would write
them for each head, more bytes than x has. S and Q are read from memory in bf16: to carry Q on the chip a program would have to
stay with one head.

Dao and Gu, arXiv:2405.21060.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooftile.recurrent.kernels.parts import silu, softplus
from rooftile.recurrent.kernels.state_space.tiles import tile
from rooftile.recurrent.linear.kernels.tiles import part_of


# fmt: off
@triton.jit(do_not_specialize=["T", "B", "size", "rows"])
def _gradients(
    x_ptr, b_ptr, c_ptr, z_ptr, dy_ptr, d_ptr, cb_ptr, step_ptr, total_ptr, state_ptr, back_ptr,
    dx_ptr, db_ptr, dc_ptr, dz_ptr, dd_ptr, pairs_ptr, to_step_ptr, to_state_ptr, through_ptr, cu_ptr,
    x_strides, b_strides, c_strides, z_strides, dy_strides, d_strides, T, B, size, slots, rows,
    HEADS: tl.constexpr, SHARE: tl.constexpr, SPAN: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, GATED: tl.constexpr, SKIP: tl.constexpr, PACKED: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):
    # fmt: on
    """Writes dx and dz of SPAN heads of a group in a chunk, what they add to dB, dC and dD, and the parts of their steps' gradients.

    What has one number for each token is written for each head and part of P: a part's numbers are added by `_step_gradients`.
    """
    groups: tl.constexpr = HEADS // SHARE
    PARTS: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    chunks = size // BLOCK
    slot, chunk, g, span = tl.program_id(0) // chunks, tl.program_id(0) % chunks, tl.program_id(1), tl.program_id(2)
    sequence, length, first, start = part_of(slot, cu_ptr, T, B, size, PACKED)
    if start + chunk * BLOCK >= length:
        return
    n, s = tl.arange(0, BLOCK), tl.arange(0, BLOCK_N)
    t = start + chunk * BLOCK + n
    here = t < length
    b = tile(b_ptr, b_strides, sequence, g, first, t, s, here, N, BLOCK_N).to(DOT)
    c = tile(c_ptr, c_strides, sequence, g, first, t, s, here, N, BLOCK_N).to(DOT)
    cell = slot.to(tl.int64) * chunks + chunk
    lower, diagonal = n[:, None] >= n[None, :], n[:, None] == n[None, :]
    cb = tl.load(cb_ptr + (cell * groups + g) * BLOCK * BLOCK + n[:, None] * BLOCK + n[None, :]).to(tl.float32)
    row = (sequence.to(tl.int64) * T if not PACKED else 0) + first + t
    db, dc = tl.zeros((BLOCK, BLOCK_N), tl.float32), tl.zeros((BLOCK, BLOCK_N), tl.float32)
    d_cb = tl.zeros((BLOCK, BLOCK), tl.float32)
    for i in tl.range(0, tl.minimum(SPAN, SHARE - span * SPAN) * PARTS, num_stages=STAGES):
        h, part = g * SHARE + span * SPAN + i // PARTS, i % PARTS
        p = part * BLOCK_P + tl.arange(0, BLOCK_P)
        place = (h.to(tl.int64) * slots + slot) * size + chunk * BLOCK
        step, total = tl.load(step_ptr + place + n), tl.load(total_ptr + place + n)
        end = tl.load(total_ptr + place + BLOCK - 1)
        x = tile(x_ptr, x_strides, sequence, h, first, t, p, here, P, BLOCK_P)
        dy = tile(dy_ptr, dy_strides, sequence, h, first, t, p, here, P, BLOCK_P)
        square = (p < P)[:, None] & (s < N)[None, :]
        of_state = (cell * HEADS + h) * P * N + p[:, None] * N + s[None, :]
        state, back = tl.load(state_ptr + of_state, mask=square, other=0.0), tl.load(back_ptr + of_state, mask=square, other=0.0)
        inside = here[:, None] & (p < P)[None, :]
        to = row[:, None] * (HEADS * P) + h * P + p[None, :]
        from_start, to_end = tl.exp2(total), tl.exp2(end - total)
        decay = tl.exp2(tl.where(lower, total[:, None] - total[None, :], float("-inf")))
        weights = cb * decay
        x_dot, wide_x = x.to(DOT), x.to(tl.float32)
        if SKIP:
            skip = tl.load(d_ptr + h * d_strides[0] + p * d_strides[1], mask=p < P, other=0.0).to(tl.float32)
        if GATED:
            z = tile(z_ptr, z_strides, sequence, h, first, t, p, here, P, BLOCK_P).to(tl.float32)
            y = tl.dot(c, tl.trans(state.to(DOT)), input_precision=PRECISION) * from_start[:, None]
            y = tl.dot((weights * step[None, :]).to(DOT), x_dot, y, input_precision=PRECISION)
            if SKIP:
                y += skip[None, :] * wide_x
            wide_dy = dy.to(tl.float32)
            sigmoid = 1 / (1 + tl.exp(-z))
            tl.store(dz_ptr + to, (wide_dy * y * sigmoid * (1 + z * (1 - sigmoid))).to(dz_ptr.dtype.element_ty), mask=inside)
            wide_g = wide_dy * silu(z)
        else:
            wide_g = dy.to(tl.float32)
        g_dot = wide_g.to(DOT)
        # the pairs of tokens
        gx = tl.dot(g_dot, tl.trans(x_dot), input_precision=PRECISION) * decay
        d_cb += gx * step[None, :]
        m = gx * cb
        to_step = tl.sum(m, 0)
        m = tl.where(diagonal, 0.0, m)
        pairs = tl.sum(m * step[None, :], 1) - step * tl.sum(m, 0)
        # the state before the chunk
        read = tl.dot(g_dot, state.to(DOT), input_precision=PRECISION) * from_start[:, None]
        dc += read
        pairs += tl.sum(read * c.to(tl.float32), 1)
        # the state after it
        moved = tl.dot(x_dot, back.to(DOT), input_precision=PRECISION) * to_end[:, None]
        db += moved * step[:, None]
        to_state = tl.sum(moved * b.to(tl.float32), 1)
        dx = tl.dot(b, tl.trans(back.to(DOT)), input_precision=PRECISION) * to_end[:, None]
        dx = tl.dot(tl.trans(weights.to(DOT)), g_dot, dx, input_precision=PRECISION) * step[:, None]
        if SKIP:
            dx += skip[None, :] * wide_g
            tl.store(dd_ptr + (cell * HEADS + h) * P + p, tl.sum(wide_g * wide_x, 0), mask=p < P)
        tl.store(dx_ptr + to, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        through = tl.sum(tl.sum(state.to(tl.float32) * back.to(tl.float32), 1), 0) * tl.exp2(end)
        head = h * PARTS + part
        place = (head.to(tl.int64) * slots + slot) * size + chunk * BLOCK + n
        tl.store(pairs_ptr + place, pairs)
        tl.store(to_step_ptr + place, to_step + to_state)
        tl.store(to_state_ptr + place, to_state * step)
        tl.store(through_ptr + (head.to(tl.int64) * slots + slot) * chunks + chunk, through)
    d_cb = d_cb.to(DOT)
    dc = tl.dot(d_cb, b, dc, input_precision=PRECISION)
    db = tl.dot(tl.trans(d_cb), c, db, input_precision=PRECISION)
    place = ((span.to(tl.int64) * rows + row) * groups + g)[:, None] * N + s[None, :]
    inside = here[:, None] & (s < N)[None, :]
    tl.store(db_ptr + place, db, mask=inside)
    tl.store(dc_ptr + place, dc, mask=inside)


# fmt: off
@triton.jit(do_not_specialize=["T", "B", "size", "low", "high"])
def _step_gradients(
    dt_ptr, bias_ptr, a_ptr, step_ptr, pairs_ptr, to_step_ptr, to_state_ptr, through_ptr, d_dt_ptr, d_a_ptr, d_bias_ptr, cu_ptr,
    dt_strides, T, B, size, slots, low, high,
    HEADS: tl.constexpr, PARTS: tl.constexpr, SOFTPLUS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
):
    # fmt: on
    """Writes a segment's gradient of dt, and what it adds to the gradients of A and of the bias."""
    slot, h = tl.program_id(0), tl.program_id(1)
    sequence, length, first, start = part_of(slot, cu_ptr, T, B, size, PACKED)
    if start >= length:
        return
    n = tl.arange(0, BLOCK)
    rate = tl.load(a_ptr + h).to(tl.float32)
    d_rate, d_bias = 0.0, 0.0
    for c in range(0, tl.minimum(size, length - start), BLOCK):
        t = start + c + n
        here = t < length
        pairs, to_step, to_state = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
        through = 0.0
        for part in tl.static_range(PARTS):
            place = ((h * PARTS + part).to(tl.int64) * slots + slot) * size + c
            pairs += tl.load(pairs_ptr + place + n)
            to_step += tl.load(to_step_ptr + place + n)
            # of the token before
            to_state += tl.load(to_state_ptr + place + n - 1, mask=n > 0, other=0.0)
            through += tl.load(through_ptr + place // BLOCK)
        step = tl.load(step_ptr + (h.to(tl.int64) * slots + slot) * size + c + n)
        # rows from a token on, and tokens before it, pass over its exponent
        d_log = tl.cumsum(pairs, 0, reverse=True) + tl.cumsum(to_state, 0) + through
        d_log = tl.where(here, d_log, 0.0)
        d_step = to_step + d_log * rate
        d_rate += tl.sum(d_log * step, 0)
        place = sequence.to(tl.int64) * dt_strides[0] + (first + t) * dt_strides[1] + h * dt_strides[2]
        raw = tl.load(dt_ptr + place, mask=here, other=0.0).to(tl.float32)
        if BIAS:
            raw += tl.load(bias_ptr + h).to(tl.float32)
        if SOFTPLUS:
            free = softplus(raw)
            d_step *= 1 / (1 + tl.exp(-raw))
        else:
            free = raw
        # written so that a NaN stays; a step on a limit has a gradient
        d_step = tl.where((free < low) | (free > high), 0.0, d_step)
        d_step = tl.where(here, d_step, 0.0)
        d_bias += tl.sum(d_step, 0)
        row = (sequence.to(tl.int64) * T if not PACKED else 0) + first + t
        tl.store(d_dt_ptr + row * HEADS + h, d_step.to(d_dt_ptr.dtype.element_ty), mask=here)
    tl.store(d_a_ptr + slot * HEADS + h, d_rate)
    tl.store(d_bias_ptr + slot * HEADS + h, d_bias)
