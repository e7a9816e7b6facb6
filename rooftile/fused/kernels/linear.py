"""A batch-invariant linear projection: `rooftile.fused.linear` defines it, and this rounds once, after the bias.

A program owns a tile of the output and sums over all columns, first to last. The tile follows from the weight's shape and never
from the number of rows: with more rows there are more programs, and each row's instructions stay the same.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.runtime.launch import Kernel

# tiles of this many rows of output share the columns of the weight that an L2 cache holds
TOGETHER = tl.constexpr(8)


@triton.jit(do_not_specialize=["total"])
def _linear(
    x_ptr, weight_ptr, bias_ptr, o_ptr, total,
    OUT: tl.constexpr, IN: tl.constexpr, BIAS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Writes a tile (BLOCK_R, BLOCK_N) of x weight^T + bias."""
    columns: tl.constexpr = (OUT + BLOCK_N - 1) // BLOCK_N
    tiles = tl.cdiv(total, BLOCK_R)
    group = tl.program_id(0) // (TOGETHER * columns)
    height = tl.minimum(tiles - group * TOGETHER, TOGETHER)
    place = tl.program_id(0) % (TOGETHER * columns)
    # int64: a row times the columns passes 2**31 in a long prompt, and in the head of a large vocabulary
    r = (group * TOGETHER + place % height).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    n = (place // height).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    in_rows, in_columns = (r < total)[:, None], (n < OUT)[None, :]
    acc = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for k_0 in tl.range(0, IN, BLOCK_K, num_stages=STAGES):
        here = k_0 + k < IN
        x = tl.load(x_ptr + (r * IN)[:, None] + (k_0 + k)[None, :], mask=in_rows & here[None, :], other=0.0)
        w = tl.load(weight_ptr + (n * IN)[None, :] + (k_0 + k)[:, None], mask=in_columns & here[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < OUT, other=0.0).to(tl.float32)[None, :]
    tl.store(o_ptr + (r * OUT)[:, None] + n[None, :], acc.to(o_ptr.dtype.element_ty), mask=in_rows & in_columns)


_start_linear = Kernel(_linear)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (total, in) to (total, out)."""
    x, weight = x.contiguous(), weight.contiguous()
    total, out = x.shape[0], weight.shape[0]
    o = torch.empty((total, out), dtype=x.dtype, device=x.device)
    if o.numel():
        constants = _constants(*weight.shape, bias is not None, x.dtype)
        programs = triton.cdiv(total, constants["BLOCK_R"]) * triton.cdiv(out, constants["BLOCK_N"])
        arguments = (x, weight, weight if bias is None else bias.contiguous(), o, total)
        _start_linear((programs, 1, 1), arguments, constants)
    return o


@cache
def _constants(out: int, inner: int, bias: bool, dtype: torch.dtype) -> dict[str, Any]:
    return tile_of(out, dtype) | {"OUT": out, "IN": inner, "BIAS": bias}


def tile_of(out: int, dtype: torch.dtype) -> dict[str, int]:
    """Returns a program's tile for an output with this many columns: narrow where there are few, so that programs fill a chip."""
    if dtype == torch.float32:
        return {"BLOCK_R": 32, "BLOCK_N": 64, "BLOCK_K": 32, "STAGES": 3, "num_warps": 4}
    block_n = 128 if out >= 16384 else 64 if out >= 8192 else 32
    return {"BLOCK_R": 64, "BLOCK_N": block_n, "BLOCK_K": 64, "STAGES": 4, "num_warps": 4}
