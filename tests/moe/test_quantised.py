"""Experts whose weights are quantised: the numbers that codes stand for, whatever runs the product."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rooftile import moe, quantise_weight
from rooftile.errors import InvalidInput
from rooftile.moe.quantised import dense, stacked
from rooftile.weights import QuantisedWeight
from tests.moe import by_hand

FORMATS = ("fp8", "int8", "w8", "int4:32", "mxfp8", "mxfp4", "nvfp4")
# N, K, E, d, h
SIZES = {"odd": (23, 3, 7, 96, 64), "one": (1, 2, 5, 64, 32), "none": (0, 2, 3, 64, 32)}


def quantised(w: Tensor, word: str) -> QuantisedWeight:
    format, _, group = word.partition(":")
    return quantise_weight(w.flatten(0, 1), format, group=int(group) if group else None)


def drawn(size: str, word: str, activation: str = "silu", *, both: bool = True) -> tuple:
    """Tokens, choices, gates, and quantised weights of experts."""
    torch.manual_seed(3)
    N, K, E, d, h = SIZES[size]
    n = 1 if activation == "relu2" else 2
    u, gates = torch.randn(N, d), torch.rand(N, K)
    chosen = torch.stack([torch.randperm(E)[:K] for _ in range(N)]) if N else torch.zeros(0, K, dtype=torch.int64)
    up, down = torch.randn(E, n * h, d) * d**-0.5, torch.randn(E, d, h)
    return u, moe.Routing(chosen.int(), gates), quantised(up, word), quantised(down, word) if both else down


def of_definition(u: Tensor, routing: moe.Routing, up: QuantisedWeight, down: QuantisedWeight, **more) -> Tensor:
    """In fp64, token by token."""
    E = down.shape[0] // u.shape[1]
    up, down = (x.dequantise(torch.float64).unflatten(0, (E, -1)) for x in (up, down))
    return by_hand.mixture(u.double(), routing.experts, routing.gates.double(), up, down, **more)


@pytest.mark.parametrize("activation", ["silu", "clamped", "relu2"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("word", FORMATS)
def test_values_are_the_definitions(word: str, size: str, activation: str) -> None:
    given = drawn(size, word, activation)
    due = of_definition(*given, activation=activation)
    for backend in ("tiled", "eager", None):
        found = moe.experts(*given, activation=activation, backend=backend)
        torch.testing.assert_close(found.double(), due, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("word", ["w8", "mxfp4"])
def test_neighbours_change_no_bit(word: str) -> None:
    u, routing, up, down = drawn("odd", word)
    whole = moe.experts(u, routing, up, down, deterministic=True)
    for n in (0, 11):
        one = moe.experts(
            u[n : n + 1], moe.Routing(routing.experts[n : n + 1], routing.gates[n : n + 1]), up, down, deterministic=True
        )
        assert torch.equal(one[0], whole[n])


def test_gradients_pass_through_the_numbers() -> None:
    u, routing, up, down = drawn("odd", "w8")
    u.requires_grad_()
    moe.experts(u, routing, up, down).square().sum().backward()
    other = u.detach().clone().requires_grad_()
    plain = dense(moe.problem.Weights(up, down), torch.float32)
    moe.experts(other, routing, plain.up, plain.down).square().sum().backward()
    torch.testing.assert_close(u.grad, other.grad)


def test_one_weight_may_stay_plain() -> None:
    u, routing, up, down = drawn("odd", "w8", both=False)
    due = moe.experts(u, routing, up.dequantise().unflatten(0, (7, -1)), down)
    torch.testing.assert_close(moe.experts(u, routing, up, down), due)


def test_a_shared_network_is_quantised_too() -> None:
    u, routing, up, down = drawn("odd", "w8")
    shared_up, shared_down, gate = torch.randn(2 * 48, 96) * 0.1, torch.randn(96, 48), torch.randn(96)
    codes = {"shared_up": quantise_weight(shared_up, "w8"), "shared_down": quantise_weight(shared_down, "w8")}
    due = of_definition(u, routing, up, down, **{name: x.dequantise(torch.float64) for name, x in codes.items()},
                        shared_gate=gate.double())  # fmt: skip
    found = moe.experts(u, routing, up, down, **codes, shared_gate=gate)
    torch.testing.assert_close(found.double(), due, rtol=1e-3, atol=1e-3)


def test_tiles_of_each_expert_become_groups_of_its_rows() -> None:
    parts = [quantise_weight(torch.randn(200, 256), "fp8_tile") for _ in range(3)]
    whole = stacked(parts)
    assert (whole.format, whole.group, whole.shape) == ("fp8", 128, (600, 256))
    assert torch.equal(whole.dequantise(torch.float64), torch.cat([part.dequantise(torch.float64) for part in parts]))


@pytest.mark.parametrize("word", FORMATS)
def test_a_stack_has_the_numbers_of_its_parts(word: str) -> None:
    parts = [quantised(torch.randn(1, 24, 64), word) for _ in range(3)]
    assert torch.equal(stacked(parts).dequantise(), torch.cat([part.dequantise() for part in parts]))


def test_parts_that_do_not_go_together_are_no_stack() -> None:
    w = torch.randn(32, 64)
    assert stacked([quantise_weight(w, "w8"), quantise_weight(w, "int8")]) is None
    assert stacked([quantise_weight(w, "int4", group=32), quantise_weight(w, "int4", group=64)]) is None
    assert stacked([quantise_weight(torch.randn(32, 130), "fp8_tile")] * 2) is None


@pytest.mark.parametrize(
    ("change", "due"),
    [
        (lambda up, down: (quantise_weight(torch.randn(100, 96), "w8"), down), r"up is \(100, 96\); a quantised one must be"),
        (
            lambda up, down: (up, quantise_weight(torch.randn(90, 64), "w8")),
            r"down is \(90, 64\); a quantised one must be \(E d, h\), d = 96",
        ),
        (lambda up, down: (quantise_weight(up.dequantise(), "fp8_tile"), down), "up is in fp8_tile, whose tiles may lie across"),
        (lambda up, down: ("w8", down), "up is 'w8'; must be a tensor"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(change, due: str) -> None:
    u, routing, up, down = drawn("odd", "w8")
    with pytest.raises(InvalidInput, match=due):
        moe.experts(u, routing, *change(up, down))
