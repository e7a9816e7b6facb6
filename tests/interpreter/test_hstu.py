"""HSTU attention's kernels in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from rooftile.recommend.hstu.kernels import shape
from rooftile_lab.bench.suites import hstu
from tests.recommend.hstu_cases import MASKS
from tests.recommend.test_hstu import (  # noqa: F401 - collected here
    TARGETS,
    check_outputs_and_gradients,
    test_a_bad_target_reaches_no_other,
    test_a_user_does_not_depend_on_its_neighbours,
    test_gradients_with_positions_of_the_callers_own,
    test_head_dims_and_strides,
    test_nothing_to_compute,
    test_times_as_queries_and_as_keys,
)

# numpy warns where a GPU does not
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("contextual", "targets"), [(0, None), (2, TARGETS)])
@pytest.mark.parametrize("mask", MASKS)
def test_outputs_and_gradients(mask: str, contextual: int, targets: tuple[int, ...] | None, dtype: torch.dtype) -> None:
    # the tables' kernels differ from those without, so both run in each number of bits
    check_outputs_and_gradients(mask, contextual, targets, (targets is None) == (dtype == torch.bfloat16), dtype)


@pytest.mark.parametrize(("rows", "keys"), [(64, 16), (32, 16), (16, 64)])
def test_tiles_that_are_not_square(rows: int, keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Diagonals of a tile with more rows than keys begin anew more than once."""
    monkeypatch.setattr(shape, "WIDE", (shape.Tiles(rows, keys, 4, 1),) * 3)
    check_outputs_and_gradients("both sides", 2, TARGETS, True, torch.float32)
    check_outputs_and_gradients("causal", 0, None, True, torch.float32)


@pytest.mark.parametrize("tables", [True, False])
def test_the_benchmark_compares_right_programs(tables: bool) -> None:
    """The peer's kernels compute what ours do, and a program that is wrong is refused."""
    problem = hstu.problem_of("small", torch.device("cpu"), torch.float32)
    if not tables:
        problem = problem._replace(leaves=problem.leaves[:3])
    assert hstu.refusal(hstu.ours, problem) == ""
    assert hstu.refusal(hstu.public, problem) == ""
    assert hstu.refusal(hstu.softmax, problem).startswith("y is")
