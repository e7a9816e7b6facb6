"""Transposes a result (N, M) to (M, N), and applies scales, bias and rounding.

cuSPARSELt computes W x^T, and its default algorithm takes up to 1.6 times as long to write it transposed (h200-sparsity.jsonl).
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.runtime.launch import Kernel

ROWS, COLUMNS = 64, 64


@triton.jit(do_not_specialize=["M", "sixteens"])
def _transpose(
    y_ptr, x_scales_ptr, w_scales_ptr, bias_ptr, o_ptr, M, sixteens, N: tl.constexpr, SCALED: tl.constexpr,
    BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Writes a tile of o (M, N) from y (N, y_stride); y_stride = 16 * sixteens. Reads y's padding, to load aligned words."""
    y_stride = sixteens * 16
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    in_rows, in_columns = m < M, n < N
    y = tl.load(y_ptr + (n * y_stride)[:, None] + m[None, :], mask=in_columns[:, None] & (m < y_stride)[None, :], other=0.0)
    y = tl.trans(y)
    if SCALED:
        y = y.to(tl.float32) * tl.load(x_scales_ptr + m, mask=in_rows, other=0.0)[:, None]
        y *= tl.load(w_scales_ptr + n, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        y = y.to(tl.float32) + tl.load(bias_ptr + n, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    place = (m * N)[:, None] + n[None, :]
    tl.store(o_ptr + place, y.to(o_ptr.dtype.element_ty), mask=in_rows[:, None] & in_columns[None, :])


_start = Kernel(_transpose)


def transposed(
    y: Tensor, M: int, x_scales: Tensor | None, w_scales: Tensor | None, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """Returns (M, N) from a contiguous y (N, M padded to a multiple of 16), rounded once.

    It is multiplied by scales (M, 1) and (N, 1), and a bias (N,) is added.
    """
    N = y.shape[0]
    o = torch.empty((M, N), dtype=out_dtype, device=y.device)
    given = [y if one is None else one.contiguous() for one in (x_scales, w_scales, bias)]
    grid = (triton.cdiv(M, ROWS), triton.cdiv(N, COLUMNS), 1)
    _start(grid, (y, *given, o, M, y.stride(0) // 16), constants_of(N, x_scales is not None, bias is not None))
    return o


@cache
def constants_of(N: int, scaled: bool, bias: bool) -> dict[str, object]:
    """The compile-time arguments."""
    return {"N": N, "SCALED": scaled, "BIAS": bias, "ROWS": ROWS, "COLUMNS": COLUMNS, "num_warps": 4}
