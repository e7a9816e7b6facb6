"""The gradients of a chunk, for the heads of a group one after another.

With the names of `outputs.py`, S the state before the chunk, Q the gradient of the state after it, G that of y before the gate,
L_ts = exp(e_t - e_s) for s <= t, and M_ts = (G X^T)_ts (C B^T)_ts L_ts:

    dX       = d (((C B^T) L)^T G + exp(e_last - e) B Q^T) + D G
    d(C B^T) = sum over heads of (G X^T) L d_s
    dC       = sum over heads of exp(e) G S, + d(C B^T) B
    dB       = sum over heads of d exp(e_last - e) X Q, + d(C B^T)^T C
    dd_s     = sum_t M_ts + exp(e_last - e_s) <X_s Q, B_s>

The gradient of the exponent of token r, log a_r, sums what passes over it: pairs s < r <= t of the chunk, rows t >= r that read S,
tokens s < r that reach Q, and what goes through, exp(e_last) <S, Q>. None of it is a difference of sums over rows and columns of
M, which is the shorter way and loses the gradient of A where decays are strong: the pairs that pass over r are a product with a
triangle of ones.

Why it is cut so: for a head's chunk of c tokens, S and Q take as many bytes as x has for 128 tokens, and x, G, dX as many as c, so
the chunk is long. A program goes through a share of a group's heads, so that dC, dB and d(C B^T) are sums on the chip; a program
for each head would write them for each head, more bytes than x has. The three sums and the products beside them do not fit
the registers of a processor, so `_input_gradients` has pairs and dX, `_map_gradients` what S and Q give B and C, for half of the
numbers of a state; x and G are read twice for that. `_map_sums` adds the shares, `_step_gradients` what steps and exponents got.

Dao and Gu, arXiv:2405.21060.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooftile.recurrent.kernels.state_space.tiles import square, tile
from rooftile.recurrent.linear.kernels.tiles import part_of


# fmt: off
@triton.jit(do_not_specialize=["T", "B", "size"])
def _input_gradients(
    x_ptr, b_ptr, g_ptr, back_ptr, d_ptr, cb_ptr, step_ptr, total_ptr, dx_ptr, dd_ptr, d_cb_ptr,
    to_step_ptr, own_ptr, later_ptr, cu_ptr, x_strides, b_strides, g_strides, d_strides, T, B, size, slots,
    HEADS: tl.constexpr, SHARE: tl.constexpr, SPAN: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, SKIP: tl.constexpr, PACKED: tl.constexpr,
    COPIES: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):
    # fmt: on
    """Writes dx of SPAN heads of a group for BLOCK_R tokens s of a chunk, and what their pairs (s, t) give.

    These are d(C B^T), dD, and for each head and part of P: the sums of M over t; what passes over these tokens, from pairs
    whose s is among them (`own`); and for a token t the sum of M over these s, which passes over later stripes (`later`).
    """
    groups: tl.constexpr = HEADS // SHARE
    PARTS: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    STRIPES: tl.constexpr = BLOCK // BLOCK_R
    SLICE: tl.constexpr = min(BLOCK_N, BLOCK_R)
    chunks = size // BLOCK
    # the stripes of a chunk read the same G and Q
    stripe, of_chunk = tl.program_id(0) % STRIPES, tl.program_id(0) // STRIPES
    slot, chunk, g, span = of_chunk // chunks, of_chunk % chunks, tl.program_id(1), tl.program_id(2)
    sequence, length, first, start = part_of(slot, cu_ptr, T, B, size, PACKED)
    if start + chunk * BLOCK >= length:
        return
    n, r = tl.arange(0, BLOCK), stripe * BLOCK_R + tl.arange(0, BLOCK_R)
    begin, own_begin = start + chunk * BLOCK, start + chunk * BLOCK + stripe * BLOCK_R
    own_t = start + chunk * BLOCK + r
    own_here = own_t < length
    if BLOCK_R >= 64:
        b = tile(b_ptr, b_strides, sequence, g, first, length, own_begin, 0, BLOCK_R, N, BLOCK_N, COPIES).to(DOT)
    cell = slot.to(tl.int64) * chunks + chunk
    own = (cell * groups + g) * BLOCK * BLOCK + r[:, None] + n[None, :] * BLOCK
    cb = tl.load(cb_ptr + own)
    row = (sequence.to(tl.int64) * T if not PACKED else 0) + first + own_t
    d_cb = tl.zeros((BLOCK_R, BLOCK), tl.float32)
    for i in tl.range(0, tl.minimum(SPAN, SHARE - span * SPAN) * PARTS, num_stages=STAGES):
        h, part = g * SHARE + span * SPAN + i // PARTS, i % PARTS
        p = part * BLOCK_P + tl.arange(0, BLOCK_P)
        place = (h.to(tl.int64) * slots + slot) * size + chunk * BLOCK
        step, total, later = tl.load(step_ptr + place + r), tl.load(total_ptr + place + r), tl.load(total_ptr + place + n)
        end = tl.load(total_ptr + place + BLOCK - 1)
        x = tile(x_ptr, x_strides, sequence, h, first, length, own_begin, part * BLOCK_P, BLOCK_R, P, BLOCK_P, COPIES)
        grad = tile(g_ptr, g_strides, sequence, h, first, length, begin, part * BLOCK_P, BLOCK, P, BLOCK_P, COPIES)
        decay = tl.exp2(tl.where(r[:, None] <= n[None, :], later[None, :] - total[:, None], float("-inf")))
        weights = (cb.to(tl.float32) * decay).to(DOT)
        dx = tl.dot(weights, grad.to(DOT), input_precision=PRECISION)
        if BLOCK_R < 64:
            # products of few rows take both factors from registers, which are few: some numbers of the state at a time
            from_state = tl.zeros((BLOCK_R, BLOCK_P), tl.float32)
            for i_s in tl.static_range(0, BLOCK_N, SLICE):
                b = tile(b_ptr, b_strides, sequence, g, first, length, own_begin, i_s, BLOCK_R, N, SLICE, COPIES).to(DOT)
                back = square(back_ptr, cell, h, part * BLOCK_P, i_s, HEADS, P, N, BLOCK_P, SLICE, COPIES).to(DOT)
                from_state = tl.dot(b, tl.trans(back), from_state, input_precision=PRECISION)
        else:
            back = square(back_ptr, cell, h, part * BLOCK_P, 0, HEADS, P, N, BLOCK_P, BLOCK_N, COPIES).to(DOT)
            from_state = tl.dot(b, tl.trans(back), input_precision=PRECISION)
        dx += from_state * tl.exp2(end - total)[:, None]
        dx *= step[:, None]
        if SKIP:
            # loaded again, from a cache: held until here they would spill
            x = tile(x_ptr, x_strides, sequence, h, first, length, own_begin, part * BLOCK_P, BLOCK_R, P, BLOCK_P, COPIES)
            same = tile(g_ptr, g_strides, sequence, h, first, length, own_begin, part * BLOCK_P, BLOCK_R, P, BLOCK_P, COPIES)
            x, same = x.to(tl.float32), same.to(tl.float32)
            dx += tl.load(d_ptr + h * d_strides[0] + p * d_strides[1], mask=p < P, other=0.0).to(tl.float32)[None, :] * same
            tl.store(dd_ptr + ((cell * STRIPES + stripe) * HEADS + h) * P + p, tl.sum(same * x, 0), mask=p < P)
        to = row[:, None] * (HEADS * P) + h * P + p[None, :]
        tl.store(dx_ptr + to, dx.to(dx_ptr.dtype.element_ty), mask=own_here[:, None] & (p < P)[None, :])
        m = tl.dot(x.to(DOT), tl.trans(grad.to(DOT)), input_precision=PRECISION) * decay
        d_cb += m * step[:, None]
        m *= cb.to(tl.float32)
        head = (h * PARTS + part).to(tl.int64) * slots + slot
        tl.store(to_step_ptr + head * size + chunk * BLOCK + r, tl.sum(m, 1))
        m = tl.where(r[:, None] == n[None, :], 0.0, m * step[:, None])
        # (r, t): the pairs of t with tokens before r
        passed = tl.dot(tl.where(r[:, None] > r[None, :], 1.0, 0.0).to(DOT), m.to(DOT), input_precision=PRECISION)
        passed = tl.sum(tl.where(r[:, None] <= n[None, :], passed, 0.0), 1)
        tl.store(own_ptr + head * size + chunk * BLOCK + r, passed)
        if STRIPES > 1:
            head += stripe * (HEADS * PARTS) * slots
            tl.store(later_ptr + head * size + chunk * BLOCK + n, tl.sum(m, 0))
    tl.store(d_cb_ptr + span.to(tl.int64) * (slots * chunks) * groups * BLOCK * BLOCK + own, d_cb)


# fmt: off
@triton.jit(do_not_specialize=["T", "B", "size"])
def _map_gradients(
    x_ptr, b_ptr, c_ptr, g_ptr, state_ptr, back_ptr, step_ptr, total_ptr,
    db_ptr, dc_ptr, read_ptr, moved_ptr, through_ptr, cu_ptr,
    x_strides, b_strides, c_strides, g_strides, T, B, size, slots,
    HEADS: tl.constexpr, SHARE: tl.constexpr, SPAN: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr, PACKED: tl.constexpr,
    COPIES: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):
    # fmt: on
    """Writes what the states of SPAN heads add to BLOCK_S columns of dB and dC, and what they give the gradients of their steps.

    What has one number for each token, or for each chunk, is written for each head, part of P and part of N.
    """
    groups: tl.constexpr = HEADS // SHARE
    PARTS: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    PARTS_N: tl.constexpr = (N + BLOCK_S - 1) // BLOCK_S
    chunks = size // BLOCK
    # the parts of N read the same x and G
    column, of_chunk = tl.program_id(0) % PARTS_N, tl.program_id(0) // PARTS_N
    slot, chunk, g, span = of_chunk // chunks, of_chunk % chunks, tl.program_id(1), tl.program_id(2)
    sequence, length, first, start = part_of(slot, cu_ptr, T, B, size, PACKED)
    if start + chunk * BLOCK >= length:
        return
    n, s = tl.arange(0, BLOCK), column * BLOCK_S + tl.arange(0, BLOCK_S)
    begin = start + chunk * BLOCK
    b = tile(b_ptr, b_strides, sequence, g, first, length, begin, column * BLOCK_S, BLOCK, N, BLOCK_S, COPIES)
    c = tile(c_ptr, c_strides, sequence, g, first, length, begin, column * BLOCK_S, BLOCK, N, BLOCK_S, COPIES)
    cell = slot.to(tl.int64) * chunks + chunk
    db, dc = tl.zeros((BLOCK, BLOCK_S), tl.float32), tl.zeros((BLOCK, BLOCK_S), tl.float32)
    for i in tl.range(0, tl.minimum(SPAN, SHARE - span * SPAN) * PARTS, num_stages=STAGES):
        h, part = g * SHARE + span * SPAN + i // PARTS, i % PARTS
        place = (h.to(tl.int64) * slots + slot) * size + chunk * BLOCK
        step, total = tl.load(step_ptr + place + n), tl.load(total_ptr + place + n)
        end = tl.load(total_ptr + place + BLOCK - 1)
        state = square(state_ptr, cell, h, part * BLOCK_P, column * BLOCK_S, HEADS, P, N, BLOCK_P, BLOCK_S, COPIES)
        back = square(back_ptr, cell, h, part * BLOCK_P, column * BLOCK_S, HEADS, P, N, BLOCK_P, BLOCK_S, COPIES)
        x = tile(x_ptr, x_strides, sequence, h, first, length, begin, part * BLOCK_P, BLOCK, P, BLOCK_P, COPIES).to(DOT)
        grad = tile(g_ptr, g_strides, sequence, h, first, length, begin, part * BLOCK_P, BLOCK, P, BLOCK_P, COPIES).to(DOT)
        through = tl.sum(tl.sum(state.to(tl.float32) * back.to(tl.float32), 1), 0) * tl.exp2(end)
        read = tl.dot(grad, state.to(DOT), input_precision=PRECISION) * tl.exp2(total)[:, None]
        dc += read
        read = tl.sum(read * c.to(tl.float32), 1)
        moved = tl.dot(x, back.to(DOT), input_precision=PRECISION) * tl.exp2(end - total)[:, None]
        db += moved * step[:, None]
        moved = tl.sum(moved * b.to(tl.float32), 1)
        head = ((h * PARTS + part) * PARTS_N + column).to(tl.int64) * slots + slot
        tl.store(read_ptr + head * size + chunk * BLOCK + n, read)
        tl.store(moved_ptr + head * size + chunk * BLOCK + n, moved)
        tl.store(through_ptr + head * chunks + chunk, through)
    place = ((span.to(tl.int64) * (slots * chunks) + cell) * groups + g) * BLOCK * N + n[:, None] * N + s[None, :]
    tl.store(db_ptr + place, db, mask=(s < N)[None, :])
    tl.store(dc_ptr + place, dc, mask=(s < N)[None, :])


# fmt: off
@triton.jit(do_not_specialize=["T", "B", "size", "slots"])
def _map_sums(
    b_ptr, c_ptr, d_cb_ptr, parts_b_ptr, parts_c_ptr, db_ptr, dc_ptr, cu_ptr,
    b_strides, c_strides, T, B, size, slots,
    GROUPS: tl.constexpr, SPANS: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, BLOCK_S: tl.constexpr, PACKED: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    """Adds what SPANS shares of heads give BLOCK_S columns of dB and dC of a chunk, and what d(C B^T) gives them."""
    chunks = size // BLOCK
    slot, chunk, g = tl.program_id(0) // chunks, tl.program_id(0) % chunks, tl.program_id(1)
    sequence, length, first, start = part_of(slot, cu_ptr, T, B, size, PACKED)
    if start + chunk * BLOCK >= length:
        return
    n, s = tl.arange(0, BLOCK), tl.program_id(2) * BLOCK_S + tl.arange(0, BLOCK_S)
    t = start + chunk * BLOCK + n
    here = t < length
    begin, low = start + chunk * BLOCK, tl.program_id(2) * BLOCK_S
    b = tile(b_ptr, b_strides, sequence, g, first, length, begin, low, BLOCK, N, BLOCK_S, False).to(DOT)
    c = tile(c_ptr, c_strides, sequence, g, first, length, begin, low, BLOCK, N, BLOCK_S, False).to(DOT)
    db, dc = tl.zeros((BLOCK, BLOCK_S), tl.float32), tl.zeros((BLOCK, BLOCK_S), tl.float32)
    d_cb = tl.zeros((BLOCK, BLOCK), tl.float32)
    cells = slots.to(tl.int64) * chunks * GROUPS
    cell = (slot.to(tl.int64) * chunks + chunk) * GROUPS + g
    for span in tl.static_range(SPANS):
        own = span * cells + cell
        d_cb += tl.load(d_cb_ptr + own * BLOCK * BLOCK + n[:, None] * BLOCK + n[None, :])
        place = own * BLOCK * N + n[:, None] * N + s[None, :]
        db += tl.load(parts_b_ptr + place, mask=(s < N)[None, :], other=0.0)
        dc += tl.load(parts_c_ptr + place, mask=(s < N)[None, :], other=0.0)
    dc = tl.dot(d_cb.to(DOT), b, dc, input_precision=PRECISION)
    db = tl.dot(tl.trans(d_cb.to(DOT)), c, db, input_precision=PRECISION)
    row = (sequence.to(tl.int64) * T if not PACKED else 0) + first + t
    place = (row * GROUPS + g)[:, None] * N + s[None, :]
    inside = here[:, None] & (s < N)[None, :]
    tl.store(db_ptr + place, db.to(db_ptr.dtype.element_ty), mask=inside)
    tl.store(dc_ptr + place, dc.to(dc_ptr.dtype.element_ty), mask=inside)
