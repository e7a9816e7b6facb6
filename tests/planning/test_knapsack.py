"""The knapsack: equal to trying every choice."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftile.planning.knapsack import STEPS, choose


def tried(times: list[list[float]], losses: list[list[float]], max_loss: float) -> tuple[float, float] | None:
    """The least time, and the loss that comes with it, by trying every choice."""
    sums = [
        (sum(row[n] for row, n in zip(times, numbers, strict=True)), sum(row[n] for row, n in zip(losses, numbers, strict=True)))
        for numbers in product(*(range(len(row)) for row in times))
    ]  # fmt: skip
    return min((one for one in sums if one[1] <= max_loss), default=None)


def of(numbers: list[int], rows: list[list[float]]) -> float:
    return sum(row[n] for row, n in zip(rows, numbers, strict=True))


# losses are whole steps, so that rounding up changes none of them
STEP = st.integers(0, STEPS + 200)
ITEM = st.lists(st.tuples(st.integers(1, 50), STEP), min_size=4, max_size=4)


@given(st.lists(ITEM, min_size=4, max_size=4))
def test_four_layers_of_four_formats_are_chosen_as_by_trying_all(items: list[list[tuple[int, int]]]) -> None:
    times = [[float(us) for us, _ in item] for item in items]
    losses = [[float(steps) for _, steps in item] for item in items]
    found, due = choose(times, losses, float(STEPS)), tried(times, losses, float(STEPS))
    assert (found is None) == (due is None)
    if found is not None and due is not None:
        assert of(found, times) == due[0]
        assert of(found, losses) <= STEPS


@given(st.lists(st.lists(st.tuples(st.floats(1, 50), st.floats(0, 0.5)), min_size=1, max_size=4), min_size=1, max_size=4))
def test_the_sum_of_losses_never_exceeds_what_is_allowed(items: list[list[tuple[float, float]]]) -> None:
    """Whatever the losses are; and no time is lost that half of the rounding would not explain."""
    times, losses = [[us for us, _ in item] for item in items], [[loss for _, loss in item] for item in items]
    found, due = choose(times, losses, 1.0), tried(times, losses, 1.0)
    assert (found is None) == (due is None)
    if found is not None:
        assert of(found, losses) <= 1.0 + 1e-9
        # each item loses at most a step by rounding
        almost = tried(times, losses, 1.0 - len(items) / STEPS)
        assert almost is None or of(found, times) <= almost[0] + 1e-9


def test_none_allows_any_loss_and_zero_none() -> None:
    times, losses = [[5.0, 1.0, 3.0], [5.0, 4.0, 3.0]], [[0.0, 9.0, 0.0], [0.0, 0.0, 1e-9]]
    assert choose(times, losses, None) == [1, 2]
    assert choose(times, losses, 0.0) == [2, 1]


def test_of_equal_times_the_lower_loss_wins() -> None:
    assert choose([[2.0, 2.0, 2.0]], [[0.3, 0.1, 0.2]], 1.0) == [1]
    assert choose([[2.0, 2.0, 2.0]], [[0.3, 0.1, 0.2]], None) == [1]


def test_a_loss_that_only_rounding_up_forbids_is_allowed() -> None:
    """Three thirds are one, and each of them is rounded up to 334 of 1,000 steps."""
    third = 1 / 3
    assert choose([[1.0]] * 3, [[third]] * 3, 1.0) == [0, 0, 0]
    assert choose([[1.0]] * 3, [[0.4]] * 3, 1.0) is None


def test_losses_are_rounded_up() -> None:
    """Down, two times 0.5004 would be 1,000 steps."""
    found = choose([[2.0, 1.0]] * 2, [[0.0, 0.5004]] * 2, 1.0)
    assert found is not None
    assert sum(found) == 1


def test_many_items_are_chosen_exactly() -> None:
    """129 items that save a microsecond for a step each, and half of the steps."""
    n = 129
    found = choose([[2.0, 1.0]] * n, [[0.0, STEPS / 100]] * n, float(STEPS))
    assert found is not None
    assert sum(found) == 100


def test_no_item_is_no_choice() -> None:
    assert choose([], [], 1.0) == []


@pytest.mark.parametrize("max_loss", [0.0, 1e-12, 1e12])
def test_any_size_of_losses(max_loss: float) -> None:
    assert choose([[2.0, 1.0]], [[0.0, 2 * max_loss + 1]], max_loss) == [0]
    assert choose([[2.0, 1.0]], [[0.0, max_loss]], max_loss) == [1]
