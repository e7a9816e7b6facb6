"""One token of the gated delta rule: a program for each sequence, value head and block of columns changes its state in place."""

from __future__ import annotations

import triton
import triton.language as tl

from rooftile.recurrent.kernels.delta.chunks import inverse_length


# fmt: off
@triton.jit
def _step(
    state_ptr, q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, y_ptr, slots_ptr,
    state_strides, q_strides, k_strides, v_strides, g_strides, beta_strides, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    QK_NORM: tl.constexpr, SLOTS: tl.constexpr,
):
    # fmt: on
    """Reads a token, changes the state, and writes the output."""
    # the blocks of a state run side by side, so that each page of memory is opened once
    BLOCKS: tl.constexpr = (DV + BLOCK_V - 1) // BLOCK_V
    n, h = (tl.program_id(0) // (HEADS * BLOCKS)).to(tl.int64), tl.program_id(0) // BLOCKS % HEADS
    d, e = tl.arange(0, BLOCK_D), tl.program_id(0) % BLOCKS * BLOCK_V + tl.arange(0, BLOCK_V)
    slot = tl.load(slots_ptr + n).to(tl.int64) if SLOTS else n
    place = state_ptr + slot * state_strides[0] + h * state_strides[1]
    place += d[:, None] * state_strides[2] + e[None, :] * state_strides[3]
    inside = (d < D)[:, None] & (e < DV)[None, :]
    state = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    q = tl.load(q_ptr + n * q_strides[0] + (h // GROUP) * q_strides[1] + d, mask=d < D, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + n * k_strides[0] + (h // GROUP) * k_strides[1] + d, mask=d < D, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + n * v_strides[0] + h * v_strides[1] + e, mask=e < DV, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + n * g_strides[0] + h * g_strides[1]).to(tl.float32)
    beta = tl.load(beta_ptr + n * beta_strides[0] + h * beta_strides[1]).to(tl.float32)
    q *= tl.sum(inverse_length(q[None, :], QK_NORM), 0) * scale
    k *= tl.sum(inverse_length(k[None, :], QK_NORM), 0)
    state *= tl.exp(g)
    written = beta * (v - tl.sum(state * k[:, None], 0))
    state += k[:, None] * written[None, :]
    tl.store(place, state, mask=inside)
    tl.store(y_ptr + (n * HEADS + h) * DV + e, tl.sum(state * q[:, None], 0), mask=e < DV)
