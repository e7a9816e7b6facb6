"""Number formats with 8 bits or fewer, and how real numbers are encoded in them.

A number is rounded to the nearest one in the format, ties to even. Larger numbers than the largest saturate, infinities too. A
NaN stays a NaN: floating formats have a code for it, and the integer formats, which are symmetric here, reserve the code below
their smallest number.

OCP 8-bit floating point (OFP8) 1.0 for e4m3 and e5m2; OCP Microscaling Formats (MX) 1.0 for e2m1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rooftile.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Format:
    """A number format: the storage dtype of its values, the largest value, and the bits per value."""

    name: str
    dtype: torch.dtype
    largest: float
    bits: int
    # exponent of the largest power of two, for formats with one scale per block
    largest_exponent: int = 0

    @property
    def is_integer(self) -> bool:
        return self.dtype == torch.int8


FP8_E4M3 = Format("fp8_e4m3", torch.float8_e4m3fn, 448.0, 8, 8)
FP8_E5M2 = Format("fp8_e5m2", torch.float8_e5m2, 57344.0, 8, 15)
# -128 and -8 are the codes for NaN; weights, which are finite, use them as numbers (`rooftile.matmul`). Each int4 is stored in
# its own byte
INT8 = Format("int8", torch.int8, 127.0, 8)
INT4 = Format("int4", torch.int8, 7.0, 4)
# four bits in a byte: sign, two bits of exponent, one bit of mantissa
FP4_E2M1 = Format("fp4_e2m1", torch.uint8, 6.0, 4, 2)

FORMATS = {format.name: format for format in (FP8_E4M3, FP8_E5M2, INT8, INT4)}

# the values of the codes 0 to 7 of e2m1; 8 to 15 are the same, negative
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def format_of(name: str) -> Format:
    """Returns the format with this name: fp8_e4m3, fp8_e5m2, int8 or int4."""
    if name not in FORMATS:
        raise InvalidInput(f"format is {name!r}; has {', '.join(FORMATS)}")
    return FORMATS[name]


def encode(x: Tensor, format: Format) -> Tensor:
    """Encodes each number of a float tensor, in the format's storage dtype."""
    x = x.float()
    if format is FP4_E2M1:
        return _encode_e2m1(x)
    bounded = x.clamp(-format.largest, format.largest)
    if format.is_integer:
        return bounded.round().nan_to_num(nan=-format.largest - 1).to(torch.int8)
    return bounded.to(format.dtype)


def decode(values: Tensor, format: Format) -> Tensor:
    """Decodes to fp32."""
    if format is FP4_E2M1:
        numbers = torch.tensor([*_E2M1, *(-x for x in _E2M1)], device=values.device)
        return numbers[values.long()]
    numbers = values.float()
    return numbers.masked_fill(values == -int(format.largest) - 1, torch.nan) if format.is_integer else numbers


def _encode_e2m1(x: Tensor) -> Tensor:
    """Encodes to e2m1, which has no NaN: the block's scale represents it instead."""
    size = x.abs().clamp(max=6.0)
    # below 2 the step is a half, below 4 it is 1, then 2; each number of steps is rounded to even
    step = torch.where(size < 2.0, 0.5, torch.where(size < 4.0, 1.0, 2.0))
    rounded = (size / step).round() * step
    code = torch.searchsorted(torch.tensor(_E2M1, device=x.device), rounded.nan_to_num(nan=0.0).contiguous())
    return (code + 8 * torch.signbit(x)).to(torch.uint8)
