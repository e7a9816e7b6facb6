"""A linear layer whose forward is the product with its quantised weight, and whose parameter has a gradient.

Rounding has no gradient. With W' and X' the numbers that codes stand for, and dY the gradient of the result:

    dX = dY W'      dW = dY^T X'

"straight" takes them as gradients of what was rounded. "clip" leaves out numbers that lie beyond the format's, because changing
them a little changes nothing. "lsq" has a gradient for scales, too (`learned`); otherwise scales count as constants.

Bengio et al., arXiv:1308.3432; Jacob et al., arXiv:1712.05877.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from rooftile.errors import Unsupported
from rooftile.numerics.block_floating import BLOCK_FORMATS, MX_ACTIVATIONS, SHARED, Rule, quantise_blocks, rounded_activations
from rooftile.numerics.quantised_rows import rounded_rows
from rooftile.qat.rounding.codes import Held, Rounding, Taken, clipped, taken_from
from rooftile.qat.rounding.finite import flag_for
from rooftile.qat.rounding.learned import gradients_of
from rooftile.qat.rounding.slow import COMPILED, backend_for, warn_if_slow
from rooftile.runtime.operators import below_autograd, define, watched
from rooftile.weights import QuantisedWeight, dequantise, multiply, weight_format

ESTIMATORS = ("straight", "clip", "lsq")


def linear(
    x: Tensor, w: Tensor, bias: Tensor | None, rounding: Rounding, taken: Taken | None = None,
    scales: Tensor | None = None, in_training: bool = False, mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns x (..., K) times the rounded w (N, K), plus the bias (N,), with gradients for all of them.

    taken: the codes of w, where they are known already.
    scales: learned ones (N, K / group), fp32.
    mask: of a w without its zeros in place, whose codes are known and tell all that its gradient needs.
    in_training: whether an error about w may come later (`finite`), where compiled code takes the codes.
    """
    if torch.compiler.is_compiling():
        found: Tensor = linear_rounded(x, w, bias, scales, *rounding, in_training)
        return found
    made: Tensor = _Rounded.apply(x, w, bias, scales, rounding, Held(taken, mask), in_training)
    return made


def _inside_blocks(x: Tensor, activations: str, rule: Rule) -> Tensor:
    """Returns which activations lie among the format's numbers, or at most half a code beyond them."""
    name = MX_ACTIVATIONS[activations]
    exponents = quantise_blocks(x, name, rule=rule).exponents
    power = torch.exp2(exponents.float() - 127).repeat_interleave(SHARED, -1)
    return x.float().abs() <= power * (BLOCK_FORMATS[name].largest + 0.5)


def run(
    x: Tensor, w: Tensor, bias: Tensor | None, scales: Tensor | None, format: str, group: int | None, estimator: str,
    activations: str | None, rule: Rule, in_training: bool,
) -> Tensor:  # fmt: skip
    """Computes `linear_rounded`."""
    warn_if_slow(format, x.device, COMPILED)
    rounding = Rounding(format, group, estimator, activations, rule)
    return _forward(x, taken_from(w, rounding, scales, flag_for(w, in_training)).codes, bias, rounding)


def _forward(x: Tensor, weight: QuantisedWeight, bias: Tensor | None, rounding: Rounding) -> Tensor:
    x = rounded_activations(x, rounding.activations, rounding.rule)
    if x.is_cuda and weight_format(weight.format).activations is None:
        # training has many rows: the weight is unpacked once, and PyTorch's product is the fastest
        return functional.linear(x, dequantise(weight, x.dtype), None if bias is None else bias.to(x.dtype))
    backend = backend_for(weight.format, x.device)
    y = multiply(x.reshape(-1, x.shape[-1]), weight, bias, out_dtype=x.dtype, deterministic=False, backend=backend)
    # no view, as nn.Linear returns none: FSDP puts its hooks on a layer's result, and an operation in place on a view loses them
    made: Tensor = torch.ops.aten._unsafe_view(y, (*x.shape[:-1], weight.shape[0]))
    return made


