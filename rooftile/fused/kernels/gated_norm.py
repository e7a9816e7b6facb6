"""RMS norm of gated numbers and its gradients, in one pass each: a group of a row is read once, and stays in registers.

A program of the gradient owns one group of some rows, and adds up its part of the weight's gradient in their order.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.fused.kernels.gate_up import _slope
from rooftile.fused.kernels.tile import PIECE, warps_for
from rooftile.numerics.activated import activated
from rooftile.runtime.dependent_launch import overlaps, wait_for_inputs
from rooftile.runtime.launch import Kernel

# programs that share the groups of all rows
PROGRAMS = 528
# numbers of a group that the gradient's program holds in registers
WHOLE = 4096


@triton.jit
def _opened(x, z, weight, there, eps, SIZE: tl.constexpr, GATE_FIRST: tl.constexpr):
    """Returns silu(z), what is normalised, its reciprocal root mean square, and the weight in fp32."""
    silu = activated(z, "silu")
    # outside a row silu(0) is 0, whatever a NaN does
    u = tl.where(there, x * silu, 0.0) if GATE_FIRST else x
    return silu, u, tl.rsqrt(tl.sum(u * u, 1) / SIZE + eps)[:, None], weight.to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def _gated_norm(
    x_ptr, gate_ptr, weight_ptr, o_ptr, rows, x_stride, gate_stride, eps, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, GATE_FIRST: tl.constexpr, SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Writes BLOCK_R groups, which lie side by side in a row, or in the rows after it."""
    if PDL:
        wait_for_inputs()
    unit = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    n = tl.arange(0, BLOCK_N)[None, :]
    row, group = unit // GROUPS, unit % GROUPS
    there = (row < rows)[:, None] & (n < SIZE)
    own = (group * SIZE)[:, None] + n
    x = tl.load(x_ptr + row[:, None] * x_stride + own, mask=there, other=0.0).to(tl.float32)
    z = tl.load(gate_ptr + row[:, None] * gate_stride + own, mask=there, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + (n if SHARED else own), mask=(n < SIZE) if SHARED else there, other=0.0)
    silu, u, r, weight = _opened(x, z, weight, there, eps, SIZE, GATE_FIRST)
    y = u * r * weight
    if not GATE_FIRST:
        y *= silu
    tl.store(o_ptr + (unit * SIZE)[:, None] + n, y.to(o_ptr.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["rows", "per_program"])
def _gated_norm_gradients(
    dy_ptr, x_ptr, gate_ptr, weight_ptr, dx_ptr, dgate_ptr, dw_ptr, rows, per_program, dy_stride, x_stride, gate_stride, eps,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, GATE_FIRST: tl.constexpr,
    SHARED: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """Writes the gradients of one group of some rows, and their part (GROUPS, SIZE) of the weight's gradient."""
    n = tl.arange(0, BLOCK_N)[None, :]
    part, group = tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS
    inside = n < SIZE
    weight = tl.load(weight_ptr + (n if SHARED else group * SIZE + n), mask=inside, other=0.0)
    total = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    first = part * per_program
    for start in range(first, tl.minimum(first + per_program, rows), BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        there = ((row < rows) & (row < first + per_program))[:, None] & inside
        row = row.to(tl.int64)[:, None]
        own = group * SIZE + n
        x = tl.load(x_ptr + row * x_stride + own, mask=there, other=0.0, eviction_policy="evict_last").to(tl.float32)
        z = tl.load(gate_ptr + row * gate_stride + own, mask=there, other=0.0, eviction_policy="evict_last").to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_stride + own, mask=there, other=0.0, eviction_policy="evict_last").to(tl.float32)
        silu, u, r, w = _opened(x, z, weight, there, eps, SIZE, GATE_FIRST)
        g = dy * w if GATE_FIRST else dy * w * silu
        mean = (tl.sum(tl.where(there, g * u, 0.0), 1) / SIZE)[:, None] * r
        if AGAIN:
            # a long group and its sums leave the registers: what the sum has read is in the cache
            x = tl.load(x_ptr + row * x_stride + own, mask=there, other=0.0, eviction_policy="evict_first").to(tl.float32)
            z = tl.load(gate_ptr + row * gate_stride + own, mask=there, other=0.0, eviction_policy="evict_first").to(tl.float32)
            dy = tl.load(dy_ptr + row * dy_stride + own, mask=there, other=0.0, eviction_policy="evict_first").to(tl.float32)
            silu = activated(z, "silu")
            u = x * silu if GATE_FIRST else x
            g = dy * w if GATE_FIRST else dy * w * silu
        h = u * r
        du = r * (g - h * mean)
        if GATE_FIRST:
            dx, dgate, dw = du * silu, du * x * _slope(z, "silu"), dy * h
        else:
            dx, dgate, dw = du, dy * h * w * _slope(z, "silu"), dy * h * silu
        place = row * (GROUPS * SIZE) + own
        tl.store(dx_ptr + place, dx.to(dx_ptr.dtype.element_ty), mask=there)
        tl.store(dgate_ptr + place, dgate.to(dgate_ptr.dtype.element_ty), mask=there)
        total += tl.where(there, dw, 0.0)
    tl.store(dw_ptr + (part.to(tl.int64) * GROUPS + group) * SIZE + n, tl.sum(total, 0)[None, :], mask=inside)


_start, _start_gradients = Kernel(_gated_norm), Kernel(_gated_norm_gradients)


def forward(x: Tensor, gate: Tensor, weight: Tensor, groups: int, gate_first: bool, eps: float) -> Tensor:
    """Normalises (rows, size)."""
    x, gate, weight = (each if each.stride(-1) == 1 else each.contiguous() for each in (x, gate, weight))
    o = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if o.numel():
        constants = forward_constants(x.shape[1], groups, gate_first, weight.shape[0] < x.shape[1], x.device)
        grid = triton.cdiv(x.shape[0] * groups, constants["BLOCK_R"]), 1, 1
        _start(grid, (x, gate, weight, o, x.shape[0], x.stride(0), gate.stride(0), eps), constants)
    return o


def gradients(
    dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor, groups: int, gate_first: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of x and of the gate (rows, size), and of the weight."""
    dy, x, gate, weight = (each if each.stride(-1) == 1 else each.contiguous() for each in (dy, x, gate, weight))
    rows, size = x.shape
    dx, dgate = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    constants = gradient_constants(size, groups, gate_first, weight.shape[0] < size)
    # whole tiles for each program
    tiles = triton.cdiv(rows, constants["BLOCK_R"])
    per_program = triton.cdiv(tiles, max(PROGRAMS // groups, 1)) * constants["BLOCK_R"]
    parts = triton.cdiv(rows, per_program) if rows else 0
    dw = torch.empty((parts, groups, size // groups), dtype=torch.float32, device=x.device)
    if rows:
        strides = dy.stride(0), x.stride(0), gate.stride(0)
        _start_gradients(
            (parts * groups, 1, 1), (dy, x, gate, weight, dx, dgate, dw, rows, per_program, *strides, eps), constants
        )
    total = dw.sum((0, 1)) if constants["SHARED"] else dw.sum(0).flatten()
    return dx, dgate, total.to(weight.dtype)


@cache
def constants_of(size: int, groups: int, gate_first: bool, shared: bool) -> dict[str, int]:
    """The compile-time arguments that the norm and its gradient share."""
    block = triton.next_power_of_2(size // groups)
    rows = max(PIECE // block, 1)
    return {
        "GROUPS": groups, "SIZE": size // groups, "BLOCK_R": rows, "BLOCK_N": block, "GATE_FIRST": gate_first, "SHARED": shared,
        "num_warps": warps_for(rows * block),
    }  # fmt: skip


@cache
def forward_constants(size: int, groups: int, gate_first: bool, shared: bool, device: torch.device) -> dict[str, int]:
    """The compile-time arguments of the norm."""
    return constants_of(size, groups, gate_first, shared) | overlaps(device)


@cache
def gradient_constants(size: int, groups: int, gate_first: bool, shared: bool) -> dict[str, int]:
    """The compile-time arguments of the gradient."""
    own = constants_of(size, groups, gate_first, shared)
    return own | {"AGAIN": own["BLOCK_N"] > WHOLE}
