"""Norms with gradients, for any leading shape: `rms_norm`, `layer_norm`, and both of a residual stream with something added.

Forward they are `normalise` and `add_norm`, so a model that is trained with them and one that is served say the same. The
gradient of the weights is summed in fp32, over parts of rows in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.fused import kernels
from rooftile.fused.differentiable import Operation
from rooftile.fused.norm import Weights, has_whole_accesses, normalise, normalised_as_defined
from rooftile.fused.where import check_floats, checked, kernels_run_on, quantised, quantised_words
from rooftile.numerics.quantised_rows import QuantisedRows, as_rows, fake_rows
from rooftile.runtime.operators import call, define, needs_steps
from rooftile.runtime.words import answers_with

# the longest row of the kernels
LONGEST = 1 << 16


@answers_with(quantised_words("rms_norm"))
def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, plus_one: bool = False) -> Tensor:
    """RMS norm over the last axis: x / sqrt(mean x² + eps) * weight, in fp32, in the dtype of x.

    Args:
        x: (..., size), any strides.
        weight: (size,).
        eps: added to the mean square.
        plus_one: whether weight is a distance from one, as in Gemma; then it rounds once, at the end.

    Example:
        >>> rms_norm(torch.randn(2, 5, 64), torch.ones(64)).shape
        torch.Size([2, 5, 64])
    """
    return _normalised(x, weight, None, eps, plus_one)


@answers_with(quantised_words("layer_norm"))
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """Layer norm over the last axis: (x - mean) / sqrt(variance + eps) * weight + bias.

    Example:
        >>> layer_norm(torch.randn(5, 64), torch.ones(64), torch.zeros(64)).mean(-1).abs().max() < 1e-5
        tensor(True)
    """
    return _normalised(x, weight, bias, eps, False)


@answers_with(quantised_words("add_rms_norm"))
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, plus_one: bool = False
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Adds x to a residual stream; returns the RMS norm of the sum, and the sum, rounded once. Both are new tensors.

    Example:
        >>> y, residual = add_rms_norm(*torch.randn(2, 5, 64), torch.ones(64))
    """
    return _added(x, residual, weight, None, eps, plus_one)


@answers_with(quantised_words("add_layer_norm"))
def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    """Adds x to a residual stream; returns the layer norm of the sum, and the sum, rounded once. Both are new tensors.

    Example:
        >>> y, residual = add_layer_norm(*torch.randn(2, 5, 64), torch.ones(64), torch.zeros(64))
    """
    return _added(x, residual, weight, bias, eps, False)


def _normalised(x: Tensor, w: Tensor, b: Tensor | None, eps: float, plus_one: bool) -> Tensor:
    _check(x, w, b)
    (y,) = _NORM(as_rows(x), w, b, float(eps), plus_one)
    return y.view(x.shape)


def normalised_quantised(x: Tensor, w: Tensor, b: Tensor | None, eps: float, plus_one: bool, format: str) -> QuantisedRows:
    """Computes `rms_norm`, or `layer_norm` with b, in a format, "fp8" or "int8"."""
    _check(x, w, b)
    eps, rows = float(eps), as_rows(x)
    if needs_steps(x, w, b) or not _kernels_run_on(rows):
        return quantised(_normalised(x, w, b, eps, plus_one), format)
    norm = Weights(w.contiguous(), None if b is None else b.contiguous(), eps, plus_one)
    found: QuantisedRows = normalise(rows, norm, checked(format))
    return _shaped(found.codes, found.scales, x, format)


def _shaped(codes: Tensor, scales: Tensor, x: Tensor, out: str) -> QuantisedRows:
    return QuantisedRows(codes.view(x.shape), scales.view(*x.shape[:-1], 1), out, x.dtype)


def _added(x: Tensor, stream: Tensor, w: Tensor, b: Tensor | None, eps: float, plus_one: bool) -> tuple[Tensor, Tensor]:
    _check_added(x, stream, w, b)
    y, total = _SUM_NORM(as_rows(x), as_rows(stream), w, b, float(eps), plus_one)
    return y.view(x.shape), total.view(x.shape)


