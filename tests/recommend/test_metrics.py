"""Measures of recommendations, against pairs in Python."""

from __future__ import annotations

import math

import pytest
import torch

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
    assert auc(scores, labels, groups) == pytest.approx(sum(areas[g] * n for g, n in sizes.items()) / sum(sizes.values()))


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
