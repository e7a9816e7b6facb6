"""Chooses a tile for a number of rows, and launches kernels.

The tiles are reasoned for a chip of 132 multiprocessors and not yet measured. Under `deterministic` one tile serves any number of
rows, so that the order of a row's sums follows from N and K.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor

from rooftile.weights.definition import Product
from rooftile.weights.triton import scaled, weight_only
from rooftile.weights.triton.scaled import ScaledWeight
from rooftile.weights.triton.unpacked import Weight, block_of, bytes_of, weight_of
from rooftile.weights.triton.weight_only import OutputTile
from rooftile.weights.weight import Parts

# programs that fill a chip twice
PROGRAMS = 264
# parts of K, at most: each of them is written and read in fp32
MOST_SPLITS = 16
# rows: the tile's rows and columns, and its warps
TABLE = ((16, 16, 64, 4), (32, 32, 64, 4), (64, 64, 64, 4), (128, 128, 64, 8), (1 << 62, 128, 128, 8))
# the tile of any number of rows
FIXED = (16, 64, 4)


@cache
def tile_of(M: int, N: int, K: int, block_k: int, bias: bool, deterministic: bool) -> tuple[OutputTile, int]:
    """Returns the tile of a product with M rows, and its warps."""
    block_m, block_n, warps = FIXED if deterministic else next(each[1:] for each in TABLE if each[0] >= M)
    steps = triton.cdiv(K, block_k)
    # under `deterministic` as if there were one row
    programs = triton.cdiv(N, block_n) * (1 if deterministic else triton.cdiv(M, block_m))
    splits = min(max(PROGRAMS // programs, 1), MOST_SPLITS, steps)
    per_split = triton.cdiv(steps, splits)
    splits = triton.cdiv(steps, per_split)
    stages = 3 if block_m * block_n >= 128 * 128 else 4
    return OutputTile(block_m, block_n, per_split, splits, bias and splits == 1, stages), warps


def multiply(x: Tensor, x_scales: Tensor | None, parts: Parts, bias: Tensor | None, product: Product) -> Tensor:
    """Multiplies x (M, K), or its codes with their scales, with a weight, to (M, N)."""
    if x_scales is None:
        return _weight_only(x, parts, bias, product)
    return _scaled(x, x_scales, parts, bias, product)


def _weight_only(x: Tensor, parts: Parts, bias: Tensor | None, product: Product) -> Tensor:
    if parts.order is not None:
        x = x.index_select(1, parts.order)
    x = x if x.stride(-1) == 1 else x.contiguous()
    # fp32 tiles are twice as large
    block_k = block_of(product.group, product.K, 32 if x.dtype == torch.float32 else 64)
    weight = weight_of(parts, product.format, product.group, (product.N, product.K), block_k)
    rows = _bucket(x.shape[0])
    tile, warps = tile_of(rows, product.N, product.K, block_k, bias is not None, product.deterministic)
    o = _output(x, product, tile, torch.float32)
    codes, scales, zeros, outer = bytes_of(parts)
    arguments = (x, codes, scales, zeros, outer, scales if bias is None else bias, o, x.shape[0], x.stride(0))
    weight_only.start(_grid(x.shape[0], product.N, tile), arguments, _constants(weight, tile, warps))
    return o if tile.SPLITS == 1 else added(o, None, None, bias, product.out_dtype)


def _scaled(x: Tensor, x_scales: Tensor, parts: Parts, bias: Tensor | None, product: Product) -> Tensor:
    x, codes = x.contiguous(), parts.codes.contiguous()
    w_scales = parts.scales.contiguous()
    constants = ScaledWeight(product.format, product.N, product.K, 128)
    rows = _bucket(x.shape[0])
    tile, warps = tile_of(rows, product.N, product.K, 128, bias is not None, product.deterministic)
    o = _output(x, product, tile, torch.int32 if product.format == "int8" else torch.float32)
    if product.format != "int8":
        x, codes = x.view(torch.uint8), codes.view(torch.uint8)
    arguments = (x, codes, x_scales.contiguous(), w_scales, w_scales if bias is None else bias, o, x.shape[0])
    scaled.start(_grid(x.shape[0], product.N, tile), arguments, _constants_of_codes(constants, tile, warps))
    if tile.SPLITS == 1:
        return o
    by_row = product.format != "fp8_tile"
    return added(o, x_scales.contiguous() if by_row else None, w_scales, bias, product.out_dtype)


def _bucket(M: int) -> int:
    """Rounds rows up to a power of two, so that lengths of prompts share their tiles."""
    return triton.next_power_of_2(M)


def _output(x: Tensor, product: Product, tile: OutputTile, sums: torch.dtype) -> Tensor:
    if tile.SPLITS == 1:
        return torch.empty((x.shape[0], product.N), dtype=product.out_dtype, device=x.device)
    return torch.empty((tile.SPLITS, x.shape[0], product.N), dtype=sums, device=x.device)


def _grid(M: int, N: int, tile: OutputTile) -> tuple[int, int, int]:
    return triton.cdiv(M, tile.BLOCK_M) * triton.cdiv(N, tile.BLOCK_N), tile.SPLITS, 1


def added(parts: Tensor, x_scales: Tensor | None, w_scales: Tensor | None, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Returns the sum of all splits' parts (SPLITS, M, N), fp32 or int32, with scales and bias, rounded once."""
    splits, M, N = parts.shape
    o = torch.empty((M, N), dtype=out_dtype, device=parts.device)
    constants = _constants_of_adding(N, splits, x_scales is not None, bias is not None)
    given = (x_scales, w_scales, bias)
    arguments = (parts, *(parts if x is None else x for x in given), o, M * N)
    scaled.start_adding((triton.cdiv(M * N, constants["BLOCK"]), 1, 1), arguments, constants)
    return o


@cache
def _constants(weight: Weight, tile: OutputTile, warps: int) -> dict[str, object]:
    return {"W": weight, "T": tile, "num_warps": warps}


@cache
def _constants_of_codes(codes: ScaledWeight, tile: OutputTile, warps: int) -> dict[str, object]:
    return {"C": codes, "T": tile, "num_warps": warps}


@cache
def _constants_of_adding(N: int, splits: int, is_scaled: bool, bias: bool) -> dict[str, object]:
    return {"N": N, "SPLITS": splits, "SCALED": is_scaled, "BIAS": bias, "BLOCK": 512, "num_warps": 4}
