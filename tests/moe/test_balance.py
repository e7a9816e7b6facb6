"""The balance loss by its formula, by sequence, by groups; its gradient; the step of a selection bias."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

import rooftile as rt
from rooftile import moe


def by_formula(experts: Tensor, scores: Tensor, groups: int | None = None) -> Tensor:
    """sum f P of one sequence (T, K), in fp64, without alpha."""
    (T, K), E = experts.shape, scores.shape[-1]
    f = torch.tensor([E / (K * T) * sum(int(e) == i for e in experts.flatten()) for i in range(E)], dtype=torch.float64)
    P = scores.double().mean(0)
    if groups is None:
        return (f * P).sum()
    size = E // groups
    return sum(f[g * size : (g + 1) * size].mean() * P[g * size : (g + 1) * size].sum() for g in range(groups))


def routed(*shape: int, **options) -> moe.Routing:
    return moe.route(torch.randn(*shape, 16), torch.randn(8, 16), **({"active": 3} | options))


@pytest.mark.parametrize("groups", [None, 1, 4, 8])
def test_a_batch_is_one_sequence_and_a_leading_axis_has_several(groups: int | None) -> None:
    routing = routed(2, 3, 11)
    one = moe.Routing(*(x.flatten(0, 2) for x in routing))
    due = by_formula(*one[::2], groups=groups)
    torch.testing.assert_close(moe.balance_loss(one, alpha=0.5, groups=groups).double(), 0.5 * due, rtol=1e-5, atol=0)
    each = [by_formula(e, s, groups) for e, s in zip(routing.experts.flatten(0, 1), routing.scores.flatten(0, 1), strict=True)]
    due = torch.stack(each).mean()
    torch.testing.assert_close(moe.balance_loss(routing, alpha=1, groups=groups).double(), due, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_sequences_count_by_themselves(dtype: torch.dtype) -> None:
    routing, ends = routed(30), [0, 4, 4, 5, 30, 30]
    parts = [slice(a, b) for a, b in pairwise(ends) if a < b]
    due = torch.stack([by_formula(routing.experts[part], routing.scores[part]) for part in parts]).mean()
    found = moe.balance_loss(routing, alpha=1.0, cu=torch.tensor(ends, dtype=dtype))
    torch.testing.assert_close(found.double(), due, rtol=1e-5, atol=0)


@pytest.mark.parametrize("options", [{}, {"score": "sigmoid", "normalise": True}, {"score": "chosen softmax"}])
@pytest.mark.parametrize("groups", [None, 2])
def test_a_uniform_routing_costs_alpha(options: dict, groups: int | None) -> None:
    routing = moe.route(torch.randn(12, 16), torch.zeros(8, 16), active=8, **options)
    torch.testing.assert_close(moe.balance_loss(routing, alpha=0.01, groups=groups), torch.tensor(0.01))


def test_one_expert_for_all_costs_most() -> None:
    scores = torch.zeros(12, 8)
    scores[:, 5] = 1.0
    routing = moe.Routing(torch.full((12, 1), 5, dtype=torch.int32), torch.ones(12, 1), scores)
    torch.testing.assert_close(moe.balance_loss(routing, alpha=1.0), torch.tensor(8.0))


def test_scores_of_a_sigmoid_are_divided_by_their_sum() -> None:
    routing = routed(20, score="sigmoid")
    due = by_formula(routing.experts, routing.scores.double() / routing.scores.double().sum(-1, keepdim=True))
    torch.testing.assert_close(moe.balance_loss(routing, alpha=1.0).double(), due, rtol=1e-5, atol=0)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_gradient_flows_through_the_scores_alone(score: str) -> None:
    u, centroids = torch.randn(9, 6).double().requires_grad_(), torch.randn(8, 6).double().requires_grad_()

    def loss(*x: Tensor) -> Tensor:
        return moe.balance_loss(moe.route(*x, active=2, score=score), alpha=1.0, cu=torch.tensor([0, 4, 9]), groups=4)

    assert torch.autograd.gradcheck(loss, (u, centroids))
    # a constant load leaves the gradient of the formula
    routing = moe.route(u, centroids, active=2, score=score)
    s = routing.scores / routing.scores.sum(-1, keepdim=True)
    f = torch.stack([(routing.experts == i).sum() * 8 / (2 * 9) for i in range(8)])
    due = torch.autograd.grad((f * s.mean(0)).sum(), (u, centroids), retain_graph=True)
    found = torch.autograd.grad(moe.balance_loss(routing, alpha=1.0), (u, centroids))
    for x, y in zip(found, due, strict=True):
        torch.testing.assert_close(x, y)


def test_no_tokens_cost_nothing() -> None:
    assert moe.balance_loss(routed(0)) == 0
    assert moe.balance_loss(routed(0), cu=torch.tensor([0])) == 0
    assert moe.balance_loss(routed(3, 0)) == 0


def test_a_bias_goes_up_where_tokens_are_few() -> None:
    experts = torch.tensor([[0, 1], [0, 2], [0, 1], [0, 3]], dtype=torch.int32)
    bias = torch.zeros(4, requires_grad=True)
    assert moe.update_bias(bias, moe.Routing(experts, torch.ones(4, 2)), rate=0.25) is bias
    # loads are 4, 2, 1, 1, and their mean 2
    assert bias.tolist() == [-0.25, 0.0, 0.25, 0.25]


def test_steps_of_a_bias_balance_the_load() -> None:
    u, centroids, bias = torch.randn(512, 16) + 1, torch.randn(8, 16) / 8, torch.zeros(8)

    def heaviest() -> tuple[int, moe.Routing]:
        routing = moe.route(u, centroids, active=2, score="sigmoid", bias=bias)
        return int(routing.experts.flatten().bincount(minlength=8).max()), routing

    before = heaviest()[0]
    for _ in range(300):
        moe.update_bias(bias, heaviest()[1], rate=0.01)
    # the mean is 128
    assert before > 250
    assert heaviest()[0] < 150


R = routed(5)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: moe.balance_loss(R[0]), "routing is a torch.int32 tensor .*; must be the Routing that route returns"),
        (lambda: moe.balance_loss(R._replace(scores=None)), "routing has no scores; the balance loss needs"),
        (lambda: moe.balance_loss(R, groups=3), "groups is 3 and there are 8 experts; must divide that"),
        (lambda: moe.balance_loss(R, alpha="1"), "alpha is '1'; must be a finite number"),
        (lambda: moe.balance_loss(R, cu=torch.tensor([0, 4])), "cu ends at 4; must end at 5"),
        (lambda: moe.balance_loss(R, cu=torch.tensor([0, 4, 3, 5])), "cu falls somewhere"),
        (lambda: moe.balance_loss(routed(2, 3), cu=torch.tensor([0, 6])), "with cu they must be packed"),
        (lambda: moe.balance_loss(R, aux_loss_alpha=1), "balance_loss has no argument aux_loss_alpha: write alpha="),
        (lambda: moe.update_bias(torch.zeros(8).bfloat16(), R), "must be a float32 tensor .*: a step would be lost"),
        (lambda: moe.update_bias(torch.zeros(7), R), r"bias is \(7,\); routing has 8 experts"),
        (lambda: moe.update_bias(torch.zeros(8), R, rate=float("nan")), "rate is nan; must be a finite number"),
    ],
)
def test_a_mistake_gets_a_sentence(call, sentence: str) -> None:
    with pytest.raises(rt.InvalidInput, match=sentence):
        call()
