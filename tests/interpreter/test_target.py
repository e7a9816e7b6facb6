"""Target attention's kernels in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from rooftile.recommend.target.kernels import outputs
from tests.recommend import test_target as plain
from tests.recommend.test_target import (  # noqa: F401 - collected here
    check_outputs_and_gradients,
    test_a_search_is_a_sort,
    test_equal_scores_in_all_precisions,
    test_packed_candidates,
    test_strides_and_head_dims,
    test_values_are_keys_and_nothing_to_compute,
    test_what_is_not_chosen_has_no_gradient,
)

# numpy warns where a GPU does not
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SMALL = {"lengths": (5, 0, 1, 70), "M": 3, "k": 40}
CASES = [
    ("softmax", "whole", 4, torch.float32), ("softmax", "whole", 0, torch.bfloat16), ("silu", "whole", 0, torch.float32),
    ("sigmoid", "whole", 1, torch.bfloat16), ("softmax", "exact", 1, torch.float32), ("silu", "summed", 4, torch.float32),
    ("sigmoid", "exact", 0, torch.bfloat16),
]  # fmt: skip


@pytest.mark.parametrize(("weights", "search", "bias", "dtype"), CASES)
def test_outputs_and_gradients(weights: str, search: str, bias: int, dtype: torch.dtype) -> None:
    check_outputs_and_gradients(weights, search, bias, dtype, **SMALL)


@pytest.mark.parametrize(("weights", "search"), [("softmax", "whole"), ("silu", "exact"), ("sigmoid", "lsh")])
def test_one_candidate_at_a_time_is_many_at_once(weights: str, search: str) -> None:
    plain.test_one_candidate_at_a_time_is_many_at_once(weights, search)


@pytest.mark.parametrize(("weights", "search"), [("sigmoid", "whole"), ("softmax", "exact"), ("silu", "category")])
def test_a_bad_candidate_and_a_bad_user_stay_alone(weights: str, search: str) -> None:
    plain.test_a_bad_candidate_and_a_bad_user_stay_alone(weights, search)


@pytest.mark.parametrize(("weights", "bias"), [("softmax", 1), ("sigmoid", 0)])
def test_a_history_in_parts(weights: str, bias: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts with fewer tiles than others, and users with none."""
    monkeypatch.setattr(outputs, "processors", lambda device: 100)
    monkeypatch.setattr(outputs, "LEAST_TILES", 1)
    assert outputs.parts_of(40, 5, torch.device("cpu")) == 5
    check_outputs_and_gradients(weights, "whole", bias, torch.float32, lengths=(5, 0, 300), M=3)