def added_quantised(
    x: Tensor, stream: Tensor, w: Tensor, b: Tensor | None, eps: float, plus_one: bool, format: str
) -> tuple[QuantisedRows, Tensor]:
    """Computes `add_rms_norm`, or `add_layer_norm` with b, the norm in a format, "fp8" or "int8"."""
    if needs_steps(x, stream, w, b):
        y, total = _added(x, stream, w, b, eps, plus_one)
        return quantised(y, format), total
    _check_added(x, stream, w, b)
    rows = (as_rows(each) for each in (x, stream))
    found = call(_SUM_NORM_QUANTISED, _sum_quantised, *rows, w, b, float(eps), plus_one, checked(format))
    codes, scales, total = found
    return _shaped(codes, scales, x, format), total.view(x.shape)


def _check_added(x: Tensor, stream: Tensor, w: Tensor, b: Tensor | None) -> None:
    _check(x, w, b)
    check_floats(x=x, residual=stream)
    if x.shape != stream.shape or x.dtype != stream.dtype:
        raise InvalidInput(f"x is {x.dtype} {tuple(x.shape)} and residual {stream.dtype} {tuple(stream.shape)}; must be alike")


def _sum_quantised(
    x: Tensor, stream: Tensor, w: Tensor, b: Tensor | None, eps: float, plus_one: bool, out: str
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if not (_kernels_run_on(x) and has_whole_accesses(x)):
        y, total = _sum_run(x, stream, w, b, eps, plus_one)
        rows = quantised(y, out)
        return rows.codes, rows.scales, total
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    norm = Weights(w.contiguous(), None if b is None else b.contiguous(), eps, plus_one)
    codes, scales = kernels.norm.quantised(x, stream.contiguous(), norm, None, out, None, total)
    return codes, scales, total


def _check(x: Tensor, w: Tensor, b: Tensor | None) -> None:
    check_floats(x=x, weight=w, **({} if b is None else {"bias": b}))
    for name, each in (("weight", w), ("bias", b)):
        if each is not None and tuple(each.shape) != (x.shape[-1],):
            raise InvalidInput(f"{name} is {tuple(each.shape)} and x {tuple(x.shape)}; must be ({x.shape[-1]},)")


def _defined(x: Tensor, w: Tensor, b: Tensor | None, eps: float, plus_one: bool) -> tuple[Tensor]:
    if b is not None:
        wide = _wide(x)
        return (torch.nn.functional.layer_norm(wide, w.shape, w.to(wide.dtype), b.to(wide.dtype), eps).to(x.dtype),)
    return (_rms(x, w, eps, plus_one),)


def _rms(x: Tensor, w: Tensor, eps: float, plus_one: bool) -> Tensor:
    if x.dtype == torch.float64:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (1.0 + w if plus_one else w)
    return normalised_as_defined(x, Weights(w, None, eps, plus_one)).to(x.dtype)


def _run(x: Tensor, w: Tensor, b: Tensor | None, eps: float, plus_one: bool) -> tuple[Tensor]:
    if _kernels_run_on(x):
        return (kernels.norm.normalise(x, Weights(w.contiguous(), None if b is None else b.contiguous(), eps, plus_one)),)
    return (_defined(x, w, b, eps, plus_one)[0].contiguous(),)


def _gradients(
    dy: Tensor, y: None, x: Tensor, w: Tensor, b: Tensor | None, eps: float, plus_one: bool
) -> tuple[Tensor, ...]:  # fmt: skip
    """dx = r (g - x̂ mean(g x̂)), for a layer norm less mean(g); with g = dy w, x̂ = r x, and r = 1 / sqrt(mean x² + eps)."""
    wide, dy = _wide(x), _wide(dy)
    if b is not None:
        wide = wide - wide.mean(-1, keepdim=True)
    r = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    unit = wide * r
    g = dy * (1.0 + _wide(w) if plus_one else _wide(w))
    dx = g - unit * (g * unit).mean(-1, keepdim=True)
    if b is not None:
        dx = dx - g.mean(-1, keepdim=True)
    db = dy.new_zeros(0) if b is None else dy.sum(0).to(b.dtype)
    return (dx * r).to(x.dtype), (dy * unit).sum(0).to(w.dtype), db


def _run_gradients(
    dy: Tensor, y: None, x: Tensor, w: Tensor, b: Tensor | None, eps: float, plus_one: bool
) -> tuple[Tensor, ...]:  # fmt: skip
    if _kernels_run_on(x):
        return kernels.norm_gradients.gradients(dy, None, x, w, b, eps, plus_one)
    return _gradients(dy, None, x, w, b, eps, plus_one)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _kernels_run_on(x: Tensor) -> bool:
    return kernels_run_on(x) and 0 < x.shape[-1] <= LONGEST


def _fake_gradients(dy: Tensor, y: None, x: Tensor, w: Tensor, b: Tensor | None, *others: Any) -> tuple[Tensor, ...]:
    wide = torch.promote_types(dy.dtype, torch.float32)
    return (
        x.new_empty(x.shape),
        w.new_empty(w.shape),
        dy.new_empty(0, dtype=wide) if b is None else b.new_empty(b.shape),
    )


def _sum_defined(x: Tensor, stream: Tensor, *norm: Any) -> tuple[Tensor, Tensor]:
    total = stream + x
    return _defined(total, *norm)[0], total


def _sum_run(x: Tensor, stream: Tensor, *norm: Any) -> tuple[Tensor, Tensor]:
    if _kernels_run_on(x):
        w, b, eps, plus_one = norm
        weights = Weights(w.contiguous(), None if b is None else b.contiguous(), eps, plus_one)
        return kernels.norm.sum_norm(x, stream.contiguous(), weights)
    total = (stream + x).contiguous()
    return _run(total, *norm)[0], total


def _sum_gradients(dy: Tensor, dtotal: Tensor, y: None, total: Tensor, x: None, stream: None, *norm: Any) -> tuple[Tensor, ...]:
    dx, dw, db = _gradients(dy, None, total, *norm)
    return dx + dtotal, dw, db


def _run_sum_gradients(
    dy: Tensor, dtotal: Tensor, y: None, total: Tensor, x: None, stream: None, *norm: Any
) -> tuple[Tensor, ...]:
    if _kernels_run_on(total):
        return kernels.norm_gradients.gradients(dy, dtotal, total, *norm)
    return _sum_gradients(dy, dtotal, None, total, None, None, *norm)


_NORM = Operation(
    "norm", "Tensor x, Tensor weight, Tensor? bias, float eps, bool plus_one", results=1, run=_run, defined=_defined,
    run_gradients=_run_gradients, gradients=_gradients, fake=lambda x, *_: (x.new_empty(x.shape),),
    fake_gradients=_fake_gradients, given_to={0: 0, 1: 1, 2: 2}, unused=frozenset((0,)),
)  # fmt: skip
_SUM_NORM = Operation(
    "sum_norm", "Tensor x, Tensor stream, Tensor weight, Tensor? bias, float eps, bool plus_one", results=2, run=_sum_run,
    defined=_sum_defined, run_gradients=_run_sum_gradients, gradients=_sum_gradients,
    fake=lambda x, *_: (x.new_empty(x.shape), x.new_empty(x.shape)),
    fake_gradients=lambda dy, dtotal, y, total, x, stream, w, b, *_: _fake_gradients(dy, None, total, w, b),
    given_to={0: 0, 1: 0, 2: 1, 3: 2}, differentiable=2, unused=frozenset((0, 2, 3)),
)  # fmt: skip
_SUM_NORM_QUANTISED = define(
    "sum_norm_quantised(Tensor x, Tensor stream, Tensor weight, Tensor? bias, float eps, bool plus_one, str out) "
    "-> (Tensor, Tensor, Tensor)",
    _sum_quantised,
    lambda x, *arguments: (*fake_rows(x, arguments[-1]), x.new_empty(x.shape)),
)
