"""The product with a 2:4 weight in plain PyTorch: with the dense weight, zeros between the kept values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rooftile.weights import definition
from rooftile.weights.definition import AT_ONCE, product_of
from rooftile.weights.two_four.compressed import two_four_dense
from rooftile.weights.weight import Parts


class Sparse(NamedTuple):
    """The tensors of a 2:4 weight."""

    values: Tensor  # (N, K / 2)
    places: Tensor  # (N, K / 8)
    scales: Tensor | None  # FP8, INT8: (N, 1)


# the format that x is quantised to, by the dtype of values: those that are codes
CODES = {torch.float8_e4m3fn: "fp8", torch.int8: "int8"}


class SparseProduct(NamedTuple):
    """A product, but for its tensors."""

    N: int
    K: int
    out_dtype: torch.dtype
    deterministic: bool


def multiply(x: Tensor, x_scales: Tensor | None, weight: Sparse, bias: Tensor | None, product: SparseProduct) -> Tensor:
    """Multiplies x (M, K), or its codes with their scales, with a weight, to (M, N)."""
    w = two_four_dense(weight.values, weight.places, product.K)
    if x_scales is None:
        return multiply_dense(x, w.to(x.dtype), bias, product.out_dtype, deterministic=product.deterministic)
    parts = Parts(w, scales_of(weight), None, None, None)
    named = definition.Product(CODES[w.dtype], product.K, product.N, product.K, product.out_dtype, product.deterministic)
    return definition.multiply(x, x_scales, parts, bias, named)


def scales_of(weight: Sparse) -> Tensor:
    """The scales (N, 1) of a weight in codes; ones where it has no scales."""
    if weight.scales is not None:
        return weight.scales
    return torch.ones(weight.values.shape[0], 1, device=weight.values.device)


def multiply_dense(x: Tensor, w: Tensor, bias: Tensor | None, out_dtype: torch.dtype, *, deterministic: bool = False) -> Tensor:
    """x (M, K) times w (N, K) transposed, plus the bias: summed in fp32, fp64 for fp64, and rounded once."""
    wide = torch.float64 if torch.float64 in (x.dtype, out_dtype) else torch.float32
    found = []
    for rows in w.split(max(AT_ONCE // max(w.shape[1], 1), 1)):
        found.append(product_of(x.to(wide), rows.to(wide), deterministic=deterministic))
    y = torch.cat(found, 1) if len(found) > 1 else found[0]
    return (y if bias is None else y + bias.to(wide)).to(out_dtype)
