"""Weights quantised in one pass, with the bits of `rooftile.weights.quantise_weight` in PyTorch's operations.

A program owns a row: it reads the row once, and writes its codes and its scales. A number that is not finite raises a flag. In
training the row may be 2:4, with zeros for what its mask leaves out; and a bit for each number may say whether it lies inside the
format's numbers, for a gradient that passes only there.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.numerics.formats import FP8_E4M3, INT8
from rooftile.numerics.row_kernels import codes_of
from rooftile.runtime.launch import Kernel
from rooftile.weights.formats import WeightFormat


class RoundingConfig(NamedTuple):
    """The compile-time configuration."""

    K: int
    GROUPS: int  # groups of a row
    GROUP: int
    PARTS: int  # groups of a row, padded to a power of two
    WIDTH: int  # numbers of a group, padded to a power of two
    RULE: str  # "row": rooftile.numerics; "symmetric": compressed-tensors; "exponent": OCP's microscaling formats
    LARGEST: float
    EXPONENT: int  # log2 of the largest power of two of the format
    FRACTION: int  # bits of the fraction of a block's largest number, above which its power of two is the next one
    IS_INTEGER: bool
    IS_PACKED: bool
    MASKED: bool = False
    INSIDE: bool = False


@triton.jit
def _power(exponent):
    """2^exponent for normal numbers."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _rounded(x):
    """The nearest whole number, ties to even, of numbers below 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _symmetric(x, HALF: tl.constexpr):
    """Codes from -HALF to HALF - 1, still fp32, scales in bf16, and which numbers lie at most half a code beyond."""
    size = tl.max(tl.abs(x), 1)
    scale = tl.maximum(tl.div_rn(size, tl.full(size.shape, HALF - 0.5, tl.float32)), 1.1754943508222875e-38)
    scale = tl.where(size == 0.0, 1.0, scale.to(tl.bfloat16).to(tl.float32))
    steps = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    # a tiny scale is rounded up to the smallest normal number, and a quotient is never far beyond HALF
    inside = (steps >= -HALF - 0.5) & (steps <= HALF - 0.5)
    return tl.minimum(tl.maximum(_rounded(steps), -HALF), HALF - 1.0), scale, inside


@triton.jit
def _by_exponent(x, LARGEST: tl.constexpr, EXPONENT: tl.constexpr, FRACTION: tl.constexpr):
    """Numbers over the power of two that they share, at most LARGEST, its exponent, and which lie at most 1/2 beyond."""
    size = tl.max(tl.abs(x), 1)
    bits = size.to(tl.int32, bitcast=True)
    # a subnormal number has an exponent below the smallest that is stored, and 0 stands for it
    exponent = ((bits >> 23) & 255) - 127 - EXPONENT + ((bits & 0x7FFFFF) > FRACTION).to(tl.int32)
    exponent = tl.minimum(tl.maximum(exponent, -127), 127)
    # neither half of the power leaves the normal numbers; the shift rounds down
    half = exponent >> 1
    scaled = x * _power(-half)[:, None] * _power(half - exponent)[:, None]
    return tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST), exponent, tl.abs(scaled) <= LARGEST + 0.5


@triton.jit
def _e2m1(x):
    """Codes 0 to 15 of numbers up to 6."""
    size = tl.abs(x)
    per_unit = tl.where(size < 2.0, 2.0, tl.where(size < 4.0, 1.0, 0.5))
    steps = _rounded(size * per_unit)
    size = tl.where(per_unit == 2.0, steps * 0.5, tl.where(per_unit == 1.0, steps, steps * 2.0))
    code = tl.where(size < 2.0, size * 2.0, tl.where(size < 4.0, size + 2.0, size * 0.5 + 4.0)).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def _store_bits(ptr, inside, CODES: tl.constexpr):
    """Writes the bits of a row, eight to a byte, the first in the lowest bit."""
    eights = tl.reshape(inside.to(tl.int32), (CODES.PARTS, CODES.WIDTH // 8, 8))
    bits = tl.sum(eights << tl.arange(0, 8)[None, None, :], 2).to(tl.uint8)
    part, eighth = tl.arange(0, CODES.PARTS), tl.arange(0, CODES.WIDTH // 8)
    byte = part[:, None] * (CODES.GROUP // 8) + eighth[None, :]
    there = (part[:, None] < CODES.GROUPS) & (eighth[None, :] < (CODES.GROUP + 7) // 8)
    tl.store(ptr + byte, bits, mask=there)


@triton.jit
def _quantise_weight(w_ptr, mask_ptr, codes_ptr, scales_ptr, inside_ptr, flag_ptr, stride, CODES: tl.constexpr):
    """Quantises one row. Numbers that are not finite count as 0, and raise the flag."""
    row = tl.program_id(0).to(tl.int64)
    part, at = tl.arange(0, CODES.PARTS), tl.arange(0, CODES.WIDTH)
    k = part[:, None] * CODES.GROUP + at[None, :]
    there = (part[:, None] < CODES.GROUPS) & (at[None, :] < CODES.GROUP)
    x = tl.load(w_ptr + row * stride + k, mask=there, other=0.0).to(tl.float32)
    if CODES.MASKED:
        x = tl.where(tl.load(mask_ptr + row * CODES.K + k, mask=there, other=0) != 0, x, 0.0)
    is_finite = (x == x) & (tl.abs(x) != float("inf"))
    tl.store(flag_ptr, 1, mask=tl.max(tl.max(tl.where(is_finite, 0, 1), 1), 0) > 0)
    x = tl.where(is_finite, x, 0.0)
    place = row * CODES.GROUPS + part
    if CODES.RULE == "exponent":
        scaled, exponent, inside = _by_exponent(x, CODES.LARGEST, CODES.EXPONENT, CODES.FRACTION)
        tl.store(scales_ptr + place, (exponent + 127).to(tl.uint8), mask=part < CODES.GROUPS)
        codes = _e2m1(scaled) if CODES.IS_PACKED else scaled
    elif CODES.RULE == "symmetric":
        codes, scale, inside = _symmetric(x, CODES.LARGEST)
        tl.store(scales_ptr + place, scale.to(tl.bfloat16), mask=part < CODES.GROUPS)
        if CODES.IS_PACKED:
            codes = (codes + CODES.LARGEST).to(tl.int32)
    else:
        codes, scale = codes_of(x, CODES.LARGEST, CODES.IS_INTEGER)
        tl.store(scales_ptr + place, scale, mask=part < CODES.GROUPS)
    if CODES.INSIDE:
        _store_bits(inside_ptr + row * ((CODES.K + 7) // 8), inside, CODES)
    if CODES.IS_PACKED:
        pairs = tl.reshape(codes, (CODES.PARTS, CODES.WIDTH // 2, 2))
        low, high = tl.split(pairs)
        half = tl.arange(0, CODES.WIDTH // 2)
        byte = part[:, None] * (CODES.GROUP // 2) + half[None, :]
        is_byte = (part[:, None] < CODES.GROUPS) & (half[None, :] < CODES.GROUP // 2)
        tl.store(codes_ptr + row * (CODES.K // 2) + byte, (low | (high << 4)).to(tl.uint8), mask=is_byte)
    else:
        tl.store(codes_ptr + row * CODES.K + k, codes.to(codes_ptr.dtype.element_ty), mask=there)


@triton.jit
def _keep_inside(dw_ptr, bits_ptr, K: tl.constexpr, COLUMNS: tl.constexpr):
    """Multiplies a part of a row by its bits, in place."""
    row = tl.program_id(0).to(tl.int64)
    byte = tl.program_id(1) * (COLUMNS // 8) + tl.arange(0, COLUMNS // 8)
    k = byte[:, None] * 8 + tl.arange(0, 8)[None, :]
    bits = tl.load(bits_ptr + row * ((K + 7) // 8) + byte, mask=byte * 8 < K, other=0).to(tl.int32)
    inside = (bits[:, None] >> tl.arange(0, 8)[None, :]) & 1
    dw = tl.load(dw_ptr + row * K + k, mask=k < K, other=0.0)
    tl.store(dw_ptr + row * K + k, (dw.to(tl.float32) * inside.to(tl.float32)).to(dw.dtype), mask=k < K)


_start, _start_keeping = Kernel(_quantise_weight), Kernel(_keep_inside)
# numbers of a row that a program keeps or not
COLUMNS = 2048


def keep_inside(dw: Tensor, inside: Tensor) -> Tensor:
    """Returns dw (N, K), which is contiguous and changes in place, times bits (N, K / 8) of `quantise`."""
    N, K = dw.shape
    _start_keeping((N, triton.cdiv(K, COLUMNS), 1), (dw, inside), _keeping(K))
    return dw


@cache
def _keeping(K: int) -> dict[str, Any]:
    return {"K": K, "COLUMNS": COLUMNS, "num_warps": 4}


def quantise(
    w: Tensor, kind: WeightFormat, group: int, flag: Tensor, mask: Tensor | None = None, wants_inside: bool = False,
    rule: str = "floor",
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Returns codes (N, K), or (N, K / 2) of 4 bits, scales (N, K / group), and what lies inside (N, K / 8) or None.

    w: (N, K) in 16 or 32 bits.
    flag: int32 (1,), set to 1 where a number is not finite, and left as it is otherwise.
    mask: bool (N, K); what it leaves out counts as 0.
    wants_inside: not for fp8 and int8, whose numbers are all inside.
    rule: of mxfp8 and mxfp4.
    """
    w = w if w.stride(-1) == 1 else w.contiguous()
    N, K = w.shape
    codes = torch.empty((N, K // 2 if kind.is_packed else K), dtype=kind.codes, device=w.device)
    scales = torch.empty((N, K // group), dtype=_dtype_of_scales(kind), device=w.device)
    inside = torch.empty((N, -(-K // 8)), dtype=torch.uint8, device=w.device) if wants_inside else None
    kept = flag if mask is None else mask.contiguous().view(torch.int8)
    arguments = (w, kept, codes, scales, flag if inside is None else inside, flag, w.stride(0))
    _start((N, 1, 1), arguments, constants_of(kind, K, group, mask is not None, wants_inside, rule))
    return codes, scales, inside


def _dtype_of_scales(kind: WeightFormat) -> torch.dtype:
    if kind.has_exponents:
        return torch.uint8
    return torch.float32 if kind.name in ("fp8", "int8") else torch.bfloat16


@cache
def constants_of(
    kind: WeightFormat, K: int, group: int, masked: bool = False, inside: bool = False, scales: str = "floor"
) -> dict[str, Any]:
    """The compile-time arguments; `scales` is the rule of powers of two."""
    parts, width = triton.next_power_of_2(K // group), triton.next_power_of_2(group)
    if kind.has_exponents:
        rule, largest, exponent = ("exponent", 6.0, 2) if kind.is_packed else ("exponent", FP8_E4M3.largest, 8)
    elif kind.name in ("fp8", "int8"):
        rule, largest, exponent = "row", (INT8 if kind.name == "int8" else FP8_E4M3).largest, 0
    else:
        rule, largest, exponent = "symmetric", 2.0 ** (kind.bits - 1), 0
    # no fraction is above all 23 bits
    fraction = int((largest / 2**exponent - 1) * 2**23) if scales == "round_up" else 1 << 23
    is_integer = rule != "exponent" and kind.name != "fp8"
    codes = RoundingConfig(
        K, K // group, group, parts, width, rule, largest, exponent, fraction, is_integer, kind.is_packed, masked, inside
    )
    return {"CODES": codes, "num_warps": min(max(parts * width // 512, 1), 16)}
