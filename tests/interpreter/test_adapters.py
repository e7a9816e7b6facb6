"""The kernels of adapters, interpreted, beside their definition in fp64: rows of many adapters, in any order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rooftile.engine.adapters.groups import FEW, SMALL, group_rows, most_tiles
from rooftile.engine.adapters.kernels import add_in_kernels, tile_for
from rooftile.engine.adapters.matrices import Matrices

# parts that end within blocks, and parts that begin at multiples of 16
ODD, EVEN = (0, 200, 240, 257), (0, 560, 592, 640)
RANKS = [("R", 0, "R"), (5, 3, 0), (0, 0, 0), (1, "R", "R - 1"), (0, 9, 1)]


def matrices(bounds: tuple[int, ...], K: int, R: int, dtype: torch.dtype) -> Matrices:
    """Five slots with such ranks; what nobody may read is NaN."""
    made = Matrices.of(
        torch.full((5, 3 * R, K), torch.nan, dtype=dtype), torch.full((5, R, bounds[-1]), torch.nan, dtype=dtype),
        torch.zeros(5, 3, dtype=torch.int32), bounds,
    )  # fmt: skip
    for slot, ranks in enumerate(RANKS):
        for part, word in enumerate(ranks):
            rank = {"R": R, "R - 1": R - 1}.get(word, word)
            if rank:
                rows = bounds[part + 1] - bounds[part]
                made.write(slot, part, torch.randn(rank, K) / K**0.5, torch.randn(rows, rank))
    return made


def due(y: Tensor, x: Tensor, made: Matrices, slots: Tensor) -> Tensor:
    found = y.double()
    for row, slot in enumerate(slots.tolist()):
        for part in range(3):
            rank = int(made.ranks[slot, part]) if slot >= 0 else 0
            if rank:
                begin, end = made.bounds[part : part + 2]
                a, b = made.a[slot, part * made.rank :][:rank].double(), made.b[slot, :rank, begin:end].double()
                found[row, begin:end] += (a @ x[row].double()) @ b
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("rows", "R", "K", "bounds", "padded"),
    [
        (1, 16, 112, ODD, False), (1, 16, 112, EVEN, True), (37, 16, 1030, EVEN, True), (37, 48, 112, ODD, True),
        (37, 16, 112, ODD, False), (21, 80, 600, EVEN, False), (FEW + 3, 80, 112, ODD, True), (FEW + 3, 16, 270, EVEN, False),
    ],
)  # fmt: skip
def test_rows_of_many_adapters(
    rows: int, R: int, K: int, bounds: tuple[int, ...], padded: bool, dtype: torch.dtype
) -> None:  # fmt: skip
    torch.manual_seed(rows + R)
    made = matrices(bounds, K, R, dtype)
    slots = torch.randint(-1, 5, (rows,)) if rows > 1 else torch.tensor([3])
    x, y = torch.randn(rows, K, dtype=dtype), torch.randn(rows, bounds[-1], dtype=dtype)
    groups = group_rows(slots, tiles=most_tiles(rows, 5)) if padded else group_rows(slots)
    exact = due(y, x, made, slots)
    found = y.clone()
    add_in_kernels(found, x, made, groups)
    # what shrinks is rounded to the dtype in between
    tolerance = 1e-5 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance * 4)
    assert torch.equal(found[slots < 0], y[slots < 0])


def test_shares_cover_all_columns() -> None:
    """Sizes of published models, and odd ones: no column is left out, and no share is wasted on few rows."""
    for dtype in (torch.bfloat16, torch.float32):
        for K in (1, 40, 511, 512, 513, 4096, 8960, 14336, 28672, 100_000):
            for R in (16, 48, 64, 256):
                tile = tile_for(SMALL, dtype, K, R)
                steps = -(-K // tile.BLOCK_K)
                share = -(-steps // tile.SPLITS)
                assert (tile.SPLITS - 1) * share < steps <= tile.SPLITS * share
                assert max(8192 // R**2, -(-K // 4096)) >= tile.SPLITS


def test_more_rows_than_there_are_tiles_of_any_step() -> None:
    for rows in (1, 2, 16, 64, 512, 513, 4096):
        for adapters in (1, 3, 16):
            for slots in (torch.arange(rows) % adapters, torch.zeros(rows).long(), torch.full((rows,), -1)):
                assert group_rows(slots).tiles <= most_tiles(rows, adapters)
