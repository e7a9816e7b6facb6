"""The kernels of adapters compile for the chips that they are for, without one; no register spills, and words are wide."""

from __future__ import annotations

import re
from itertools import product

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")

from rooftile.engine.adapters import kernels  # noqa: E402
from rooftile.engine.adapters.groups import LARGE, SMALL  # noqa: E402
from tests.grids import pairs, swept  # noqa: E402
from tests.kernels.test_experts_compile import compiled, runs_on_matrix_units  # noqa: E402

POINTERS = dict.fromkeys(("ranks_ptr", "tiles_ptr", "order_ptr", "blocks_ptr"), "*i32") | {"h_ptr": "*fp32"}
POINTERS |= dict.fromkeys(("rows", "K", "PARTS", "early"), "i32")
K = 14336
GRID = [*product((80, 90), (SMALL, LARGE), (16, 48, 256), (torch.bfloat16, torch.float32))]


@pytest.mark.parametrize(("sm", "block", "rank", "dtype"), swept(GRID, pairs), ids=str)
def test_both_compile(sm: int, block: int, rank: int, dtype: torch.dtype) -> None:
    tile = kernels.tile_for(block, dtype, K, rank)
    constants = kernels.constants_of(tile, rank, True, torch.device("cpu"))
    for kernel, its in zip((kernels._shrink, kernels._expand), constants, strict=True):
        built = compiled(kernel, its | {"PDL": sm >= 90}, sm, dtype, POINTERS, multiples=("K", "N"))
        assert dtype == torch.float32 or runs_on_matrix_units(built, sm, block)
        if dtype == torch.bfloat16:
            # numbers of 16 bits, which nothing reads or writes one by one
            assert not re.findall(r"(?:ld|st)\.global\S*\.b16", built.asm["ptx"])


def test_a_matrix_is_read_before_the_kernel_waits() -> None:
    """The wait of `early` comes first, then A or B, and then the wait of all programs."""
    tile = kernels.tile_for(SMALL, torch.bfloat16, K, 16)
    for kernel, its in zip(
        (kernels._shrink, kernels._expand), kernels.constants_of(tile, 16, True, torch.device("cpu")), strict=True
    ):
        built = compiled(kernel, its | {"PDL": True}, 90, torch.bfloat16, POINTERS, multiples=("K", "N"))
        _, between, _ = built.asm["ptx"].split("griddepcontrol.wait")
        assert len(re.findall(r"ld\.global\S*\.v4\.b32", between)) == tile.BLOCK_K * 16 // (8 * 32 * tile.warps)
