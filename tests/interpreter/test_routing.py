"""The router's kernels, interpreted: against the router token by token in fp64, and against plain operations bit by bit."""

from __future__ import annotations

import math
from itertools import product
from unittest import mock

import pytest
import torch
from torch import Tensor

from rooftile import moe
from rooftile.moe import routing as plain
from rooftile.moe.kernels import routing as kernels
from tests.grids import swept
from tests.moe import by_hand

ROUTERS = {
    "mixtral": (8, {"active": 2, "normalise": True}),
    "deepseek": (13, {"active": 6}),
    "qwen": (24, {"active": 8, "normalise": True, "round_gates": True}),
    "all": (7, {"active": 7, "scale": 2.0}),
    "one of one": (1, {"active": 1, "score": "sigmoid"}),
    "all by logits": (9, {"active": 9, "score": "chosen softmax"}),
    "whole groups": (12, {"active": 6, "groups": 4, "active_groups": 2, "score": "sigmoid"}),
    "gpt-oss": (32, {"active": 4, "score": "chosen softmax"}),
    "v2": (20, {"active": 3, "groups": 4, "active_groups": 2, "scale": 1.5}),
    "v3": (
        36,
        {
            "active": 5, "groups": 6, "active_groups": 3, "group_score": "sum of best two", "score": "sigmoid",
            "normalise": True, "scale": 2.5,
        },
    ),
}  # fmt: skip


def inputs(E: int, N: int, d: int, dtype: torch.dtype, biases: bool) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    u, centroids = torch.randn(N, d).to(dtype), (2 * torch.randn(E, d) / d**0.5).to(dtype)
    return u, centroids, {"bias": torch.randn(E) / 4, "logit_bias": torch.randn(E).to(dtype)} if biases else {}


def by_plain(*given, **words) -> moe.Routing:
    with mock.patch.object(plain, "runs_kernels", return_value=False):
        return moe.route(*given, **words)


# N, d, dtype
TOKENS = (
    (1, 40, torch.bfloat16), (6, 1, torch.float32), (3, 1037, torch.float16), (kernels.FEW + 3, 33, torch.float32),
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "tokens", "biases"),
    swept(product(ROUTERS, TOKENS, (False, True)), lambda case: ((case[0], case[1][0] == 1), case[::2], case[1:])),
    ids=str,
)
def test_kernels_equal_python(name: str, tokens: tuple[int, int, torch.dtype], biases: bool) -> None:
    N, d, dtype = tokens
    E, words = ROUTERS[name]
    u, centroids, tensors = inputs(E, N, d, dtype, biases)
    words = {k: v for k, v in words.items() if k != "round_gates"}
    for deterministic in (False, True):
        with mock.patch.object(kernels, "route", wraps=kernels.route) as seen:
            found = moe.route(u, centroids, **words, **tensors, deterministic=deterministic)
        assert seen.called
        experts, gates = by_hand.routed(u, centroids, **words, **tensors)
        assert found.experts.tolist() == experts
        assert (found.experts.dtype, found.gates.dtype, found.scores.dtype) == (torch.int32, torch.float32, torch.float32)
        torch.testing.assert_close(found.gates, torch.tensor(gates, dtype=torch.float32), rtol=2e-6, atol=1e-7)
        torch.testing.assert_close(found.scores, by_plain(u, centroids, **words, **tensors).scores, rtol=2e-6, atol=1e-7)


def test_gates_are_rounded_to_the_dtype_of_tokens() -> None:
    E, words = ROUTERS["qwen"]
    u, centroids, _ = inputs(E, 5, 40, torch.bfloat16, False)
    exact, rounded = (moe.route(u, centroids, **words | {"round_gates": flag}).gates for flag in (False, True))
    assert torch.equal(rounded, exact.bfloat16().float())
    assert not torch.equal(rounded, exact)


