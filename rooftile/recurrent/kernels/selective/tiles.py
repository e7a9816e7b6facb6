"""Parts of the selective scan's kernels: a tile has TOKENS tokens of a block of channels, and a thread owns whole columns of it.

The recurrence of one number of the state, S <- a S + b, runs down a column in a thread's registers. Channels lie `apart` from each
other, which is 1, but the compiler is not told: it would give a thread neighbouring channels, and the tokens of a column to several
threads.
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
def tile(ptr, strides, b, rows, w, inside):
    """Loads tokens (TOKENS, channels)."""
    place = ptr + b * strides[0] + rows[:, None] * strides[1] + w[None, :]
    return tl.load(place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def column(ptr, strides, b, rows, n, here):
    """Loads number n of B or C of each token."""
    return tl.load(ptr + b * strides[0] + rows * strides[1] + n, mask=here, other=0.0).to(tl.float32)


@triton.jit
def steps(raw, inside, SOFTPLUS: tl.constexpr):
    """Computes the steps of a tile: 0 outside, where nothing moves."""
    return tl.where(inside, softplus(raw) if SOFTPLUS else raw, 0.0)


@triton.jit
def decays(dt, rate, here):
    """Computes exp(dt A), and 1 outside, where a rate may be infinite."""
    return tl.where(here[:, None], tl.exp2(dt * rate[None, :]), 1.0)


@triton.jit
def _join(through_a, a_a, before_a, b_a, through_b, a_b, before_b, b_b):
    return through_b * a_a * through_a, a_b, before_b + through_b * (a_a * before_a + b_a), b_b


@triton.jit
def states_before(a, b, state, t):
    """Computes S before each token of S <- a S + b."""
    found = tl.where((t == 0)[:, None], state[None, :], tl.zeros_like(a))
    _, _, found, _ = tl.associative_scan((tl.full(a.shape, 1.0, tl.float32), a, found, b), 0, _join)
    return found


@triton.jit
def states_behind(a, b, state, t, TOKENS: tl.constexpr):
    """Computes the same from the last token to the first one, and S before the first one."""
    found = tl.zeros_like(a)
    for k in tl.static_range(TOKENS):
        j = TOKENS - 1 - k
        found = tl.where((t == j)[:, None], state[None, :], found)
        state = row(a, t, j) * state + row(b, t, j)
    return found, state
