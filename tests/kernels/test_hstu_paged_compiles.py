"""The kernels of HSTU attention over pages compile without a GPU: on matrix instructions, with what a program may have."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed on this platform")

from rooftile.kvcache import Pages
from rooftile.recommend import RelativeBias, hstu_attention_paged, time_edges
from tests.kernels.recorded import SHARED, compiled, recorded


@pytest.mark.parametrize(
    ("dim", "rows", "pages", "dtype", "sm"),
    [
        (64, 1, torch.bfloat16, torch.bfloat16, 80),
        (64, 512, torch.int8, torch.bfloat16, 80),
        (128, 512, torch.bfloat16, torch.bfloat16, 90),
        (128, 512, torch.float8_e4m3fn, torch.bfloat16, 90),
        (128, 2, torch.float8_e4m3fn, torch.bfloat16, 90),
        (256, 512, torch.bfloat16, torch.bfloat16, 90),
        (64, 40, torch.float32, torch.float32, 90),
    ],
)
def test_candidates_against_pages(dim: int, rows: int, pages: torch.dtype, dtype: torch.dtype, sm: int) -> None:
    memory = Pages(4, layers=1, heads=4, dim=dim, dtype=pages)
    # block tables with room for more than a share
    table, lengths = torch.zeros(2, 520, dtype=torch.int32), torch.tensor([8000, 64], dtype=torch.int32)
    cu = torch.tensor([0, rows, 2 * rows], dtype=torch.int32)
    q, k, v = torch.randn(3, 2 * rows, 4, dim, dtype=dtype)
    bias, times = RelativeBias(torch.randn(512), torch.randn(33), time_edges(33)), torch.zeros(2 * rows, dtype=torch.int64)
    with recorded(sm) as launches:
        hstu_attention_paged(
            q, memory.view(0, table[:, :4], lengths // 200, cu), alpha=0.1, scale=0.1, bias=bias, times=times,
            key_times=torch.zeros(4, 16, dtype=torch.int64), candidates=(k, v), backend="triton",
        )  # fmt: skip
        hstu_attention_paged(
            q, memory.view(0, table, lengths, cu), alpha=0.1, scale=0.1, candidates=(k, v), backend="triton"
        )  # fmt: skip
    assert {one.name for one in launches.values()} == {"_paged", "_add_shares"}
    for one in launches.values():
        found = compiled(one, sm)
        assert found.shared <= SHARED[sm]
        assert found.matrix or dtype == torch.float32 or one.name == "_add_shares"
        assert found.hot_spills == 0
