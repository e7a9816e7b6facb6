"""Gated activations of two tensors with strided rows, and their gradients: the activation is computed again in the backward."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.fused.kernels.tile import PIECE, warps_for
from rooftile.numerics.activated import activated
from rooftile.numerics.activations import KINDS
from rooftile.runtime.launch import Kernel


@triton.jit
def _slope(x, KIND: tl.constexpr):
    """The derivative of an activation. Far from zero a factor is 0 or 1 whatever the other is, so what overflows is clamped."""
    x = tl.minimum(tl.maximum(x, -80.0), 80.0)
    if KIND == "silu":
        s = 1.0 / (1.0 + tl.exp(-x))
        y = s * (1.0 + x * (1.0 - s))
    elif KIND == "tanh":
        z = 1.5957691216057308 * (x + 0.044715 * (x * x * x))
        s = 1.0 / (1.0 + tl.exp(-tl.minimum(tl.maximum(z, -80.0), 80.0)))
        y = s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * (x * x))
    elif KIND == "erf":
        y = 0.5 * (1.0 + tl.math.erf(x * 0.7071067811865476)) + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    else:
        tl.static_assert(KIND == "relu")
        y = tl.where(x > 0.0, 1.0, 0.0)
    return y


@triton.jit
def _gate_up(gate_ptr, up_ptr, o_ptr, gate_stride, up_stride, SIZE: tl.constexpr, PIECE: tl.constexpr, KIND: tl.constexpr):
    pieces: tl.constexpr = (SIZE + PIECE - 1) // PIECE
    row = (tl.program_id(0) // pieces).to(tl.int64)
    n = tl.program_id(0) % pieces * PIECE + tl.arange(0, PIECE)
    gate = tl.load(gate_ptr + row * gate_stride + n, mask=n < SIZE, other=0.0)
    up = tl.load(up_ptr + row * up_stride + n, mask=n < SIZE, other=0.0)
    opened = activated(gate.to(tl.float32), KIND).to(gate.dtype).to(tl.float32)
    tl.store(o_ptr + row * SIZE + n, (opened * up.to(tl.float32)).to(gate.dtype), mask=n < SIZE)


@triton.jit
def _gate_up_gradients(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, dy_stride, gate_stride, up_stride, dx_stride,
    SIZE: tl.constexpr, PIECE: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    pieces: tl.constexpr = (SIZE + PIECE - 1) // PIECE
    row = (tl.program_id(0) // pieces).to(tl.int64)
    n = tl.program_id(0) % pieces * PIECE + tl.arange(0, PIECE)
    there = n < SIZE
    dy = tl.load(dy_ptr + row * dy_stride + n, mask=there, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + n, mask=there, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + n, mask=there, other=0.0).to(tl.float32)
    dtype: tl.constexpr = dgate_ptr.dtype.element_ty
    tl.store(dgate_ptr + row * dx_stride + n, (dy * up * _slope(gate, KIND)).to(dtype), mask=there)
    tl.store(dup_ptr + row * dx_stride + n, (dy * activated(gate, KIND)).to(dtype), mask=there)


_start, _start_gradients = Kernel(_gate_up), Kernel(_gate_up_gradients)


def forward(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """(rows, size) twice to (rows, size)."""
    gate, up = (x if x.stride(-1) == 1 else x.contiguous() for x in (gate, up))
    o = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if o.numel():
        constants = constants_of(gate.shape[1], activation)
        _start(_grid(gate, constants), (gate, up, o, gate.stride(0), up.stride(0)), constants)
    return o


def gradients(dy: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Returns dgate and dup, (rows, size) each."""
    dgate, dup = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    _write_gradients(dy, gate, up, dgate, dup, activation)
    return dgate, dup


def gradients_of_halves(dy: Tensor, x: Tensor, activation: str) -> Tensor:
    """Returns the gradient of x (rows, 2 * size), a gate and what it gates side by side."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    gate, up = x.chunk(2, dim=1)
    dgate, dup = dx.chunk(2, dim=1)
    _write_gradients(dy, gate, up, dgate, dup, activation)
    return dx


def _write_gradients(dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor, activation: str) -> None:
    dy, gate, up = (x if x.stride(-1) == 1 else x.contiguous() for x in (dy, gate, up))
    if dy.numel():
        constants = constants_of(gate.shape[1], activation)
        arguments = (dy, gate, up, dgate, dup, dy.stride(0), gate.stride(0), up.stride(0), dgate.stride(0))
        _start_gradients(_grid(gate, constants), arguments, constants)


def _grid(x: Tensor, constants: dict[str, object]) -> tuple[int, int, int]:
    return x.shape[0] * triton.cdiv(x.shape[1], constants["PIECE"]), 1, 1


@cache
def constants_of(size: int, activation: str) -> dict[str, object]:
    """The compile-time arguments."""
    piece = min(PIECE, triton.next_power_of_2(size))
    return {"SIZE": size, "PIECE": piece, "KIND": KINDS[activation], "num_warps": warps_for(piece)}
