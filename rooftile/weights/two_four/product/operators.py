"""The product with a 2:4 weight as an operator, with gradients for x and the bias. The weight is a constant."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rooftile.errors import Unsupported
from rooftile.numerics.quantised_rows import QuantisedRows
from rooftile.runtime.operators import below_autograd, define, transforms_active, wants_grad, watched
from rooftile.weights.two_four import TwoFour
from rooftile.weights.two_four.compressed import two_four_dense
from rooftile.weights.two_four.product import dispatch as backends
from rooftile.weights.two_four.product.definition import Sparse, SparseProduct


def multiply_two_four(
    x: Tensor | QuantisedRows, weight: TwoFour, bias: Tensor | None, *, out_dtype: torch.dtype, deterministic: bool, backend: str
) -> Tensor:
    """Multiplies x (..., K) with a weight to (..., N); `rooftile.linear` checks the arguments. backend "" chooses one."""
    codes, scales = (x.codes, x.scales.flatten(0, -2)) if isinstance(x, QuantisedRows) else (x, None)
    rows = codes.reshape(-1, codes.shape[-1])
    tensors = (rows, scales, weight.values, weight.places, weight.scales, bias)
    y = _apply((*tensors, weight.shape[1], out_dtype, deterministic, backend))
    return y if codes.ndim == 2 else y.reshape(*codes.shape[:-1], weight.shape[0])


def _apply(arguments: tuple[Any, ...]) -> Tensor:
    x, bias = arguments[0], arguments[5]
    if torch.compiler.is_compiling():
        if transforms_active():
            raise Unsupported("transforms of torch.func over rooftile.linear inside torch.compile; compile without them")
        found: Tensor = linear_two_four(*arguments)
        return found
    if wants_grad(x, bias) or watched(*arguments) or torch.autograd.forward_ad._current_level >= 0:
        made: Tensor = _SparseLinear.apply(*arguments)
        return made
    return run(*arguments)


def run(
    x: Tensor, x_scales: Tensor | None, values: Tensor, places: Tensor, scales: Tensor | None, bias: Tensor | None, K: int,
    out_dtype: torch.dtype, deterministic: bool, backend: str,
) -> Tensor:  # fmt: skip
    """Computes `linear_two_four`."""
    N = values.shape[0]
    product = SparseProduct(N, K, out_dtype, deterministic)
    if x.is_meta or not x.shape[0] or not N:
        return x.new_empty((x.shape[0], N), dtype=out_dtype)
    with torch.autocast(x.device.type, enabled=False):
        return backends.run(backends.SparseProductCall(x, x_scales, Sparse(values, places, scales), bias, product), backend)


def _fake(x: Tensor, x_scales: Tensor | None, values: Tensor, *others: Any) -> Tensor:
    return x.new_empty((x.shape[0], values.shape[0]), dtype=others[4])


class _SparseLinear(torch.autograd.Function):
    """The product for autograd, forward mode and transforms: linear in x and the bias."""

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        with below_autograd():
            return (linear_two_four if watched(*arguments) else run)(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, _, values, places, scales, bias, ctx.K, ctx.out_dtype, *_ = inputs
        ctx.dtype, ctx.shape, ctx.bias = x.dtype, (x.shape[0], values.shape[0]), None if bias is None else bias.dtype
        ctx.save_for_backward(values, places, scales)
        ctx.save_for_forward(values, places, scales)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        dx = dbias = None
        if ctx.needs_input_grad[0]:
            dtype = torch.promote_types(dy.dtype, ctx.dtype)
            dx = (dy.to(dtype) @ _weight_of(ctx, dtype)).to(ctx.dtype)
        if ctx.bias is not None and ctx.needs_input_grad[5]:
            dbias = dy.sum(0, dtype=torch.promote_types(dy.dtype, torch.float32)).to(ctx.bias)
        return dx, None, None, None, None, dbias, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, *others: Any) -> Tensor:
        dbias = others[4]
        found: Tensor = ctx.saved_tensors[1].new_zeros((), dtype=ctx.out_dtype) if dbias is None else dbias
        if dx is not None:
            found = found + functional.linear(dx, _weight_of(ctx, dx.dtype))
        return found.to(ctx.out_dtype).expand(ctx.shape)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Tensor, int]:
        if any(dim is not None for dim in in_dims[1:]):
            found = [_SparseLinear.apply(*_sample(in_dims, arguments, n)) for n in range(info.batch_size)]
            return torch.stack(found), 0
        x = arguments[0].movedim(in_dims[0], 0)
        return _SparseLinear.apply(x.flatten(0, 1), *arguments[1:]).unflatten(0, x.shape[:2]), 0


def _sample(in_dims: tuple[Any, ...], arguments: tuple[Any, ...], n: int) -> list[Any]:
    return [x if dim is None else x.select(dim, n) for x, dim in zip(arguments, in_dims, strict=True)]


def _weight_of(ctx: Any, dtype: torch.dtype) -> Tensor:
    values, places, scales = ctx.saved_tensors
    found: Tensor = two_four_dense(values, places, ctx.K)
    return (found if scales is None else found.float() * scales).to(dtype)


linear_two_four = define(
    "linear_two_four(Tensor x, Tensor? x_scales, Tensor values, Tensor places, Tensor? scales, Tensor? bias, SymInt K, "
    "ScalarType out_dtype, bool deterministic, str backend) -> Tensor",
    run, _fake, _SparseLinear.apply, has_gradient=(0, 5),
)  # fmt: skip
