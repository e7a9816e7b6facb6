"""The tiles of the experts' kernels: as large as fits registers and shared memory."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton

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


def tile_of(block_m: int, kind: str, dtype: torch.dtype, hopper: bool) -> dict[str, int]:
    """Columns and depth of a tile, warps and stages; the kind is an activation, "none", or "through" one, in the backward."""
    two = kind in ("silu", "clamped")
    if dtype == torch.float32:
        return {"BLOCK_M": block_m, "BLOCK_N": 32, "BLOCK_K": 32, "num_warps": 4, "num_stages": 2}
    if block_m <= 32:
        # few rows: the weights are what is read, in long pieces
        return {"BLOCK_M": block_m, "BLOCK_N": 32 if two else 64, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4}
    # two halves of 128 columns fill the registers, and a clamp with biases needs some more
    wide = 128 if not two or (hopper and kind == "silu") else 64
    warps = 8 if block_m == 128 else 4
    block_n = wide if block_m == 128 or not two else 64
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": 64, "num_warps": warps, "num_stages": 3}


def gradient_tile(dtype: torch.dtype, hopper: bool) -> dict[str, int]:
    """The block of a weight's gradient, and how many rows a step adds to it."""
    if dtype == torch.float32:
        return {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 32, "num_warps": 4, "num_stages": 2}
    return {"BLOCK_M": 128, "BLOCK_N": 256 if hopper else 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 4 if hopper else 3}


# each of these gives one dictionary for the same arguments: a launch is recognised by it


@cache
def product_constants(
    E: int, size_in: int, size_out: int, activation: str, dtype: torch.dtype, hopper: bool, block_m: int, bias: bool, keep: bool,
    turned: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """From tokens to sorted rows with an activation, and with "none" from sorted rows to (token, choice)."""
    is_second = activation == "none"
    return {
        "E": E, "BLOCK_E": triton.next_power_of_2(E), "IN": size_in, "OUT": size_out, "ACTIVATION": activation,
        "GATHER": not is_second, "SCATTER": is_second, "TURNED": turned, "BIAS": bias, "KEEP": keep, "GROUP": _GROUP,
        **tile_of(block_m, activation, dtype, hopper),
    }  # fmt: skip


@cache
def through_constants(
    E: int, d: int, h: int, activation: str, dtype: torch.dtype, hopper: bool, block_m: int, bias: bool, keep: bool
) -> dict[str, Any]:
    return {
        "E": E, "BLOCK_E": triton.next_power_of_2(E), "D": d, "H": h, "ACTIVATION": activation, "BIAS": bias, "KEEP": keep,
        "GROUP": _GROUP, **tile_of(block_m, "through", dtype, hopper),
    }  # fmt: skip


@cache
def weight_constants(size_out: int, size_in: int, left: bool, dtype: torch.dtype, hopper: bool) -> dict[str, Any]:
    """The left factor, or else the right one, is read by token."""
    return {
        "OUT": size_out, "IN": size_in, "LEFT_BY_TOKEN": left, "RIGHT_BY_TOKEN": not left, **gradient_tile(dtype, hopper),
    }  # fmt: skip


@cache
def bias_constants(size: int, by_token: bool) -> dict[str, Any]:
    return {"OUT": size, "BY_TOKEN": by_token, "BLOCK_N": 128, "BLOCK_K": 32, "num_warps": 4}


@cache
def sum_constants(E: int, K: int, d: int, shared: bool) -> dict[str, Any]:
    return {"E": E, "K": K, "D": d, "SHARED": shared, "BLOCK": block_of(d), "num_warps": 4}


@cache
def sum_gradients_constants(E: int, K: int, d: int, parts: int, shared: bool) -> dict[str, Any]:
    return {**sum_constants(E, K, d, shared), "PARTS": parts, "BLOCK_PARTS": triton.next_power_of_2(parts)}


@cache
def element_constants(size: int, activation: str, gated: bool | None = None) -> dict[str, Any]:
    gate = {} if gated is None else {"GATED": gated}
    return {"S": size, "ACTIVATION": activation, **gate, "BLOCK": block_of(size), "num_warps": 4}


def block_of(size: int) -> int:
    """The numbers of a row that a program has at a time."""
    return min(triton.next_power_of_2(size), 1024)
