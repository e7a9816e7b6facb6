"""`DeepSeekMoE`: its parts, its loss, training, and bad input."""

from __future__ import annotations

import copy

import pytest
import torch

import rooftile as rt
from rooftile import moe
from tests.moe import by_hand


def layer(**options) -> torch.nn.Module:
    return rt.nn.DeepSeekMoE(16, **({"experts": 6, "active": 2, "shared": 2, "hidden": 12} | options))


def test_a_layer_is_its_parts() -> None:
    mixed, x = layer(), torch.randn(2, 7, 16)
    assert {name: tuple(p.shape) for name, p in mixed.named_parameters()} == {
        "centroids": (6, 16), "up": (6, 24, 16), "down": (6, 16, 12), "shared_up": (48, 16), "shared_down": (16, 24),
    }  # fmt: skip
    experts, gates = by_hand.routed(x.flatten(0, 1), mixed.centroids, 2)
    weights = {name: p.double() for name, p in mixed.named_parameters() if name != "centroids"}
    due = by_hand.mixture(x.double().flatten(0, 1), torch.tensor(experts), torch.tensor(gates).double(), **weights)
    torch.testing.assert_close(mixed(x).double().flatten(0, 1), due, rtol=1e-4, atol=1e-5)
    assert torch.equal(mixed(x.flatten(0, 1)), mixed(x).flatten(0, 1))
    assert mixed(x[0, 0]).shape == (16,)


def test_a_routing_is_made_once_for_output_and_loss() -> None:
    mixed, x = layer(), torch.randn(2, 7, 16)
    routing = mixed.route(x)
    assert torch.equal(mixed(x, routing), mixed(x))
    moe.balance_loss(routing, alpha=1.0).backward(retain_graph=True)
    assert mixed.centroids.grad.abs().sum() > 0
    assert mixed.up.grad is None
    mixed(x, routing).sum().backward()
    assert mixed.up.grad is not None
    # nothing of a call stays in the layer
    assert copy.deepcopy(mixed)(x).shape == x.shape


def test_the_loss_spreads_tokens() -> None:
    mixed, x = layer(shared=0), torch.randn(256, 16) + 1
    optimiser = torch.optim.SGD([mixed.centroids], lr=1.0)

    def heaviest() -> int:
        return int(mixed.route(x).experts.flatten().bincount(minlength=6).max())

    with torch.no_grad():
        mixed.centroids[2] += 0.5
    before = heaviest()
    for _ in range(40):
        optimiser.zero_grad()
        moe.balance_loss(mixed.route(x), alpha=1.0).backward()
        optimiser.step()
    assert before > 200
    assert heaviest() < 150


def test_a_router_and_a_selection_bias() -> None:
    router = moe.Router(active=2, score="sigmoid", groups=3, active_groups=2, group_score="sum of best two", normalise=True)
    mixed, x = layer(active=None, router=router, selection_bias=True), torch.randn(2, 7, 16)
    assert mixed.selection_bias.dtype == torch.float32
    with torch.no_grad():
        mixed.selection_bias[3] = 9.0
    assert (mixed.route(x).experts == 3).any(-1).all()
    assert "selection_bias" in mixed.state_dict()
    moe.update_bias(mixed.selection_bias, mixed.route(x), rate=0.5)
    assert mixed.selection_bias[3] == 8.5
    restored = layer(router=router, selection_bias=True)
    restored.load_state_dict(mixed.state_dict())
    assert torch.equal(restored(x), mixed(x))
    assert "groups=3" in repr(mixed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    mixed = layer(dtype=dtype)
    x = torch.randn(5, 16, dtype=dtype)
    y = mixed(x)
    assert y.dtype == dtype
    y.sum().backward()
    assert all(p.grad.isfinite().all() for p in mixed.parameters())
    due = copy.deepcopy(mixed).double()(x.double())
    torch.testing.assert_close(y.double(), due, rtol=0.05, atol=0.05)


def test_other_activations_have_their_shapes() -> None:
    mixed = layer(activation="relu2")
    assert mixed.up.shape == (6, 12, 16)
    assert mixed.shared_up.shape == (24, 16)
    assert mixed(torch.randn(3, 16)).shape == (3, 16)
    assert layer(shared=0).shared_up is None


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"active": 7}, "active is 7 and there are 6 experts; must be at most that"),
        ({"active": None}, "active is missing; give active="),
        ({"hidden": 0}, "hidden is 0; must be an int of at least 1"),
        ({"shared": -1}, "shared is -1; must be an int of at least 0"),
        ({"router": moe.Router(active=3)}, "active is 2 and router has active=3; leave one out"),
        ({"activation": "gelu"}, "activation is 'gelu'; must be 'silu', 'clamped' or 'relu2'"),
        ({"backend": "cuda"}, "backend is 'cuda'; must be 'auto', 'triton', 'tiled' or 'eager'"),
        ({"n_routed_experts": 6}, "DeepSeekMoE has no argument n_routed_experts: write experts="),
        ({"num_experts_per_tok": 2}, "DeepSeekMoE has no argument num_experts_per_tok: write active="),
        ({"hidden_size": 2}, "DeepSeekMoE has no argument hidden_size: write width="),
        ({"moe_intermediate_size": 2}, "DeepSeekMoE has no argument moe_intermediate_size: write hidden="),
        ({"norm_topk_prob": True}, r"write router=rooftile.moe.Router\(active=..., normalise=True\)"),
    ],
)
def test_a_mistake_gets_a_sentence(options: dict, sentence: str) -> None:
    with pytest.raises(rt.InvalidInput, match=sentence):
        layer(**options)


def test_a_call_for_a_pair_is_answered() -> None:
    with pytest.raises(rt.InvalidInput, match=r"forward has no argument return_routing: call routing = layer.route\(x\)"):
        layer()(torch.randn(3, 16), return_routing=True)
