"""Number formats with 8 bits or fewer, and how real numbers are encoded in them.

A number is rounded to the nearest one in the format, ties to even. Larger numbers than the largest saturate, infinities too. A
NaN stays a NaN: floating formats have a code for it, and the integer formats, which are symmetric here, reserve the code below
their smallest number.

OCP 8-bit floating point (OFP8) 1.0 for e4m3 and e5m2; OCP Microscaling Formats (MX) 1.0 for e2m1, e3m2, e2m3 and the int8 of
MXINT8.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.runtime.words import answers_foreign_words


@dataclass(frozen=True, slots=True)
class Format:
    """A number format: the storage dtype of its values, the largest value, and the bits per value."""

    name: str
    dtype: torch.dtype
    largest: float
    bits: int
    # exponent of the largest power of two, for formats with one scale per block
    largest_exponent: int = 0
    # bits of the mantissa of a float that PyTorch has no dtype for
    mantissa: int = 0
    # the value of the integer 1
    unit: float = 1.0

    @property
    def is_integer(self) -> bool:
        return self.dtype == torch.int8


FP8_E4M3 = Format("fp8_e4m3", torch.float8_e4m3fn, 448.0, 8, 8)
FP8_E5M2 = Format("fp8_e5m2", torch.float8_e5m2, 57344.0, 8, 15)
# -128 and -8 are the codes for NaN; weights, which are finite, use them as numbers (`rooftile.weights`). Each int4 is stored in
# its own byte
INT8 = Format("int8", torch.int8, 127.0, 8)
INT4 = Format("int4", torch.int8, 7.0, 4)
# each in its own byte: sign, exponent, mantissa. They have no NaN: the scale of a block represents it
FP4_E2M1 = Format("fp4_e2m1", torch.uint8, 6.0, 4, 2, mantissa=1)
FP6_E3M2 = Format("fp6_e3m2", torch.uint8, 28.0, 6, 4, mantissa=2)
FP6_E2M3 = Format("fp6_e2m3", torch.uint8, 7.5, 6, 2, mantissa=3)
# the elements of MXINT8. -128, which is -2, is left out, as the standard allows, so that the numbers are symmetric
INT8_64THS = Format("int8_64ths", torch.int8, 127 / 64, 8, 0, unit=1 / 64)

FORMATS = {format.name: format for format in (FP8_E4M3, FP8_E5M2, INT8, INT4)}


def format_of(name: str) -> Format:
    """Returns the format with this name: fp8_e4m3, fp8_e5m2, int8 or int4."""
    if name not in FORMATS:
        raise InvalidInput(f"format is {name!r}; has {', '.join(FORMATS)}")
    return FORMATS[name]


@answers_foreign_words
def encode(x: Tensor, format: Format) -> Tensor:
    """Encodes each number of a float tensor, in the format's storage dtype."""
    x = x.float()
    if format.mantissa:
        return _encode_small_float(x, format)
    bounded = x.clamp(-format.largest, format.largest)
    if format.is_integer:
        steps = bounded / format.unit
        return steps.round().nan_to_num(nan=-format.largest / format.unit - 1).to(torch.int8)
    return bounded.to(format.dtype)


@answers_foreign_words
def decode(values: Tensor, format: Format) -> Tensor:
    """Decodes to fp32."""
    if format.mantissa:
        return torch.tensor(_numbers(format), device=values.device)[values.long()]
    numbers = values.float()
    if format.unit != 1.0:
        return numbers * format.unit
    return numbers.masked_fill(values == -int(format.largest) - 1, torch.nan) if format.is_integer else numbers


def _least_exponent(format: Format) -> int:
    """The exponent of the least normal number, which the numbers below it share."""
    exponent_bits = format.bits - 1 - format.mantissa
    return 2 - 2 ** (exponent_bits - 1)


def _encode_small_float(x: Tensor, format: Format) -> Tensor:
    """Encodes to a float without NaN, in which NaN becomes 0."""
    size = x.abs().clamp(max=format.largest).nan_to_num(nan=0.0)
    least, steps = _least_exponent(format), 2**format.mantissa
    # frexp's fraction is below 1, so frexp(1) has exponent 1; and frexp(0) has exponent 0
    exponent = (torch.frexp(size).exponent - 1).clamp(min=least).masked_fill(size == 0, least)
    # 2^(mantissa - exponent) from its bits: some devices' powers are not exact
    inverse_step = ((format.mantissa - exponent + 127) << 23).view(torch.float32)
    code = (size * inverse_step).round()
    # a power of two has the code after the largest one of the exponent below, so a number may be rounded up to it
    code += (exponent - least) * steps
    return (code + 2 ** (format.bits - 1) * torch.signbit(x)).to(torch.uint8)


@cache
def _numbers(format: Format) -> tuple[float, ...]:
    """The numbers of all codes of a small float, the negative ones last."""
    least, steps = _least_exponent(format), 2**format.mantissa
    half = []
    for code in range(2 ** (format.bits - 1)):
        exponent, mantissa = divmod(code, steps)
        # numbers of exponent 0 have no leading one
        whole, exponent = (mantissa, 0) if exponent == 0 else (steps + mantissa, exponent - 1)
        half.append(whole / steps * 2.0 ** (least + exponent))
    return (*half, *(-x for x in half))
