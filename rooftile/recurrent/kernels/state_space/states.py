"""States between chunks and segments, and their gradients: one recurrence, walked forward or back.

    S <- exp(e_last) S + (d_s exp(e_last - e_s) X)^T B      forward: V = X, rows are those of B
    Q <- exp(e_last) Q + (exp(e_t) G)^T C                   back: V = G, the gradient of y before the gate, rows are those of C

A segment's sum is what it adds to a state of zeros. `_scan` makes the state at each segment's beginning of them (or its end, on
the way back), from which `_chunk_states` walks the segment again and keeps what it has at every chunk. With END the sums and the
scan give the state at the other end of the tokens alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooftile.recurrent.kernels.state_space.tiles import tile
from rooftile.recurrent.linear.kernels.tiles import part_of


@triton.jit
def _after(state, v, rows, step, total, end, BACK: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """Returns the state (P, N) at the other end of a chunk."""
    weight = tl.exp2(total) if BACK else step * tl.exp2(end - total)
    weighted = (v.to(tl.float32) * weight[:, None]).to(DOT)
    return tl.dot(tl.trans(weighted), rows.to(DOT), state * tl.exp2(end), input_precision=PRECISION)


# fmt: off
@triton.jit(do_not_specialize=["T", "B", "size"])
def _segment_sums(
    v_ptr, rows_ptr, step_ptr, total_ptr, part_ptr, decay_ptr, cu_ptr,
    v_strides, rows_strides, T, B, size, slots,
    HEADS: tl.constexpr, SHARE: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr, BACK: tl.constexpr, END: tl.constexpr, PACKED: tl.constexpr, COPIES: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # fmt: on
    """Writes what a segment adds to the state, and the sum of its exponents; without END nothing for one that no other follows."""
    slot, h, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence, length, first, start = part_of(slot, cu_ptr, T, B, size, PACKED)
    if start >= length:
        return
    if not END:
        if BACK:
            if start == 0:
                return
        else:
            if start + size >= length:
                return
    n, s, p = tl.arange(0, BLOCK), tl.arange(0, BLOCK_N), part * BLOCK_P + tl.arange(0, BLOCK_P)
    state = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    place = (h.to(tl.int64) * slots + slot) * size
    sum_of_ends = 0.0
    chunks = tl.cdiv(tl.minimum(size, length - start), BLOCK)
    for i in range(0, chunks):
        c = (chunks - 1 - i if BACK else i) * BLOCK
        step, total = tl.load(step_ptr + place + c + n), tl.load(total_ptr + place + c + n)
        end = tl.load(total_ptr + place + c + BLOCK - 1)
        v = tile(v_ptr, v_strides, sequence, h, first, length, start + c, part * BLOCK_P, BLOCK, P, BLOCK_P, COPIES)
        rows = tile(rows_ptr, rows_strides, sequence, h // SHARE, first, length, start + c, 0, BLOCK, N, BLOCK_N, COPIES)
        state = _after(state, v, rows, step, total, end, BACK, DOT, PRECISION)
        sum_of_ends += end
    own = (slot.to(tl.int64) * HEADS + h) * P * N
    tl.store(part_ptr + own + p[:, None] * N + s[None, :], state, mask=(p < P)[:, None] & (s < N)[None, :])
    if part == 0:
        tl.store(decay_ptr + slot * HEADS + h, sum_of_ends)


# fmt: off
@triton.jit(do_not_specialize=["T", "B", "size"])
def _scan(
    part_ptr, first_ptr, decay_ptr, end_ptr, cu_ptr, T, B, size,
    HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr, BACK: tl.constexpr, END: tl.constexpr,
    PACKED: tl.constexpr,
):
    # fmt: on
    """Replaces what each segment adds by the state with which its walk begins; with END writes the state at the end instead."""
    block, b, h = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = block * BLOCK + tl.arange(0, BLOCK)
    if PACKED:
        begin = tl.load(cu_ptr + b).to(tl.int32)
        slot = begin // size + b
        segments = tl.cdiv(tl.load(cu_ptr + b + 1).to(tl.int32) - begin, size)
    else:
        segments = tl.cdiv(T, size)
        slot = b * segments
    state = tl.load(first_ptr + (b.to(tl.int64) * HEADS + h) * SIZE + n, mask=n < SIZE, other=0.0).to(tl.float32)
    for i in range(0, segments, AHEAD):
        # no load may pass a store: some sums are read first. The sum of the segment where the walk ends was not written
        read = ()
        for k in tl.static_range(AHEAD):
            head = (slot + (segments - 1 - i - k if BACK else i + k)).to(tl.int64) * HEADS + h
            inner = i + k + (0 if END else 1) < segments
            added = tl.load(part_ptr + head * SIZE + n, mask=(n < SIZE) & inner, other=0.0)
            read = read + ((added, tl.load(decay_ptr + head, mask=inner, other=0.0)),)
        for k in tl.static_range(AHEAD):
            head = (slot + (segments - 1 - i - k if BACK else i + k)).to(tl.int64) * HEADS + h
            if not END:
                tl.store(part_ptr + head * SIZE + n, state, mask=(n < SIZE) & (i + k < segments))
            state = state * tl.exp2(read[k][1]) + read[k][0]
    if END:
        tl.store(end_ptr + (b.to(tl.int64) * HEADS + h) * SIZE + n, state, mask=n < SIZE)


# fmt: off
@triton.jit(do_not_specialize=["T", "B", "size"])
def _chunk_states(
    v_ptr, rows_ptr, kept_ptr, step_ptr, total_ptr, start_ptr, last_ptr, cu_ptr,
    v_strides, rows_strides, T, B, size, slots,
    HEADS: tl.constexpr, SHARE: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr, BACK: tl.constexpr, WHOLE: tl.constexpr, PACKED: tl.constexpr,
    COPIES: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    """Keeps the state with which each chunk of a segment is entered; on the way back also writes what is left at the first."""
    slot, h, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence, length, first, start = part_of(slot, cu_ptr, T, B, size, PACKED)
    if start >= length:
        return
    n, s, p = tl.arange(0, BLOCK), tl.arange(0, BLOCK_N), part * BLOCK_P + tl.arange(0, BLOCK_P)
    square = (p < P)[:, None] & (s < N)[None, :]
    of_state = p[:, None] * N + s[None, :]
    origin = sequence if WHOLE else slot
    state = tl.load(start_ptr + (origin.to(tl.int64) * HEADS + h) * P * N + of_state, mask=square, other=0.0).to(tl.float32)
    own = (h.to(tl.int64) * slots + slot) * size
    kept = slot.to(tl.int64) * (size // BLOCK)
    chunks = tl.cdiv(tl.minimum(size, length - start), BLOCK)
    for i in range(0, chunks):
        chunk = chunks - 1 - i if BACK else i
        c = chunk * BLOCK
        step, total = tl.load(step_ptr + own + c + n), tl.load(total_ptr + own + c + n)
        end = tl.load(total_ptr + own + c + BLOCK - 1)
        v = tile(v_ptr, v_strides, sequence, h, first, length, start + c, part * BLOCK_P, BLOCK, P, BLOCK_P, COPIES)
        rows = tile(rows_ptr, rows_strides, sequence, h // SHARE, first, length, start + c, 0, BLOCK, N, BLOCK_N, COPIES)
        if COPIES:
            place = [(kept + chunk).to(tl.int32), h, part * BLOCK_P, 0]
            kept_ptr.store(place, state.to(kept_ptr.dtype).reshape(1, 1, BLOCK_P, BLOCK_N))
        else:
            target = kept_ptr + ((kept + chunk) * HEADS + h) * P * N + of_state
            tl.store(target, state.to(kept_ptr.dtype.element_ty), mask=square)
        state = _after(state, v, rows, step, total, end, BACK, DOT, PRECISION)
    if BACK:
        if start == 0:
            target = last_ptr + (sequence.to(tl.int64) * HEADS + h) * P * N + of_state
            tl.store(target, state.to(last_ptr.dtype.element_ty), mask=square)
