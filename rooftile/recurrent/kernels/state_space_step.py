"""One token of Mamba-2's recurrence for each sequence: reads each state once and writes it once, in place.

A program owns some rows of one head's state, so that a step is no more than a copy of the states.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.recurrent.kernels.parts import silu, softplus, unknown_dtype
from rooftile.recurrent.rule import Given, Tensors
from rooftile.runtime.dependent_launch import overlaps, wait_for_inputs
from rooftile.runtime.launch import Kernel

# numbers of a state in a program: 32 in each of 128 threads
TILE = 4096
LARGEST_N = 1024


# fmt: off
@triton.jit
def _ssd_step(
    state_ptr, x_ptr, dt_ptr, B_ptr, C_ptr, z_ptr, A_ptr, D_ptr, bias_ptr, slots_ptr, y_ptr,
    state_strides, x_strides, dt_strides, B_strides, C_strides, z_strides, D_strides, A_stride, bias_stride, slots_stride,
    low, high,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, GROUP: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    SOFTPLUS: tl.constexpr, LIMITED: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_SLOTS: tl.constexpr, PDL: tl.constexpr,
):
    # fmt: on
    """Changes rows of P of one sequence's head, and writes their outputs."""
    if PDL:
        wait_for_inputs()
    s, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    in_p, in_n = p < P, n < N
    row = tl.load(slots_ptr + s * slots_stride).to(tl.int64) if HAS_SLOTS else s
    own = state_ptr + row * state_strides[0] + h * state_strides[1]
    place = own + p[:, None].to(tl.int64) * state_strides[2] + n[None, :].to(tl.int64) * state_strides[3]
    inside = in_p[:, None] & in_n[None, :]
    state = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + s * x_strides[0] + h * x_strides[1] + p * x_strides[2], mask=in_p, other=0.0).to(tl.float32)
    dt = tl.load(dt_ptr + s * dt_strides[0] + h * dt_strides[1]).to(tl.float32)
    if HAS_BIAS:
        dt += tl.load(bias_ptr + h * bias_stride).to(tl.float32)
    if SOFTPLUS:
        dt = softplus(dt)
    if LIMITED:
        # written so that a NaN stays
        dt = tl.where(dt < low, low, dt)
        dt = tl.where(dt > high, high, dt)
    group = h // GROUP
    B = tl.load(B_ptr + s * B_strides[0] + group * B_strides[1] + n * B_strides[2], mask=in_n, other=0.0).to(tl.float32)
    C = tl.load(C_ptr + s * C_strides[0] + group * C_strides[1] + n * C_strides[2], mask=in_n, other=0.0).to(tl.float32)
    decay = tl.exp(dt * tl.load(A_ptr + h * A_stride).to(tl.float32))
    state = decay * state + (dt * x)[:, None] * B[None, :]
    tl.store(place, state.to(state_ptr.dtype.element_ty), mask=inside)
    y = tl.sum(state * C[None, :], 1)
    if HAS_D:
        y += tl.load(D_ptr + h * D_strides[0] + p * D_strides[1], mask=in_p, other=0.0).to(tl.float32) * x
    if HAS_Z:
        y *= silu(tl.load(z_ptr + s * z_strides[0] + h * z_strides[1] + p * z_strides[2], mask=in_p, other=0.0).to(tl.float32))
    tl.store(y_ptr + (s * H + h) * P + p, y.to(y_ptr.dtype.element_ty), mask=in_p)


_start = Kernel(_ssd_step)


@cache
def constants_of(H: int, P: int, N: int, G: int, device: torch.device, *flags: bool) -> dict[str, Any]:
    """One dictionary for the same arguments; flags: softplus, limits, D, z, dt_bias, slots."""
    block_n = triton.next_power_of_2(N)
    block_p = max(1, min(triton.next_power_of_2(P), TILE // block_n))
    names = ("SOFTPLUS", "LIMITED", "HAS_D", "HAS_Z", "HAS_BIAS", "HAS_SLOTS")
    shape = {"H": H, "P": P, "N": N, "GROUP": H // G, "BLOCK_P": block_p, "BLOCK_N": block_n}
    return shape | dict(zip(names, flags, strict=True)) | overlaps(device) | {"num_warps": 4}


def step_refusal(tokens: Tensors, constants: Tensors, state: Tensor, options: Given) -> str | None:
    """Says why the kernel does not run such tensors, or None."""
    (x, *_) = tokens
    assert x is not None
    if state.shape[-1] > LARGEST_N:
        return f"states of {state.shape[-1]} numbers; has up to {LARGEST_N}"
    return unknown_dtype(x, state)


def step(state: Tensor, tokens: Tensors, constants: Tensors, slots: Tensor | None, options: Given) -> Tensor:
    """Reads one token of each sequence, changes the states in place, and returns contiguous outputs."""
    x, dt, B, C, z = tokens
    A, D, bias = constants
    assert x is not None and dt is not None and B is not None and C is not None and A is not None
    softplus_on, low, high = options
    S, H, P = x.shape
    y = torch.empty((S, H, P), dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    # softplus gives no step below 0
    limited = not softplus_on or (low, high) != (0.0, float("inf"))
    there = (D is not None, z is not None, bias is not None, slots is not None)
    own = constants_of(H, P, state.shape[-1], B.shape[1], x.device, bool(softplus_on), limited, *there)
    d_strides = (0, 0) if D is None else (D.stride(0), D.stride(1) if D.ndim == 2 else 0)
    # any tensor stands for one that is not there
    arguments = (
        state, x, dt, B, C, x if z is None else z, A, A if D is None else D, A if bias is None else bias,
        x if slots is None else slots, y,
        state.stride(), x.stride(), dt.stride(), B.stride(), C.stride(), (0, 0, 0) if z is None else z.stride(), d_strides,
        A.stride(0), 0 if bias is None else bias.stride(0), 0 if slots is None else slots.stride(0),
        float(low), float(high),
    )  # fmt: skip
    _start((S, H, triton.cdiv(P, own["BLOCK_P"])), arguments, own)
    return y
