"""The product of sorted rows with the weight of each row's expert, which is quantised.

A program dequantises each block of a weight, bit for bit as `QuantisedWeight.dequantise`, to the dtype of the rows, and
multiplies it as `products._product` multiplies a plain one. So a step that is bound by bytes reads codes and scales in place of
16 bits.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.moe.kernels.activations import _activated
from rooftile.moe.kernels.products import _place, _tile
from rooftile.moe.kernels.tiles import Way
from rooftile.moe.quantised import rows_in
from rooftile.moe.sorting import Sorted
from rooftile.runtime.launch import Kernel
from rooftile.weights import QuantisedWeight
from rooftile.weights.triton.unpacked import Weight, block_of, bytes_of, weight_of, weights

# tiles of rows that share a block of a weight
_GROUP = 8


# fmt: off
@triton.jit(do_not_specialize=["TILES"])
def _quantised_product(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, outer_ptr, bias_ptr, y_ptr, from_ptr, to_ptr, bounds_ptr, TILES,
    E: tl.constexpr, BLOCK_E: tl.constexpr, OUT: tl.constexpr, ACTIVATION: tl.constexpr, GATHER: tl.constexpr,
    SCATTER: tl.constexpr, ALONE: tl.constexpr, BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr, W: tl.constexpr,
):
    # fmt: on
    """y = act(x W^T + bias) by rows, (rows, OUT), as in `products._product`; W is (E OUT, IN), or (E 2 OUT, IN), in codes."""
    TWO: tl.constexpr = (ACTIVATION == "silu") or (ACTIVATION == "clamped")
    HALVES: tl.constexpr = 2 if TWO else 1
    BLOCK_K: tl.constexpr = W.BLOCK_K
    IN: tl.constexpr = W.K
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    tile, column = _place(TILES, (OUT + BLOCK_N - 1) // BLOCK_N, GROUP)
    if ALONE:
        expert, start, end = tl.load(bounds_ptr + tile), tile, tile + 1
    else:
        expert, start, end = _tile(bounds_ptr, tile, E, BLOCK_E, BLOCK_M)
    if (expert < 0) | (expert >= E):
        return
    rows = start + tl.arange(0, BLOCK_M)
    here = rows < end
    # past the expert's rows stands some row, which is not written: so no load asks for the row
    source = tl.where(here, rows, start).to(tl.int64)
    if GATHER:
        source = source * 0 if ALONE else tl.load(from_ptr + rows, mask=here, other=0)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows = n < OUT
    k = tl.arange(0, BLOCK_K)
    x = x_ptr + source[:, None] * IN + k[None, :]
    row = expert.to(tl.int64) * (HALVES * OUT) + n
    a = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    b = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for c in range(0, IN, BLOCK_K):
        part = tl.load(x + c, mask=(k < IN - c)[None, :], other=0.0)
        w = weights(codes_ptr, scales_ptr, zeros_ptr, outer_ptr, row, c, in_rows, dtype, W)
        a = tl.dot(part, tl.trans(w), a, input_precision="ieee")
        if TWO:
            w = weights(codes_ptr, scales_ptr, zeros_ptr, outer_ptr, row + OUT, c, in_rows, dtype, W)
            b = tl.dot(part, tl.trans(w), b, input_precision="ieee")
    if BIAS:
        a += tl.load(bias_ptr + row, mask=in_rows, other=0.0).to(tl.float32)[None, :]
        if TWO:
            b += tl.load(bias_ptr + row + OUT, mask=in_rows, other=0.0).to(tl.float32)[None, :]
    rounded, other = a.to(dtype), b.to(dtype)
    if ACTIVATION != "none":
        rounded = _activated(rounded.to(tl.float32), other.to(tl.float32), ACTIVATION).to(dtype)
    target = tl.load(to_ptr + rows, mask=here, other=0) if SCATTER and not ALONE else rows.to(tl.int64)
    tl.store(y_ptr + target[:, None] * OUT + n[None, :], rounded, mask=here[:, None] & in_rows[None, :])


_start = Kernel(_quantised_product)


def multiply(
    x: Tensor, weight: QuantisedWeight, bias: Tensor | None, y: Tensor, rows: Sorted, experts: int, block_m: int, way: Way,
    activation: str = "none",
) -> None:  # fmt: skip
    """Writes y; x has sorted rows, or tokens to gather, and y has sorted rows, or is by token and choice."""
    count, out = rows.order.shape[0], y.shape[1]
    assert rows_in(weight, experts) == out * (2 if activation in ("silu", "clamped") else 1)
    kind = weight_of(weight.parts, weight.format, weight.group, weight.shape, depth_of(weight, block_m, x.dtype))
    constants = quantised_constants(experts, out, activation, x.dtype, block_m, bias is not None, way, kind)
    most = count if way.alone else count // block_m + min(experts, count)
    arguments = (
        x, *bytes_of(weight.parts), x if bias is None else bias.contiguous(), y, rows.tokens, rows.order, rows.bounds, most,
    )  # fmt: skip
    _start((most * triton.cdiv(out, constants["BLOCK_N"]), 1, 1), arguments, constants)


def depth_of(weight: QuantisedWeight, block_m: int, dtype: torch.dtype) -> int:
    """The columns of a weight that a step dequantises: one group, or several whole ones."""
    most = 32 if dtype == torch.float32 else 128 if block_m <= 32 else 64
    return block_of(weight.group, weight.shape[1], most)


@cache
def quantised_constants(
    E: int, size_out: int, activation: str, dtype: torch.dtype, block_m: int, bias: bool, way: Way, kind: Weight
) -> dict[str, Any]:
    two = activation in ("silu", "clamped")
    if dtype == torch.float32:
        block_n, warps, stages = 32, 4, 2
    elif block_m <= 32:
        block_n, warps, stages = 32 if two else 64, 4, 4
    else:
        block_n, warps, stages = 64 if two else 128, 8 if block_m == 128 else 4, 3
    return {
        "E": E, "BLOCK_E": triton.next_power_of_2(E), "OUT": size_out, "ACTIVATION": activation, "GATHER": way.gather,
        "SCATTER": way.scatter, "ALONE": way.alone, "BIAS": bias, "BLOCK_M": block_m, "BLOCK_N": block_n, "GROUP": _GROUP,
        "W": kind, "num_warps": warps, "num_stages": stages,
    }  # fmt: skip
