"""Few rows times a 2:4 weight, on any GPU: values and places are read, spread in registers, and multiplied densely.

Few rows read 9/16 of a dense weight's bytes (5/8 in FP8). Sparse matrix units would take values as they are, and Triton
cannot use them. So values are spread, and on an H200 that took longer than the bytes that are saved (h200-sparsity.jsonl):
spread weights go from one thread's registers to another's. Hopper has a kernel that needs none of this
(`rooftile.weights.hopper.two_four`).

A program owns some rows of the weight, and a part of K where whole rows are too few programs for a chip; a second kernel adds
the parts in order. The weight is the first matrix, so that 64 of its rows fill Hopper's matrix units, however few rows x has. The
next tiles are read into registers while one is multiplied.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.runtime.launch import Kernel
from rooftile.weights.triton.launch import added
from rooftile.weights.two_four.compression_kernels import joined
from rooftile.weights.two_four.definition import bits_of
from rooftile.weights.two_four.product.definition import Sparse, SparseProduct, scales_of

# rows of x in a tile, at most
MOST_ROWS = 64
# programs that fill a chip of 132 multiprocessors three times, and parts of K
PROGRAMS, MOST_SPLITS = 396, 16


class SparseTile(NamedTuple):
    """The compile-time arguments of a kernel."""

    N: int
    K: int
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    STEPS: int  # tiles of K per program
    SPLITS: int
    WHOLE: bool  # whether K is a multiple of BLOCK_K
    SCALED: bool  # FP8
    BIAS: bool


@triton.jit
def _read(values_ptr, places_ptr, n, k_0, T: tl.constexpr):
    """The values of whole groups (BLOCK_N, BLOCK_K / 4), both in one number, and places (BLOCK_N, BLOCK_K / 8), from k_0 on."""
    group = k_0 // 4 + tl.arange(0, T.BLOCK_K // 4)
    byte = k_0 // 8 + tl.arange(0, T.BLOCK_K // 8)
    in_rows = (n < T.N)[:, None]
    in_values, in_places = in_rows, in_rows
    if not T.WHOLE:
        in_values, in_places = in_rows & (group < T.K // 4)[None, :], in_rows & (byte < (T.K + 7) // 8)[None, :]
    values = tl.load(values_ptr + (n * (T.K // 4))[:, None] + group[None, :], mask=in_values, other=0)
    places = tl.load(places_ptr + (n * ((T.K + 7) // 8))[:, None] + byte[None, :], mask=in_places, other=0)
    return values, places


@triton.jit
def _read_x(x_ptr, m, M, x_stride, k_0, T: tl.constexpr):
    """x (BLOCK_M, BLOCK_K) from column k_0 on."""
    k = k_0 + tl.arange(0, T.BLOCK_K)
    there = (m < M)[:, None]
    if not T.WHOLE:
        there = there & (k < T.K)[None, :]
    return tl.load(x_ptr + (m * x_stride)[:, None] + k[None, :], mask=there, other=0)


@triton.jit
def _spread(values, places):
    """The dense tile (BLOCK_N, BLOCK_K) in integers: both values of a group are shifted to their places in one number."""
    # bytes rather than what is made of them cross from one thread to another
    four = tl.broadcast_to(places[:, :, None], (places.shape[0], places.shape[1], 2)).to(tl.uint32)
    four = tl.reshape(four >> (tl.arange(0, 2) << 2)[None, None, :].to(tl.uint32), (values.shape[0], values.shape[1]))
    if values.dtype == tl.int32:
        both = values.to(tl.uint32, bitcast=True)
        group = (both & 0xFFFF).to(tl.uint64) << ((four << 4) & 48).to(tl.uint64)
        group |= (both >> 16).to(tl.uint64) << ((four << 2) & 48).to(tl.uint64)
        a, c = group.to(tl.uint32), (group >> 32).to(tl.uint32)
        dense = joined(a.to(tl.int16), (a >> 16).to(tl.int16), c.to(tl.int16), (c >> 16).to(tl.int16))
    else:
        both = values.to(tl.uint16, bitcast=True).to(tl.uint32)
        group = ((both & 0xFF) << ((four << 3) & 24)) | ((both >> 8) << ((four << 1) & 24))
        dense = joined(group.to(tl.int8), (group >> 8).to(tl.int8), (group >> 16).to(tl.int8), (group >> 24).to(tl.int8))
    return dense


@triton.jit(do_not_specialize=["M"])
def _few_rows(
    x_ptr, values_ptr, places_ptr, x_scales_ptr, w_scales_ptr, bias_ptr, o_ptr, M, x_stride, dtype: tl.constexpr, T: tl.constexpr
):
    """Writes a tile of x w^T with scales and bias, or with splits the sums of its part of K in fp32."""
    BLOCK_N: tl.constexpr = T.BLOCK_N
    BLOCK_M: tl.constexpr = T.BLOCK_M
    tiles = tl.cdiv(M, BLOCK_M)
    m = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK_M + tl.arange(0, T.BLOCK_M)
    n = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_N + tl.arange(0, T.BLOCK_N)
    split = tl.program_id(1)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    start, last = split * T.STEPS, tl.minimum((split + 1) * T.STEPS, tl.cdiv(T.K, T.BLOCK_K))
    values, places = _read(values_ptr, places_ptr, n, start * T.BLOCK_K, T)
    x = _read_x(x_ptr, m, M, x_stride, start * T.BLOCK_K, T)
    for step in tl.range(start, last, num_stages=1):
        w, now = _spread(values, places).to(dtype, bitcast=True), x.to(dtype, bitcast=True)
        # past the end the last tile is read again
        next_k = tl.minimum(step + 1, last - 1) * T.BLOCK_K
        values, places = _read(values_ptr, places_ptr, n, next_k, T)
        x = _read_x(x_ptr, m, M, x_stride, next_k, T)
        acc = tl.dot(w, tl.trans(now), acc, max_num_imprecise_acc=T.BLOCK_K)
    in_columns = n < T.N
    if T.SPLITS == 1:
        if T.SCALED:
            acc *= tl.load(x_scales_ptr + m, mask=m < M, other=0.0)[None, :]
            acc *= tl.load(w_scales_ptr + n, mask=in_columns, other=0.0)[:, None]
        if T.BIAS:
            acc += tl.load(bias_ptr + n, mask=in_columns, other=0.0).to(tl.float32)[:, None]
    place = (m * T.N)[None, :] + n[:, None] + split.to(tl.int64) * M * T.N
    tl.store(o_ptr + place, acc.to(o_ptr.dtype.element_ty), mask=in_columns[:, None] & (m < M)[None, :])


start = Kernel(_few_rows)
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float8_e4m3fn: tl.float8e4nv}


@cache
def tile_of(M: int, product: SparseProduct, scaled: bool, bias: bool) -> SparseTile:
    """Returns the tile of a product with M rows, a power of two. Under `deterministic` one serves any number of rows."""
    N, K = product.N, product.K
    block_m = MOST_ROWS if product.deterministic else min(max(M, 16), MOST_ROWS)
    # the fastest of those that were tried on an H200; a large tile of x leaves registers for half of K
    block_n, block_k = 64, 64 if block_m == MOST_ROWS and not scaled else 128
    programs, steps = triton.cdiv(N, block_n), triton.cdiv(K, block_k)
    splits = min(max(PROGRAMS // programs, 1), MOST_SPLITS, steps)
    per_split = triton.cdiv(steps, splits)
    splits = triton.cdiv(steps, per_split)
    return SparseTile(N, K, block_m, block_n, block_k, per_split, splits, K % block_k == 0, scaled, bias and splits == 1)


def multiply(x: Tensor, x_scales: Tensor | None, weight: Sparse, bias: Tensor | None, product: SparseProduct) -> Tensor:
    """Multiplies x (M, K), or its FP8 codes with their scales, with a weight, to (M, N)."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    M, N, dtype = x.shape[0], product.N, weight.values.dtype
    tile = tile_of(triton.next_power_of_2(M), product, x_scales is not None, bias is not None)
    shape, kind = ((M, N), product.out_dtype) if tile.SPLITS == 1 else ((tile.SPLITS, M, N), torch.float32)
    o = torch.empty(shape, dtype=kind, device=x.device)
    w_scales = None if x_scales is None else scales_of(weight).contiguous()
    x_scales = None if x_scales is None else x_scales.contiguous()
    given = [o if one is None else one for one in (x_scales, w_scales, bias)]
    tensors = (bits_of(x), _groups_of(weight.values), weight.places.contiguous(), *given, o)
    grid = (triton.cdiv(M, tile.BLOCK_M) * triton.cdiv(N, tile.BLOCK_N), tile.SPLITS, 1)
    start(grid, (*tensors, M, x.stride(0)), constants_of(dtype, tile))
    return o if tile.SPLITS == 1 else added(o, x_scales, w_scales, bias, product.out_dtype)


def _groups_of(values: Tensor) -> Tensor:
    """Values (N, K / 2) as (N, K / 4) integers, each the bits of a group's two."""
    values = values.contiguous()
    values = values.clone() if values.storage_offset() % 2 else values
    return values.view(torch.int32 if values.element_size() == 2 else torch.int16)


@cache
def constants_of(dtype: torch.dtype, tile: SparseTile) -> dict[str, object]:
    """The compile-time arguments."""
    return {"dtype": _TYPES[dtype], "T": tile, "num_warps": 4}
