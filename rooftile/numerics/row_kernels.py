"""Rows of activations quantised to FP8 or INT8, with the bits of `rooftile.numerics.quantise_rows`."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.numerics.formats import FP8_E4M3, INT8
from rooftile.numerics.scaling import BLOCK
from rooftile.runtime.dependent_launch import overlaps, wait_for_inputs
from rooftile.runtime.launch import Kernel


@triton.jit
def codes_of(x, LARGEST: tl.constexpr, INTEGER: tl.constexpr):
    """Codes, still fp32, and scales of parts (PARTS, WIDTH) of a row: a scale per part. NaN and infinity affect no scale."""
    lost = (x != x) | (tl.abs(x) == float("inf"))
    size = tl.max(tl.where(lost, 0.0, tl.abs(x)), 1)
    size = tl.where(size == 0.0, LARGEST, tl.maximum(size, LARGEST * 1.1754943508222875e-38))
    scale = tl.div_rn(size, tl.full(size.shape, LARGEST, tl.float32))
    if INTEGER:
        inverse = tl.div_rn(tl.full(size.shape, 1.0, tl.float32), scale)
        # beyond 2^23 there are only whole numbers, so this rounds to the nearest, ties to even
        steps = tl.minimum(tl.maximum(x * inverse[:, None], -LARGEST), LARGEST)
        codes = (steps + 12582912.0) - 12582912.0
        codes = tl.where(lost, -LARGEST - 1.0, codes)
        scale = tl.where(tl.max(lost.to(tl.int32), 1) > 0, float("nan"), scale)
    else:
        inverse = tl.div_rn(tl.full(size.shape, LARGEST, tl.float32), size)
        codes = tl.minimum(tl.maximum(tl.where(lost, 0.0, x) * inverse[:, None], -LARGEST), LARGEST)
        codes = tl.where(lost, float("nan"), codes)
    return codes, scale


@triton.jit
def given_codes(x, scale, LARGEST: tl.constexpr):
    """FP8 codes, still fp32, of x (ROWS, WIDTH) with one given scale; larger numbers saturate."""
    lost = (x != x) | (tl.abs(x) == float("inf"))
    codes = tl.div_rn(tl.where(lost, 0.0, x), scale)
    return tl.where(lost, float("nan"), tl.minimum(tl.maximum(codes, -LARGEST), LARGEST))


@triton.jit
def _quantise_rows(
    x_ptr, given_ptr, codes_ptr, scales_ptr, x_stride, K: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    WIDTH: tl.constexpr, LARGEST: tl.constexpr, INTEGER: tl.constexpr, GIVEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Quantises one row."""
    if PDL:
        wait_for_inputs()
    m = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    k = part[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    x = tl.load(x_ptr + m * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
    if GIVEN:
        given = tl.load(given_ptr)
        scale = tl.full((PARTS,), 1.0, tl.float32) * given
        codes = given_codes(x, given, LARGEST)
    else:
        codes, scale = codes_of(x, LARGEST, INTEGER)
    tl.store(codes_ptr + m * K + k, codes.to(codes_ptr.dtype.element_ty), mask=k < K)
    tl.store(scales_ptr + m * COLUMNS + part, scale, mask=part < COLUMNS)


@triton.jit
def _round_rows(
    x_ptr, o_ptr, x_stride, K: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr,
    LARGEST: tl.constexpr, INTEGER: tl.constexpr,
):  # fmt: skip
    """Writes the numbers that one row's codes stand for."""
    m = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, PARTS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    x = tl.load(x_ptr + m * x_stride + k, mask=k < K, other=0.0)
    codes, scale = codes_of(x.to(tl.float32), LARGEST, INTEGER)
    if not INTEGER:
        codes = codes.to(tl.float8e4nv).to(tl.float32)
    tl.store(o_ptr + m * K + k, (codes * scale[:, None]).to(x.dtype), mask=k < K)


_start, _start_rounding = Kernel(_quantise_rows), Kernel(_round_rows)


def quantise(x: Tensor, format: str, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns codes (M, K) and scales (M, 1), or (M, K / 128), of x (M, K)."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    M, K = x.shape
    constants = constants_of(K, format, scale is not None, x.device)
    codes = torch.empty((M, K), dtype=(INT8 if format == "int8" else FP8_E4M3).dtype, device=x.device)
    scales = torch.empty((M, constants["COLUMNS"]), dtype=torch.float32, device=x.device)
    given = scales if scale is None else scale.float().reshape(1)
    if M:
        _start((M, 1, 1), (x, given, codes, scales, x.stride(0)), constants)
    return codes, scales


def rounded(x: Tensor, format: str) -> Tensor:
    """Returns x (M, K) as its codes stand for it, in its dtype."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    M, K = x.shape
    o = torch.empty((M, K), dtype=x.dtype, device=x.device)
    if M:
        _start_rounding((M, 1, 1), (x, o, x.stride(0)), rounding_constants(K, format))
    return o


@cache
def rounding_constants(K: int, format: str) -> dict[str, object]:
    """The compile-time arguments of `rounded`."""
    kind = INT8 if format == "int8" else FP8_E4M3
    columns = -(-K // BLOCK) if format == "fp8_tile" else 1
    width = BLOCK if format == "fp8_tile" else triton.next_power_of_2(K)
    parts = triton.next_power_of_2(columns)
    return {
        "K": K, "COLUMNS": columns, "PARTS": parts, "WIDTH": width, "LARGEST": kind.largest, "INTEGER": kind.is_integer,
        "num_warps": min(max(parts * width // 512, 1), 16),
    }  # fmt: skip


@cache
def constants_of(K: int, format: str, given: bool, device: torch.device) -> dict[str, object]:
    """The compile-time arguments of `quantise`."""
    return rounding_constants(K, format) | {"GIVEN": given} | overlaps(device)
