"""Weights of every format, and the rule for results: at most twice the error of the definition in the same dtype."""

from __future__ import annotations

import torch
from torch import Tensor

import rooftile as rt
from rooftile.numerics import QuantisedRows, quantise_rows
from rooftile.weights import QuantisedWeight, definition
from rooftile.weights.definition import Product

# each with the options of `quantise_weight`
FORMATS = {
    "fp8": {"format": "fp8"},
    "fp8_tile": {"format": "fp8_tile"},
    "int8": {"format": "int8"},
    "w8": {"format": "w8"},
    "int4": {"format": "int4"},
    "int4, 32, zeros": {"format": "int4", "group": 32, "zero_points": True},
    "int4, 64": {"format": "int4", "group": 64},
    "mxfp8": {"format": "mxfp8"},
    "mxfp4": {"format": "mxfp4"},
    "nvfp4": {"format": "nvfp4"},
}
QUANTISES_X = ("fp8", "fp8_tile", "int8")


def weight_of(name: str, N: int, K: int, device: str | torch.device = "cpu", seed: int = 0) -> QuantisedWeight:
    """A weight with outliers."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(N, K, generator=generator) * 0.05
    w[torch.rand(N, K, generator=generator) < 0.002] *= 30
    return rt.quantise_weight(w, **FORMATS[name]).to(device)


def ordered(weight: QuantisedWeight) -> QuantisedWeight:
    """The weight with its columns in another order (act-order)."""
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(1)).int().to(weight.device)
    return QuantisedWeight(*weight.parts[:3], order, weight.format, weight.group, weight.shape, weight.outer)


def defined(x: Tensor | QuantisedRows, weight: QuantisedWeight, bias: Tensor | None = None, *, exact: bool = False) -> Tensor:
    """The definition: in the dtype of x, or in fp64 of the same codes and the same 16-bit weights."""
    if not isinstance(x, QuantisedRows) and weight.format in QUANTISES_X:
        x = quantise_rows(x, weight.format, scale=weight.input_scale)
    dtype = torch.float64 if exact else x.dtype
    product = Product(weight.format, weight.group, *weight.shape, dtype, False)
    if isinstance(x, QuantisedRows):
        return definition.multiply(x.codes, x.scales, weight.parts, bias, product)
    if not exact:
        return definition.multiply(x, None, weight.parts, bias, product)
    y = x.double() @ weight.dequantise(x.dtype).double().T
    return y if bias is None else y + bias.double()


def assert_product(
    found: Tensor, x: Tensor | QuantisedRows, weight: QuantisedWeight, bias: Tensor | None = None, *, sums: float = 0.0
) -> None:
    """The rule of two, on the largest and the mean error; `sums` is the unit of sums coarser than the result's."""
    exact, plain = defined(x, weight, bias, exact=True), defined(x, weight, bias)
    assert found.dtype == plain.dtype
    assert found.shape == plain.shape
    if not found.numel():
        return
    unit = 8 * max(torch.finfo(found.dtype).eps, sums) * exact.abs().amax() + 1e-30
    for reduce in (torch.amax, torch.mean):
        error, due = (reduce((y.double() - exact).abs()) for y in (found, plain))
        assert error <= 2 * due + unit, (float(error), float(due), float(unit))
