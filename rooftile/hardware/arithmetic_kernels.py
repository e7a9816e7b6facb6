"""Two Triton kernels that compute much on few bytes: chains of multiply-adds and of exponentials."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

REPEATS = 512
BLOCK = 1024


@triton.jit
def multiply_adds_kernel(x, y, REPEATS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at)
    for _ in range(REPEATS):
        value = tl.fma(value, 0.999, 0.001)
    tl.store(y + at, value)


@triton.jit
def exponentials_kernel(x, y, REPEATS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at)
    for _ in range(REPEATS):
        # values stay between 0 and 1, and every step needs the one before
        value = tl.exp2(-value)
    tl.store(y + at, value)


def repeat_multiply_adds(x: torch.Tensor) -> torch.Tensor:
    """Computes REPEATS times value * 0.999 + 0.001 of each number; x: fp32, a multiple of 1024 numbers."""
    y = torch.empty_like(x)
    multiply_adds_kernel[(x.numel() // BLOCK,)](x, y, REPEATS, BLOCK, enable_fp_fusion=True)
    return y


def repeat_exponentials(x: torch.Tensor) -> torch.Tensor:
    """Computes REPEATS times 2 ** -value of each number; x: fp32, a multiple of 1024 numbers."""
    y = torch.empty_like(x)
    exponentials_kernel[(x.numel() // BLOCK,)](x, y, REPEATS, BLOCK, enable_fp_fusion=True)
    return y
