"""Softmax of whole rows, and its gradient: one read and one write of each number."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.fused.kernels.tile import warps_for
from rooftile.launch import Kernel


@triton.jit
def _softmax(x_ptr, o_ptr, x_stride, scale, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + n, mask=n < SIZE, other=0.0).to(tl.float32) * scale
    x = tl.where(n < SIZE, x, float("-inf"))
    p = tl.exp(x - tl.max(x, 0))
    # NaN marks a row that holds one, whatever its largest number is
    total = tl.sum(p, 0) + tl.sum(tl.where(x != x, x, 0.0), 0)
    tl.store(o_ptr + row * SIZE + n, (p / total).to(o_ptr.dtype.element_ty), mask=n < SIZE)


@triton.jit
def _softmax_gradient(dy_ptr, y_ptr, o_ptr, dy_stride, y_stride, scale, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    dy = tl.load(dy_ptr + row * dy_stride + n, mask=n < SIZE, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + row * y_stride + n, mask=n < SIZE, other=0.0).to(tl.float32)
    dx = scale * y * (dy - tl.sum(dy * y, 0))
    tl.store(o_ptr + row * SIZE + n, dx.to(o_ptr.dtype.element_ty), mask=n < SIZE)


_start, _start_gradient = Kernel(_softmax), Kernel(_softmax_gradient)


def forward(x: Tensor, scale: float) -> Tensor:
    """(rows, size) to (rows, size)."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    o = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if o.numel():
        _start((x.shape[0], 1, 1), (x, o, x.stride(0), scale), constants_of(x.shape[1]))
    return o


def gradient(dy: Tensor, y: Tensor, scale: float) -> Tensor:
    """Returns dx (rows, size)."""
    dy, y = (x if x.stride(-1) == 1 else x.contiguous() for x in (dy, y))
    o = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    if o.numel():
        _start_gradient((y.shape[0], 1, 1), (dy, y, o, dy.stride(0), y.stride(0), scale), constants_of(y.shape[1]))
    return o


@cache
def constants_of(size: int) -> dict[str, int]:
    """The compile-time arguments."""
    block = triton.next_power_of_2(size)
    return {"SIZE": size, "BLOCK": block, "num_warps": warps_for(block)}
