"""The numbers that a weight's codes stand for, with gradients: what embeddings look up, and what others read as `weight`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rooftile.numerics.block_floating import Rule
from rooftile.qat.rounding.codes import Held, Rounding, Taken, clipped, taken_from
from rooftile.qat.rounding.finite import flag_for
from rooftile.qat.rounding.learned import gradients_of
from rooftile.runtime.operators import below_autograd, define, watched
from rooftile.weights import dequantise


def numbers(
    w: Tensor, rounding: Rounding, taken: Taken | None = None, scales: Tensor | None = None, in_training: bool = False
) -> Tensor:  # fmt: skip
    """Returns the rounded w (N, K) in its dtype, with its gradient and the gradient of learned scales; the rest is as in
    `rooftile.qat.rounding.product.linear`."""
    if torch.compiler.is_compiling():
        found: Tensor = weight_rounded(w, scales, *rounding, in_training)
        return found
    made: Tensor = _Numbers.apply(w, scales, rounding, Held(taken), in_training)
    return made


def run(
    w: Tensor, scales: Tensor | None, format: str, group: int | None, estimator: str, activations: str | None, rule: Rule,
    in_training: bool,
) -> Tensor:  # fmt: skip
    """Computes `weight_rounded`."""
    rounding = Rounding(format, group, estimator, activations, rule)
    return dequantise(taken_from(w, rounding, scales, flag_for(w, in_training)).codes, w.dtype)


def run_backward(
    dw: Tensor, w: Tensor, scales: Tensor | None, format: str, group: int | None, estimator: str, activations: str | None,
    rule: Rule,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes `weight_rounded_backward`: the gradient of w and of learned scales, empty without these."""
    rounding = Rounding(format, group, estimator, activations, rule)
    # no result of an operator is one of its arguments
    return _gradients(dw.clone(), w, scales, rounding, None)


def _gradients(
    dw: Tensor, w: Tensor, scales: Tensor | None, rounding: Rounding, taken: Taken | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    # the gradient is another's: it stays as it is
    if scales is None and not rounding.clips:
        return dw, w.new_empty(0)
    taken = taken or taken_from(w, rounding, scales, flag_for(w, in_training=True))
    if scales is None:
        return clipped(dw.clone(), w, taken), w.new_empty(0)
    dw, dscales = gradients_of(dw, w, taken.codes)
    return dw, dscales.to(scales.dtype)


def _fake(w: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(w, memory_format=torch.contiguous_format)


def _fake_backward(dw: Tensor, w: Tensor, scales: Tensor | None, *others: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(dw), w.new_empty(0) if scales is None else torch.empty_like(scales)


class _Numbers(torch.autograd.Function):
    """The numbers that a weight's codes stand for, with the gradients of the weight and of learned scales."""

    @staticmethod
    def forward(w: Tensor, scales: Tensor | None, rounding: Rounding, held: Held | None, in_training: bool) -> Tensor:
        with below_autograd():
            if held is None or watched(w, scales) or w.is_meta:
                found: Tensor = weight_rounded(w, scales, *rounding, in_training)
                return found
            held.taken = held.taken or taken_from(w, rounding, scales)
            return dequantise(held.taken.codes, w.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        w, scales, ctx.rounding, ctx.held, _ = inputs
        ctx.save_for_backward(w, scales)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dw: Tensor) -> Any:
        w, scales = ctx.saved_tensors
        taken = None if ctx.held is None else ctx.held.taken
        if taken is None or watched(dw, w, scales) or w.is_meta:
            dw, dscales = weight_rounded_backward(dw, w, scales, *ctx.rounding)
        else:
            dw, dscales = _gradients(dw, w, scales, ctx.rounding, taken)
        return dw, None if scales is None else dscales, None, None, None


def _autograd(w: Tensor, scales: Tensor | None, *options: Any) -> Any:
    *rounding, in_training = options
    return _Numbers.apply(w, scales, Rounding(*rounding), None, in_training)


weight_rounded = define(
    "weight_rounded(Tensor w, Tensor? scales, str format, int? group, str estimator, str? activations, str rule, "
    "bool in_training) -> Tensor", run, _fake, _autograd, has_gradient=(0, 1),
)  # fmt: skip
weight_rounded_backward = define(
    "weight_rounded_backward(Tensor dw, Tensor w, Tensor? scales, str format, int? group, str estimator, str? activations, "
    "str rule) -> (Tensor, Tensor)", run_backward, _fake_backward,
)  # fmt: skip
