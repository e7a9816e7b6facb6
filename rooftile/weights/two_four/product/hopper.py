"""Few rows times a 2:4 weight on Hopper: refusals, tiles and launches of `rooftile.weights.hopper.two_four`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from rooftile.runtime.early_weights import may_read_early
from rooftile.runtime.launch import Kernel
from rooftile.weights.hopper import launch
from rooftile.weights.hopper.ordered import in_order
from rooftile.weights.hopper.schedule import STEP, WARPGROUPS, ProductTile
from rooftile.weights.hopper.two_four import product_of_two_four
from rooftile.weights.two_four.product.definition import Sparse, SparseProduct, scales_of

FP8 = torch.float8_e4m3fn
# numbers of K to 16 bytes of places: the copy engine steps over multiples of those
UNIT = 128
# steps in flight, at least; twice as many rows of the weight in a tile, with fewer steps, took as long or longer on an H100
LEAST_STAGES = 4
# rows of x in FP8 up to which a warpgroup orders them for itself in however many steps: they become fp16 on the way
ORDERS_FP8_IN_MANY_STEPS = 8


def refusals(x: Tensor, weight: Sparse, product: SparseProduct) -> Iterator[str]:
    """Yields why the kernel does not take a call; the device is known to be Hopper, and dtypes to fit."""
    if x.shape[0] > launch.MOST_ROWS and not product.deterministic:
        yield f"{x.shape[0]:,} rows; has up to {launch.MOST_ROWS:,}"
    if product.N < launch.LEAST_N:
        yield f"N is {product.N}; has {launch.LEAST_N} and more"
    if product.K % UNIT:
        yield f"K is {product.K}; has multiples of {UNIT}"
    if weight.values.data_ptr() % 16 or weight.places.data_ptr() % 16:
        yield "values or places at an address that is no multiple of 16; has aligned ones"


@cache
def tile_of(M: int, is_fp8: bool, orders: bool) -> ProductTile:
    """Returns the tile of a product of M rows of x; `orders`: a warpgroup orders them for itself."""
    tile = ProductTile(1, min(max(triton.next_power_of_2(M), 8), 128), 1, 0)
    x_bytes = tile.block_m * STEP.value * (1 if is_fp8 and orders else 2)
    # a warpgroup has rows of two steps in order
    held = WARPGROUPS * 2 * tile.block_m * STEP.value * 2 if orders else 0
    stage = tile.block_n * (STEP.value // 2 * (1 if is_fp8 else 2) + STEP.value // 8) + x_bytes
    most = min((launch.SHARED - held) // stage, launch.MOST_STAGES)
    # half of the memory leaves room for a program of the next kernel, whose copies begin while this one ends
    return tile._replace(STAGES=most if launch.BYTES < M else max(most // 2, min(most, LEAST_STAGES)))


def multiply(x: Tensor, x_scales: Tensor | None, weight: Sparse, bias: Tensor | None, product: SparseProduct) -> Tensor:
    """Multiplies x (M, K), or its FP8 codes with their scales, with a weight, to (M, N)."""
    o = torch.empty((x.shape[0], product.N), dtype=product.out_dtype, device=x.device)
    values, words = weight.values.contiguous(), weight.places.contiguous().view(torch.int32)
    w_scales = None if x_scales is None else scales_of(weight).contiguous()
    bias = None if bias is None else bias.contiguous()
    most = launch.MOST_ROWS_IN_ORDER if product.deterministic else launch.MOST_ROWS
    for start in range(0, x.shape[0], most):
        rows = slice(start, start + most)
        x_scales_here = None if x_scales is None else x_scales[rows].contiguous()
        _start(x[rows], x_scales_here, values, words, w_scales, bias, product, o[rows])
    return o


def _start(
    x: Tensor, x_scales: Tensor | None, values: Tensor, words: Tensor, w_scales: Tensor | None, bias: Tensor | None,
    product: SparseProduct, o: Tensor,
) -> None:  # fmt: skip
    is_fp8, processors = values.dtype == FP8, launch.processors_of(x.device)
    in_many_steps = ORDERS_FP8_IN_MANY_STEPS if is_fp8 else launch.ORDERS_IN_MANY_STEPS
    orders = launch.orders_itself(x.shape[0], product.N, product.K, processors, in_many_steps)
    if not orders:
        x = in_order(x, "pairs", torch.float16 if is_fp8 else None)
    elif x.stride(-1) != 1 or x.stride(0) * x.element_size() % 16 or x.data_ptr() % 16:
        # the copy engine steps over multiples of 16 bytes
        x = x.clone(memory_format=torch.contiguous_format)
    tile = tile_of(x.shape[0], is_fp8, orders)
    sizes = launch.sizes_of(tile, x.shape[0], product.N, product.K, product.deterministic)
    # under `deterministic` as if there were one row
    rows = 1 if product.deterministic else x.shape[0]
    programs = launch.programs_of(sizes, processors, rows)
    shared = launch.shared_sums(tile, programs, sizes, torch.float32, x.device)
    kernel, constants = kernel_of(is_fp8, not orders, bias is not None, tile)
    # a pointer that is not read points anywhere
    given = [values if one is None else one for one in (x_scales, w_scales, bias)]
    kernel(
        (programs, 1, 1),
        (values, x, words, *given, o, *shared, *sizes, int(may_read_early())),
        constants,
    )  # fmt: skip


@cache
def kernel_of(is_fp8: bool, ordered: bool, bias: bool, tile: ProductTile) -> tuple[Kernel, dict[str, Any]]:
    """Returns the kernel of a tile, and its compile-time arguments."""
    boxes = (launch.described(tile.block_n, STEP.value // 2), launch.described(tile.block_m), launch.described(tile.block_n, 4))
    kernel = Kernel(product_of_two_four, boxes)
    return kernel, {"ORDERED": ordered, "SCALED": is_fp8, "BIAS": bias, "T": tile} | launch.LAUNCH
