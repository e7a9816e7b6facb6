"""Parts of the selective scan's kernels: a thread owns a channel with all numbers of its state, and walks tokens, some at once.

Channels lie `apart` from each other, which is 1, but the compiler is not told: it would give a thread neighbouring channels, and the
numbers of a state to several threads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooftile.recurrent.kernels.parts import softplus


@triton.jit
def channels(apart, BLOCK_W: tl.constexpr):
    """Numbers the channels of a program."""
    return tl.max_contiguous((tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)) * apart, 2)


@triton.jit
def row(x, n, i):
    """Returns row i of x, whose rows are numbered by n and lie in a thread: no instruction is left of it."""
    # -0.0 changes no sum
    return tl.sum(tl.where((n == i)[:, None], x, -0.0), 0)


@triton.jit
def by_channel(ptr, w, W, IS_THERE: tl.constexpr):
    """Loads a number of each channel, or zeros."""
    if IS_THERE:
        return tl.load(ptr + w, mask=w < W, other=0.0).to(tl.float32)
    return tl.zeros(w.shape, tl.float32)


@triton.jit
def rates_of(ptr, n, w, N: tl.constexpr, W: tl.constexpr):
    """Loads the rates (N, W) of a program, finite: a step of 0 keeps every state."""
    rates = tl.load(ptr + n[:, None] * W + w[None, :], mask=(n < N)[:, None] & (w < W)[None, :], other=0.0)
    return tl.clamp(rates, -3e38, 3e38, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def token(t, count):
    """Returns the token that is read in the place of token t, which may lie behind the last one, and whether t is there."""
    return tl.maximum(tl.minimum(t, count - 1), 0), (t >= 0) & (t < count)


@triton.jit
def steps(raw, inside, SOFTPLUS: tl.constexpr):
    """Computes the steps of a tile: 0 outside, where nothing moves."""
    return tl.where(inside, softplus(raw) if SOFTPLUS else raw, 0.0)


@triton.jit
def _fold(rows, lane, BIT: tl.constexpr, HALF: tl.constexpr):
    """Adds the channels that differ in a bit; one of the two keeps the first half of the rows, and one the second."""
    folded = ()
    if HALF > 0:
        upper = (lane & BIT) != 0
        for i in tl.static_range(HALF):
            sent, kept = tl.where(upper, rows[i], rows[i + HALF]), tl.where(upper, rows[i + HALF], rows[i])
            folded = folded + (kept + tl.gather(sent, lane ^ BIT, 0),)
    else:
        folded = folded + (rows[0] + tl.gather(rows[0], lane ^ BIT, 0),)
    return folded


@triton.jit
def sums_over_channels(rows, lane, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Sums each of the rows (LANES,), a tuple of a power of 2: place l of vector i holds the sum of row l * ROWS // LANES + i.

    A row costs one exchange between threads, where a sum that every thread knows takes five.
    """
    for level in tl.static_range(5):
        if (LANES >> level) > 1:
            rows = _fold(rows, lane, LANES >> (level + 1), ROWS >> (level + 1))
    return rows
