"""The router of every family: against token-by-token Python, ties, groups, biases, and gradients of every score."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import rooftile as rt
from rooftile import moe
from tests.moe import by_hand

ROUTERS = {
    "deepseek": {"active": 3},
    "all": {"active": 12},
    "one": {"active": 1, "scale": 2.0},
    "mixtral": {"active": 2, "normalise": True},
    "granite": {"active": 4, "score": "chosen softmax"},
    "v2": {"active": 3, "groups": 4, "active_groups": 2, "scale": 1.5},
    "v3": {
        "active": 4, "groups": 3, "active_groups": 2, "group_score": "sum of best two", "score": "sigmoid", "normalise": True,
        "scale": 2.5,
    },
    "no groups of v3": {"active": 4, "score": "sigmoid", "normalise": True},
}  # fmt: skip
E, D = 12, 16


def inputs(N: int = 37, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(N, D, dtype=dtype), torch.randn(E, D, dtype=dtype) / 2


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_equals_python(name: str, with_bias: bool) -> None:
    u, centroids = inputs()
    tensors = {"bias": torch.randn(E).double(), "logit_bias": torch.randn(E).double()} if with_bias else {}
    routing = moe.route(u, centroids, **ROUTERS[name], **tensors)
    experts, gates = by_hand.routed(u, centroids, **ROUTERS[name], **tensors)
    assert routing.experts.tolist() == experts
    torch.testing.assert_close(routing.gates, torch.tensor(gates, dtype=torch.float64))
    assert routing.experts.dtype == torch.int32
    assert routing.scores.shape == (37, E)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scores_and_gates_are_fp32(dtype: torch.dtype) -> None:
    u, centroids = inputs(dtype=dtype)
    routing = moe.route(u.view(1, 37, D), centroids.float(), active=3)
    assert routing.gates.dtype == routing.scores.dtype == torch.float32
    assert routing.experts.shape == routing.gates.shape == (1, 37, 3)
    due = (u.double() @ centroids.double().T).softmax(-1)
    torch.testing.assert_close(routing.scores[0].double(), due, rtol=1e-5, atol=1e-7)


def test_rounded_gates_are_numbers_of_the_tokens_dtype() -> None:
    u, centroids = inputs(dtype=torch.bfloat16)
    exact, rounded = (moe.route(u, centroids, active=3, round_gates=flag).gates for flag in (False, True))
    assert torch.equal(rounded, exact.bfloat16().float())
    assert not torch.equal(rounded, exact)


@pytest.mark.parametrize("name", ROUTERS)
def test_ties_go_to_the_lower_index(name: str) -> None:
    # all scores are equal, then two values by turns: sorts that are not stable differ from 16 numbers on
    options = ROUTERS[name]
    count, u = 192, torch.ones(3, 1)
    routing = moe.route(u, torch.zeros(count, 1), **options)
    assert routing.experts.tolist() == 3 * [list(range(options["active"]))]
    routing = moe.route(u, torch.arange(count).remainder(2)[:, None].float(), **options)
    assert routing.experts.tolist() == 3 * [list(range(1, 2 * options["active"], 2))]


def test_a_group_without_a_chance_is_never_chosen_though_a_bias_makes_scores_negative() -> None:
    u, centroids = inputs()
    # 0 in place of -inf would choose what is masked
    routing = moe.route(u, centroids, **ROUTERS["v3"], bias=torch.full((E,), -10.0))
    groups = (routing.experts // (E // 3)).tolist()
    assert all(len(set(row)) <= 2 for row in groups)


def test_a_bias_chooses_and_does_not_gate() -> None:
    u, centroids = inputs()
    bias = torch.zeros(E).double()
    bias[7] = 100.0
    routing = moe.route(u, centroids, active=2, score="sigmoid", bias=bias)
    assert (routing.experts[:, 0] == 7).all()
    torch.testing.assert_close(routing.gates[:, 0], (u @ centroids[7]).sigmoid())


@pytest.mark.parametrize("name", ROUTERS)
def test_gradients_reach_scores_that_were_not_chosen(name: str) -> None:
    u, centroids = (x.requires_grad_() for x in inputs(5))
    logit_bias = torch.randn(E).double().requires_grad_()

    def gates(*leaves: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        routing = moe.route(*leaves[:2], **ROUTERS[name], logit_bias=leaves[2])
        # gradcheck leaves out a result without a gradient
        assert routing.gates.requires_grad
        return routing.gates, routing.scores

    assert torch.autograd.gradcheck(gates, (u, centroids, logit_bias))
    if name == "deepseek":
        routing = moe.route(u[:1], centroids, active=3)
        (found,) = torch.autograd.grad(routing.gates[0, 0], centroids)
        assert (found.abs().sum(-1) > 0).all()


def test_a_record_and_words_are_one() -> None:
    options = ROUTERS["v3"]
    u, centroids = inputs()
    due = moe.route(u, centroids, **options)
    for routing in (
        moe.route(u, centroids, moe.Router(**options)),
        moe.route(u, centroids, moe.Router(active=1, score="sigmoid", groups=3), **options),
        moe.route(u, centroids, **{k: np.int64(v) if type(v) is int else v for k, v in options.items()}),
    ):
        assert all(torch.equal(x, y) for x, y in zip(routing, due, strict=True))
    assert hash(moe.Router(active=np.int32(2))) == hash(moe.Router(active=2))


@pytest.mark.parametrize("name", ["deepseek", "v3", "granite"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_deterministic_choice_does_not_depend_on_neighbours(name: str, dtype: torch.dtype) -> None:
    u, centroids = torch.randn(70, 33).to(dtype), torch.randn(E, 33).to(dtype)
    due = moe.route(u, centroids, **ROUTERS[name], deterministic=True)
    for rows in (slice(0, 1), slice(69, 70), slice(3, 20), slice(5, 70)):
        found = moe.route(u[rows], centroids, **ROUTERS[name], deterministic=True)
        assert all(torch.equal(x, y[rows]) for x, y in zip(found, due, strict=True))


def test_no_tokens_and_a_token_without_axes() -> None:
    _, centroids = inputs()
    assert moe.route(torch.zeros(0, D).double(), centroids, active=2).experts.shape == (0, 2)
    assert moe.route(torch.zeros(2, 0, 3, D).double(), centroids, active=2, deterministic=True).scores.shape == (2, 0, 3, E)
    assert moe.route(torch.ones(D).double(), centroids, active=2).gates.shape == (2,)


def test_nan_of_one_token_stays_with_it() -> None:
    u, centroids = inputs()
    due = moe.route(u, centroids, **ROUTERS["v3"])
    u[4] = float("nan")
    found = moe.route(u, centroids, **ROUTERS["v3"])
    keep = torch.arange(37) != 4
    assert all(torch.equal(x[keep], y[keep]) for x, y in zip(found, due, strict=True))
    assert found.gates[4].isnan().all()
    assert set(found.experts[4].tolist()) <= set(range(E))


U, C = torch.randn(5, D), torch.randn(E, D)


@pytest.mark.parametrize(
    ("arguments", "options", "sentence"),
    [
        ((U, C), {}, "active is missing; give active="),
        ((U, C), {"active": 13}, "active is 13 and there are 12 experts; must be at most that"),
        ((U, C), {"active": 0}, "active is 0; must be an int of at least 1"),
        ((U, C), {"active": 2, "score": "tanh"}, "score is 'tanh'; must be 'softmax', 'sigmoid' or 'chosen softmax'"),
        ((U, C), {"active": 2, "groups": 5}, "groups is 5 and there are 12 experts; must divide that"),
        ((U, C), {"active": 2, "groups": 3, "active_groups": 4}, "active_groups is 4 and groups is 3; must be at most that"),
        ((U, C), {"active": 5, "groups": 3}, "active is 5 and active_groups is 1, with 4 experts; must be at most that"),
        (
            (U, C), {"active": 1, "groups": 12, "group_score": "sum of best two"},
            "groups is 12 for 12 experts; the sum of best two needs groups of two or more",
        ),
        ((U, C), {"active": 2, "group_score": "mean"}, "group_score is 'mean'; must be 'maximum' or 'sum of best two'"),
        ((U, C), {"active": 2, "normalise": 1}, "normalise is 1; must be True or False"),
        ((U, C), {"active": 2, "scale": float("inf")}, "scale is inf; must be a finite number"),
        ((U, C), {"active": 2, "deterministic": 1}, "deterministic is 1; must be True, False, or None"),
        ((U, C[:, :8]), {"active": 2}, r"centroids is \(12, 8\) and u \(5, 16\); must be \(E, d\) and \(..., d\)"),
        ((U.long(), C), {"active": 2}, "u is a torch.int64 tensor .*; must be a floating-point tensor"),
        ((U, C[0]), {"active": 2}, r"centroids is a torch.float32 tensor \(16,\); must be a floating-point tensor \(E, d\)"),
        ((U, C), {"active": 2, "bias": torch.ones(3)}, r"bias is .* \(3,\); must be a floating-point tensor \(12,\)"),
        ((U, C), {"active": 2, "logit_bias": 1.0}, r"logit_bias is 1.0; must be a floating-point tensor \(12,\)"),
        ((U, C.to("meta")), {"active": 2}, "centroids is on meta; u is on cpu"),
        ((U, C, "v3"), {}, "router is 'v3'; must be a rooftile.moe.Router"),
        ((U, C), {"topk": 2}, "route has no argument topk: write active="),
        ((U, C), {"num_experts_per_tok": 2}, "route has no argument num_experts_per_tok: write active="),
        ((U, C), {"active": 2, "norm_topk_prob": True}, "route has no argument norm_topk_prob: write normalise="),
        ((U, C), {"active": 2, "topk_group": 2}, "route has no argument topk_group: write active_groups="),
        ((U, C), {"active": 2, "scoring_func": "sigmoid"}, "route has no argument scoring_func: write score="),
    ],
)  # fmt: skip
def test_a_mistake_gets_a_sentence(arguments: tuple, options: dict, sentence: str) -> None:
    with pytest.raises(rt.InvalidInput, match=sentence) as raised:
        moe.route(*arguments, **options)
    assert "\n" not in str(raised.value)
