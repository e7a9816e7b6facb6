"""The product with a quantised weight as operators, with gradients for x and the bias.

The weight is a constant. The gradient of x goes through the dequantised weight, and rounding x to FP8 or INT8 counts as the
identity, so that adapters can be trained over such weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rooftile.errors import Unsupported
from rooftile.numerics.quantised_rows import QuantisedRows
from rooftile.runtime.operators import below_autograd, call, define, transforms_active, wants_grad, watched
from rooftile.weights import dispatch as backends
from rooftile.weights.definition import Product
from rooftile.weights.weight import Parts, QuantisedWeight, dequantised

# the places of the tensors in an operator's arguments: x, its scales, codes, scales, zeros, order, outer, input scale, bias
_TENSORS = 9


def multiply(
    x: Tensor | QuantisedRows, weight: QuantisedWeight, bias: Tensor | None, *, out_dtype: torch.dtype, deterministic: bool,
    backend: str,
) -> Tensor:  # fmt: skip
    """Multiplies x (..., K) with a weight to (..., N); `rooftile.linear` checks the arguments. backend "" chooses one."""
    if isinstance(x, QuantisedRows):
        codes, scales = x.codes, x.scales.flatten(0, -2)
    else:
        codes, scales = x, None
    rows = codes.reshape(-1, codes.shape[-1])
    tensors = (rows, scales, *weight.parts, weight.input_scale, bias)
    arguments = (*tensors, weight.format, weight.group, *weight.shape, out_dtype, deterministic, backend)
    y = _apply(arguments)
    return y if codes.ndim == 2 else y.reshape(*codes.shape[:-1], weight.shape[0])


def _apply(arguments: tuple[Any, ...]) -> Tensor:
    x, bias = arguments[0], arguments[8]
    if torch.compiler.is_compiling():
        if transforms_active():
            raise Unsupported("transforms of torch.func over rooftile.linear inside torch.compile; compile without them")
        return linear_quantised(*arguments)
    if x.is_meta and not transforms_active():
        return linear_quantised(*arguments)
    if wants_grad(x, bias) or watched(*arguments) or torch.autograd.forward_ad._current_level >= 0:
        return _Linear.apply(*arguments)
    return run(*arguments)


def dequantise(weight: QuantisedWeight, dtype: torch.dtype) -> Tensor:
    """Returns the weight (N, K) in a dtype, by the kernel where it runs; the bits of `QuantisedWeight.dequantise`."""
    arguments = (*weight.parts, weight.format, weight.group, *weight.shape, dtype)
    found: Tensor = call(dequantise_weight, _dequantise, *arguments)
    return found


def parts_of(tensors: Sequence[Tensor | None]) -> Parts:
    """Returns a weight's tensors as they cross an operator's schema."""
    codes, scales, *others = tensors
    assert codes is not None
    assert scales is not None
    return Parts(codes, scales, *others)


def run(*arguments: Any) -> Tensor:
    """Computes `linear_quantised`, whose arguments it takes."""
    x, x_scales, *_, given, bias = arguments[:_TENSORS]
    format, group, N, K, out_dtype, deterministic, backend = arguments[_TENSORS:]
    product, parts = Product(format, group, N, K, out_dtype, deterministic), parts_of(arguments[2:7])
    backend_ = backends.chosen(backends.ProductCall(x, x_scales, parts, bias, product), backend)
    if not x.shape[0]:
        return x.new_empty((0, N), dtype=out_dtype)
    with torch.autocast(x.device.type, enabled=False):
        if product.activations is not None and x_scales is None:
            x, x_scales = backend_.quantise(x, product.activations, given)
        return backend_.multiply(x, x_scales, parts, bias, product)


def _fake(*arguments: Any) -> Tensor:
    x, N, out_dtype = arguments[0], arguments[_TENSORS + 2], arguments[_TENSORS + 4]
    return x.new_empty((x.shape[0], N), dtype=out_dtype)


def _dequantise(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, order: Tensor | None, outer: Tensor | None, format: str, group: int,
    N: int, K: int, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    parts = Parts(codes, scales, zeros, order, outer)
    if backends.unpacks(parts, format, group, K, dtype):
        from rooftile.weights.triton import unpacked

        return unpacked.dequantise(parts, format, group, (N, K), dtype)
    return dequantised(parts, format, group, (N, K), dtype)


def _fake_dequantise(codes: Tensor, *others: Any) -> Tensor:
    return codes.new_empty((others[-3], others[-2]), dtype=others[-1])


def _weight_of(ctx_tensors: tuple[Any, ...], rest: tuple[Any, ...], dtype: torch.dtype) -> Tensor:
    """The dequantised weight."""
    return dequantise_weight(*ctx_tensors, *rest[:4], dtype)


class _Linear(torch.autograd.Function):
    """The product for autograd, forward mode and transforms: linear in x and the bias."""

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        with below_autograd():
            return (linear_quantised if watched(*arguments) or arguments[0].is_meta else run)(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        parts, ctx.rest = inputs[2:7], inputs[_TENSORS:]
        ctx.dtype, ctx.rows, bias = inputs[0].dtype, inputs[0].shape[0], inputs[8]
        ctx.bias = None if bias is None else bias.dtype
        ctx.save_for_backward(*parts)
        ctx.save_for_forward(*parts)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        dx = dbias = None
        if ctx.needs_input_grad[0]:
            dtype = torch.promote_types(dy.dtype, ctx.dtype)
            dx = (dy.to(dtype) @ _weight_of(ctx.saved_tensors, ctx.rest, dtype)).to(ctx.dtype)
        if ctx.bias is not None and ctx.needs_input_grad[8]:
            dbias = dy.sum(0, dtype=torch.promote_types(dy.dtype, torch.float32)).to(ctx.bias)
        return dx, *[None] * 7, dbias, *[None] * len(ctx.rest)

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, *others: Any) -> Tensor:
        out_dtype, dbias = ctx.rest[4], others[7]
        saved = ctx.saved_tensors
        found: Tensor = saved[0].new_zeros((), dtype=out_dtype) if dbias is None else dbias
        if dx is not None:
            found = found + functional.linear(dx, _weight_of(saved, ctx.rest, dx.dtype))
        return found.to(out_dtype).expand(ctx.rows, ctx.rest[2])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Tensor, int]:
        if any(dim is not None for dim in in_dims[1:]):
            found = [_Linear.apply(*_sample(in_dims, arguments, n)) for n in range(info.batch_size)]
            return torch.stack(found), 0
        x = arguments[0].movedim(in_dims[0], 0)
        y = _Linear.apply(x.flatten(0, 1), *arguments[1:])
        return y.unflatten(0, x.shape[:2]), 0


def _sample(in_dims: tuple[Any, ...], arguments: tuple[Any, ...], n: int) -> list[Any]:
    return [x if dim is None else x.select(dim, n) for x, dim in zip(arguments, in_dims, strict=True)]


_WEIGHT = "Tensor codes, Tensor scales, Tensor? zeros, Tensor? order, Tensor? outer"
linear_quantised = define(
    f"linear_quantised(Tensor x, Tensor? x_scales, {_WEIGHT}, Tensor? input_scale, Tensor? bias, str format, int group, int N, "
    "int K, ScalarType out_dtype, bool deterministic, str backend) -> Tensor",
    run, _fake, _Linear.apply, has_gradient=(0, 8),
)  # fmt: skip
dequantise_weight = define(
    f"dequantise_weight({_WEIGHT}, str format, int group, int N, int K, ScalarType dtype) -> Tensor", _dequantise,
    _fake_dequantise,
)  # fmt: skip
