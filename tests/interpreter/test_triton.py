"""The conformance suite on the interpreted Triton kernels, on the cases small enough for an interpreter."""

from __future__ import annotations

import pytest
import torch

from rooftile.exact import dispatch
from rooftile.exact.cases import CASES, Case, tagged
from tests.conformance import test_block_lists as block_lists
from tests.conformance.exact import check
from tests.conformance.test_block_lists import (  # noqa: F401 - collected here
    test_a_list_and_its_complement_merged_are_the_whole,
    test_a_nan_shows_where_it_is_seen_and_nowhere_else,
    test_all_blocks_are_the_mask_alone,
    test_the_order_of_a_list_does_not_matter_and_a_block_that_is_not_there_is_passed_over,
)
from tests.conformance.test_boolean_bias import test_equals_masking_by_hand  # noqa: F401 - collected here
from tests.conformance.test_invariance import (  # noqa: F401 - collected here
    test_a_nan_in_one_packed_sequence_stays_there,
    test_a_nan_that_is_seen_shows_exactly_where_it_is_seen,
    test_every_backend_drops_the_same_weights,
    test_offsets_and_sinks_may_be_every_other_word,
    test_rows_that_see_nothing_are_zero_and_give_nothing,
    test_what_the_mask_hides_does_not_leak,
)
from tests.conformance.test_nan_gradients import (  # noqa: F401 - collected here
    test_a_nan_of_a_bias_behind_the_mask_is_not_there,
    test_a_nan_shows_where_it_is_seen,
    test_a_row_that_sees_only_its_sink_does_not_use_do,
    test_a_sink_of_minus_infinity_is_no_sink,
)
from tests.conformance.test_repeated_calls import (  # noqa: F401 - collected here
    test_a_repeated_call_has_its_own_gradients,
    test_a_repeated_call_reads_its_own_data,
    test_a_wrong_call_is_refused_after_right_ones,
    test_gradients_flow_after_calls_without,
    test_what_differs_from_an_earlier_call_counts,
)
from tests.grids import swept

# numpy warns where a GPU does not: of a NaN that a test put there, of a number too large in a row that is then masked
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# the interpreter takes about 10 ms for a tile, whatever its size
MOST_TILES = 40


def tiles(case: Case) -> int:
    """How many tiles of 64 by 64 a case has, about."""
    sizes = case.problem().sizes
    return sizes.H * sum((T // 64 + 1) * (S // 64 + 1) for T, S in sizes.sequences)


def small() -> list[Case]:
    return [case for case in tagged("conformance") if tiles(case) <= MOST_TILES]


def _traits(case: Case) -> list:
    """`make test` runs each option, alone too, each part of a mask, each edge of the sizes, each dtype and head dim."""
    problem = case.problem()
    spec, sizes, mask = problem.spec, problem.sizes, case.mask
    parts = (mask.left is not None, mask.right is not None, mask.prefix is not None, len(mask.chunks))
    layouts = [(spec.layout, trait) for trait in (*spec.options_on, parts, ("groups", spec.group > 1))]
    if len(spec.options_on) == 1:
        layouts.append((spec.layout, "alone", spec.options_on))
    more = (sizes.T > sizes.S, sizes.T < sizes.S)
    edges = [("edge", n) for n in (sizes.T, sizes.S) if n < 2] + [("tile", sizes.T % 64 < 2, more), (mask.is_full, more)]
    inputs = [case.strides, case.scatter, case.bias, case.scale is None]
    if case.offset:
        inputs += [("offset", case.offset, spec.dtype.itemsize == 2), ("offset", spec.dtype, spec.layout, bool(case.bias))]
    return [*layouts, *edges, spec.dtype, (spec.dim, spec.dim_v), *inputs]


def test_the_kernels_run_here() -> None:
    assert not list(dispatch.BACKENDS["triton"].refusals(tagged("conformance")[0].problem().spec))
    assert len(small()) > len(tagged("conformance")) * 0.7


@pytest.mark.parametrize("case", swept(small(), _traits), ids=lambda case: case.name)
def test_equals_the_definition(case: Case) -> None:
    check(case, "backward-lse", "triton", torch.device("cpu"))


def listed_tiles(case: block_lists.Lists) -> float:
    """How many tiles of 64 by 64 the lists of a case name, about."""
    lengths = case.lengths or ((case.T, case.S),) * 2
    return case.density * case.H * sum(-(-T // 64) * -(-S // 64) for T, S in lengths)


# without the four largest, whose masks, options and head dims others have too
@pytest.mark.parametrize(
    "case", swept(block_lists.CASES, lambda case: [case.name] * (listed_tiles(case) <= 80)), ids=lambda case: case.name
)
def test_lists_equal_the_definition_with_the_pairs_by_hand(case: block_lists.Lists) -> None:
    block_lists.assert_by_hand(case, "triton", torch.device("cpu"))


@pytest.mark.parametrize("name", ["one-query", "no-key", "bias-keys", "sinks-more-queries", "packed-empty"])
@pytest.mark.parametrize("phase", ["forward", "forward-lse", "backward"])
def test_equals_the_definition_when_less_is_asked_for(name: str, phase: str) -> None:
    check(CASES[name], phase, "triton", torch.device("cpu"))
