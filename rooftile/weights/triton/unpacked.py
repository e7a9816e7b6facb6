"""Weights dequantised, bit for bit as `QuantisedWeight.dequantise`: a tile inside of a product, or the whole weight."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.runtime.launch import Kernel
from rooftile.weights.weight import Parts

# rows and columns that a program dequantises
BLOCK_N, BLOCK_K = 16, 128


class Weight(NamedTuple):
    """All that a kernel is compiled for of a weight and the columns of its tiles."""

    FORMAT: str
    N: int
    K: int
    GROUP: int
    ZEROS: bool
    OUTER: str  # "all", "row" or ""
    BLOCK_K: int
    GROUPS: int  # in a tile, and in a row
    COLUMNS: int


def weight_of(parts: Parts, format: str, group: int, shape: tuple[int, int], block_k: int) -> Weight:
    """Returns the constants of a weight. A tile has one group, or several whole ones."""
    N, K = shape
    outer = "" if parts.outer is None else "row" if parts.outer.shape[0] > 1 else "all"
    return _weight_of(format, N, K, group, parts.zeros is not None, outer, block_k)


@cache
def _weight_of(format: str, N: int, K: int, group: int, zeros: bool, outer: str, block_k: int) -> Weight:
    if group != K and group > block_k:
        assert group % block_k == 0, "a tile has no part of a group"
    groups = 1 if group in (K,) or group >= block_k else block_k // group
    return Weight(format, N, K, group, zeros, outer, block_k, groups, K // group)


@triton.jit
def _codes(codes_ptr, n, k_0, in_rows, W: tl.constexpr):
    """Codes (BLOCK_N, BLOCK_K) as fp32 numbers, before zero points."""
    if W.FORMAT == "int4" or W.FORMAT == "mxfp4" or W.FORMAT == "nvfp4":
        pair = tl.arange(0, W.BLOCK_K // 2)
        here = in_rows[:, None] & (k_0 + 2 * pair < W.K)[None, :]
        pairs = tl.load(codes_ptr + (n * ((W.K + 1) // 2))[:, None] + (k_0 // 2 + pair)[None, :], mask=here, other=0)
        codes = tl.interleave(pairs & 15, pairs >> 4).to(tl.int32)
        if W.FORMAT == "int4":
            numbers = (codes - 8).to(tl.float32)
        else:
            # e2m1 in the bits of fp16 is a number 2^14 times too small
            numbers = (((codes & 7) << 9) | ((codes & 8) << 12)).to(tl.int16).to(tl.float16, bitcast=True).to(
                tl.float32
            ) * 16384.0
    else:
        k = k_0 + tl.arange(0, W.BLOCK_K)
        here = in_rows[:, None] & (k < W.K)[None, :]
        codes = tl.load(codes_ptr + (n * W.K)[:, None] + k[None, :], mask=here, other=0).to(tl.int32)
        if W.FORMAT == "w8" or W.FORMAT == "int8":
            numbers = codes.to(tl.float32)
        else:
            # e4m3 in the bits of fp16 is a number 2^8 times too small; chips before Ada know no e4m3
            numbers = (((codes & 127) << 7) | ((codes & 128) << 8)).to(tl.int16).to(tl.float16, bitcast=True).to(
                tl.float32
            ) * 256.0
    return numbers


@triton.jit
def _spread(x, W: tl.constexpr):
    """Numbers per group, (BLOCK_N, GROUPS), spread over the columns of a tile."""
    GROUPS: tl.constexpr = W.GROUPS
    GROUP: tl.constexpr = W.GROUP
    BLOCK_K: tl.constexpr = W.BLOCK_K
    ROWS: tl.constexpr = x.shape[0]
    if GROUPS > 1:
        x = tl.reshape(tl.broadcast_to(x[:, :, None], (ROWS, GROUPS, GROUP)), (ROWS, BLOCK_K))
    return x


@triton.jit
def _power(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def weights(codes_ptr, scales_ptr, zeros_ptr, outer_ptr, n, k_0, in_rows, dtype: tl.constexpr, W: tl.constexpr):
    """Weights (BLOCK_N, BLOCK_K) of the rows n from column k_0 on: (code - zero) * scale in fp32, rounded to dtype."""
    numbers = _codes(codes_ptr, n, k_0, in_rows, W)
    g = tl.arange(0, W.GROUPS)
    if W.GROUP < W.K:
        g += k_0 // W.GROUP
    place = (n * W.COLUMNS)[:, None] + g[None, :]
    there = in_rows[:, None] & (g < W.COLUMNS)[None, :]
    if W.ZEROS:
        numbers -= _spread(tl.load(zeros_ptr + place, mask=there, other=0).to(tl.float32), W)
    if W.FORMAT == "mxfp8" or W.FORMAT == "mxfp4":
        exponent = tl.load(scales_ptr + place, mask=there, other=127).to(tl.int32) - 127
        # two factors: the smallest power of two is subnormal
        half = exponent >> 1
        numbers = numbers * _spread(_power(half), W) * _spread(_power(exponent - half), W)
    elif W.FORMAT == "nvfp4":
        code = tl.load(scales_ptr + place, mask=there, other=0).to(tl.int32)
        scale = (code << 7).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        numbers = numbers * _spread(scale, W)
        if W.OUTER == "all":
            numbers = numbers * tl.load(outer_ptr)
        else:
            numbers = numbers * tl.load(outer_ptr + n, mask=in_rows, other=0.0)[:, None]
    else:
        numbers = numbers * _spread(tl.load(scales_ptr + place, mask=there, other=0.0).to(tl.float32), W)
    return numbers.to(dtype)


@triton.jit
def _dequantise(codes_ptr, scales_ptr, zeros_ptr, outer_ptr, o_ptr, BLOCK_N: tl.constexpr, W: tl.constexpr):
    """Writes a tile (BLOCK_N, BLOCK_K) of the weight."""
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k_0 = tl.program_id(0) * W.BLOCK_K
    found = weights(codes_ptr, scales_ptr, zeros_ptr, outer_ptr, n, k_0, n < W.N, o_ptr.dtype.element_ty, W)
    k = k_0 + tl.arange(0, W.BLOCK_K)
    tl.store(o_ptr + (n * W.K)[:, None] + k[None, :], found, mask=(n < W.N)[:, None] & (k < W.K)[None, :])


_start_dequantise = Kernel(_dequantise)


def bytes_of(parts: Parts) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns codes, scales, zeros and the outer scale as kernels take them: contiguous, FP8 as bytes, and none missing."""
    codes, scales = (x.contiguous() for x in parts[:2])
    codes, scales = (x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x for x in (codes, scales))
    zeros = codes if parts.zeros is None else parts.zeros.contiguous()
    return codes, scales, zeros, scales if parts.outer is None else parts.outer.contiguous()


def block_of(group: int, K: int, most: int) -> int:
    """Returns the columns of a tile, at most `most`: it has one group, or several whole ones."""
    if group == K or group % most == 0:
        return most
    return most if most % group == 0 else group


def dequantise(parts: Parts, format: str, group: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Returns the weight (N, K)."""
    o = torch.empty(shape, dtype=dtype, device=parts.codes.device)
    constants = _constants(weight_of(parts, format, group, shape, block_of(group, shape[1], BLOCK_K)))
    grid = (triton.cdiv(shape[1], constants["W"].BLOCK_K), triton.cdiv(shape[0], BLOCK_N), 1)
    _start_dequantise(grid, (*bytes_of(parts), o), constants)
    if parts.order is None:
        return o
    return torch.empty_like(o).index_copy_(1, parts.order.long(), o)


@cache
def _constants(weight: Weight) -> dict[str, object]:
    return {"BLOCK_N": BLOCK_N, "W": weight, "num_warps": 4}
