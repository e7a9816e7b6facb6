"""A linear layer whose forward is the product with its quantised weight, and whose parameter has a gradient.

Rounding has no gradient. With W' and X' the numbers that codes stand for, and dY the gradient of the result:

    dX = dY W'      dW = dY^T X'

"straight" takes them as gradients of what was rounded. "clip" leaves out weights that lie beyond the format's numbers, because
changing them a little changes nothing. Scales count as constants.

Bengio et al., arXiv:1308.3432; Jacob et al., arXiv:1712.05877.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from rooftile.errors import Unsupported
from rooftile.matmul import QuantisedWeight, dequantise, multiply, quantise_weight, weight_format
from rooftile.matmul.packing import OFFSET
from rooftile.matmul.weight import factors
from rooftile.numerics.rows import quantise_rows
from rooftile.operators import below_autograd, define, wants_grad, watched

ESTIMATORS = ("straight", "clip")
# the least and the largest code of each kind of number
_RANGES = {"int4": (-OFFSET, OFFSET - 1), "int8": (-127, 127), "w8": (-128, 127), "mxfp4": (-6, 6), "nvfp4": (-6, 6)}
_E4M3 = (-448, 448)


class Rounding(NamedTuple):
    """How a weight is rounded: a word of `quantise_weight`, its group, and the estimator of the gradient."""

    format: str
    group: int | None
    estimator: str


class Held:
    """The codes of one call, which the forward leaves for the backward."""

    def __init__(self, codes: QuantisedWeight | None = None) -> None:
        self.codes = codes


def linear(x: Tensor, w: Tensor, bias: Tensor | None, rounding: Rounding, codes: QuantisedWeight | None = None) -> Tensor:
    """Returns x (..., K) times the rounded w (N, K), plus the bias (N,), with gradients for all three.

    codes: those of w, where they are known already.
    """
    if torch.compiler.is_compiling():
        found: Tensor = linear_rounded(x, w, bias, *rounding)
        return found
    made: Tensor = _Rounded.apply(x, w, bias, rounding, Held(codes))
    return made


def numbers(w: Tensor, rounding: Rounding, codes: QuantisedWeight | None = None) -> Tensor:
    """Returns the rounded w (N, K) in its dtype, with its gradient."""
    found: Tensor = _Numbers.apply(w, rounding, Held(codes))
    return found


def inside(w: Tensor, weight: QuantisedWeight) -> Tensor:
    """Returns which weights lie among the format's numbers, or at most half a code beyond them: bool (N, K)."""
    least, most = _RANGES.get(weight.format, _E4M3)
    steps = w.detach().float()
    for scales in factors(weight.parts, weight.format, weight.group, weight.shape, torch.float32):
        steps = steps / scales
    return (steps >= least - 0.5) & (steps <= most + 0.5)


def run(x: Tensor, w: Tensor, bias: Tensor | None, format: str, group: int | None, estimator: str) -> Tensor:
    """Computes `linear_rounded`."""
    return _forward(x, quantise_weight(w, format, group=group), bias)


def _forward(x: Tensor, weight: QuantisedWeight, bias: Tensor | None) -> Tensor:
    if x.is_cuda and weight_format(weight.format).activations is None:
        # training has many rows: the weight is unpacked once, and PyTorch's product is the fastest
        return functional.linear(x, dequantise(weight, x.dtype), None if bias is None else bias.to(x.dtype))
    y = multiply(x.reshape(-1, x.shape[-1]), weight, bias, out_dtype=x.dtype, deterministic=False, backend="")
    # no view, as nn.Linear returns none: FSDP puts its hooks on a layer's result, and an operation in place on a view loses them
    made: Tensor = torch.ops.aten._unsafe_view(y, (*x.shape[:-1], weight.shape[0]))
    return made


