"""Scaled tensors: quantised values times scales, each of which covers a part of the tensor.

A scale is the largest absolute value of its part over the format's largest number, so that nothing saturates. NaN and infinity
do not affect the scale, and become NaN. A part of zeros has scale 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.numerics.formats import Format, decode, encode, format_of
from rooftile.runtime.words import answers_foreign_words

Granularity = Literal["tensor", "head", "block", "row", "channel"]
GRANULARITIES = get_args(Granularity)

# positions that share a scale under granularity "block"
BLOCK = 128


@dataclass(frozen=True, slots=True)
class Scaled:
    """A quantised tensor: `values` in the shape of the original, in the format's storage type, and fp32 `scales`.

    scales have the shape of the original, with 1 along the axes that they cover. Under "block" the axis of positions has one
    scale per 128 positions; the last block may be shorter.
    """

    values: Tensor
    scales: Tensor
    format: Format
    granularity: Granularity

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns values times scales."""
        return (decode(self.values, self.format) * self.row_scales()).to(dtype)

    def row_scales(self) -> Tensor:
        """Returns scales that broadcast over the values: scales of blocks are repeated for each position."""
        if self.granularity != "block":
            return self.scales
        return self.scales.repeat_interleave(BLOCK, dim=-3)[..., : self.values.shape[-3], :, :]


@answers_foreign_words
def quantise(x: Tensor, format: str = "fp8_e4m3", *, granularity: Granularity = "tensor") -> Scaled:
    """Quantises a tensor: values in a format, and scales.

    Args:
        x: (..., T, H, D), float; computed in fp32.
        format: fp8_e4m3, fp8_e5m2, int8 or int4.
        granularity: the numbers that share a scale: the whole "tensor"; a "head", over all positions and channels; a "block" of
            128 positions of a head; a "row", one position of a head; a "channel" of a head, over all positions.

    Raises:
        InvalidInput: the format or granularity does not exist, or x has too few axes for it.

    Example:
        >>> scaled = quantise(torch.randn(2, 300, 8, 64), "int8", granularity="row")
        >>> scaled.scales.shape
        torch.Size([2, 300, 8, 1])
        >>> error = scaled.dequantise() - x
    """
    kind = format_of(format)
    if granularity not in GRANULARITIES:
        raise InvalidInput(f"granularity is {granularity!r}; has {', '.join(GRANULARITIES)}")
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise InvalidInput(f"x is {type(x).__name__ if not isinstance(x, Tensor) else x.dtype}; must be a float tensor")
    if x.ndim < 3:
        raise InvalidInput(f"x is {tuple(x.shape)}; must have at least three axes (..., T, H, D)")
    x = set_aside(x.float())
    scales, inverse = scales_of(sizes(x, granularity), kind)
    rows = Scaled(x, inverse, kind, granularity).row_scales()
    return Scaled(encode(x * rows, kind), scales, kind, granularity)


def scales_of(size: Tensor, kind: Format) -> tuple[Tensor, Tensor]:
    """Returns scales for parts with these largest absolute values, and the factors that numbers are multiplied by.

    One division per scale and one multiplication per number give the same bits on every device, equal to torchao's. No scale is
    below 2^-126, and a part of zeros has scale 1.
    """
    # a subnormal scale has no finite inverse, and 0 * inf is NaN
    size = size.clamp(min=kind.largest * 2.0**-126).masked_fill(size == 0, kind.largest)
    scales = divided(size, kind.largest)
    # PyTorch computes number / tensor as a reciprocal and a product, which rounds twice
    return scales, 1.0 / scales if kind.is_integer else torch.full_like(size, kind.largest) / size


def divided(x: Tensor, by: float) -> Tensor:
    """Returns x / by, rounded once. On a GPU, PyTorch multiplies by the inverse of a Python number, which rounds twice."""
    return x / torch.full_like(x, by)


def set_aside(x: Tensor) -> Tensor:
    """Replaces infinities by NaN."""
    return torch.where(x.isfinite(), x, torch.nan)


def sizes(x: Tensor, granularity: Granularity) -> Tensor:
    """Returns the largest absolute value of each part, ignoring NaN; 0 where all are NaN."""
    size = x.abs().nan_to_num(nan=0.0)
    if granularity == "tensor":
        return _largest(size, tuple(range(x.ndim)))
    if granularity == "head":
        return _largest(size, (-3, -1))
    if granularity == "row":
        return _largest(size, (-1,))
    if granularity == "channel":
        return _largest(size, (-3,))
    blocks = -(-x.shape[-3] // BLOCK)
    missing = blocks * BLOCK - x.shape[-3]
    # some releases of PyTorch refuse to add nothing to an empty tensor
    padded = torch.nn.functional.pad(size, (0, 0, 0, 0, 0, missing)) if missing else size
    return _largest(padded.unflatten(-3, (blocks, BLOCK)), (-3, -1)).squeeze(-3)


def _largest(size: Tensor, axes: tuple[int, ...]) -> Tensor:
    if 0 in (size.shape[axis] for axis in axes):
        return size.sum(axes, keepdim=True)
    return size.amax(axes, keepdim=True)
