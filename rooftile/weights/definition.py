"""The product with a quantised weight in plain PyTorch, which every kernel must agree with, on any device.

Weights are dequantised a tile of rows at a time, so memory stays near the weight's own. Everything is summed in fp32, in
fp64 for inputs or results of fp64, and rounded once, after the bias. Products of int8 are exact.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rooftile.weights.formats import TILE, weight_format
from rooftile.weights.weight import Parts, dequantised, rows_of

# numbers of a weight that are dequantised at once
AT_ONCE = 1 << 22
# rows of x that are multiplied at once under `deterministic`
ROWS = 16
# rows of x from which INT8 products on Hopper have a kernel for many rows
MANY_IN_INT8 = 1025
# number of products of int8 numbers whose sum is exact in fp32: 128 * 127 * 1024 < 2^24
EXACT = 1024


class Product(NamedTuple):
    """A product, but for its tensors."""

    format: str
    group: int
    N: int
    K: int
    out_dtype: torch.dtype
    deterministic: bool

    @property
    def activations(self) -> str | None:
        """The format of activations; None where they stay in their dtype."""
        return weight_format(self.format).activations


def has_many_rows(rows: int, product: Product) -> bool:
    """Whether Hopper's kernel for INT8 products of many rows takes this many rows of x.

    Under `deterministic` it takes none: a row's bits are those that the kernel for few rows gives it.
    """
    is_aligned = product.N % 16 == 0 and product.out_dtype in (torch.bfloat16, torch.float16)
    return product.format == "int8" and rows >= MANY_IN_INT8 and is_aligned and not product.deterministic


def multiply(x: Tensor, x_scales: Tensor | None, parts: Parts, bias: Tensor | None, product: Product) -> Tensor:
    """Multiplies x (M, K), or its codes with their scales, with a weight, to (M, N)."""
    wide = torch.float64 if torch.float64 in (x.dtype, product.out_dtype) else torch.float32
    rows = max(AT_ONCE // product.K // TILE, 1) * TILE
    found = []
    for start in range(0, product.N, rows):
        stop = min(start + rows, product.N)
        part = rows_of(parts, product.format, start, stop)
        if x_scales is None:
            w = dequantised(part, product.format, product.group, (stop - start, product.K), x.dtype)
            y = product_of(x.to(wide), w.to(wide), deterministic=product.deterministic)
        else:
            y = _of_codes(x, x_scales, part, product, wide)
        if bias is not None:
            y = y + bias[start:stop].to(wide)
        found.append(y.to(product.out_dtype))
    return found[0] if len(found) == 1 else torch.cat(found, dim=1)


def product_of(x: Tensor, w: Tensor, *, deterministic: bool) -> Tensor:
    """x (M, K) times w (N, K) transposed; `deterministic`: a row's bits do not depend on the other rows."""
    if not deterministic:
        return functional.linear(x, w)
    padded = functional.pad(x, (0, 0, 0, -x.shape[0] % ROWS))
    # each tile is a tensor of its own: MKL's sums also depend on how its arguments are aligned
    parts = [functional.linear(tile.clone(), w) for tile in padded.split(ROWS)]
    return torch.cat(parts)[: x.shape[0]] if parts else x.new_empty(0, w.shape[0])


def _of_codes(x: Tensor, x_scales: Tensor, parts: Parts, product: Product, wide: torch.dtype) -> Tensor:
    """Sums of products of codes, times both scales."""
    codes = parts.codes
    if product.format == "int8":
        return exact_product(x, codes).to(wide) * x_scales.to(wide) * parts.scales.to(wide).T
    if product.format == "fp8":
        sums = product_of(x.to(wide), codes.to(wide), deterministic=product.deterministic)
        return sums * x_scales.to(wide) * parts.scales.to(wide).T
    y = x.new_zeros(x.shape[0], codes.shape[0], dtype=wide)
    by_row = parts.scales.to(wide).repeat_interleave(TILE, dim=0)[: codes.shape[0]]
    for n, start in enumerate(range(0, product.K, TILE)):
        here = slice(start, start + TILE)
        sums = product_of(x[:, here].to(wide), codes[:, here].to(wide), deterministic=product.deterministic)
        y = y + sums * (x_scales[:, n : n + 1].to(wide) * by_row[:, n])
    return y


def exact_product(x: Tensor, w: Tensor) -> Tensor:
    """x (M, K) times w (N, K) transposed, both int8, exact in int32."""
    if x.device.type == "cpu" and has_int8_units():
        # several times faster than sums in fp32, from one row on
        return torch._int_mm(x, w.T)
    return in_exact_sums(x, w)


@cache
def has_int8_units() -> bool:
    """Whether a CPU adds products of int8 numbers in int32 (VNNI): without, pairs of them may saturate in 16 bits."""
    return torch.cpu._is_vnni_supported()


def in_exact_sums(x: Tensor, w: Tensor) -> Tensor:
    """Computes `exact_product` in parts of K that are exact in fp32, which are added as integers."""
    total = torch.zeros(x.shape[0], w.shape[0], dtype=torch.int32, device=x.device)
    for start in range(0, x.shape[1], EXACT):
        here = slice(start, start + EXACT)
        total += functional.linear(x[:, here].float(), w[:, here].float()).to(torch.int32)
    return total
