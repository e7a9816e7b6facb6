"""Attention between gathered rows in Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch

from tests.approximate.test_gathered import (  # noqa: F401 - collected here
    test_a_nan_in_a_group_shows_where_it_is_seen_and_nowhere_else,
    test_a_nan_in_a_round_shows_where_it_is_seen_and_nowhere_else,
    test_groups_equal_the_definition,
    test_hashes_are_those_of_plain_operations,
    test_large_scores,
    test_members_are_those_of_the_definition,
    test_nothing_to_compute,
    test_places_out_of_range_are_passed_over,
    test_rounds_equal_the_definition,
    test_sixteen_bits,
    test_the_methods_take_the_kernels_and_name_what_they_refuse,
    test_weights_add_up_to_one_in_the_backward_too,
)

# numpy warns where a GPU does not
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("count", [1, 3, 40, 99, 100])
def test_the_best_of_scores_of_all_sizes(count: int) -> None:
    """One exponent, many of them, signs, ties, zeros of both signs, infinities and NaN."""
    from rooftile.approximate.gathered.kernels.grouping import best

    scores = torch.stack([
        torch.rand(100) + 1, torch.exp2(torch.randn(100) * 30), torch.randn(100), -torch.rand(100) * 1e-30, torch.zeros(100),
        torch.randint(3, (100,)) - 1.0, torch.randn(100), torch.randn(100),
    ])  # fmt: skip
    scores[4, ::3] = -0.0
    scores[6, ::7], scores[6, 1::7] = torch.inf, -torch.inf
    scores[7, 5::9] = torch.nan
    # NaN is the largest, and ties go to the lower place
    due = scores.nan_to_num(math.inf, posinf=3e38, neginf=-3e38).argsort(descending=True, stable=True)[:, :count]
    assert torch.equal(best(scores, count).long(), due.sort(-1).values)
