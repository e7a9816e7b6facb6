"""Searches of histories that are in awkward orders and of awkward lengths, in Triton's interpreter."""

from __future__ import annotations

import pytest

from rooftile.recommend.target.kernels.search import launch
from tests.recommend.target_cases import ORDERS, check_order

# numpy warns where a GPU does not
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("margin", [0, launch.MARGIN])
def test_orders(order: str, margin: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where more reach a bound than there is room for, and a last walk begins anew."""
    monkeypatch.setattr(launch, "MARGIN", margin)
    check_order(order, (600, 0, 40), 50)


@pytest.mark.parametrize("order", [order for order in ORDERS if order not in ("holes", "no scores")])
def test_nothing_is_left_for_the_last_walk(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is slow. Candidates with many scores that are NaN or inf need it."""
    monkeypatch.setattr(launch, "walk", lambda *arguments: None)
    check_order(order, (600, 0, 40), 50, nan=False)


@pytest.mark.parametrize("order", ["random", "few values", "holes"])
def test_parts_of_a_history(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "processors", lambda device: 100)
    monkeypatch.setattr(launch, "LEAST_TILES", 1)
    check_order(order, (600, 700), 40)


@pytest.mark.parametrize(("lengths", "k"), [((127, 128, 129), 128), ((1, 255, 257), 130), ((64, 65, 300), 64), ((3, 128), 1)])
def test_lengths_around_tiles(lengths: tuple[int, ...], k: int) -> None:
    """Users with fewer events than k, with as many, and with one more or less than whole tiles."""
    check_order("few values", lengths, k)
    check_order("random", lengths, k)
