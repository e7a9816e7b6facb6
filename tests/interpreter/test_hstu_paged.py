"""The kernels of HSTU attention over pages in Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.recommend.hstu_cases import MASKS
from tests.recommend.test_hstu_paged import (  # noqa: F401 - collected here
    check_rows_of_many_users,
    test_a_bad_candidate_reaches_no_other,
    test_a_long_history_is_cut_into_shares,
    test_a_user_does_not_depend_on_its_neighbours,
    test_head_dims_and_strides,
    test_nothing_to_compute,
)

# numpy warns where a GPU does not
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("candidates", [False, True])
@pytest.mark.parametrize(("pages", "bias"), [("fp32", True), ("bf16", False), ("fp8", True), ("int8", True)])
def test_rows_in_each_format(pages: str, bias: bool, candidates: bool) -> None:
    check_rows_of_many_users("causal", candidates, pages, bias)


@pytest.mark.parametrize("mask", MASKS)
def test_rows_under_each_mask(mask: str) -> None:
    check_rows_of_many_users(mask, mask in ("prefix", "window"), "fp32", False)
