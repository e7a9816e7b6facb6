"""FP8 and INT8 products: codes times codes, and scales on the sums; and the kernel that adds the parts of a split K.

Sums of FP8 leave the matrix units for fp32 registers every 128 of K, because Hopper's sums carry about 14 bits. Sums of INT8 are
exact.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from rooftile.runtime.launch import Kernel


class ScaledWeight(NamedTuple):
    """All that a kernel is compiled for of a weight in FP8 or INT8."""

    FORMAT: str
    N: int
    K: int
    BLOCK_K: int


@triton.jit(do_not_specialize=["M"])
def _scaled(x_ptr, codes_ptr, x_scales_ptr, w_scales_ptr, bias_ptr, o_ptr, M, C: tl.constexpr, T: tl.constexpr):
    """Writes a tile of x w^T with scales and bias, or with splits the sums of its part of K."""
    BLOCK_M: tl.constexpr = T.BLOCK_M
    BLOCK_N: tl.constexpr = T.BLOCK_N
    SUM: tl.constexpr = tl.int32 if C.FORMAT == "int8" else tl.float32
    tiles = tl.cdiv(M, BLOCK_M)
    m = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK_M + tl.arange(0, T.BLOCK_M)
    n = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_N + tl.arange(0, T.BLOCK_N)
    in_rows, in_columns = m < M, n < C.N
    split = tl.program_id(1)
    acc = tl.zeros((BLOCK_M, BLOCK_N), SUM)
    last = tl.minimum((split + 1) * T.STEPS, tl.cdiv(C.K, C.BLOCK_K))
    for step in tl.range(split * T.STEPS, last, num_stages=T.STAGES):
        k = step * C.BLOCK_K + tl.arange(0, C.BLOCK_K)
        here = k < C.K
        # bytes: a number has no place among FP8 pointers
        x = tl.load(x_ptr + (m * C.K)[:, None] + k[None, :], mask=in_rows[:, None] & here[None, :], other=0)
        w = tl.load(codes_ptr + (n * C.K)[None, :] + k[:, None], mask=in_columns[None, :] & here[:, None], other=0)
        if C.FORMAT != "int8":
            x, w = x.to(tl.float8e4nv, bitcast=True), w.to(tl.float8e4nv, bitcast=True)
        if C.FORMAT == "int8":
            acc = tl.dot(x, w, acc, out_dtype=tl.int32)
        elif C.FORMAT == "fp8":
            acc = tl.dot(x, w, acc, max_num_imprecise_acc=128)
        else:
            x_scale = tl.load(x_scales_ptr + m * ((C.K + 127) // 128) + step, mask=in_rows, other=0.0)
            w_scale = tl.load(w_scales_ptr + (n // 128) * ((C.K + 127) // 128) + step, mask=in_columns, other=0.0)
            acc += tl.dot(x, w) * (x_scale[:, None] * w_scale[None, :])
    there = in_rows[:, None] & in_columns[None, :]
    if T.SPLITS == 1:
        acc = acc.to(tl.float32)
        if C.FORMAT != "fp8_tile":
            x_scale = tl.load(x_scales_ptr + m, mask=in_rows, other=0.0)
            w_scale = tl.load(w_scales_ptr + n, mask=in_columns, other=0.0).to(tl.float32)
            acc = acc * x_scale[:, None] * w_scale[None, :]
        if T.BIAS:
            acc += tl.load(bias_ptr + n, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    place = (m * C.N)[:, None] + n[None, :] + split.to(tl.int64) * M * C.N
    tl.store(o_ptr + place, acc.to(o_ptr.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["total"])
def _add_parts(
    parts_ptr, x_scales_ptr, w_scales_ptr, bias_ptr, o_ptr, total,
    N: tl.constexpr, SPLITS: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds the parts of all splits in order, and does what comes after a sum: scales, bias, rounding."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = place < total
    n, m = place % N, place // N
    if N % BLOCK == 0:
        # all of a program's places are in one row: no division for each of them
        n = tl.program_id(0) % (N // BLOCK) * BLOCK + tl.arange(0, BLOCK)
        m = tl.program_id(0) // (N // BLOCK) + tl.zeros((BLOCK,), tl.int32)
    total_64 = total.to(tl.int64)
    acc = tl.load(parts_ptr + place, mask=there, other=0)
    for split in tl.static_range(1, SPLITS):
        acc += tl.load(parts_ptr + split * total_64 + place, mask=there, other=0)
    acc = acc.to(tl.float32)
    if SCALED:
        acc = acc * tl.load(x_scales_ptr + m, mask=there, other=0.0)
        acc = acc * tl.load(w_scales_ptr + n, mask=there, other=0.0).to(tl.float32)
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=there, other=0.0).to(tl.float32)
    tl.store(o_ptr + place, acc.to(o_ptr.dtype.element_ty), mask=there)


start, start_adding = Kernel(_scaled), Kernel(_add_parts)
