"""The tiles of the experts' kernels: as large as fits registers and shared memory."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton

from rooftile.runtime.devices import capability

# rows of a tile where a token's bits may not depend on the number of tokens
_FIXED_ROWS = 64
# tiles of rows that share a block of a weight
_GROUP = 8


def is_large(device: torch.device) -> bool:
    """Whether the chip has 227 KB of shared memory: Hopper, and Blackwell in data centres, but not in workstations."""
    return (9, 0) <= capability(device) < (12, 0)


def rows_of_tile(rows: int, experts: int, dtype: torch.dtype, is_fixed: bool) -> int:
    """The power of two from 16 to 128 (fp32: 32) that holds an expert's rows if experts share them evenly; or a fixed one."""
    largest = 32 if dtype == torch.float32 else 128
    if is_fixed:
        return min(_FIXED_ROWS, largest)
    return min(max(triton.next_power_of_2(-(-rows // experts)), 16), largest)


def tile_of(block_m: int, activation: str, dtype: torch.dtype, large: bool) -> dict[str, int]:
    """Columns and depth of a tile, warps and stages."""
    two = activation in ("silu", "clamped")
    if dtype == torch.float32:
        return {"BLOCK_M": block_m, "BLOCK_N": 32, "BLOCK_K": 32, "num_warps": 4, "num_stages": 2}
    if block_m <= 32:
        # few rows: the weights are what is read, in long pieces
        return {"BLOCK_M": block_m, "BLOCK_N": 32 if two else 64, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4}
    if block_m == 128:
        # 256 columns, of both halves where there are two, fill the registers; a clamp with biases needs some more
        columns = 256 if large and activation in ("silu", "none") else 128
        block_n, stages = columns // (2 if two else 1), 4 if large and columns == 256 else 3
        return {"BLOCK_M": 128, "BLOCK_N": block_n, "BLOCK_K": 64, "num_warps": 8, "num_stages": stages}
    return {"BLOCK_M": block_m, "BLOCK_N": 64 if two else 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3}


def gradient_tile(size_in: int, dtype: torch.dtype, large: bool) -> dict[str, int]:
    """The block of a weight's gradient (out, in), and how many rows a step adds to it."""
    if dtype == torch.float32:
        return {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 32, "num_warps": 4, "num_stages": 2}
    # the rows' indices are loads, too: they take two of the stages
    columns = 256 if large and size_in % 256 == 0 else 128
    return {"BLOCK_M": 128, "BLOCK_N": columns, "BLOCK_K": 64, "num_warps": 8, "num_stages": 5 if large else 3}


# each of these gives one dictionary for the same arguments: a launch is recognised by it


class Way(NamedTuple):
    """How a product finds rows and weights."""

    gather: bool = False  # x is by token
    scatter: bool = False  # y is by token and choice
    turned: bool = False  # the weight is (E, in, out)
    alone: bool = False  # there is one token, whose rows are in the order of its choices


@cache
def product_constants(
    E: int, size_in: int, size_out: int, activation: str, dtype: torch.dtype, large: bool, block_m: int, bias: bool, keep: bool,
    way: Way,
) -> dict[str, Any]:  # fmt: skip
    return {
        "E": E, "BLOCK_E": triton.next_power_of_2(E), "IN": size_in, "OUT": size_out, "ACTIVATION": activation,
        "GATHER": way.gather, "SCATTER": way.scatter, "TURNED": way.turned, "ALONE": way.alone, "BIAS": bias, "KEEP": keep,
        "GROUP": _GROUP, **tile_of(block_m, activation, dtype, large),
    }  # fmt: skip


@cache
def weight_constants(size_out: int, size_in: int, left: bool, dtype: torch.dtype, large: bool) -> dict[str, Any]:
    """The left factor, or else the right one, is read by token."""
    tile = gradient_tile(size_in, dtype, large)
    return {"OUT": size_out, "IN": size_in, "LEFT_BY_TOKEN": left, "RIGHT_BY_TOKEN": not left, **tile}


@cache
def bias_constants(size: int, by_token: bool) -> dict[str, Any]:
    return {"OUT": size, "BY_TOKEN": by_token, "BLOCK_N": 128, "BLOCK_K": 32, "num_warps": 4}


@cache
def sum_constants(E: int, K: int, d: int, shared: bool) -> dict[str, Any]:
    return {"E": E, "K": K, "D": d, "SHARED": shared, "BLOCK": block_of(d), "num_warps": 4}


@cache
def activation_constants(size: int, activation: str) -> dict[str, Any]:
    return {"S": size, "ACTIVATION": activation, "BLOCK": block_of(size), "num_warps": 4}


@cache
def activation_gradient_constants(
    E: int, size: int, d: int, activation: str, *, gated: bool, routed: bool, bias: bool, keep: bool
) -> dict[str, Any]:
    flags = {"GATED": gated, "ROUTED": routed, "BIAS": bias, "KEEP": keep}
    return {"E": E, "D": d, **activation_constants(size, activation), **flags}


def block_of(size: int) -> int:
    """The numbers of a row that a program has at a time."""
    return min(triton.next_power_of_2(size), 1024)
