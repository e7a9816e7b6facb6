"""The rows of a tile on the device, and the configuration that kernels are compiled for."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.exact.backends.device.row_stats import FAR_OF_FP32, FAR_OF_HALF
from rooftile.exact.backends.triton.scores import LOG2E


class SelectedShape(NamedTuple):
    """The compile-time configuration."""

    GROUP: int
    QUERIES: int  # queries to a tile, or to a step over the queries of a block
    ROWS: int  # queries times heads, padded to a power of two
    BLOCK: int  # tokens of a chosen block
    KEYS: int  # keys per step: a power of two that divides BLOCK
    D: int
    DV: int
    BLOCK_D: int
    BLOCK_DV: int
    PRECISION: str
    FAR: float  # an lse beyond it, in log2, is not precise enough to compute weights from it alone
    PAGE: int = 0  # tokens of a page of a cache that has the keys; 0: they lie one after the other


@triton.jit
def rows_of(table_ptr, tile, hk, SHAPE: tl.constexpr):
    """The rows of a tile: their places, heads, positions, bits, and whether they are there."""
    m = tl.arange(0, SHAPE.ROWS)
    r = m // SHAPE.GROUP
    held = tl.load(table_ptr + tile * 5 + 1)
    there = (r < held) & (r < SHAPE.QUERIES)
    row = tl.load(table_ptr + tile * 5) + r
    position = tl.load(table_ptr + tile * 5 + 2) + r
    return row.to(tl.int64), hk * SHAPE.GROUP + m % SHAPE.GROUP, position, r, there


@triton.jit
def lines_of(j, S, pages_ptr, strides, SHAPE: tl.constexpr):
    """The places of the keys at positions j (KEYS, 1) of a sequence; a page has the number that its table says."""
    if SHAPE.PAGE:
        page = tl.load(pages_ptr + j // SHAPE.PAGE, mask=j < S, other=0).to(tl.int64)
        line = page * strides[2] + (j % SHAPE.PAGE) * strides[0]
    else:
        line = j.to(tl.int64) * strides[0]
    return line[:, None]


@triton.jit
def in_log2(lse):
    """lse in units of log2; rows that see nothing get +inf, and so weights of 0."""
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)


def shape_of(q: Tensor, v: Tensor, Hk: int, block: int, queries: int, page: int = 0) -> SelectedShape:
    """The configuration of a call with packed q (total, H, D)."""
    group = q.shape[1] // Hk
    padded = [max(16, 1 << (dim - 1).bit_length()) for dim in (queries * group, q.shape[-1], v.shape[-1])]
    # a step's scores and values stay in registers
    keys = min(block & -block, 64 if q.dtype.itemsize == 2 else 32 if max(padded[1:]) <= 64 else 16)
    precision = "ieee" if q.dtype == torch.float32 else "tf32"
    far = FAR_OF_FP32 if q.dtype == torch.float32 else FAR_OF_HALF
    return SelectedShape(
        group, queries, padded[0], block, keys, q.shape[-1], v.shape[-1], padded[1], padded[2], precision, far, page
    )


class LaunchOptions(NamedTuple):
    """How a kernel is launched."""

    warps: int
    stages: int  # loads of its loop that are under way, and one


def launch_of(shape: SelectedShape, stages: int) -> LaunchOptions:
    """Four warps and `stages`; for heads above 128, whose sums fill the registers of four warps, eight and three.

    In fp32, and with heads of 256, shared memory holds one step.
    """
    is_wide = max(shape.BLOCK_D, shape.BLOCK_DV) > 128
    is_large = shape.PRECISION == "ieee" or shape.BLOCK_D + shape.BLOCK_DV > 384
    return LaunchOptions(8 if is_wide else 4, 1 if is_large else 3 if is_wide else stages)


def constants_of(shape: SelectedShape, launch: LaunchOptions) -> dict[str, Any]:
    """Returns the compile-time arguments of a kernel."""
    return _constants(shape, launch)


@cache
def _constants(shape: SelectedShape, launch: LaunchOptions) -> dict[str, Any]:
    # one dictionary for equal constants: a launch is known by its identity
    return {"SHAPE": shape, "num_warps": launch.warps, "num_stages": launch.stages}


def strides_of(*tensors: Tensor) -> tuple[tuple[int, int], ...]:
    """Row and head strides of each."""
    return tuple((x.stride(0), x.stride(1)) for x in tensors)
