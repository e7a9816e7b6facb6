"""`softmax(scale * x)` over the last axis, with a gradient from the result alone."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.fused import kernels
from rooftile.fused.differentiable import Operation
from rooftile.fused.where import check_floats, kernels_run_on
from rooftile.numerics.quantised_rows import as_rows
from rooftile.runtime.words import answers_foreign_words


@answers_foreign_words
def softmax(x: Tensor, scale: float = 1.0) -> Tensor:
    """softmax(scale * x) over the last axis, in fp32, rounded once; a row of -inf is NaN, as in PyTorch.

    Args:
        x: (..., size), any strides.
        scale: multiplies x.

    Example:
        >>> softmax(torch.zeros(2, 4)).unique()
        tensor([0.2500])
    """
    check_floats(x=x)
    (y,) = _SOFTMAX(as_rows(x), float(scale))
    return y.view(x.shape)


def _defined(x: Tensor, scale: float) -> tuple[Tensor]:
    wide = x if x.dtype == torch.float64 else x.float()
    return ((wide * scale).softmax(-1).to(x.dtype),)


def _run(x: Tensor, scale: float) -> tuple[Tensor]:
    if _kernels_run_on(x):
        return (kernels.softmax.forward(x, scale),)
    return (_defined(x, scale)[0].contiguous(),)


def _gradients(dy: Tensor, y: Tensor, _: None, scale: float) -> tuple[Tensor]:
    """dx = scale y (dy - sum(dy y))."""
    wide = torch.promote_types(y.dtype, torch.float32)
    dy, p = dy.to(wide), y.to(wide)
    return ((scale * p * (dy - (dy * p).sum(-1, keepdim=True))).to(y.dtype),)


def _run_gradients(dy: Tensor, y: Tensor, _: None, scale: float) -> tuple[Tensor]:
    if _kernels_run_on(y):
        return (kernels.softmax.gradient(dy, y, scale),)
    return _gradients(dy, y, None, scale)


def _kernels_run_on(x: Tensor) -> bool:
    return kernels_run_on(x) and x.shape[-1] > 0


_SOFTMAX = Operation(
    "softmax", "Tensor x, float scale", results=1, run=_run, defined=_defined, run_gradients=_run_gradients,
    gradients=_gradients, fake=lambda x, _: (x.new_empty(x.shape),),
    fake_gradients=lambda dy, y, *_: (y.new_empty(y.shape),), given_to={0: 0}, unused=frozenset((1,)),
)  # fmt: skip
