"""The kernels of adapters compile for the chips that they are for, without one; no register spills."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")

from rooftile.engine.adapters import kernels  # noqa: E402
from rooftile.engine.adapters.groups import LARGE, SMALL  # noqa: E402
from rooftile.engine.adapters.matrices import COLUMNS  # noqa: E402
from tests.kernels.test_experts_compile import compiled, runs_on_matrix_units  # noqa: E402

POINTERS = dict.fromkeys(("ranks_ptr", "tiles_ptr", "order_ptr", "blocks_ptr"), "*i32") | {"h_ptr": "*fp32"}
POINTERS |= dict.fromkeys(("rows", "K", "PARTS"), "i32")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rank", [16, 64])
@pytest.mark.parametrize("block", [SMALL, LARGE])
@pytest.mark.parametrize("sm", [80, 90])
def test_both_compile(sm: int, block: int, rank: int, dtype: torch.dtype) -> None:
    tile = kernels.tile_for(block, dtype)
    both = {"R": rank, "BLOCK_R": kernels.block_r(rank), "BLOCK_M": tile.BLOCK_M, "SPLITS": tile.SPLITS, "PDL": sm >= 90}
    both |= {"num_warps": tile.num_warps}
    for kernel, more in (
        (kernels._shrink, {"BLOCK_K": tile.BLOCK_K, "num_stages": tile.num_stages}), (kernels._expand, {"BLOCK_N": COLUMNS}),
    ):  # fmt: skip
        built = compiled(kernel, both | more, sm, dtype, POINTERS, multiples=("K", "N"))
        assert dtype == torch.float32 or runs_on_matrix_units(built, sm, block)
