"""Measures of recommendations, against pairs in Python."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import rooftile as rt
from rooftile.recommend.metrics import auc, hit_rate, ndcg, ranks


def test_ranks_of_scores_with_ties_and_nan() -> None:
    scores = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.5, 0.5], [torch.nan, 0.0, 1.0], [3.0, torch.nan, 1.0]])
    # ties and NaN count against the true item
    assert ranks(scores, torch.tensor([1, 0, 0, 0])).tolist() == [0, 2, 2, 1]
    assert hit_rate(scores, torch.tensor([1, 0, 0, 0]), 2) == 0.5
    due = (1 + 1 / math.log2(4) + 1 / math.log2(4) + 1 / math.log2(3)) / 4
    assert ndcg(scores, torch.tensor([1, 0, 0, 0]), 3) == pytest.approx(due)
    assert ndcg(scores, torch.tensor([1, 0, 0, 0]), 1) == 0.25


def test_the_area_is_the_share_of_pairs_in_order() -> None:
    scores, labels, groups = torch.randint(5, (60,)) / 5, torch.randint(2, (60,)), torch.randint(4, (60,))

    def area(rows: list[int]) -> float | None:
        pairs = [(float(scores[i]), float(scores[j])) for i in rows for j in rows if labels[i] and not labels[j]]
        return sum((a > b) + (a == b) / 2 for a, b in pairs) / len(pairs) if pairs else None

    assert auc(scores, labels) == pytest.approx(area(list(range(60))))
    areas = {g: area([i for i in range(60) if groups[i] == g]) for g in range(4)}
    sizes = {g: int((groups == g).sum()) for g in range(4) if areas[g] is not None}
    order = torch.randperm(60)
    assert auc(scores[order], labels[order], groups[order] * 10**15 - 5) == pytest.approx(auc(scores, labels, groups))
    assert auc(scores, labels, groups) == pytest.approx(sum(areas[g] * n for g, n in sizes.items()) / sum(sizes.values()))


class Operations(TorchDispatchMode):
    """Counts operations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_many_groups_take_no_further_pass_over_the_rows() -> None:
    counts = []
    for size in (2, 500):
        rows = torch.arange(1000)
        with Operations() as operations:
            assert auc((rows % 2).float(), rows % 2, rows // size) == 1.0
        counts.append(operations.count)
    assert counts[0] == counts[1]


def test_bad_input() -> None:
    with pytest.raises(rt.InvalidInput, match=r"scores is .*; must be float \(n, items\)"):
        ranks(torch.zeros(3), torch.zeros(3, dtype=torch.long))
    with pytest.raises(rt.InvalidInput, match="nothing to compare"):
        auc(torch.rand(3), torch.ones(3))
    with pytest.raises(rt.InvalidInput, match="scores has NaN"):
        auc(torch.tensor([torch.nan, 1.0]), torch.tensor([0, 1]))
    with pytest.raises(rt.InvalidInput, match="other values than 0 and 1"):
        auc(torch.rand(2), torch.tensor([0, 2]))
    with pytest.raises(rt.InvalidInput, match="labels is"):
        auc(torch.rand(2), torch.ones(3))
