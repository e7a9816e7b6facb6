"""Attention between gathered rows in Triton's interpreter."""

from __future__ import annotations

import pytest

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
)

# numpy warns where a GPU does not
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
