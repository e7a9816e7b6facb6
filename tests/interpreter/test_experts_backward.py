"""The kernels of the experts' backward, interpreted: against token-by-token Python in fp64."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from rooftile import moe
from rooftile.moe import kernels
from rooftile.moe.by_expert import Gradients
from rooftile.moe.problem import Options, Weights
from rooftile.runtime.launch import observe
from tests.approximate.tolerance import assert_within
from tests.grids import pairs, swept
from tests.moe.test_experts import ACTIVATIONS, SIZES, choices, run, tensors

# a sigmoid far below 0
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize(("size", "activation", "dtype"), swept(product(SIZES, ACTIVATIONS, DTYPES), pairs), ids=str)
def test_gradients_equal_python(size: str, activation: str, dtype: torch.dtype) -> None:
    experts, given = tensors(size, activation)
    given = {name: x if name == "gates" else x.to(dtype).float() for name, x in given.items()}
    exact = run(experts, given, torch.float64, activation, by_hand=True)
    plain = run(experts, given, dtype, activation, backend="eager")
    for deterministic in (False, True):
        found = run(experts, given, dtype, activation, backend="triton", deterministic=deterministic)
        assert {name: x.dtype for name, x in found.items()} == {name: x.dtype for name, x in plain.items()}
        assert_within(found, exact, plain, dtype, terms=256)


# tokens, K, E, d, h: rows of an expert fill some tiles and a part of one, and several blocks of columns
LARGE = {"even": (300, 2, 3, 72, 140), "all to the same": (290, 1, 4, 140, 72)}


@pytest.mark.parametrize(("size", "dtype"), swept(product(LARGE, DTYPES[:2]), lambda case: case), ids=str)
def test_several_tiles_of_an_expert(size: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, size, (*LARGE[size], 0))
    _, given = tensors(size)
    N, K, E, *_ = LARGE[size]
    experts = choices("random" if size == "even" else "same", N, K, E)
    given = {name: x if name == "gates" else x.to(dtype).float() for name, x in given.items()}
    exact = run(experts, given, torch.float64, "silu", backend="eager")
    plain = run(experts, given, dtype, "silu", backend="eager")
    found = run(experts, given, dtype, "silu", backend="triton")
    assert_within(found, exact, plain, dtype, terms=512)
    assert all(
        (found["dup"][e] == 0).all() and (found["dup_bias"][e] == 0).all()
        for e in set(range(E)) - set(experts.flatten().tolist())
    )
    again = run(experts, given, dtype, "silu", backend="triton")
    assert all(torch.equal(x, again[name]) for name, x in found.items())


def arguments(size: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Weights, Tensor]:
    experts, given = tensors(size)
    u, gates, *weights = (x.to(dtype) for x in given.values())
    return u, experts.int(), gates.float(), Weights(*weights), torch.randn(u.shape).to(dtype)


def backward(
    u: Tensor, chosen: Tensor, gates: Tensor, weights: Weights, dy: Tensor, *, needs_weights: bool = True
) -> tuple[Gradients, list[str]]:
    """The gradients from the kernels, and the launches of the backward."""
    options, names = Options(backend="triton"), []
    _, p, shared = kernels.forward(u, chosen, gates, weights, options, True)
    with observe(names.append):
        found = kernels.backward(dy, p, shared, u, chosen, gates, weights, options, needs_weights)
    return found, names


def test_without_gradients_of_weights_their_kernels_do_not_run() -> None:
    given = arguments("odd")
    due, names = backward(*given)
    assert {"_weight_gradient", "_bias_gradient"} < set(names)
    found, names = backward(*given, needs_weights=False)
    assert set(names) == {"_place_rows", "_product", "_activate_backward", "_sum_gradients"}
    assert torch.equal(found.u, due.u)
    assert torch.equal(found.gates, due.gates)
    assert [x is None for x in found[2:]] == [True] * 7


def test_a_choice_that_is_no_expert_gives_nan_in_its_token_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # fresh memory has NaN in tests, and here it has numbers: so the NaN is the kernels'
    monkeypatch.setattr(Tensor, "new_empty", Tensor.new_zeros)
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
    u, chosen, gates, weights, dy = arguments("odd")
    wrong = torch.zeros_like(chosen, dtype=torch.bool)
    wrong[3, 1], wrong[20, 0], wrong[0, 2] = True, True, True
    # without its wrong choices, a token is its other choices
    due, _ = backward(u, chosen, gates.masked_fill(wrong, 0), weights, dy)
    chosen = chosen.clone()
    chosen[3, 1], chosen[20, 0], chosen[0, 2] = 7, -1, -100
    found, _ = backward(u, chosen, gates, weights, dy)
    assert torch.equal(found.gates.isnan(), wrong)
    torch.testing.assert_close(found.gates[~wrong], due.gates[~wrong])
    lost = wrong.any(-1)
    assert found.u[lost].isnan().all()
    torch.testing.assert_close(found.u[~lost], due.u[~lost])
    for x, y in zip(found[2:], due[2:], strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_of_one_expert_reaches_its_tokens_alone(activation: str) -> None:
    experts, given = tensors("odd", activation, everything=False)
    lost = (experts == 2).any(-1)
    assert 0 < lost.sum() < len(lost)
    u, gates, up, down = (x.clone() for x in given.values())
    up[2] = float("nan")
    leaves = [x.requires_grad_() for x in (u, gates, up, down)]
    y = moe.experts(u, moe.Routing(experts, gates), up, down, activation=activation, backend="triton")
    du, dgates, dup, ddown = torch.autograd.grad(y.sum(), leaves)
    assert torch.equal(du.isnan().any(-1), lost)
    assert torch.equal(dgates.isnan(), experts == 2)
    for x in (dup, ddown):
        assert [bool(part.isnan().any()) for part in x] == [e == 2 for e in range(7)]


def test_strides_do_not_matter() -> None:
    u, chosen, gates, weights, dy = arguments("odd")
    due, _ = backward(u, chosen, gates, weights, dy)
    turned = Weights(*(x.mT.contiguous().mT if x.ndim > 1 else x for x in weights))
    found, _ = backward(*(x.mT.contiguous().mT for x in (u, chosen, gates)), turned, dy.mT.contiguous().mT)
    assert all(torch.equal(x, y) for x, y in zip(found, due, strict=True))
    # the gradient of a sum has strides of 0
    ones = torch.ones_like(dy)
    assert torch.equal(
        backward(u, chosen, gates, weights, ones[:1, :1].expand_as(dy))[0].up, backward(u, chosen, gates, weights, ones)[0].up
    )


def test_a_deterministic_gradient_does_not_depend_on_neighbours() -> None:
    experts, given = tensors("wide", everything=False)
    dy = torch.randn_like(given["u"])

    def gradient(rows: slice) -> Tensor:
        u, gates = given["u"][rows].clone().requires_grad_(), given["gates"][rows]
        routing = moe.Routing(experts[rows], gates)
        y = moe.experts(u, routing, given["up"], given["down"], backend="triton", deterministic=True)
        return torch.autograd.grad(y, u, dy[rows])[0]

    due = gradient(slice(None))
    for rows in (slice(0, 1), slice(34, 35), slice(3, 20)):
        assert torch.equal(gradient(rows), due[rows])
