"""The gate and up projections of a feed-forward network in one product that writes only the gated result.

A kernel for Hopper has sums of both halves of a weight in registers. Elsewhere this is the product and the gate, one after the
other, so `takes` says beforehand where it is one kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.matmul import backends
from rooftile.matmul.definition import Product
from rooftile.matmul.product import multiply, parts_of, run
from rooftile.matmul.weight import QuantisedWeight
from rooftile.numerics.activations import KINDS, gated_halves
from rooftile.operators import call, define, needs_steps


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


def _arguments(weight: QuantisedWeight, bias: Tensor | None) -> tuple[Any, ...]:
    return (*weight.parts, bias, weight.format, weight.group, *weight.shape)


def _takes(x: Tensor, *arguments: Any) -> bool:
    *parts, bias, format, group, N, K, _ = arguments
    product = Product(format, group, N, K, x.dtype, False)
    if product.activations is not None or N % 32:
        return False
    asked = backends.Call(x, None, parts_of(parts), bias, product)
    return next(backends.refusals("hopper", asked), None) is None


def _run(x: Tensor, *arguments: Any) -> Tensor:
    *parts, bias, format, group, N, K, activation = arguments
    if x.shape[0] and _takes(x, *arguments):
        from rooftile.matmul.hopper import launch

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
