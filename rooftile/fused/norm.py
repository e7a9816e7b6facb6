"""Layer norm and RMS norm of rows, and of a residual stream after an addition to it.

They round where Transformers rounds, so that a checkpoint in bfloat16 gives the same text; exceptions are named.

Zhang and Sennrich, RMSNorm, arXiv:1910.07467; Ba et al., Layer Normalization, arXiv:1607.06450.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from rooftile.errors import InvalidInput
from rooftile.fused import kernels
from rooftile.fused.where import checked, kernels_run_on
from rooftile.numerics.quantised_rows import QuantisedRows, fake_rows, quantise_rows
from rooftile.runtime.operators import call, define, needs_steps


class NormWeights(Protocol):
    """The weights of a norm, and its kind: a layer norm has a bias, an RMS norm does not."""

    @property
    def weight(self) -> Tensor:
        """(size,)."""
        ...

    @property
    def bias(self) -> Tensor | None:
        """(size,), of a layer norm."""
        ...

    @property
    def eps(self) -> float:
        """Added to the variance."""
        ...

    @property
    def plus_one(self) -> bool:
        """Whether an RMS norm's weights are distances from one, as Gemma's are; then it rounds once, at the end."""
        ...

    @property
    def rounds_once(self) -> bool:
        """Whether an RMS norm rounds only after the product with its weights, as OLMo's does, or before it too."""
        ...


class Weights(NamedTuple):
    """A `NormWeights` of plain values, as it crosses an operator's schema."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    plus_one: bool
    rounds_once: bool = False


def normalise(x: Tensor, norm: NormWeights, out: str | None = None, scale: Tensor | None = None) -> Any:
    """x (..., size), contiguous, normalised over its last axis.

    Args:
        x: (total, size) or (total, heads, size), in the dtype of the weights, any strides.
        norm: `rooftile.models.projection.Norm`, or `Weights`.
        out: "fp8" or "int8" for x (total, size): the rounded result is quantised in the same kernel, to `QuantisedRows` with
            the bits of `quantise_rows`.
        scale: the one scale of all rows in FP8, a tensor of one number; None finds one per row.

    Example:
        >>> normalise(torch.randn(5, 64), Weights(torch.ones(64), None, 1e-6, False)).shape
        torch.Size([5, 64])
    """
    weight, bias = norm.weight, norm.bias
    if out is not None:
        return _quantised(x, None, norm, None, checked(out), scale)
    if needs_steps(x, weight, bias):
        return normalised_as_defined(x, norm)
    found: Tensor = call(_NORMALISE, _normalise, x, weight, bias, norm.eps, norm.plus_one, norm.rounds_once)
    return found


def add_norm(
    x: Tensor, residual: Tensor, norm: NormWeights, post: NormWeights | None = None, out: str | None = None,
    scale: Tensor | None = None,
) -> tuple[Any, Tensor]:  # fmt: skip
    """The residual stream with x added to it: normalised, and as it is. x is normalised by `post` first, if there is one.

    Without a derivative or a transform, a contiguous residual is updated in place: use the returned stream afterwards, not
    `residual`.

    Args:
        x: (total, size), in the dtype of the weights.
        residual: (total, size), the stream, in the dtype of x or in fp32.
        norm: of the sum.
        post: of x alone, before it is added.
        out, scale: quantise the norm, as in `normalise`.

    Returns:
        the normalised stream and the stream, both (total, size).
    """
    first = norm if post is None else post
    if out is not None:
        residual = residual.contiguous()
        return _quantised(x, residual, norm, post, checked(out), scale), residual
    if needs_steps(x, residual, norm.weight, norm.bias, first.weight, first.bias):
        return added_as_defined(x, residual, norm, post)
    residual = residual.contiguous()
    found = call(_ADD_NORM, _add_norm, x, residual, *_fields(norm), *_fields(post))
    return found, residual


def _fields(norm: NormWeights | None) -> tuple[Any, ...]:
    """A norm as it crosses an operator's schema."""
    return (
        (None, None, 0.0, False, False) if norm is None else (norm.weight, norm.bias, norm.eps, norm.plus_one, norm.rounds_once)
    )


def _quantised(
    x: Tensor, residual: Tensor | None, norm: NormWeights, post: NormWeights | None, out: str, scale: Tensor | None
) -> QuantisedRows:  # fmt: skip
    """The quantised norm of x (total, size), or of a residual, which x is added to."""
    first = norm if post is None else post
    if needs_steps(x, residual, norm.weight, norm.bias, first.weight, first.bias):
        raise InvalidInput(
            f"out is {out!r} and a gradient or a transform is wanted, which rounding has none of; leave out away, and quantise "
            "the result"
        )
    found: Any
    if residual is None:
        found = call(_NORMALISE_QUANTISED, _normalise_quantised, x, *_fields(norm), out, scale)
    else:
        fields = (*_fields(norm), *_fields(post))
        found = call(_ADD_NORM_QUANTISED, _add_norm_quantised, x, residual, *fields, out, scale)
    codes, scales = found
    return QuantisedRows(codes, scales, out, x.dtype)


