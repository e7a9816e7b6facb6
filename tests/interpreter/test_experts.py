"""The experts' kernels, interpreted: against the experts token by token in fp64."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from rooftile import moe
from rooftile.errors import Unsupported
from rooftile.moe import kernels
from rooftile.moe.problem import ELSEWHERE, Options, Weights
from tests.grids import pairs, swept
from tests.moe.by_hand import mixture

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
# tokens, d, h, E, K
SIZES = {
    "none": (0, 16, 16, 4, 2),
    "one": (1, 24, 20, 5, 1),
    "alone": (5, 16, 8, 1, 1),
    "odd": (37, 40, 23, 7, 3),
    "many": (150, 144, 72, 3, 2),
}


def tensors(size: str, activation: str, dtype: torch.dtype, bias: bool, shared: bool) -> tuple[Tensor, moe.Routing, dict]:
    N, d, h, E, K = SIZES[size]
    n = 1 if activation == "relu2" else 2
    made = {"up": (E, n * h, d), "down": (E, d, h)}
    made |= {"up_bias": (E, n * h), "down_bias": (E, d)} if bias else {}
    made |= {"shared_up": (n * 9, d), "shared_down": (d, 9), "shared_gate": (d,)} if shared else {}
    given = {name: (torch.randn(shape) / shape[-1] ** 0.5).to(dtype) for name, shape in made.items()}
    # the last expert has no token, and the first has most
    weight = torch.tensor([8.0, *[1.0] * (E - 2), 0.0]) if E - 1 >= K else torch.ones(E)
    chosen = torch.stack([torch.multinomial(weight, K) for _ in range(N)]) if N else torch.zeros(0, K, dtype=torch.int64)
    return torch.randn(N, d).to(dtype), moe.Routing(chosen.int(), torch.rand(N, K)), given


# activation, bias, shared network
KINDS = (("silu", False, True), ("clamped", True, False), ("relu2", True, True))


@pytest.mark.parametrize(("size", "kind", "dtype"), swept(product(SIZES, KINDS, TOLERANCE), pairs), ids=str)
def test_experts_equal_python(size: str, kind: tuple[str, bool, bool], dtype: torch.dtype) -> None:
    activation, bias, shared = kind
    u, routing, given = tensors(size, activation, dtype, bias, shared)
    wide = {name: x.double() for name, x in given.items()}
    due = mixture(u.double(), *routing[:2], activation=activation, **wide)
    for deterministic in (False, True):
        y = moe.experts(u, routing, activation=activation, backend="triton", deterministic=deterministic, **given)
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), due, rtol=TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])


@pytest.mark.parametrize("activation", ["silu", "clamped", "relu2"])
def test_gradients_read_what_the_kernel_keeps(activation: str) -> None:
    u, routing, given = tensors("odd", activation, torch.float32, True, True)
    leaves = [u.requires_grad_(), routing.gates.requires_grad_(), *(x.requires_grad_() for x in given.values())]
    found, due = (
        torch.autograd.grad(moe.experts(u, routing, activation=activation, backend=way, **given).square().sum(), leaves)
        for way in ("triton", "eager")
    )
    for x, y in zip(found, due, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def test_strides_do_not_matter() -> None:
    u, routing, given = tensors("odd", "silu", torch.float32, False, False)
    due = moe.experts(u, routing, backend="triton", **given)
    turned = {name: x.mT.contiguous().mT for name, x in given.items()}
    assert torch.equal(moe.experts(u.mT.contiguous().mT, routing, backend="triton", **turned), due)


def test_a_deterministic_token_does_not_depend_on_neighbours() -> None:
    u, routing, given = tensors("many", "silu", torch.float32, False, False)
    due = moe.experts(u, routing, backend="triton", deterministic=True, **given)
    for rows in (slice(0, 1), slice(3, 90)):
        part = moe.Routing(routing.experts[rows], routing.gates[rows])
        assert torch.equal(moe.experts(u[rows], part, backend="triton", deterministic=True, **given), due[rows])


def test_fp64_is_refused_by_name_and_taken_without() -> None:
    u, routing, given = tensors("odd", "silu", torch.float32, False, False)
    wide = {name: x.double() for name, x in given.items()}
    with pytest.raises(Unsupported, match=r"u is torch\.float64; needs bfloat16"):
        moe.experts(u.double(), routing, backend="triton", **wide)
    torch.testing.assert_close(moe.experts(u.double(), routing, **wide), mixture(u.double(), *routing[:2], **wide))


def test_a_choice_that_is_no_expert_gives_nan_in_its_token_alone() -> None:
    u, routing, given = tensors("odd", "silu", torch.float32, False, False)
    due = moe.experts(u, routing, backend="triton", **given)
    chosen = routing.experts.clone()
    chosen[3, 1], chosen[20, 0] = 7, -1
    options = Options("silu", False, "triton")
    y, _, _ = kernels.forward(u, chosen, routing.gates, Weights(given["up"], given["down"]), options, False)
    wrong = torch.zeros(len(u), dtype=torch.bool)
    wrong[[3, 20]] = True
    assert y[wrong].isnan().all()
    torch.testing.assert_close(y[~wrong], due[~wrong], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3, 37])
def test_what_two_ranks_have_adds_up(rows: int) -> None:
    """A rank leaves out the choices of the other's experts; few tokens, one alone and many have kernels of their own."""
    u, routing, given = tensors("odd", "silu", torch.float32, True, False)
    part = moe.Routing(routing.experts[:rows], routing.gates[:rows])
    due = moe.experts(u[:rows], part, backend="triton", **given)
    for deterministic in (False, True):
        options = Options("silu", deterministic, "triton")
        total = torch.zeros_like(due)
        for held in (slice(0, 4), slice(4, 7)):
            weights = Weights(*(given[name][held].contiguous() for name in ("up", "down", "up_bias", "down_bias")))
            local = part.experts - held.start
            local[(local < 0) | (local >= held.stop - held.start)] = ELSEWHERE
            total += kernels.forward(u[:rows], local, part.gates, weights, options, False)[0]
        torch.testing.assert_close(total, due, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ["silu", "clamped", "relu2"])
def test_one_token_which_is_not_sorted_equals_its_row_of_many(activation: str) -> None:
    u, routing, given = tensors("odd", activation, torch.float32, True, False)
    # an expert may be chosen twice
    chosen = routing.experts.clone()
    chosen[0, 1] = chosen[0, 0]
    due = moe.experts(u, moe.Routing(chosen, routing.gates), activation=activation, backend="triton", deterministic=True, **given)
    for row in (0, 5):
        part = moe.Routing(chosen[row : row + 1], routing.gates[row : row + 1])
        words = {"activation": activation, "backend": "triton", "deterministic": True, **given}
        assert torch.equal(moe.experts(u[row : row + 1], part, **words), due[row : row + 1])
    options = Options(activation, False, "triton")
    chosen[0, 2] = 7
    assert kernels.forward(u[:1], chosen[:1], routing.gates[:1], Weights(*given.values()), options, False)[0].isnan().all()
