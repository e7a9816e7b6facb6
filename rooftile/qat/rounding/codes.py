"""The codes of a weight in training: how they are asked for, how they are taken, and what they leave for the backward."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rooftile.numerics.block_floating import Rule
from rooftile.qat.rounding.learned import with_scales
from rooftile.runtime.operators import replaced
from rooftile.weights import QuantisedWeight
from rooftile.weights.packing import OFFSET
from rooftile.weights.quantise import quantise_trained
from rooftile.weights.weight import factors

# the least and the largest code of each kind of number
_RANGES = {"int4": (-OFFSET, OFFSET - 1), "int8": (-127, 127), "w8": (-128, 127), "mxfp4": (-6, 6), "nvfp4": (-6, 6)}
_E4M3 = (-448, 448)


class Rounding(NamedTuple):
    """How a layer is rounded: a word of `quantise_weight`, its group, the estimator of the gradient, and a format of activations.

    activations: one of `block_floating.MX_ACTIVATIONS`; None where they are what the format of the weight says.
    rule: of the powers of two of mxfp8 and mxfp4, of weights and of activations.
    """

    format: str
    group: int | None
    estimator: str
    activations: str | None = None
    rule: Rule = "floor"

    @property
    def clips(self) -> bool:
        """Whether a weight may lie so far outside that it has no gradient: scales of the others fit the largest number."""
        return self.estimator == "clip" and self.format not in ("fp8", "fp8_tile", "int8") and self.rule == "floor"


class Taken(NamedTuple):
    """The codes of a weight, and the bits of which numbers lie inside the format's, where they are there and somebody asks."""

    codes: QuantisedWeight
    inside: Tensor | None = None


class Held:
    """The codes of one call, which the forward leaves for the backward.

    mask: of a weight that comes as it is; without one its zeros are in place.
    """

    def __init__(self, taken: Taken | None = None, mask: Tensor | None = None) -> None:
        self.taken, self.mask = taken, mask

    def masked(self, w: Tensor) -> Tensor:
        """Returns w with its zeros in place."""
        return w if self.mask is None else torch.where(self.mask, w, 0.0)


def taken_from(
    w: Tensor, rounding: Rounding, scales: Tensor | None = None, flag: Tensor | None = None, mask: Tensor | None = None
) -> Taken:  # fmt: skip
    """Takes the codes of a weight: with `scales` under "lsq", otherwise with those that it has by itself.

    flag: int32 (1,), raised where numbers are not finite; without it that is an error.
    mask: bool (N, K), of what is kept.
    """
    if scales is None:
        return Taken(
            *quantise_trained(
                w, rounding.format, rounding.group, rule=rounding.rule, flag=flag, mask=mask, wants_inside=rounding.clips
            )
        )
    return Taken(with_scales(w if mask is None else torch.where(mask, w, 0.0), rounding.format, scales, flag))


def inside(w: Tensor, weight: QuantisedWeight) -> Tensor:
    """Returns which weights lie among the format's numbers, or at most half a code beyond them: bool (N, K)."""
    least, most = _RANGES.get(weight.format, _E4M3)
    steps = w.detach().float()
    for scales in factors(weight.parts, weight.format, weight.group, weight.shape, torch.float32):
        steps = steps / scales
    return (steps >= least - 0.5) & (steps <= most + 0.5)


def clipped(dw: Tensor, w: Tensor, taken: Taken) -> Tensor:
    """Returns dw with zeros for what lies outside; it may change in place."""
    if taken.inside is None or replaced(dw):
        return dw * inside(w, taken.codes)
    from rooftile.weights.triton import weights

    return weights.keep_inside(dw.contiguous(), taken.inside)
