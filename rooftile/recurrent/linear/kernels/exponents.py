"""Exponential features of a tile, the factors of their pairs, and the largest exponents of a chunk: see `exponential`."""

from __future__ import annotations

import triton
import triton.language as tl

from rooftile.recurrent.linear.kernels.tiles import head_rows, is_lost, part_of


@triton.jit
def projected(x, w_ptr, rest_ptr, f, d, root, F: tl.constexpr, D: tl.constexpr):
    """W y, in fp32: 16-bit inputs meet W as the sum of two 16-bit numbers, so that W keeps its digits."""
    there = (f < F)[None, :] & (d < D)[:, None]
    place = f[None, :] * D + d[:, None]
    w = tl.load(w_ptr + place, mask=there, other=0.0)
    if x.dtype == tl.float32:
        p = tl.dot(x, w, input_precision="ieee")
    else:
        p = tl.dot(x, w)
        p = tl.dot(x, tl.load(rest_ptr + place, mask=there, other=0.0), p)
    return p * root


@triton.jit
def exponential(x, top, w_ptr, rest_ptr, f, d, root, F: tl.constexpr, D: tl.constexpr):
    """The features f of a tile, relative to the largest of each row; 0 in lost rows."""
    p = projected(x, w_ptr, rest_ptr, f, d, root, F, D)
    return tl.where((is_lost(top) == 0)[:, None] & (f < F)[None, :], tl.exp(p - top[:, None]), 0.0)


@triton.jit
def decayed(before, after):
    """exp(before - after), 0 if there was nothing before."""
    return tl.where(before == float("-inf"), 0.0, tl.exp(before - after))


@triton.jit
def paired(a, m, running, lower):
    """A or its gradient with the factors of its pairs, 0 behind the mask."""
    return tl.where(lower, a * tl.exp(m[None, :] - running[:, None]), 0.0)


# fmt: off
@triton.jit(do_not_specialize=["T", "B"])
def _exponents(
    x_ptr, w_ptr, rest_ptr, top_ptr, m_ptr, running_ptr, cu_ptr, x_strides, root, T, B,
    HEADS: tl.constexpr, D: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_F: tl.constexpr,
    KEYS: tl.constexpr, PACKED: tl.constexpr,
):
    # fmt: on
    """The largest projection of each token; of keys also m, and its largest until there in the chunk."""
    slot, h = tl.program_id(0), tl.program_id(1)
    b, length, first, start = part_of(slot, cu_ptr, T, B, BLOCK, PACKED)
    if start >= length:
        return
    batch = b.to(tl.int64)
    n, d = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    t = start + n
    here = t < length
    x = head_rows(x_ptr, x_strides, batch, h, first, t, d, here, d < D)
    y = x.to(tl.float32) * root
    half = 0.5 * tl.sum(y * y, 1)
    lost = is_lost(half)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    for f_0 in range(0, F, BLOCK_F):
        f = f_0 + tl.arange(0, BLOCK_F)
        p = projected(x, w_ptr, rest_ptr, f, d, root, F, D)
        p = tl.where(lost[:, None], 0.0, p)
        top = tl.maximum(top, tl.max(tl.where((f < F)[None, :], p, float("-inf")), 1))
    top = tl.where(lost, float("inf"), top)
    row = ((0 if PACKED else batch * T) + first + t) * HEADS + h
    tl.store(top_ptr + row, top, mask=here)
    if KEYS:
        m = tl.where(lost, float("inf"), top - half)
        tl.store(m_ptr + row, m, mask=here)
        running = tl.max(tl.where(n[:, None] >= n[None, :], m[None, :], float("-inf")), 1)
        tl.store(running_ptr + row, running, mask=here)
