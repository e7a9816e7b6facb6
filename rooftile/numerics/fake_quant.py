"""Fake quantisation: the forward rounds, and the backward ignores the rounding.

A network that will run quantised is trained with rounded tensors. Rounding has no gradient. The straight-through estimator
uses the gradient of the identity, and zero where a number saturated.

Bengio et al., arXiv:1308.3432; Jacob et al., arXiv:1712.05877.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.numerics.formats import encode, format_of
from rooftile.numerics.scaling import Granularity, Scaled, quantise
from rooftile.runtime.words import answers_foreign_words


@answers_foreign_words
def fake_quantise(
    x: Tensor, format: str = "int8", *, granularity: Granularity = "tensor", scales: Tensor | None = None
) -> Tensor:
    """Returns `quantise(x).dequantise()` in the dtype of x, with a straight-through gradient.

    Args:
        x: (..., T, H, D), float.
        format: fp8_e4m3, fp8_e5m2, int8 or int4.
        granularity: as in `quantise`.
        scales: given scales, in the shape that `quantise` returns; None computes them from the largest absolute value of each
            part, so that nothing saturates. With given scales, numbers beyond the format's largest saturate and get no
            gradient.

    Example:
        >>> w = torch.randn(64, 1, 64, requires_grad=True)
        >>> fake_quantise(w, "int4", granularity="row").sum().backward()
        >>> w.grad.unique()
        tensor([1.])
    """
    if scales is None:
        rounded = quantise(x.detach(), format, granularity=granularity).dequantise(x.dtype)
        inside = torch.ones_like(x, dtype=torch.bool)
    else:
        kind = format_of(format)
        steps = x.detach().float() * Scaled(x, 1.0 / scales, kind, granularity).row_scales()
        rounded = Scaled(encode(steps, kind), scales, kind, granularity).dequantise(x.dtype)
        inside = steps.abs() <= kind.largest
    through: Tensor = _StraightThrough.apply(x, rounded, inside)
    return through


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Tensor, inside: Tensor) -> Tensor:
        ctx.save_for_backward(inside)
        return rounded

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (inside,) = ctx.saved_tensors
        return dy * inside, None, None
