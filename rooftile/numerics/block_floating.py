"""Block floating point: 32 neighbours of a row share a power of two (OCP Microscaling Formats, MX, 1.0).

The scale is a power of two, stored as its exponent and a bias in one byte (E8M0); 255 says that the block is NaN. Elements are
floats of 8 (MXFP8), 6 (MXFP6) or 4 bits (MXFP4), or integers of 64ths (MXINT8). A block that holds a NaN or infinity becomes NaN
as a whole, because only MXFP8 has a NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.numerics.formats import FP4_E2M1, FP6_E2M3, FP6_E3M2, FP8_E4M3, FP8_E5M2, INT8_64THS, Format, decode, encode
from rooftile.runtime.words import answers_foreign_words

Rule = Literal["floor", "round_up"]
RULES = get_args(Rule)
BLOCK_FORMATS = {
    "mxfp8_e4m3": FP8_E4M3, "mxfp8_e5m2": FP8_E5M2, "mxfp6_e3m2": FP6_E3M2, "mxfp6_e2m3": FP6_E2M3, "mxfp4": FP4_E2M1,
    "mxint8": INT8_64THS,
}  # fmt: skip

# formats of a layer's activations beside those that a format of weights brings, for hardware to come, and their names above
MX_ACTIVATIONS = {"mxfp4": "mxfp4", "mxfp8": "mxfp8_e4m3"}

# elements that share a scale
SHARED = 32
_BIAS, _NAN = 127, 255


@dataclass(frozen=True, slots=True)
class BlockScaled:
    """A tensor in block floating point: `values` in the shape of the original, and uint8 `exponents` (..., D / 32)."""

    values: Tensor
    exponents: Tensor
    format: Format

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Multiplies each element by its block's power of two."""
        numbers = decode(self.values, self.format).unflatten(-1, (-1, SHARED))
        # two factors: the smallest power of two is subnormal in fp32, and some devices flush it to zero
        exponents = self.exponents.to(torch.int32) - _BIAS
        half = exponents // 2
        scaled = numbers * _power(half).unsqueeze(-1) * _power(exponents - half).unsqueeze(-1)
        return scaled.masked_fill((self.exponents == _NAN).unsqueeze(-1), torch.nan).flatten(-2).to(dtype)


@answers_foreign_words
def quantise_blocks(x: Tensor, format: str = "mxfp8_e4m3", *, rule: Rule = "floor") -> BlockScaled:
    """Quantises a tensor to block floating point, in blocks of 32 along its last axis.

    Args:
        x: (..., D), float, D a multiple of 32; computed in fp32.
        format: mxfp8_e4m3, mxfp8_e5m2, mxfp6_e3m2, mxfp6_e2m3, mxfp4 or mxint8. NVFP4 has scales of another kind:
            `quantise_nvfp4`.
        rule: how a block's scale is computed from its largest absolute value. "floor", the standard's rule: 2^(floor(log2 size) -
            exponent of the format's largest power of two), so that the largest numbers may saturate. "round_up": the smallest
            power of two for which none saturates.

    Raises:
        InvalidInput: the format or rule does not exist, or D is not a multiple of 32.

    Example:
        >>> quantise_blocks(torch.randn(4, 128), "mxfp4", rule="round_up").exponents.shape
        torch.Size([4, 4])
    """
    if format not in BLOCK_FORMATS:
        raise InvalidInput(f"format is {format!r}; has {', '.join(BLOCK_FORMATS)}")
    if rule not in RULES:
        raise InvalidInput(f"rule is {rule!r}; has {', '.join(RULES)}")
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim == 0 or x.shape[-1] % SHARED:
        what = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise InvalidInput(f"x is {what}; must be a float tensor whose last axis is a multiple of {SHARED}")
    kind = BLOCK_FORMATS[format]
    blocks = x.float().unflatten(-1, (-1, SHARED))
    size = blocks.abs().amax(-1)
    exponents = _floor_exponent(size, kind) if rule == "floor" else _round_up_exponent(size, kind)
    exponents = exponents.clamp(-_BIAS, _BIAS)
    half = exponents // 2
    scaled = blocks * _power(-half).unsqueeze(-1) * _power(half - exponents).unsqueeze(-1)
    lost = ~size.isfinite()
    stored = (exponents + _BIAS).masked_fill(lost, _NAN).to(torch.uint8)
    return BlockScaled(encode(scaled, kind).flatten(-2), stored, kind)


def _floor_exponent(size: Tensor, kind: Format) -> Tensor:
    _, exponent = torch.frexp(size)
    # frexp's fraction is below 1, so frexp(1) has exponent 1
    return _scale_zeros(size, exponent - 1 - kind.largest_exponent)


def _round_up_exponent(size: Tensor, kind: Format) -> Tensor:
    # fractions and exponents compare without rounding: a quotient of tiny numbers would become 0
    fraction, exponent = torch.frexp(size)
    largest_fraction, largest_exponent = math.frexp(kind.largest)
    return _scale_zeros(size, exponent - largest_exponent + (fraction > largest_fraction).int())


def _scale_zeros(size: Tensor, exponent: Tensor) -> Tensor:
    """Gives blocks of zeros the smallest scale."""
    return exponent.masked_fill(size == 0, -_BIAS)


def _power(exponent: Tensor) -> Tensor:
    """Builds 2^exponent from its bits, for normal numbers: exact on every device."""
    return ((exponent + 127) << 23).view(torch.float32)


def rounded_activations(x: Tensor, activations: str | None, rule: Rule = "floor") -> Tensor:
    """Rounds x (..., D) to a format of MX_ACTIVATIONS and returns it in its dtype; returns x itself for None."""
    return x if activations is None else quantise_blocks(x, MX_ACTIVATIONS[activations], rule=rule).dequantise(x.dtype)
