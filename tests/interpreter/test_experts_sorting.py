"""The kernels that sort tokens by expert, interpreted: against a stable sort."""

from __future__ import annotations

import pytest
import torch

from rooftile.moe import sorting
from rooftile.moe.kernels.sorting import sort


@pytest.mark.parametrize(
    ("N", "K", "E"),
    [(0, 2, 3), (1, 1, 1), (1, 8, 128), (37, 3, 7), (128, 8, 5), (1023, 1, 3), (513, 2, 3), (700, 6, 65), (6000, 3, 2)],
)
def test_counting_equals_a_stable_sort(N: int, K: int, E: int) -> None:
    chosen = torch.randint(0, E, (N, K), dtype=torch.int32)
    for x in (chosen, chosen.clamp(max=0), chosen.mT.contiguous().mT):
        found, due = sort(x, E), sorting.sort(x, E)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, due, strict=True))


@pytest.mark.parametrize("N", [40, 900])
def test_a_choice_that_is_no_expert_has_no_place(N: int) -> None:
    chosen = torch.randint(-2, 7, (N, 3), dtype=torch.int32)
    found = sort(chosen, 5)
    flat = chosen.flatten()
    places = torch.cat([(flat == e).nonzero()[:, 0] for e in range(5)])
    assert found.bounds[0] == 0
    assert found.ends.tolist() == [int(((flat >= 0) & (flat <= e)).sum()) for e in range(5)]
    assert torch.equal(found.order[: len(places)], places)
    assert torch.equal(found.tokens[: len(places)], places // 3)
