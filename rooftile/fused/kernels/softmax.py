"""Softmax of whole rows, and its gradient: one read and one write of each number, and two reads where rows are long."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.fused.kernels.tile import LONG_PIECE, warps_for
from rooftile.runtime.launch import Kernel

# numbers of a row that a program holds: more of them leave the registers
WHOLE, WHOLE_OF_GRADIENT = 32768, 16384
# numbers of a longer row that its gradient takes at a time: on an H100 faster than LONG_PIECE, which is better for the forward
PIECE_OF_GRADIENT = 16384


@triton.jit
def _scaled(x_ptr, n, scale, SIZE: tl.constexpr, STAYS: tl.constexpr):
    """Scores, -inf outside of the row; STAYS says when they leave the cache."""
    x = tl.load(x_ptr + n, mask=n < SIZE, other=0.0, eviction_policy=STAYS).to(tl.float32) * scale
    return tl.where(n < SIZE, x, float("-inf"))


@triton.jit
def _softmax(x_ptr, o_ptr, x_stride, scale, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Writes the softmax of one row, which is read once if it is a single block, and twice otherwise."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    o_ptr += row * SIZE
    lane = tl.arange(0, BLOCK)
    if SIZE <= BLOCK:
        x = _scaled(x_ptr, lane, scale, SIZE, "")
        p = tl.exp(x - tl.max(x, 0))
        # NaN less the largest is NaN, so the sum is NaN in a row that holds one
        tl.store(o_ptr + lane, (p / tl.sum(p, 0)).to(o_ptr.dtype.element_ty), mask=lane < SIZE)
    else:
        # each lane has a largest of its own; one that has seen nothing but -inf has no sum to scale
        largest = tl.full((BLOCK,), float("-inf"), tl.float32)
        sums = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, SIZE, BLOCK):
            x = _scaled(x_ptr, start + lane, scale, SIZE, "evict_last")
            above = tl.maximum(largest, x)
            scaled = sums * tl.exp(largest - above) + tl.exp(x - above)
            sums = tl.where(above > float("-inf"), scaled, sums + tl.where(x != x, x, 0.0))
            largest = above
        top = tl.max(largest, 0)
        # a row of -inf is NaN, as -inf - -inf is
        total = tl.sum(tl.where(largest > float("-inf"), sums * tl.exp(largest - top), sums), 0)
        for start in range(0, SIZE, BLOCK):
            n = start + lane
            p = tl.exp(_scaled(x_ptr, n, scale, SIZE, "evict_first") - top)
            tl.store(o_ptr + n, (p / total).to(o_ptr.dtype.element_ty), mask=n < SIZE, eviction_policy="evict_first")


@triton.jit
def _pair(dy_ptr, y_ptr, n, SIZE: tl.constexpr, STAYS: tl.constexpr):
    """Numbers n of a row of dy and of y in fp32, 0 past its end; STAYS says when they leave the cache."""
    dy = tl.load(dy_ptr + n, mask=n < SIZE, other=0.0, eviction_policy=STAYS).to(tl.float32)
    return dy, tl.load(y_ptr + n, mask=n < SIZE, other=0.0, eviction_policy=STAYS).to(tl.float32)


@triton.jit
def _softmax_gradient(dy_ptr, y_ptr, o_ptr, dy_stride, y_stride, scale, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Writes dx of one row; dy and y are read once if they are a single block, and twice otherwise."""
    row = tl.program_id(0).to(tl.int64)
    dy_ptr += row * dy_stride
    y_ptr += row * y_stride
    o_ptr += row * SIZE
    lane = tl.arange(0, BLOCK)
    if SIZE <= BLOCK:
        dy, y = _pair(dy_ptr, y_ptr, lane, SIZE, "")
        dx = scale * y * (dy - tl.sum(dy * y, 0))
        tl.store(o_ptr + lane, dx.to(o_ptr.dtype.element_ty), mask=lane < SIZE)
    else:
        sums = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, SIZE, BLOCK):
            dy, y = _pair(dy_ptr, y_ptr, start + lane, SIZE, "evict_last")
            sums += dy * y
        total = tl.sum(sums, 0)
        for start in range(0, SIZE, BLOCK):
            n = start + lane
            dy, y = _pair(dy_ptr, y_ptr, n, SIZE, "evict_first")
            dx = (scale * y * (dy - total)).to(o_ptr.dtype.element_ty)
            tl.store(o_ptr + n, dx, mask=n < SIZE, eviction_policy="evict_first")


_start, _start_gradient = Kernel(_softmax), Kernel(_softmax_gradient)


def forward(x: Tensor, scale: float) -> Tensor:
    """(rows, size) to (rows, size)."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    o = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if o.numel():
        _start((x.shape[0], 1, 1), (x, o, x.stride(0), scale), constants_of(x.shape[1], WHOLE, LONG_PIECE))
    return o


def gradient(dy: Tensor, y: Tensor, scale: float) -> Tensor:
    """Returns dx (rows, size)."""
    dy, y = (x if x.stride(-1) == 1 else x.contiguous() for x in (dy, y))
    o = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    if o.numel():
        constants = constants_of(y.shape[1], WHOLE_OF_GRADIENT, PIECE_OF_GRADIENT)
        _start_gradient((y.shape[0], 1, 1), (dy, y, o, dy.stride(0), y.stride(0), scale), constants)
    return o


@cache
def constants_of(size: int, whole: int, piece: int) -> dict[str, int]:
    """Returns the compile-time arguments, where a program holds up to `whole` numbers, or `piece` of a longer row."""
    block = piece if size > whole else triton.next_power_of_2(size)
    return {"SIZE": size, "BLOCK": block, "num_warps": warps_for(block)}
