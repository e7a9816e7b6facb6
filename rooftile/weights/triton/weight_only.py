"""Activations in 16 or 32 bits times weights that are dequantised in the kernel.

A program owns a tile of the output and a part of K. With few rows the weights' bytes bind, so K is split until there are programs
for a whole chip, and a second kernel adds the parts in order. With many rows a tile is large and K is whole.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from rooftile.runtime.launch import Kernel
from rooftile.weights.triton.unpacked import weights


class OutputTile(NamedTuple):
    """A program's tile of the output, and how K is split."""

    BLOCK_M: int
    BLOCK_N: int
    STEPS: int  # tiles of K per program
    SPLITS: int
    BIAS: bool
    STAGES: int


@triton.jit(do_not_specialize=["M"])
def _weight_only(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, outer_ptr, bias_ptr, o_ptr, M, x_stride, W: tl.constexpr, T: tl.constexpr
):
    """Writes a tile of x w^T + bias, or with splits its part in fp32."""
    BLOCK_M: tl.constexpr = T.BLOCK_M
    BLOCK_N: tl.constexpr = T.BLOCK_N
    tiles = tl.cdiv(M, BLOCK_M)
    # int64: rows times columns pass 2^31
    m = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK_M + tl.arange(0, T.BLOCK_M)
    n = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_N + tl.arange(0, T.BLOCK_N)
    split = tl.program_id(1)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    last = tl.minimum((split + 1) * T.STEPS, tl.cdiv(W.K, W.BLOCK_K))
    for step in tl.range(split * T.STEPS, last, num_stages=T.STAGES):
        k_0 = step * W.BLOCK_K
        k = k_0 + tl.arange(0, W.BLOCK_K)
        x = tl.load(x_ptr + (m * x_stride)[:, None] + k[None, :], mask=(m < M)[:, None] & (k < W.K)[None, :], other=0.0)
        w = weights(codes_ptr, scales_ptr, zeros_ptr, outer_ptr, n, k_0, n < W.N, dtype, W)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    there = (m < M)[:, None] & (n < W.N)[None, :]
    if T.BIAS:
        acc += tl.load(bias_ptr + n, mask=n < W.N, other=0.0).to(tl.float32)[None, :]
    place = (m * W.N)[:, None] + n[None, :] + split.to(tl.int64) * M * W.N
    tl.store(o_ptr + place, acc.to(o_ptr.dtype.element_ty), mask=there)


start = Kernel(_weight_only)