@pytest.mark.parametrize("name", ROUTERS)
def test_ties_go_to_the_lower_index(name: str) -> None:
    _, words = ROUTERS[name]
    count, u = 192, torch.ones(3, 1)
    assert moe.route(u, torch.zeros(count, 1), **words).experts.tolist() == 3 * [list(range(words["active"]))]
    found = moe.route(u, torch.arange(count).remainder(2)[:, None].float(), **words)
    assert found.experts.tolist() == 3 * [list(range(1, 2 * words["active"], 2))]


# numpy warns of infinity less infinity
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("name", ROUTERS)
def test_hostile_logits_are_chosen_as_a_sort_chooses_them(name: str, with_bias: bool) -> None:
    """NaN is above all numbers, 0 equals -0, and with most of a group at -inf what was left out of the choice is as good."""
    E, words = ROUTERS[name]
    u, centroids = torch.zeros(48, 1), torch.zeros(E, 1)
    hostile = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, 2.0, 1e38, -1e38])
    rows = [hostile[torch.randint(first, 9, (16, E))] for first in (0, 1, 3)]
    # a NaN or an infinity makes NaN of a whole softmax, so some rows have neither
    z = torch.cat([*rows[1:], rows[0]])
    tensors = {"bias": torch.where(torch.rand(E) < 0.8, -math.inf, 0.0)} if with_bias else {}
    with mock.patch.object(kernels, "logits", return_value=z), mock.patch.object(plain, "one_weight", return_value=z):
        found, due = moe.route(u, centroids, **words, **tensors), by_plain(u, centroids, **words, **tensors)
    assert torch.equal(found.experts, due.experts)
    torch.testing.assert_close(found.gates, due.gates, rtol=1e-6, atol=1e-7, equal_nan=True)
    torch.testing.assert_close(found.scores, due.scores, rtol=1e-6, atol=1e-7, equal_nan=True)


def test_a_token_does_not_depend_on_neighbours() -> None:
    E, words = ROUTERS["v3"]
    u, centroids, tensors = inputs(E, 23, 33, torch.float32, True)
    due = moe.route(u, centroids, **words, **tensors, deterministic=True)
    for rows in (slice(0, 1), slice(22, 23), slice(3, 9), slice(5, 23)):
        found = moe.route(u[rows], centroids, **words, **tensors, deterministic=True)
        assert all(torch.equal(x, y[rows]) for x, y in zip(found, due, strict=True))
    poisoned = u.clone()
    poisoned[4] = math.nan
    found = moe.route(poisoned, centroids, **words, **tensors, deterministic=True)
    keep = torch.arange(23) != 4
    assert all(torch.equal(x[keep], y[keep]) for x, y in zip(found, due, strict=True))
    assert found.gates[4].isnan().all()


def test_strides_and_leading_axes_do_not_matter() -> None:
    E, words = ROUTERS["v2"]
    u, centroids, tensors = inputs(E, 6, 40, torch.float32, True)
    due = moe.route(u, centroids, **words, **tensors)
    spread = {name: x.repeat_interleave(2)[::2] for name, x in tensors.items()}
    found = moe.route(u.mT.contiguous().mT.view(2, 3, 40), centroids.mT.contiguous().mT, **words, **spread)
    assert all(torch.equal(x.flatten(0, 1), y) for x, y in zip(found, due, strict=True))
    assert moe.route(u[0], centroids, **words, **tensors).gates.shape == (3,)
    assert moe.route(u[:0], centroids, **words, **tensors).scores.shape == (0, E)


def test_gradients_fp64_and_large_sizes_take_plain_operations() -> None:
    u, centroids = torch.randn(3, 8), torch.randn(5, 8)
    with mock.patch.object(kernels, "route", side_effect=AssertionError):
        assert moe.route(u.clone().requires_grad_(), centroids, active=2).gates.requires_grad
        assert moe.route(u, centroids.clone().requires_grad_(), active=2).gates.requires_grad
        assert moe.route(u.double(), centroids, active=2).gates.dtype == torch.float64
        assert moe.route(u, torch.randn(kernels.LARGEST_E + 1, 8), active=2).gates.shape == (3, 2)
        assert torch.func.vmap(lambda x: moe.route(x, centroids, active=2).gates)(u).shape == (3, 2)
