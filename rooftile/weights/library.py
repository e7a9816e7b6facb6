"""PyTorch's own products: FP8 with row scales, INT8, and cuBLAS on weights that are dequantised before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rooftile.runtime.devices import runs_kernels
from rooftile.weights.definition import Product
from rooftile.weights.weight import Parts


def refusals(asked: Any) -> Iterator[str]:
    """Yields why PyTorch's products do not take a call."""
    product, x = asked.product, asked.x
    if product.deterministic:
        yield "deterministic; cuBLAS chooses its sums by the number of rows"
    if product.format == "fp8_tile":
        yield "scales for tiles; has scales for rows"
    if product.format in ("fp8", "int8") and (product.N % 16 or product.K % 16):
        yield f"a weight {product.N} x {product.K}; has multiples of 16"
    if product.format == "fp8" and product.out_dtype != torch.bfloat16:
        yield f"results in {product.out_dtype}; row scales have bfloat16"
    if product.format == "fp8" and asked.bias is not None and asked.bias.dtype != torch.bfloat16:
        yield f"a bias in {asked.bias.dtype}; has bfloat16"
    if product.format == "int8" and x.shape[0] <= 16:
        yield f"{x.shape[0]} rows; has more than 16"
    if product.activations is None and product.out_dtype != x.dtype:
        yield f"x in {x.dtype} and results in {product.out_dtype}; has one dtype for both"


def multiply(x: Tensor, x_scales: Tensor | None, parts: Parts, bias: Tensor | None, product: Product) -> Tensor:
    """Multiplies x (M, K), or its codes with their scales, with a weight, to (M, N)."""
    if x_scales is None:
        from rooftile.weights.triton import unpacked

        w = unpacked.dequantise(parts, product.format, product.group, (product.N, product.K), x.dtype)
        return functional.linear(x, w, None if bias is None else bias.to(x.dtype))
    w_scales = parts.scales.float().T.contiguous()  # (1, N)
    if product.format == "int8":
        sums = torch._int_mm(x, parts.codes.T)
        if x.is_cuda and runs_kernels(x):
            from rooftile.weights.triton import launch

            # 6 bytes of a number are moved, and 22 by PyTorch's operations one after the other
            return launch.added(sums[None], x_scales.contiguous(), w_scales, bias, product.out_dtype)
        y = sums * x_scales * w_scales
        return (y if bias is None else y + bias.float()).to(product.out_dtype)
    return torch._scaled_mm(x, parts.codes.T, x_scales, w_scales, bias=bias, out_dtype=product.out_dtype)
