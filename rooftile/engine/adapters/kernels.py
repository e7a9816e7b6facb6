"""Products with the adapters of a step's rows, in two kernels: one shrinks, one expands and adds.

    H = X A^T    (rows, R) of each part, in fp32      a program: a tile of rows, up to 32 of R, a share of the columns of X
    Y += H B^T   rounded once                         a program: a tile of rows, up to 128 columns of one part of Y

A tile's rows have one adapter (see `groups`); what it does not need, a rank or a whole part, is not read. Few rows leave most of
a GPU without work, so their sum over the columns of X is split into SPLITS shares, which the second kernel adds in their order:
no kernel comes between the two, and no addition is atomic.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.engine.adapters.groups import SMALL, RowGroups
from rooftile.engine.adapters.matrices import COLUMNS, Matrices
from rooftile.runtime.dependent_launch import overlaps, wait_for_inputs
from rooftile.runtime.launch import Kernel


class Tile(NamedTuple):
    """The sizes of a program's work."""

    BLOCK_M: int
    BLOCK_K: int
    SPLITS: int
    num_warps: int
    num_stages: int


def tile_for(block: int, dtype: torch.dtype) -> Tile:
    """Returns the tile for tiles of `block` rows."""
    if dtype == torch.float32:
        return Tile(SMALL, 64, 8, 4, 3) if block == SMALL else Tile(block, 32, 1, 8, 3)
    # a share of 4,096 columns is 512: all of it is on its way when the first product begins
    return Tile(SMALL, 128, 8, 4, 4) if block == SMALL else Tile(block, 64, 1, 8, 3)


# fmt: off
@triton.jit(do_not_specialize=["rows"])
def _shrink(
    x_ptr, a_ptr, ranks_ptr, tiles_ptr, order_ptr, h_ptr,     # tensors
    rows, K, PARTS,                                           # sizes
    R: tl.constexpr, BLOCK_R: tl.constexpr,                   # the slots
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):
    # fmt: on
    """Writes a share of a tile of H (SPLITS, rows, PARTS * R)."""
    if PDL:
        wait_for_inputs()
    pieces: tl.constexpr = R // BLOCK_R
    part, r_0 = tl.program_id(1) // pieces, tl.program_id(1) % pieces * BLOCK_R
    split = tl.program_id(2)
    tile = tiles_ptr + tl.program_id(0) * 4
    slot, start, count = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    if (count > 0) & (r_0 < tl.load(ranks_ptr + slot * PARTS + part)):
        m = tl.arange(0, BLOCK_M)
        here = m < count
        # int64: a row times the columns passes 2**31 in a long prompt, and so do many slots
        row = tl.load(order_ptr + start + m, mask=here, other=0).to(tl.int64)
        r = part * R + r_0 + tl.arange(0, BLOCK_R)
        x_row, a_row = x_ptr + row * K, a_ptr + slot * PARTS * R * K + r.to(tl.int64) * K
        share = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS) * BLOCK_K
        acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for k_0 in tl.range(split * share, tl.minimum(K, (split + 1) * share), BLOCK_K):
            k = k_0 + tl.arange(0, BLOCK_K)
            x = tl.load(x_row[:, None] + k[None, :], mask=here[:, None] & (k < K)[None, :], other=0.0)
            a = tl.load(a_row[None, :] + k[:, None], mask=(k < K)[:, None], other=0.0)
            acc = tl.dot(x, a, acc, input_precision="ieee")
        h_row = h_ptr + (split * rows + start + m).to(tl.int64) * PARTS * R
        tl.store(h_row[:, None] + r[None, :], acc, mask=here[:, None])


# fmt: off
@triton.jit(do_not_specialize=["rows"])
def _expand(
    h_ptr, b_ptr, ranks_ptr, tiles_ptr, order_ptr, blocks_ptr, y_ptr,     # tensors
    rows, N, PARTS,                                                       # sizes
    R: tl.constexpr, BLOCK_R: tl.constexpr,                               # the slots
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):
    # fmt: on
    """Adds to a tile of Y (rows, N), in a block of columns of one part."""
    if PDL:
        wait_for_inputs()
    block = blocks_ptr + tl.program_id(1) * 4
    part, first, end = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    tile = tiles_ptr + tl.program_id(0) * 4
    slot, start, count = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    rank = tl.load(ranks_ptr + slot * PARTS + part)
    if (count > 0) & (rank > 0):
        m, n, r = tl.arange(0, BLOCK_M), first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R)
        here, inside = m < count, n < end
        row = tl.load(order_ptr + start + m, mask=here, other=0).to(tl.int64)
        h_row = h_ptr + (start + m).to(tl.int64) * PARTS * R + part * R
        b_row = b_ptr + slot * N * R + n.to(tl.int64) * R
        y_tile = y_ptr + (row * N)[:, None] + n[None, :]
        both = here[:, None] & inside[None, :]
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for r_0 in range(0, rank, BLOCK_R):
            b = tl.load(b_row[None, :] + (r_0 + r)[:, None], mask=inside[None, :], other=0.0)
            h = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
            for split in tl.static_range(SPLITS):
                shares = h_row + (split * rows).to(tl.int64) * PARTS * R
                h += tl.load(shares[:, None] + (r_0 + r)[None, :], mask=here[:, None], other=0.0)
            acc = tl.dot(h.to(b.dtype), b, acc, input_precision="ieee")
        y = tl.load(y_tile, mask=both, other=0.0)
        tl.store(y_tile, (y.to(tl.float32) + acc).to(y.dtype), mask=both)


_start_shrink = Kernel(_shrink)
_start_expand = Kernel(_expand)


def add_in_kernels(y: Tensor, x: Tensor, matrices: Matrices, groups: RowGroups) -> None:
    """`rooftile.engine.adapters.product.add_adapters` on a GPU."""
    if not groups.tiles:
        return
    assert y.is_contiguous(), "a product's result has gaps"
    x, rows, K = x.contiguous(), len(x), x.shape[1]
    tile, R, parts, N = tile_for(groups.block, x.dtype), matrices.rank, len(matrices.bounds) - 1, y.shape[1]
    table, order = groups.table, groups.order
    h = torch.empty((tile.SPLITS, rows, parts * R), dtype=torch.float32, device=x.device)
    shrinks, expands = _constants(tile, R, x.device)
    grid = (groups.tiles, parts * (R // shrinks["BLOCK_R"]), tile.SPLITS)
    _start_shrink(grid, (x, matrices.a, matrices.ranks, table, order, h, rows, K, parts), shrinks)
    grid = (groups.tiles, len(matrices.blocks), 1)
    _start_expand(grid, (h, matrices.b, matrices.ranks, table, order, matrices.blocks, y, rows, N, parts), expands)


def block_r(rank: int) -> int:
    """Returns how many of a slot's ranks a program takes at once."""
    return 32 if rank % 32 == 0 else 16


@cache
def _constants(tile: Tile, R: int, device: torch.device) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the constants of both kernels."""
    both = {"R": R, "BLOCK_R": block_r(R), "BLOCK_M": tile.BLOCK_M, "SPLITS": tile.SPLITS, "num_warps": tile.num_warps}
    both |= overlaps(device)
    return both | {"BLOCK_K": tile.BLOCK_K, "num_stages": tile.num_stages}, both | {"BLOCK_N": COLUMNS}
