"""Attention to chosen blocks in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from rooftile import approximate as ap
from tests.approximate.test_selected import (  # noqa: F401 - collected here
    test_a_compressed_key_counts_in_both_blocks_that_it_reaches,
    test_a_known_lse_gives_the_same_choice,
    test_a_nan_shows_where_it_is_seen_and_nowhere_else,
    test_any_tiles_and_parts_give_the_gradients,
    test_equals_the_definition,
    test_every_block_is_causal_attention,
    test_packed_sequences_are_as_alone,
    test_scores_that_share_an_offset,
    test_the_gated_sum_and_its_gradients,
    test_the_kernel_chooses_as_the_definition_does,
    test_the_lists_of_the_kernels,
    test_ties_go_to_the_lower_block,
)

# numpy warns where a GPU does not
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize(("length", "stride", "block", "count"), [(16, 2, 40, 6), (8, 4, 64, 5)])
def test_the_choice_where_a_step_has_few_blocks(length: int, stride: int, block: int, count: int) -> None:
    """More blocks are kept than a step adds, and a block has up to 32 strides."""
    q, k = torch.randn(1, 9, 2, 16), torch.randn(1, 300, 1, 16)
    words = {"length": length, "stride": stride, "block_size": block, "count": count, "tokens": 300}
    compressed = ap.compress(k, length=length, stride=stride)
    found, due = (ap.choose_blocks(q, compressed, backend=name, **words) for name in ("triton", "eager"))
    assert torch.equal(found, due)
