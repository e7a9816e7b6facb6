"""A linear projection of one row: the time that its weight takes to be read, which a product in tiles does not reach.

A program owns a few rows of the weight. It multiplies and adds in fp32, and rounds once, after the bias. With `early` it reads
its first numbers of the weight before the kernel in front has ended (`rooftile.runtime.early_weights`), while the small kernels
between two projections leave the memory idle.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rooftile.runtime.dependent_launch import overlaps
from rooftile.runtime.launch import Kernel

# rows of a program, and the most numbers of each that it reads at once
ROWS, NUMBERS = 4, 1024
# the most steps that a row is read in, which are unrolled
STEPS = 32


# fmt: off
@triton.jit(do_not_specialize=["early"])
def _one_row(
    x_ptr, weight_ptr, bias_ptr, o_ptr, early, OUT: tl.constexpr, IN: tl.constexpr, BIAS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):
    # fmt: on
    """o = W x + bias, of BLOCK_N rows of W."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    row = weight_ptr + n.to(tl.int64)[:, None] * IN
    is_row = (n < OUT)[:, None]
    if PDL:
        gdc_launch_dependents()
        if early == 0:
            gdc_wait()
    w = tl.load(row + k[None, :], mask=is_row & (k < IN)[None, :], other=0.0)
    if PDL:
        gdc_wait()
    sums = w.to(tl.float32) * tl.load(x_ptr + k, mask=k < IN, other=0.0).to(tl.float32)[None, :]
    for first in tl.static_range(BLOCK_K, IN, BLOCK_K):
        w = tl.load(row + (first + k)[None, :], mask=is_row & (first + k < IN)[None, :], other=0.0)
        x = tl.load(x_ptr + first + k, mask=first + k < IN, other=0.0).to(tl.float32)
        sums += w.to(tl.float32) * x[None, :]
    o = tl.sum(sums, 1)
    if BIAS:
        o += tl.load(bias_ptr + n, mask=n < OUT, other=0.0).to(tl.float32)
    tl.store(o_ptr + n, o.to(o_ptr.dtype.element_ty), mask=n < OUT)


_start = Kernel(_one_row)


@cache
def constants_of(out: int, inner: int, bias: bool, device: torch.device) -> dict[str, Any]:
    """The compile-time arguments, one dictionary for the same arguments."""
    block = numbers_of(inner, NUMBERS)
    own = {"OUT": out, "IN": inner, "BIAS": bias, "BLOCK_N": ROWS, "BLOCK_K": block}
    # a thread has 8 neighbours of each row, so threads exchange no x
    return own | overlaps(device) | {"num_warps": max(block // 256, 1)}


def numbers_of(size: int, most: int) -> int:
    """Returns how many numbers of a row to read at once: a power of two of 256 or more that leaves the fewest lanes idle."""
    if size <= 256:
        return triton.next_power_of_2(size)
    blocks = [block for block in (2048, 1024, 512, 256) if block <= most]
    return min(blocks, key=lambda block: triton.cdiv(size, block) * block)


def steps(inner: int) -> int:
    """Returns in how many steps a row is read."""
    return triton.cdiv(inner, numbers_of(inner, NUMBERS))


def product(x: Tensor, weight: Tensor, bias: Tensor | None, early: bool) -> Tensor:
    """x (1, in) times a weight (out, in), contiguous as its bias is, to (1, out)."""
    x = x.contiguous()
    out, inner = weight.shape
    o = torch.empty((1, out), dtype=x.dtype, device=x.device)
    constants = constants_of(out, inner, bias is not None, x.device)
    arguments = x, weight, weight if bias is None else bias, o, int(early)
    _start((triton.cdiv(out, constants["BLOCK_N"]), 1, 1), arguments, constants)
    return o
