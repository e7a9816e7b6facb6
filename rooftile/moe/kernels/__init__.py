"""The experts' forward in Triton kernels, for Ampere and newer, in bf16, fp16 and fp32.

    products   sorted rows times the weight of each row's expert, and the sum over a token's choices

Nothing is read by the host. Every sum has one owner and one order. The shared network goes through PyTorch's products.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from rooftile.moe.by_expert import shared_forward
from rooftile.moe.kernels.products import _product, _sum_choices
from rooftile.moe.problem import Options, Weights
from rooftile.moe.sorting import Sorted, sort
from rooftile.runtime.devices import capability
from rooftile.runtime.launch import Kernel

_start_product, _start_sum = Kernel(_product), Kernel(_sum_choices)
# rows of a tile where a token's bits may not depend on the number of tokens
_FIXED_ROWS = 64
# tiles of rows that share a block of a weight
_GROUP = 8


def rows_of_tile(rows: int, experts: int, dtype: torch.dtype, is_fixed: bool) -> int:
    """The power of two from 16 to 128 (fp32: 32) that holds an expert's rows if experts share them evenly; or a fixed one."""
    largest = 32 if dtype == torch.float32 else 128
    if is_fixed:
        return min(_FIXED_ROWS, largest)
    return min(max(triton.next_power_of_2(-(-rows // experts)), 16), largest)


def tile_of(block_m: int, activation: str, dtype: torch.dtype, hopper: bool) -> dict[str, int]:
    """Columns and depth of a tile, warps and stages: as large as fits registers and shared memory."""
    two = activation in ("silu", "clamped")
    if dtype == torch.float32:
        return {"BLOCK_M": block_m, "BLOCK_N": 32, "BLOCK_K": 32, "num_warps": 4, "num_stages": 2}
    if block_m <= 32:
        # few rows: the weights are what is read, in long pieces
        return {"BLOCK_M": block_m, "BLOCK_N": 32 if two else 64, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4}
    # two halves of 128 columns fill the registers, and a clamp with biases needs some more
    wide = 128 if not two or (hopper and activation == "silu") else 64
    warps = 8 if block_m == 128 else 4
    block_n = wide if block_m == 128 or not two else 64
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": 64, "num_warps": warps, "num_stages": 3}


@cache
def _constants(
    E: int, size_in: int, size_out: int, activation: str, dtype: torch.dtype, hopper: bool, block_m: int, bias: bool, keep: bool
) -> dict[str, Any]:
    """One dictionary for the same arguments: a launch is recognised by it."""
    is_second = activation == "none"
    return {
        "E": E, "BLOCK_E": triton.next_power_of_2(E), "IN": size_in, "OUT": size_out, "ACTIVATION": activation,
        "GATHER": not is_second, "SCATTER": is_second, "BIAS": bias, "KEEP": keep, "GROUP": _GROUP,
        **tile_of(block_m, activation, dtype, hopper),
    }  # fmt: skip


@cache
def _sum_constants(E: int, K: int, d: int, shared: bool) -> dict[str, Any]:
    block = min(triton.next_power_of_2(d), 1024)
    return {"E": E, "K": K, "D": d, "SHARED": shared, "BLOCK": block, "num_warps": 4}


def forward(
    u: Tensor, chosen: Tensor, gates: Tensor, weights: Weights, options: Options, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes what `by_expert.forward` does; the products before the activation are empty unless they are to be kept."""
    u, gates = u.contiguous(), gates.contiguous()
    (N, d), K, h = u.shape, chosen.shape[1], weights.down.shape[2]
    rows = sort(chosen, weights.up.shape[0])
    p = u.new_empty((N * K if keep else 0, weights.up.shape[1]))
    a, z, y = u.new_empty((N * K, h)), u.new_empty((N * K, d)), torch.empty_like(u)
    shared, shared_p = shared_forward(u, weights, options, gates.dtype)
    if N:
        block_m = rows_of_tile(N * K, weights.up.shape[0], u.dtype, options.deterministic)
        _multiply(u, weights.up, weights.up_bias, a, p, rows, block_m, options.activation, keep)
        _multiply(a, weights.down, weights.down_bias, z, p, rows, block_m, "none", False)
        constants = _sum_constants(weights.up.shape[0], K, d, shared is not None)
        grid = (N, triton.cdiv(d, constants["BLOCK"]), 1)
        _start_sum(grid, (z, gates, z if shared is None else shared.contiguous(), chosen.contiguous(), y), constants)
    return y, p, shared_p


def _multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, p: Tensor, rows: Sorted, block_m: int, activation: str, keep: bool
) -> None:
    """Writes y, and p if it is kept: from tokens to sorted rows, and with "none" from sorted rows to (token, choice)."""
    E, count, hopper = weight.shape[0], rows.order.shape[0], capability(x.device) >= (9, 0)
    constants = _constants(E, x.shape[1], y.shape[1], activation, x.dtype, hopper, block_m, bias is not None, keep)
    tiles = count // block_m + min(E, count)
    grid = (tiles * triton.cdiv(y.shape[1], constants["BLOCK_N"]), 1, 1)
    arguments = (
        x, weight.contiguous(), x if bias is None else bias.contiguous(), y, p if keep else y, rows.tokens, rows.order, rows.ends,
        tiles,
    )  # fmt: skip
    _start_product(grid, arguments, constants)
