"""Target attention's kernels in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from rooftile import recommend
from rooftile.exact import api
from rooftile.recommend.target import operator
from rooftile.recommend.target.kernels import outputs, parts
from tests.recommend import test_target as plain
from tests.recommend.target_cases import D64, case
from tests.recommend.test_target import (  # noqa: F401 - collected here
    ERRORS,
    assert_near,
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


@pytest.fixture
def _in_three_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "parts_of", lambda batch: 3)
    # the merge takes them in two steps
    monkeypatch.setattr(parts, "STEP", 2)


@pytest.mark.usefixtures("_in_three_parts")
@pytest.mark.parametrize(
    ("dim", "dim_v", "dtype"),
    [(32, 48, torch.float32), (24, 16, torch.bfloat16), (128, 128, torch.float16), (256, 256, torch.bfloat16)],
)
def test_softmax_over_parts_of_packed_attention(dim: int, dim_v: int, dtype: torch.dtype) -> None:
    """Ragged users, without candidates, without events, or with fewer events than parts; strided candidates; grouped heads."""
    given = case(lengths=(5, 0, 1, 300, 130), M=5, H=4, Hk=2, D=dim, Dv=dim_v).to(dtype)
    exact = given.to(D64)
    rows, cu_q = given.q.detach().flatten(0, 1), torch.tensor([0, 0, 3, 5, 22, 25])
    rows = rows.transpose(0, 1).contiguous().transpose(0, 1)
    with torch.no_grad():
        assert_near((given.run(),), (exact.run("eager"),), ERRORS[dtype])
        found = recommend.target_attention(rows, given.keys, given.cu, cu_q=cu_q, values=given.values, scale=0.3)
        wide = (x.double() for x in (rows, given.keys))
        words = {"cu_q": cu_q, "values": given.values.double(), "scale": 0.3, "backend": "eager"}
        assert_near((found,), (recommend.target_attention(*wide, given.cu, **words),), ERRORS[dtype])


@pytest.mark.usefixtures("_in_three_parts")
def test_a_bad_event_in_a_part_stays_with_its_user() -> None:
    given = case(lengths=(300, 140, 20), M=3, D=32, Dv=32).to(torch.float32)
    with torch.no_grad():
        clean = given.run()
        for x in (given.keys, given.values):
            x[310:330] = torch.nan
        spoiled = given.run()
    assert spoiled[1].isnan().all()
    assert torch.equal(spoiled[[0, 2]], clean[[0, 2]])


def test_which_calls_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few programs and long histories; neither calls with gradients nor deterministic ones."""
    monkeypatch.setattr(parts, "processors", lambda device: 132)
    keys, cuts = torch.randn(8192, 4, 4), []
    monkeypatch.setattr(parts, "attend", lambda batch, scale, number: cuts.append(number) or batch.q)
    monkeypatch.setattr(api, "attention_packed", lambda q, *given, **words: cuts.append(1) or q)

    def run(users: int, candidates: int, events: int, needs_grad: bool = False) -> None:
        history = keys[:events].repeat(users, 1, 1).requires_grad_(needs_grad)
        recommend.target_attention(torch.randn(users, candidates, 4, 4), history, torch.arange(users + 1) * events)

    # the host launches parts more slowly than one call
    run(1, 512, 8192)
    assert cuts.pop() == 1
    monkeypatch.setattr(parts, "LEAST_EAGER", parts.LEAST_CAPTURED)
    for users, candidates, events in ((1, 512, 8192), (1, 64, 8192), (1, 512, 4096), (2, 512, 8192), (4, 512, 8192)):
        run(users, candidates, events)
    assert cuts == [8, 16, 8, 4, 2]
    run(8, 512, 8192)
    run(1, 8, 1024)
    run(1, 8, 8192, needs_grad=True)
    assert cuts[5:] == [1, 1, 1]
    monkeypatch.setattr(operator, "attend", lambda batch, problem, way: cuts.append(0) or batch.q)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    run(1, 8, 8192)
    monkeypatch.undo()
    assert cuts[8:] == [0]
