"""One token of the selective scan: a program for each sequence and block of channels changes their states in place."""

from __future__ import annotations

import triton
import triton.language as tl

from rooftile.recurrent.kernels.parts import silu
from rooftile.recurrent.kernels.selective.tiles import by_channel, steps

LOG2_E = tl.constexpr(1.4426950408889634)


# fmt: off
@triton.jit
def _scan_step(
    state_ptr, x_ptr, dt_ptr, B_ptr, C_ptr, z_ptr, A_ptr, D_ptr, bias_ptr, slots_ptr, y_ptr,
    state_strides, x_strides, dt_strides, B_strides, C_strides, z_strides, slots_stride,
    W: tl.constexpr, N: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_N: tl.constexpr,
    SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_SLOTS: tl.constexpr,
):
    # fmt: on
    """Reads one token of a sequence, and changes a block of channels of its state."""
    s = tl.program_id(0).to(tl.int64)
    n, w = tl.arange(0, BLOCK_N), tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    in_n, in_w = n < N, w < W
    far = w.to(tl.int64)
    inside = in_w[:, None] & in_n[None, :]
    row = tl.load(slots_ptr + s * slots_stride).to(tl.int64) if HAS_SLOTS else s
    place = state_ptr + row * state_strides[0] + far[:, None] * state_strides[1] + n[None, :].to(tl.int64) * state_strides[2]
    state = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    rates = tl.load(A_ptr + w[:, None] * N + n[None, :], mask=inside, other=0.0).to(tl.float32) * LOG2_E
    bias = by_channel(bias_ptr, w, W, HAS_BIAS)
    dt = tl.load(dt_ptr + s * dt_strides[0] + far * dt_strides[1], mask=in_w, other=0.0).to(tl.float32) + bias
    dt = steps(dt, in_w, SOFTPLUS)
    x = tl.load(x_ptr + s * x_strides[0] + far * x_strides[1], mask=in_w, other=0.0).to(tl.float32)
    own = tl.load(B_ptr + s * B_strides[0] + n * B_strides[1], mask=in_n, other=0.0).to(tl.float32)
    state = tl.exp2(dt[:, None] * rates) * state + (dt * x)[:, None] * own[None, :]
    tl.store(place, state.to(state_ptr.dtype.element_ty), mask=inside)
    y = tl.sum(state * tl.load(C_ptr + s * C_strides[0] + n * C_strides[1], mask=in_n, other=0.0).to(tl.float32)[None, :], 1)
    if HAS_D:
        y += by_channel(D_ptr, w, W, HAS_D) * x
    if HAS_Z:
        y *= silu(tl.load(z_ptr + s * z_strides[0] + far * z_strides[1], mask=in_w, other=0.0).to(tl.float32))
    tl.store(y_ptr + s * W + w, y.to(y_ptr.dtype.element_ty), mask=in_w)
