"""NVFP4: 16 neighbours of a row share an e4m3 scale, and the whole tensor a factor in fp32.

The steps are compressed-tensors' own, so that codes and scales have its bits:

    factor = 448 * 6 / largest of all        scale = e4m3(factor * largest of 16 / 6)        code = e2m1(x / (scale / factor))
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.numerics.formats import FP4_E2M1, FP8_E4M3, decode, encode
from rooftile.numerics.scaling import divided, set_aside
from rooftile.runtime.words import answers_foreign_words

# elements that share a scale
SHARED = 16
# the least number of e4m3 above zero
LEAST_SCALE = 2.0**-9
# the largest power of two whose inverse is a normal number
_LARGEST_FACTOR = 2.0**126


@dataclass(frozen=True, slots=True)
class TwoLevelScaled:
    """A tensor in NVFP4: a number is its code times its scale times `outer`.

    Args:
        values: uint8, codes of e2m1, each in its own byte, in the shape of the original.
        scales: float8_e4m3fn (..., D / 16); NaN for 16 numbers of which one is not finite.
        outer: fp32, one number without axes: the inverse of the factor, which files hold.
    """

    values: Tensor
    scales: Tensor
    outer: Tensor

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Multiplies each element by its scale, then by the outer scale."""
        numbers = decode(self.values, FP4_E2M1).unflatten(-1, (-1, SHARED))
        return (numbers * self.scales.float().unsqueeze(-1) * self.outer).flatten(-2).to(dtype)


@answers_foreign_words
def quantise_nvfp4(x: Tensor, *, outer: Tensor | None = None) -> TwoLevelScaled:
    """Quantises a tensor to NVFP4, in groups of 16 along its last axis.

    Args:
        x: (..., D), float, D a multiple of 16; computed in fp32.
        outer: a scale for the whole tensor that was found before, fp32 with one number; None finds it from the largest absolute
            value. Numbers that are too large for it saturate.

    Raises:
        InvalidInput: x is no such tensor, or outer has more than one number.

    Example:
        >>> quantise_nvfp4(torch.randn(4, 64)).scales.shape
        torch.Size([4, 4])

    NVIDIA, Pretraining large language models with NVFP4, arXiv:2509.25149.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim == 0 or x.shape[-1] % SHARED:
        what = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise InvalidInput(f"x is {what}; must be a float tensor whose last axis is a multiple of {SHARED}")
    if outer is not None and (not isinstance(outer, Tensor) or outer.numel() != 1):
        what = str(tuple(outer.shape)) if isinstance(outer, Tensor) else type(outer).__name__
        raise InvalidInput(f"outer is {what}; must be a tensor of one number, or None")
    # codes have no gradient
    x = x.detach()
    groups = set_aside(x.float()).unflatten(-1, (-1, SHARED))
    outer = outer_scale(x) if outer is None else outer.float().reshape(())
    factor = 1.0 / outer
    wanted = factor * divided(groups.abs().amax(-1), 6.0)
    # no scale is zero, and NaN stays
    scales = encode(wanted.clamp(min=LEAST_SCALE), FP8_E4M3)
    codes = encode(groups / (scales.float() / factor).unsqueeze(-1), FP4_E2M1)
    return TwoLevelScaled(codes.flatten(-2), scales, outer)


def outer_scale(x: Tensor) -> Tensor:
    """Returns the scale of a whole tensor, fp32 without axes; 1 where all is zero. It is the inverse of the inverse of itself."""
    # fp64 may be infinite in fp32
    x = x.float() if x.dtype == torch.float64 else x
    kept = torch.where(x.isfinite(), x, 0.0).abs()
    size = (kept.amax() if kept.numel() else kept.sum()).float()
    # the reciprocal first: PyTorch computes a number / tensor so
    factor = (1.0 / size * (448.0 * 6.0)).clamp(max=_LARGEST_FACTOR)
    return (1.0 / factor).masked_fill(size == 0, 1.0)
