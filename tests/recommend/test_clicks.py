"""Planted clicks: whether a candidate's group lies in the history, and how far back, found anew from the items alone."""

from __future__ import annotations

import pytest
import torch

import rooftile as rt
from rooftile.recommend.data import planted_clicks

CATEGORIES, GROUPS, PER_GROUP = 6, 5, 3
SIZE = (GROUPS + 2) * PER_GROUP


def group_of(item: int) -> int:
    """The group of an item; -1 for items that are never candidates."""
    category, within = divmod(item, SIZE)
    return category * GROUPS + within // PER_GROUP if within < GROUPS * PER_GROUP else -1


def test_the_planted_distances_are_true() -> None:
    clicks = planted_clicks(
        20, 90, candidates=40, categories=CATEGORIES, groups=GROUPS, per_group=PER_GROUP, nearest=8, interests=2, times=3,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    assert clicks.events.item_count == CATEGORIES * SIZE == len(clicks.categories)
    assert torch.equal(clicks.categories, torch.arange(CATEGORIES * SIZE) // SIZE)
    assert clicks.events.cu.tolist() == list(range(0, 1801, 90))
    periods = set()
    for user, items in enumerate(clicks.events.items.view(20, 90).tolist()):
        groups = [group_of(item) for item in items]
        # an interest belongs to one period: 1 to 8, 9 to 32, or 33 to 90 events back
        for group in set(groups) - {-1}:
            backs = [90 - at for at, other in enumerate(groups) if other == group]
            assert len(backs) == 3
            assert len({(back > 8) + (back > 32) for back in backs}) == 1
        rows = zip(clicks.candidates[user].tolist(), clicks.labels[user].tolist(), clicks.distance[user].tolist(), strict=True)
        for item, label, distance in rows:
            group = group_of(item)
            assert group >= 0
            assert label == (group in groups)
            assert distance == (groups[::-1].index(group) + 1 if label else 0)
            periods.add((distance > 0) * (1 + (distance > 8) + (distance > 32)))
    assert periods == {0, 1, 2, 3}
    assert (clicks.labels.float().mean() - 0.5).abs() < 0.1
    assert (clicks.events.times.view(20, 90).diff() >= 0).all()


@pytest.mark.parametrize("length", [9, 14, 33, 37])
def test_the_oldest_events_may_be_too_few_for_a_period(length: int) -> None:
    clicks = planted_clicks(
        6, length, candidates=20, categories=CATEGORIES, groups=GROUPS, per_group=PER_GROUP, nearest=8, times=3,
        generator=torch.Generator().manual_seed(length),
    )  # fmt: skip
    for items in clicks.events.items.view(6, length).tolist():
        groups = [group_of(item) for item in items]
        counts = {group: groups.count(group) for group in set(groups) - {-1}}
        assert set(counts.values()) == {3}
        assert len(counts) == 2 * (1 + (length >= 14) + (length > 37))


def test_noise_turns_labels_round() -> None:
    clicks = planted_clicks(100, 16, noise=0.2, generator=torch.Generator().manual_seed(0))
    # 3,200 labels: five deviations are 0.035
    assert ((clicks.labels != (clicks.distance > 0)).float().mean() - 0.2).abs() < 0.035


def test_bad_input() -> None:
    with pytest.raises(rt.InvalidInput, match="nearest is 7; must be an int of at least 8"):
        planted_clicks(2, 64, nearest=7)
    with pytest.raises(rt.InvalidInput, match="length is 9; must be an int of at least 16"):
        planted_clicks(2, 9)
    with pytest.raises(rt.InvalidInput, match=r"noise is 0\.5; must be at least 0 and below 0\.5"):
        planted_clicks(2, 64, noise=0.5)
    with pytest.raises(rt.InvalidInput, match="there are 4 groups; 2 periods have 4 interests"):
        planted_clicks(2, 64, categories=2, groups=2)