def run_backward(
    dy: Tensor, x: Tensor, w: Tensor, format: str, group: int | None, estimator: str, needs_x: bool, needs_w: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes `linear_rounded_backward`: dX and dW, empty where they are not needed."""
    return _gradients(dy, x, w, Rounding(format, group, estimator), needs_x, needs_w, None)


def _gradients(
    dy: Tensor, x: Tensor, w: Tensor, rounding: Rounding, needs_x: bool, needs_w: bool, codes: QuantisedWeight | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    weight = codes or quantise_weight(w, rounding.format, group=rounding.group)
    dx, dw = x.new_empty(0), w.new_empty(0)
    if needs_x:
        dx = (dy @ dequantise(weight, dy.dtype)).to(x.dtype)
    if needs_w:
        activations = weight_format(rounding.format).activations
        rows = x if activations is None else quantise_rows(x, activations).dequantise()
        dw = (dy.flatten(0, -2).T @ rows.flatten(0, -2).to(dy.dtype)).to(w.dtype)
        if rounding.estimator == "clip":
            dw = dw * inside(w, weight)
    return dx, dw


def _fake(x: Tensor, w: Tensor, *others: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[0]))


def _fake_backward(dy: Tensor, x: Tensor, w: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    needs_x, needs_w = others[-2:]
    return x.new_empty(x.shape if needs_x else 0), w.new_empty(w.shape if needs_w else 0)


class _Rounded(torch.autograd.Function):
    """The layer. Without `held`, as inside torch.compile, the backward takes the codes again."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, bias: Tensor | None, rounding: Rounding, held: Held | None) -> Tensor:
        with below_autograd():
            if held is None or watched(x, w, bias):
                found: Tensor = linear_rounded(x, w, bias, *rounding)
                return found
            held.codes = held.codes or quantise_weight(w, rounding.format, group=rounding.group)
            return _forward(x, held.codes, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, w, bias, ctx.rounding, ctx.held = inputs
        ctx.bias = None if bias is None else bias.dtype
        ctx.save_for_backward(x, w)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, w = ctx.saved_tensors
        needs_x, needs_w, needs_bias, *_ = ctx.needs_input_grad
        codes = None if ctx.held is None else ctx.held.codes
        if codes is None or watched(dy, x, w):
            dx, dw = linear_rounded_backward(dy, x, w, *ctx.rounding, needs_x, needs_w)
        else:
            dx, dw = _gradients(dy, x, w, ctx.rounding, needs_x, needs_w, codes)
        dbias = None
        if needs_bias:
            dbias = dy.flatten(0, -2).sum(0, dtype=torch.promote_types(dy.dtype, torch.float32)).to(ctx.bias)
        return dx if needs_x else None, dw if needs_w else None, dbias, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, *others: Any) -> tuple[Tensor, int]:
        if any(dim is not None for dim in in_dims[1:3]):
            raise Unsupported("torch.vmap maps the weights of a prepared layer; map its inputs alone, or restore the model first")
        return _Rounded.apply(x.movedim(in_dims[0], 0), *others), 0


def _autograd(x: Tensor, w: Tensor, bias: Tensor | None, format: str, group: int | None, estimator: str) -> Tensor:
    if wants_grad(x, w, bias):
        found: Tensor = _Rounded.apply(x, w, bias, Rounding(format, group, estimator), None)
        return found
    with below_autograd():
        return linear_rounded(x, w, bias, format, group, estimator)


class _Numbers(torch.autograd.Function):
    """The numbers that a weight's codes stand for, with the weight's gradient."""

    @staticmethod
    def forward(w: Tensor, rounding: Rounding, held: Held) -> Tensor:
        held.codes = held.codes or quantise_weight(w, rounding.format, group=rounding.group)
        return dequantise(held.codes, w.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        w, ctx.rounding, ctx.held = inputs
        ctx.save_for_backward(w)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dw: Tensor) -> Any:
        (w,) = ctx.saved_tensors
        return dw * inside(w, ctx.held.codes) if ctx.rounding.estimator == "clip" else dw, None, None


linear_rounded = define(
    "linear_rounded(Tensor x, Tensor w, Tensor? bias, str format, int? group, str estimator) -> Tensor", run, _fake, _autograd
)
linear_rounded_backward = define(
    "linear_rounded_backward(Tensor dy, Tensor x, Tensor w, str format, int? group, str estimator, bool needs_x, bool needs_w) "
    "-> (Tensor, Tensor)", run_backward, _fake_backward,
)  # fmt: skip
