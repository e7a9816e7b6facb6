"""The experts of a few tokens, interpreted: against the experts token by token in fp64."""

from __future__ import annotations

from itertools import product
from unittest import mock

import pytest
import torch

from rooftile import moe
from rooftile.moe import kernels
from rooftile.moe.kernels import few_tokens
from rooftile.moe.problem import Options, Weights
from tests.grids import pairs, swept
from tests.interpreter.test_experts import TOLERANCE
from tests.moe.by_hand import mixture

# d, h, E, K, s
SIZES = {"odd": (40, 23, 7, 3, 9), "one": (1, 1, 1, 1, 1), "even": (64, 32, 4, 4, 0)}
# rows of several steps, the last of them not full; few of them, since each is a program
WIDE = {"wide tokens": (700, 5, 3, 2, 3), "wide experts": (9, 700, 2, 1, 530)}


def tensors(size: str, N: int, activation: str, dtype: torch.dtype, full: bool) -> tuple[torch.Tensor, moe.Routing, dict]:
    d, h, E, K, s = (SIZES | WIDE)[size]
    n = 1 if activation == "relu2" else 2
    made = {"up": (E, n * h, d), "down": (E, d, h)}
    made |= {"shared_up": (n * s, d), "shared_down": (d, s)} if s else {}
    made |= {"up_bias": (E, n * h), "down_bias": (E, d)} if full else {}
    made |= {"shared_gate": (d,)} if s and full else {}
    given = {name: (torch.randn(shape) / shape[-1] ** 0.5).to(dtype) for name, shape in made.items()}
    chosen = torch.stack([torch.randperm(E)[:K] for _ in range(N)]).int()
    return torch.randn(N, d).to(dtype), moe.Routing(chosen, torch.rand(N, K)), given


CASES = [
    *swept(
        product(SIZES, [1, few_tokens.FEW], [("silu", False), ("clamped", True), ("relu2", True), ("silu", True)], TOLERANCE),
        pairs,
    ),
    *swept(product(WIDE, [1], [("clamped", True)], TOLERANCE), lambda case: case[:1]),
]


@pytest.mark.parametrize(("size", "N", "kind", "dtype"), CASES, ids=str)
def test_experts_equal_python(size: str, N: int, kind: tuple[str, bool], dtype: torch.dtype) -> None:
    activation, full = kind
    u, routing, given = tensors(size, N, activation, dtype, full)
    due = mixture(u.double(), *routing[:2], activation=activation, **{name: x.double() for name, x in given.items()})
    with mock.patch.object(few_tokens, "forward", wraps=few_tokens.forward) as seen:
        y = moe.experts(u, routing, activation=activation, backend="triton", **given)
    assert seen.called
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), due, rtol=TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])


def test_a_choice_that_is_no_expert_gives_nan_in_its_token_alone() -> None:
    u, routing, given = tensors("odd", 2, "silu", torch.float32, True)
    options = Options("silu", False, "triton")
    weights = Weights(**given)
    due, _, shared = kernels.forward(u, routing.experts, routing.gates, weights, options, False)
    assert shared.shape == (0, 18)
    for wrong in (-1, 7, -(2**31), 2**31 - 1):
        chosen = routing.experts.clone()
        chosen[1, 2] = wrong
        # memory that was not written is not always NaN
        with mock.patch.object(torch.Tensor, "new_empty", torch.Tensor.new_zeros):
            y, _, _ = kernels.forward(u, chosen, routing.gates, weights, options, False)
        assert y[1].isnan().all()
        assert torch.equal(y[0], due[0])


def test_nan_and_strides() -> None:
    u, routing, given = tensors("odd", 2, "silu", torch.float32, True)
    due = moe.experts(u, routing, backend="triton", **given)
    turned = {name: x.mT.contiguous().mT if x.ndim > 1 else x.repeat_interleave(2)[::2] for name, x in given.items()}
    assert torch.equal(moe.experts(u.mT.contiguous().mT, routing, backend="triton", **turned), due)
    u[1, 3] = float("nan")
    found = moe.experts(u, routing, backend="triton", **given)
    assert found[1].isnan().all()
    assert torch.equal(found[0], due[0])


@pytest.mark.parametrize("reason", ["tokens", "keep", "deterministic", "width"])
def test_other_calls_take_sorted_rows(reason: str) -> None:
    N = few_tokens.FEW + 1 if reason == "tokens" else 1
    u, routing, given = tensors("odd", N, "silu", torch.float32, True)
    if reason == "width":
        with mock.patch.object(few_tokens, "STEPS", 3):
            assert not few_tokens.takes(u, routing.experts, Weights(**given), Options(), False)
        return
    options = Options("silu", reason == "deterministic", "triton")
    assert not few_tokens.takes(u, routing.experts, Weights(**given), options, reason == "keep")