def normalised_as_defined(
    x: Tensor, norm: NormWeights, dtype: torch.dtype | None = None, *, mean: Tensor | None = None
) -> Tensor:
    """`normalise` in plain operations, in a dtype or in the dtype of x.

    An RMS norm takes the mean of the squares (..., 1), in fp32, where x is a part of the numbers that are normalised.
    """
    dtype = x.dtype if dtype is None else dtype
    if norm.bias is not None:
        weight, bias = norm.weight.to(x.dtype), norm.bias.to(x.dtype)
        return functional.layer_norm(x, weight.shape, weight, bias, norm.eps).to(dtype)
    wide = x.float()
    wide = wide * torch.rsqrt((wide.pow(2).mean(-1, keepdim=True) if mean is None else mean) + norm.eps)
    if norm.plus_one:
        # Gemma multiplies before it rounds
        return (wide * (1.0 + norm.weight.float())).to(dtype)
    if norm.rounds_once:
        return (norm.weight * wide).to(dtype)
    return norm.weight * wide.to(dtype)


def added_as_defined(x: Tensor, residual: Tensor, norm: NormWeights, post: NormWeights | None = None) -> tuple[Tensor, Tensor]:
    """`add_norm` in plain operations; the residual stays as it was."""
    stream = residual + (x if post is None else normalised_as_defined(x, post))
    return normalised_as_defined(stream, norm, x.dtype), stream


def _normalise(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, plus_one: bool, rounds_once: bool) -> Tensor:
    norm = Weights(weight, bias, eps, plus_one, rounds_once)
    if kernels_run_on(x):
        return kernels.norm.normalise(x, norm)
    return normalised_as_defined(x, norm).contiguous()


def _add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, plus_one: bool, rounds_once: bool,
    post_weight: Tensor | None, post_bias: Tensor | None, post_eps: float, post_plus_one: bool,
    post_rounds_once: bool,
) -> Tensor:  # fmt: skip
    norm = Weights(weight, bias, eps, plus_one, rounds_once)
    post = None
    if post_weight is not None:
        post = Weights(post_weight, post_bias, post_eps, post_plus_one, post_rounds_once)
    if kernels_run_on(x) and residual.is_contiguous():
        return kernels.norm.add_norm(x, residual, norm, post)
    residual += x if post is None else normalised_as_defined(x, post)
    return normalised_as_defined(residual, norm, x.dtype).contiguous()


def _normalise_quantised(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    *fields, out, scale = arguments
    if kernels_run_on(x) and has_whole_accesses(x):
        return kernels.norm.quantised(x, None, Weights(*fields), None, out, scale)
    return _rows(_normalise(x, *fields), out, scale)


def _add_norm_quantised(x: Tensor, residual: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    *fields, out, scale = arguments
    if kernels_run_on(x) and has_whole_accesses(x) and residual.is_contiguous():
        post = None if fields[5] is None else Weights(*fields[5:])
        return kernels.norm.quantised(x, residual, Weights(*fields[:5]), post, out, scale)
    return _rows(_add_norm(x, residual, *fields), out, scale)


def _rows(y: Tensor, out: str, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    rows = quantise_rows(y, out, scale=scale)
    return rows.codes, rows.scales


def _fake_rows(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    return fake_rows(x, arguments[-2])


def has_whole_accesses(x: Tensor) -> bool:
    """Whether rows are whole accesses of 16 bytes: of others the compiler might take sums in another order than without codes."""
    return x.shape[-1] * x.element_size() % 16 == 0


def _fake(x: Tensor, *others: object) -> Tensor:
    return x.new_empty(x.shape)


_NORMALISE = define(
    "normalise(Tensor x, Tensor weight, Tensor? bias, float eps, bool plus_one, bool rounds_once) -> Tensor",
    _normalise,
    _fake,
)
_NORMALISE_QUANTISED = define(
    "normalise_quantised(Tensor x, Tensor weight, Tensor? bias, float eps, bool plus_one, bool rounds_once, str out, "
    "Tensor? scale) -> (Tensor, Tensor)",
    _normalise_quantised,
    _fake_rows,
)
_ADD_NORM = define(
    "add_norm(Tensor x, Tensor(a!) residual, Tensor weight, Tensor? bias, float eps, bool plus_one, "
    "bool rounds_once, Tensor? post_weight, Tensor? post_bias, float post_eps, bool post_plus_one, "
    "bool post_rounds_once) -> Tensor",
    _add_norm,
    _fake,
)
_ADD_NORM_QUANTISED = define(
    "add_norm_quantised(Tensor x, Tensor(a!) residual, Tensor weight, Tensor? bias, float eps, bool plus_one, "
    "bool rounds_once, Tensor? post_weight, Tensor? post_bias, float post_eps, bool post_plus_one, "
    "bool post_rounds_once, str out, Tensor? scale) -> (Tensor, Tensor)",
    _add_norm_quantised,
    _fake_rows,
)
