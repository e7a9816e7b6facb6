"""Rotary positions: heads rotated, also on their way into a cache (`rooftile.kvcache.page_kernels`)."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.runtime.launch import Kernel

# numbers per program
NUMBERS = 2048


@triton.jit
def _rotated(x_ptr, cos_ptr, sin_ptr, d, there, HALF: tl.constexpr):
    """Both halves of a rotated head: x_d cos - x_(d + half) sin, and x_(d + half) cos + x_d sin."""
    mask = there[:, None] & (d < HALF)[None, :]
    first = tl.load(x_ptr + d[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + HALF + d[None, :], mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + d[None, :], mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + d[None, :], mask=mask, other=0.0).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin, mask


@triton.jit
def store_heads(
    x_ptr, o_ptr, cos_ptr, sin_ptr, scale_ptr, there,
    D: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_HALF: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Copies heads of D numbers, the first 2 HALF of them rotated, each head divided by its scale (SCALED)."""
    INT8: tl.constexpr = o_ptr.dtype.element_ty == tl.int8
    rest = tl.arange(0, BLOCK_D)
    mask = there[:, None] & ((rest >= 2 * HALF) & (rest < D))[None, :]
    d = tl.arange(0, BLOCK_HALF)
    x = tl.zeros(mask.shape, tl.float32)
    if 2 * HALF < D:
        x = tl.load(x_ptr + rest[None, :], mask=mask, other=0.0).to(tl.float32)
    if HALF > 0:
        first, second, in_half = _rotated(x_ptr, cos_ptr, sin_ptr, d, there, HALF)
    if SCALED:
        largest = tl.max(tl.abs(x), 1)
        if HALF > 0:
            largest = tl.maximum(largest, tl.max(tl.maximum(tl.abs(first), tl.abs(second)), 1))
        scale = tl.div_rn(largest, 127.0 if INT8 else 448.0)
        tl.store(scale_ptr, scale, mask=there)
        # a head of nothing but zeros has scale 0, and stays zeros
        scale = tl.where(scale > 0, scale, 1.0)[:, None]
        x = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
        if HALF > 0:
            scale = tl.broadcast_to(scale, first.shape)
            first, second = tl.div_rn(first, scale), tl.div_rn(second, scale)
        if INT8:
            # numbers beyond 2^23 are whole, so this rounds to the nearest, ties to even
            x = (x + 12582912.0) - 12582912.0
            if HALF > 0:
                first, second = (first + 12582912.0) - 12582912.0, (second + 12582912.0) - 12582912.0
    if HALF > 0:
        tl.store(o_ptr + d[None, :], first.to(o_ptr.dtype.element_ty), mask=in_half)
        tl.store(o_ptr + HALF + d[None, :], second.to(o_ptr.dtype.element_ty), mask=in_half)
    if 2 * HALF < D:
        tl.store(o_ptr + rest[None, :], x.to(o_ptr.dtype.element_ty), mask=mask)


@triton.jit
def rotate_heads(
    x_ptr, o_ptr, cos_ptr, sin_ptr, total, angles, n, x_stride_t, x_stride_h, cos_stride_t,
    HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Rotates the n-th BLOCK_R heads of tokens. There are angles for some tokens, and then again from the first."""
    r = n.to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    t, h = r // HEADS, r % HEADS
    waves = (t % angles * cos_stride_t)[:, None]
    store_heads(
        x_ptr + (t * x_stride_t + h * x_stride_h)[:, None], o_ptr + (r * D)[:, None], cos_ptr + waves, sin_ptr + waves, o_ptr,
        t < total, D, HALF, BLOCK_D, BLOCK_HALF, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["total", "angles"])
def _rotate(
    x_ptr, o_ptr, cos_ptr, sin_ptr, total, angles, x_stride_t, x_stride_h, cos_stride_t,
    HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    rotate_heads(
        x_ptr, o_ptr, cos_ptr, sin_ptr, total, angles, tl.program_id(0), x_stride_t, x_stride_h, cos_stride_t, HEADS, D, HALF,
        BLOCK_R, BLOCK_D, BLOCK_HALF,
    )  # fmt: skip


_start_rotate = Kernel(_rotate)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (total, heads, D), rotated by angles whose cos and sin are (n, R / 2), where n divides total: they repeat."""
    total, heads, dim = x.shape
    x = x if x.stride(2) == 1 else x.contiguous()
    if cos.stride() != sin.stride() or cos.stride(1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    o = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    constants = rotates(heads, dim, cos.shape[1])
    if total:
        arguments = (x, o, cos, sin, total, cos.shape[0], *x.stride()[:2], cos.stride(0))
        _start_rotate((triton.cdiv(total * heads, constants["BLOCK_R"]), 1, 1), arguments, constants)
    return o


@cache
def rotates(heads: int, dim: int, half: int) -> dict[str, int]:
    """The compile-time arguments of a kernel that rotates `half` pairs of each head."""
    block_d = triton.next_power_of_2(dim)
    return {
        "HEADS": heads, "D": dim, "HALF": half, "BLOCK_R": max(NUMBERS // block_d, 1), "BLOCK_D": block_d,
        "BLOCK_HALF": triton.next_power_of_2(max(half, 1)),
    }  # fmt: skip
