"""Products with the adapters of a step's rows, in two kernels: one shrinks, one expands and adds.

    H = X A^T    (rows, R) of each part, in fp32      a program: a tile of rows, some of R, a share of the columns of X
    Y += H B^T   rounded once                         a program: a tile of rows, a block of columns of one part of Y

A tile's rows have one adapter (see `groups`); what it does not need, a rank or a whole part, is not read. Few rows leave most of
a GPU without work, so their sum over the columns of X is split into shares, which the second kernel adds in their order: no
kernel comes between the two, and no addition is atomic.

A decode step waits for memory's latency, not for its bytes. So a program of few rows reads all of its matrix at once, and with
`early` before the kernel in front of it has ended (`rooftile.runtime.early_weights`): A while the base's product ends, B while
the other kernel shrinks. Rows of Y are read and written in words of 16 bytes, for which `ALIGNED` says that blocks begin at
multiples of 16 columns.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rooftile.engine.adapters.groups import SMALL, RowGroups
from rooftile.engine.adapters.matrices import Matrices, work_of
from rooftile.runtime.dependent_launch import overlaps
from rooftile.runtime.early_weights import may_read_early
from rooftile.runtime.launch import Kernel

# for few rows the shares number MOST_SHARES over the square of the ranks, since more ranks make more programs by themselves, and
# each program of the second kernel reads every share of its ranks; but a share has at most MOST_COLUMNS columns
MOST_SHARES, MOST_COLUMNS = 8192, 4096


class Tile(NamedTuple):
    """The sizes of the programs' work.

    Args:
        BLOCK_M: rows.
        SHRUNK: ranks that a program of the first kernel computes.
        BLOCK_K: columns of X that it multiplies at once.
        SPLITS: shares of the columns of X.
        warps, stages: of the first kernel.
        BLOCK_N: columns of Y that a program of the second kernel computes.
        EXPANDED: ranks that it multiplies at once, a power of two.
        more_warps: of the second kernel.
    """

    BLOCK_M: int
    SHRUNK: int
    BLOCK_K: int
    SPLITS: int
    warps: int
    stages: int
    BLOCK_N: int
    EXPANDED: int
    more_warps: int


def tile_for(block: int, dtype: torch.dtype, K: int, R: int) -> Tile:
    """Returns the tile for tiles of `block` rows, K columns of X and slots of R ranks."""
    few, wide = block == SMALL, dtype == torch.float32
    shrunk = 16 if R % 32 or (few and R < 64) else 32
    # a share of 512 columns is read at once; where there are more rows a pipeline reads a share
    k = (64 if wide else 512) if few else (32 if wide else 64)
    steps = triton.cdiv(K, k)
    work = work_of(block, R, dtype)
    # many rows make many programs: where ranks make more, shares would only be read again by each block of Y
    most = max(MOST_SHARES // (R * R), triton.cdiv(K, MOST_COLUMNS)) if few else max(64 // R, 1)
    splits = triton.cdiv(steps, triton.cdiv(steps, most))
    warps, stages = (4, 1) if few else (8, 3)
    return Tile(block, shrunk, k, splits, warps, stages, work.columns, work.ranks, 4 if few else 8)


# fmt: off
@triton.jit(do_not_specialize=["rows", "PARTS", "early"])
def _shrink(
    x_ptr, a_ptr, ranks_ptr, tiles_ptr, order_ptr, h_ptr,     # tensors
    rows, K, PARTS, early,                                    # sizes, and whether A may be read early
    R: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    # fmt: on
    """Writes a share of a tile of H (SPLITS, rows, PARTS * R)."""
    if PDL:
        gdc_launch_dependents()
        if early == 0:
            gdc_wait()
    pieces: tl.constexpr = R // BLOCK_R
    part, r_0 = tl.program_id(1) // pieces, tl.program_id(1) % pieces * BLOCK_R
    tile = tiles_ptr + tl.program_id(0) * 4
    slot, start, count = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    works = (count > 0) & (r_0 < tl.load(ranks_ptr + slot * PARTS + part))
    m, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    here = m < count
    # int64: a row times the columns passes 2**31 in a long prompt, and so do many slots
    row = tl.load(order_ptr + start + m, mask=here, other=0).to(tl.int64)
    r = part * R + r_0 + tl.arange(0, BLOCK_R)
    x_row, a_row = x_ptr + row * K, a_ptr + slot * PARTS * R * K + r.to(tl.int64) * K
    share = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS) * BLOCK_K
    split = tl.program_id(2)
    first, end = split * share, tl.minimum(K, (split + 1) * share)
    a = tl.load(a_row[:, None] + (first + k)[None, :], mask=works & (first + k < end)[None, :], other=0.0)
    if PDL:
        # every program waits, also one without work: who waits for this kernel relies on all in front of it
        gdc_wait()
    if works:
        x = tl.load(x_row[:, None] + (first + k)[None, :], mask=here[:, None] & (first + k < end)[None, :], other=0.0)
        acc = tl.dot(x, tl.trans(a), input_precision="ieee")
        for k_0 in tl.range(first + BLOCK_K, end, BLOCK_K):
            x = tl.load(x_row[:, None] + (k_0 + k)[None, :], mask=here[:, None] & (k_0 + k < end)[None, :], other=0.0)
            a = tl.load(a_row[:, None] + (k_0 + k)[None, :], mask=(k_0 + k < end)[None, :], other=0.0)
            acc = tl.dot(x, tl.trans(a), acc, input_precision="ieee")
        h_row = h_ptr + (split * rows + start + m).to(tl.int64) * PARTS * R
        tl.store(h_row[:, None] + r[None, :], acc, mask=here[:, None])


# fmt: off
@triton.jit(do_not_specialize=["rows", "PARTS", "early"])
def _expand(
    h_ptr, b_ptr, ranks_ptr, tiles_ptr, order_ptr, blocks_ptr, y_ptr,     # tensors
    rows, N, PARTS, early,                                                # sizes, and whether B may be read early
    R: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
    ALIGNED: tl.constexpr, PDL: tl.constexpr,
):
    # fmt: on
    """Adds to a tile of Y (rows, N), in a block of columns of one part."""
    if PDL:
        gdc_launch_dependents()
        if early == 0:
            gdc_wait()
    block = blocks_ptr + tl.program_id(0) * 4
    part, first, end = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    if ALIGNED:
        first, end = tl.multiple_of(first, 16), tl.multiple_of(end, 16)
    tile = tiles_ptr + tl.program_id(1) * 4
    slot, start, count = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    # ranks are rounded up
    rank = tl.multiple_of(tl.load(ranks_ptr + slot * PARTS + part), 16)
    works = (count > 0) & (rank > 0)
    m, n, r = tl.arange(0, BLOCK_M), first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R)
    here, inside = m < count, n < end
    row = tl.load(order_ptr + start + m, mask=here, other=0).to(tl.int64)
    b_tile = b_ptr + slot * R * N + (r.to(tl.int64) * N)[:, None] + n[None, :]
    b = tl.load(b_tile, mask=works & (r < rank)[:, None] & inside[None, :], other=0.0)
    if PDL:
        # as above, every program
        gdc_wait()
    if works:
        y_tile = y_ptr + (row * N)[:, None] + n[None, :]
        both = here[:, None] & inside[None, :]
        y = tl.load(y_tile, mask=both, other=0.0)
        h_row = h_ptr + (start + m).to(tl.int64) * PARTS * R + part * R
        h = _sum_of_shares(h_row, r, rank, here, rows, PARTS, R, SPLITS)
        acc = tl.dot(h.to(b.dtype), b, input_precision="ieee")
        if R > BLOCK_R:
            for r_0 in tl.range(BLOCK_R, rank, BLOCK_R):
                b_tile += BLOCK_R * N
                b = tl.load(b_tile, mask=(r_0 + r < rank)[:, None] & inside[None, :], other=0.0)
                h = _sum_of_shares(h_row, r_0 + r, rank, here, rows, PARTS, R, SPLITS)
                acc = tl.dot(h.to(b.dtype), b, acc, input_precision="ieee")
        tl.store(y_tile, (y.to(tl.float32) + acc).to(y.dtype), mask=both)


@triton.jit
def _sum_of_shares(h_row, r, rank, here, rows, PARTS, R: tl.constexpr, SPLITS: tl.constexpr):
    """Returns some ranks of H for a tile of rows."""
    mask = here[:, None] & (r < rank)[None, :]
    h = tl.load(h_row[:, None] + r[None, :], mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        h += tl.load((h_row + (split * rows).to(tl.int64) * PARTS * R)[:, None] + r[None, :], mask=mask, other=0.0)
    return h


_start_shrink = Kernel(_shrink)
_start_expand = Kernel(_expand)


def add_in_kernels(y: Tensor, x: Tensor, matrices: Matrices, groups: RowGroups) -> None:
    """`rooftile.engine.adapters.product.add_adapters` on a GPU."""
    if not groups.tiles:
        return
    assert y.is_contiguous(), "a product's result has gaps"
    x, rows, K = x.contiguous(), len(x), x.shape[1]
    R, parts, N = matrices.rank, len(matrices.bounds) - 1, y.shape[1]
    tile = tile_for(groups.block, x.dtype, K, R)
    table, order, blocks, early = groups.table, groups.order, matrices.blocks[tile.BLOCK_M], int(may_read_early())
    h = torch.empty((tile.SPLITS, rows, parts * R), dtype=torch.float32, device=x.device)
    shrinks, expands = constants_of(tile, R, matrices.aligned, x.device)
    grid = (groups.tiles, parts * (R // tile.SHRUNK), tile.SPLITS)
    _start_shrink(grid, (x, matrices.a, matrices.ranks, table, order, h, rows, K, parts, early), shrinks)
    # programs of one tile follow each other, so that they find its rows of H near
    grid = (len(blocks), groups.tiles, 1)
    _start_expand(grid, (h, matrices.b, matrices.ranks, table, order, blocks, y, rows, N, parts, early), expands)


@cache
def constants_of(tile: Tile, R: int, aligned: bool, device: torch.device) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the constants of both kernels."""
    both = {"R": R, "BLOCK_M": tile.BLOCK_M, "SPLITS": tile.SPLITS} | overlaps(device)
    shrinks = {"BLOCK_R": tile.SHRUNK, "BLOCK_K": tile.BLOCK_K, "num_warps": tile.warps, "num_stages": tile.stages}
    expands = {"BLOCK_R": tile.EXPANDED, "BLOCK_N": tile.BLOCK_N, "ALIGNED": aligned, "num_warps": tile.more_warps}
    return both | shrinks, both | expands
