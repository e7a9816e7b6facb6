"""Scales that are learned: LSQ, learned step size quantisation.

With s the scale of n numbers, u = w / s, and q_min and q_max the least and the largest code:

    ds = g sum dW' (rne(u) - u inside, q_min or q_max outside)      g = 1 / sqrt(n q_max)      dW = dW' inside, 0 outside

A scale is a parameter in fp32, rounded to the dtype that the checkpoint stores before codes are taken; its gradient passes that
rounding as if it were not there.

Esser et al., arXiv:1902.08153.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.weights import QuantisedWeight
from rooftile.weights.formats import group_of, weight_format
from rooftile.weights.packing import OFFSET, pack
from rooftile.weights.quantise import raise_flag
from rooftile.weights.weight import centred_codes

# the least and the largest code
RANGES = {"int4": (-OFFSET, OFFSET - 1), "w8": (-128, 127), "int8": (-127, 127)}
# the dtypes of scales in a file; an int8 product takes fp32
STORED = {"int4": torch.bfloat16, "w8": torch.bfloat16, "int8": torch.float32}
LEAST = 2.0**-24


def first_scales(w: Tensor, format: str, group: int | None) -> Tensor:
    """Returns the scales to begin with, 2 mean|w| / sqrt(q_max): fp32 (N, K / group)."""
    size = group_of(weight_format(format), w.shape[1], group)
    means = w.detach().float().unflatten(1, (-1, size)).abs().mean(-1)
    return (2.0 * means / RANGES[format][1] ** 0.5).clamp(min=LEAST)


def with_scales(w: Tensor, format: str, scales: Tensor, flag: Tensor | None = None) -> QuantisedWeight:
    """Returns the codes of w (N, K) with given scales (N, K / group), rounded to the dtype that is stored.

    flag: int32 (1,), raised where w or a scale is not finite, in place of an error.

    Raises:
        InvalidInput: w or a scale is not finite.
    """
    if flag is None:
        _check_finite(w, scales)
    else:
        raise_flag(flag, w, scales)
    stored = scales.detach().clamp(min=LEAST).to(STORED[format])
    least, most = RANGES[format]
    group = w.shape[1] // scales.shape[1]
    codes = _steps(w, stored, group).round().clamp(least, most).flatten(1)
    held = pack(codes + OFFSET) if weight_format(format).is_packed else codes.to(torch.int8)
    return QuantisedWeight(held, stored, None, None, format, group, (w.shape[0], w.shape[1]))


def _check_finite(w: Tensor, scales: Tensor) -> None:
    for name, x in (("w", w), ("a scale", scales)):
        if not x.isfinite().all():
            row, column = (int(n) for n in (~x.isfinite()).nonzero()[0])
            raise InvalidInput(
                f"{name} is {x[row, column].item()} at row {row}, column {column}; must be finite: lower the learning rate"
            )


def gradients_of(dw: Tensor, w: Tensor, weight: QuantisedWeight) -> tuple[Tensor, Tensor]:
    """Returns the gradients of w (N, K) and of its scales (N, K / group), from the rounded weight's gradient."""
    least, most = RANGES[weight.format]
    steps = _steps(w, weight.scales, weight.group)
    codes = centred_codes(weight.parts, weight.format, weight.shape[1], weight.group, torch.float32)
    codes = codes.unflatten(1, (-1, weight.group))
    inside = (steps >= least) & (steps <= most)
    # outside, the code is the limit itself
    slopes = torch.where(inside, codes - steps, codes)
    factor = (weight.group * most) ** -0.5
    dscales = (dw.float().unflatten(1, (-1, weight.group)) * slopes).sum(-1) * factor
    return dw * inside.flatten(1), dscales


def _steps(w: Tensor, scales: Tensor, group: int) -> Tensor:
    """Returns w in codes that are not rounded: fp32 (N, K / group, group)."""
    return w.detach().float().unflatten(1, (-1, group)) / scales.float().unsqueeze(-1)
