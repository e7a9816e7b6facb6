"""The kernels of adapters, interpreted, beside their definition in fp64: rows of many adapters, in any order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rooftile.engine.adapters.groups import FEW, group_rows, most_tiles
from rooftile.engine.adapters.kernels import add_in_kernels
from rooftile.engine.adapters.matrices import Matrices

# parts that end within blocks, and a width that no block divides
BOUNDS, K = (0, 200, 240, 257), 112


def matrices(slots: int, R: int, dtype: torch.dtype, ranks: list[list[int]]) -> Matrices:
    """Slots with such ranks; what nobody may read is NaN."""
    made = Matrices.of(
        torch.full((slots, 3 * R, K), torch.nan, dtype=dtype), torch.full((slots, BOUNDS[-1], R), torch.nan, dtype=dtype),
        torch.zeros(slots, 3, dtype=torch.int32), BOUNDS,
    )  # fmt: skip
    for slot, each in enumerate(ranks):
        for part, rank in enumerate(each):
            if rank:
                rows = BOUNDS[part + 1] - BOUNDS[part]
                made.write(slot, part, torch.randn(rank, K) / K**0.5, torch.randn(rows, rank))
    return made


def due(y: Tensor, x: Tensor, made: Matrices, slots: Tensor) -> Tensor:
    found = y.double()
    for row, slot in enumerate(slots.tolist()):
        for part in range(3):
            rank = int(made.ranks[slot, part]) if slot >= 0 else 0
            if rank:
                begin, end = BOUNDS[part : part + 2]
                a, b = made.a[slot, part * made.rank :][:rank].double(), made.b[slot, begin:end, :rank].double()
                found[row, begin:end] += b @ (a @ x[row].double())
    return found


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("rows", "R"), [(1, 16), (37, 16), (37, 48), (FEW + 3, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_rows_of_many_adapters(rows: int, R: int, padded: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(rows + R)
    made = matrices(5, R, dtype, [[R, 0, R], [5, 3, 0], [0, 0, 0], [1, R, R - 1], [0, 9, 1]])
    slots = torch.randint(-1, 5, (rows,))
    x, y = torch.randn(rows, K, dtype=dtype), torch.randn(rows, BOUNDS[-1], dtype=dtype)
    groups = group_rows(slots, tiles=most_tiles(rows, 5)) if padded else group_rows(slots)
    exact = due(y, x, made, slots)
    found = y.clone()
    add_in_kernels(found, x, made, groups)
    # what shrinks is rounded to the dtype in between
    tolerance = 1e-5 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance * 4)
    assert torch.equal(found[slots < 0], y[slots < 0])


def test_more_rows_than_there_are_tiles_of_any_step() -> None:
    for rows in (1, 2, 16, 64, 512, 513, 4096):
        for adapters in (1, 3, 16):
            for slots in (torch.arange(rows) % adapters, torch.zeros(rows).long(), torch.full((rows,), -1)):
                assert group_rows(slots).tiles <= most_tiles(rows, adapters)