def run_backward(
    dy: Tensor, x: Tensor, w: Tensor, scales: Tensor | None, format: str, group: int | None, estimator: str,
    activations: str | None, rule: Rule, needs_x: bool, needs_w: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Computes `linear_rounded_backward`: dX, dW and the gradient of learned scales, empty where they are not needed."""
    rounding = Rounding(format, group, estimator, activations, rule)
    return _gradients(dy, x, w, scales, rounding, needs_x, needs_w, None)


def _gradients(
    dy: Tensor, x: Tensor, w: Tensor, scales: Tensor | None, rounding: Rounding, needs_x: bool, needs_w: bool,
    taken: Taken | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    # the forward has looked at w, or has raised a flag
    weight, bits = taken or taken_from(w, rounding, scales, flag_for(w, in_training=True))
    dx, dw, dscales = x.new_empty(0), w.new_empty(0), w.new_empty(0)
    if needs_x:
        dx = (dy @ dequantise(weight, dy.dtype)).to(x.dtype)
        if rounding.estimator == "clip" and rounding.activations is not None:
            dx = dx * _inside_blocks(x, rounding.activations, rounding.rule)
    if needs_w:
        activations = weight_format(rounding.format).activations
        rows = rounded_activations(x, rounding.activations, rounding.rule)
        rows = rows if activations is None else rounded_rows(rows, activations)
        dw = (dy.flatten(0, -2).T @ rows.flatten(0, -2).to(dy.dtype)).to(w.dtype)
        if scales is not None:
            dw, dscales = gradients_of(dw, w, weight)
            dscales = dscales.to(scales.dtype)
        elif rounding.clips:
            dw = clipped(dw, w, Taken(weight, bits))
    return dx, dw, dscales


def _fake(x: Tensor, w: Tensor, *others: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[0]))


def _fake_backward(dy: Tensor, x: Tensor, w: Tensor, scales: Tensor | None, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    needs_x, needs_w = others[-2:]
    dscales = w.new_empty(0) if scales is None or not needs_w else torch.empty_like(scales)
    return x.new_empty(x.shape if needs_x else 0), w.new_empty(w.shape if needs_w else 0), dscales


class _Rounded(torch.autograd.Function):
    """The layer. Without `held`, as inside torch.compile, the backward takes the codes again."""

    @staticmethod
    def forward(
        x: Tensor, w: Tensor, bias: Tensor | None, scales: Tensor | None, rounding: Rounding, held: Held | None,
        in_training: bool,
    ) -> Tensor:  # fmt: skip
        with below_autograd():
            if held is None or watched(x, w, bias, scales) or x.is_meta:
                found: Tensor = linear_rounded(x, w if held is None else held.masked(w), bias, scales, *rounding, in_training)
                return found
            held.taken = held.taken or taken_from(w, rounding, scales)
            return _forward(x, held.taken.codes, bias, rounding)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, w, bias, scales, ctx.rounding, ctx.held, _ = inputs
        ctx.bias = None if bias is None else bias.dtype
        ctx.save_for_backward(x, w, scales)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, w, scales = ctx.saved_tensors
        needs_x, needs_w, needs_bias, needs_scales, *_ = ctx.needs_input_grad
        either = needs_w or needs_scales
        taken = None if ctx.held is None else ctx.held.taken
        if taken is None or watched(dy, x, w, scales) or x.is_meta:
            w = w if ctx.held is None else ctx.held.masked(w)
            dx, dw, dscales = linear_rounded_backward(dy, x, w, scales, *ctx.rounding, needs_x, either)
        else:
            dx, dw, dscales = _gradients(dy, x, w, scales, ctx.rounding, needs_x, either, taken)
        dbias = None
        if needs_bias:
            dbias = dy.flatten(0, -2).sum(0, dtype=torch.promote_types(dy.dtype, torch.float32)).to(ctx.bias)
        wanted = (needs_x, dx), (needs_w, dw), (needs_bias, dbias), (needs_scales, dscales)
        return *(found if needed else None for needed, found in wanted), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, *others: Any) -> tuple[Tensor, int]:
        if any(dim is not None for dim in in_dims[1:4]):
            raise Unsupported("torch.vmap maps the weights of a prepared layer; map its inputs alone, or restore the model first")
        return _Rounded.apply(x.movedim(in_dims[0], 0), *others), 0


def _autograd(x: Tensor, w: Tensor, bias: Tensor | None, scales: Tensor | None, *options: Any) -> Any:
    *rounding, in_training = options
    return _Rounded.apply(x, w, bias, scales, Rounding(*rounding), None, in_training)


linear_rounded = define(
    "linear_rounded(Tensor x, Tensor w, Tensor? bias, Tensor? scales, str format, int? group, str estimator, str? activations, "
    "str rule, bool in_training) -> Tensor", run, _fake, _autograd, has_gradient=(0, 1, 2, 3),
)  # fmt: skip
linear_rounded_backward = define(
    "linear_rounded_backward(Tensor dy, Tensor x, Tensor w, Tensor? scales, str format, int? group, str estimator, "
    "str? activations, str rule, bool needs_x, bool needs_w) -> (Tensor, Tensor, Tensor)", run_backward, _fake_backward,
)  # fmt: skip
