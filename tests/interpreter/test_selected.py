"""Attention to chosen blocks in Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.approximate.test_selected import (  # noqa: F401 - collected here
    test_a_compressed_key_counts_in_both_blocks_that_it_reaches,
    test_a_known_lse_gives_the_same_choice,
    test_a_nan_shows_where_it_is_seen_and_nowhere_else,
    test_any_tiles_and_parts_give_the_gradients,
    test_equals_the_definition,
    test_every_block_is_causal_attention,
    test_packed_sequences_are_as_alone,
    test_the_gated_sum_and_its_gradients,
    test_the_kernel_chooses_as_the_definition_does,
    test_ties_go_to_the_lower_block,
)

# numpy warns where a GPU does not
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
