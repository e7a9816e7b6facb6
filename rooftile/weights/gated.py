"""The gate and up projections of a feed-forward network in one product that writes only the gated result.

A kernel for Hopper has sums of both halves of a weight in registers. Elsewhere this is the product and the gate, one after the
other, so `takes` and `takes_rows` say beforehand where it is one kernel.

The result stays in 16 bits, or leaves in FP8 where one scale of all its rows is known before: to find a scale per row, a program
would need a whole row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.numerics.activations import KINDS, gated_halves
from rooftile.numerics.quantised_rows import QuantisedRows, quantise_rows
from rooftile.runtime.operators import call, define, needs_steps
from rooftile.weights import dispatch as backends
from rooftile.weights.definition import Product
from rooftile.weights.product import multiply, parts_of, run
from rooftile.weights.weight import QuantisedWeight


def takes(x: Tensor, weight: QuantisedWeight, bias: Tensor | None) -> bool:
    """Whether one kernel makes the product and gates it: on Hopper, weights of formats whose activations stay in 16 bits."""
    # a compiled graph does not know its rows
    if torch.compiler.is_compiling() or needs_steps(x, bias):
        return False
    return _takes(x, *_arguments(weight, bias), "")


def multiply_gated(x: Tensor, weight: QuantisedWeight, bias: Tensor | None, activation: str) -> Tensor:
    """The activation of the first half of each row of x W^T + bias times its second half, (M, K) to (M, N / 2).

    Each half is rounded to the dtype of x, as are the activation and the result: as in a product and a gate one after the other.
    """
    if needs_steps(x, bias):
        return gated_halves(multiply(x, weight, bias, out_dtype=x.dtype, deterministic=False, backend=""), activation)
    found: Tensor = call(linear_gated, _run, x, *_arguments(weight, bias), activation)
    return found


def takes_rows(x: QuantisedRows, weight: QuantisedWeight, bias: Tensor | None) -> bool:
    """Whether one kernel does `multiply_gated_rows`: on Hopper, for as many rows as its product is first for."""
    if torch.compiler.is_compiling() or needs_steps(x.codes, bias) or (x.format, weight.format) != ("fp8", "fp8"):
        return False
    arguments = (x.codes, x.scales, weight.codes, weight.scales, bias, *weight.shape, x.dtype)
    return weight.order is None and _takes_rows(*arguments)


def multiply_gated_rows(
    x: QuantisedRows, weight: QuantisedWeight, bias: Tensor | None, activation: str, scale: Tensor
) -> QuantisedRows:  # fmt: skip
    """`multiply_gated` of rows in FP8 with a weight in fp8, (M, K) to (M, N / 2), quantised with one scale for all rows.

    It rounds where the product, the gate and `quantise_rows` round one after the other: to the dtype of x before it had codes.
    """
    tensors = (x.codes, x.scales, weight.codes, weight.scales, bias, scale)
    codes, scales = call(linear_gated_rows, _run_rows, *tensors, *weight.shape, x.dtype, activation)
    return QuantisedRows(codes, scales, "fp8", x.dtype)


def _arguments(weight: QuantisedWeight, bias: Tensor | None) -> tuple[Any, ...]:
    return (*weight.parts, bias, weight.format, weight.group, *weight.shape)


def _takes(x: Tensor, *arguments: Any) -> bool:
    *parts, bias, format, group, N, K, _ = arguments
    product = Product(format, group, N, K, x.dtype, False)
    if product.activations is not None or N % 32:
        return False
    asked = backends.ProductCall(x, None, parts_of(parts), bias, product)
    return next(backends.refusals("hopper", asked), None) is None


def _run(x: Tensor, *arguments: Any) -> Tensor:
    *parts, bias, format, group, N, K, activation = arguments
    if x.shape[0] and _takes(x, *arguments):
        from rooftile.weights.hopper import launch

        product = Product(format, group, N, K, x.dtype, False)
        return launch.multiply_gated(x, parts_of(parts), bias, KINDS[activation], product)
    y = run(x, None, *parts, None, bias, format, group, N, K, x.dtype, False, "")
    return gated_halves(y, activation).contiguous()


def _fake(x: Tensor, *arguments: Any) -> Tensor:
    return x.new_empty((x.shape[0], arguments[-3] // 2))


linear_gated = define(
    "linear_gated(Tensor x, Tensor codes, Tensor scales, Tensor? zeros, Tensor? order, Tensor? outer, Tensor? bias, str format, "
    "int group, int N, int K, str activation) -> Tensor",
    _run, _fake,
)  # fmt: skip


def _takes_rows(
    x: Tensor, x_scales: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, N: int, K: int, dtype: torch.dtype
) -> bool:  # fmt: skip
    product = Product("fp8", K, N, K, dtype, False)
    if N % 32 or dtype not in (torch.bfloat16, torch.float16):
        return False
    asked = backends.ProductCall(x, x_scales, parts_of((codes, scales, None, None, None)), bias, product)
    return backends.order(asked)[0] == "hopper" and next(backends.refusals("hopper", asked), None) is None


def _run_rows(
    x: Tensor, x_scales: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, scale: Tensor, N: int, K: int,
    dtype: torch.dtype, activation: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if x.shape[0] and _takes_rows(x, x_scales, codes, scales, bias, N, K, dtype):
        from rooftile.weights.hopper import launch

        product, parts = Product("fp8", K, N, K, dtype, False), parts_of((codes, scales, None, None, None))
        return launch.multiply_gated_codes(x, x_scales, parts, bias, scale, KINDS[activation], product)
    y = run(x, x_scales, codes, scales, None, None, None, None, bias, "fp8", K, N, K, dtype, False, "")
    rows = quantise_rows(gated_halves(y, activation), "fp8", scale=scale)
    return rows.codes, rows.scales


def _fake_rows(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty((x.shape[0], arguments[-4] // 2)), x.new_empty((x.shape[0], 1), dtype=torch.float32)


linear_gated_rows = define(
    "linear_gated_rows(Tensor x, Tensor x_scales, Tensor codes, Tensor scales, Tensor? bias, Tensor scale, int N, int K, "
    "ScalarType dtype, str activation) -> (Tensor, Tensor)",
    _run_rows, _fake_rows,
)  # fmt: skip
