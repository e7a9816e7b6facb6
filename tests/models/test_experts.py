"""Decoders with experts: the layer against its definition, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rooftile import InvalidInput, fused, moe
from rooftile.models import Decoder, ExpertSizes, ModelConfig
from rooftile.models.experts.feed_forward import ExpertFeedForward
from rooftile.moe import Router
from tests.moe.by_hand import mixture, routed

SIZES = ExpertSizes(experts=5, hidden=6, router=Router(active=2))
GIVEN: dict[str, Any] = {
    "family": "llama", "vocab_size": 9, "layers": 3, "hidden": 8, "heads": 2, "kv_heads": 1, "head_dim": 4, "max_len": 16,
    "windows": (None,) * 3, "rotary": None, "ffn": 12,
}  # fmt: skip
EVERYTHING = ExpertSizes(
    experts=6, hidden=5, shared=7, activation="clamped", biases=True, router_bias=True, selection_bias=True, shared_gate=True,
    router=Router(active=3, score="sigmoid", groups=3, active_groups=2, normalise=True, scale=1.7, group_score="sum of best two"),
)  # fmt: skip


def config_with(sizes: ExpertSizes, **more: Any) -> ModelConfig:
    """The second of three layers has experts, and nothing follows in the third."""
    return ModelConfig(**GIVEN | {"feed_forwards": ("dense", "experts", None), "experts": sizes} | more)


@pytest.mark.parametrize("fixed", [False, True], ids=["any-order", "fixed-order"])
@pytest.mark.parametrize(
    "sizes", [SIZES, EVERYTHING, replace(SIZES, activation="relu2", shared=3)], ids=["plain", "everything", "relu2"]
)
def test_a_feed_forward_is_its_definition(sizes: ExpertSizes, fixed: bool) -> None:
    """The layer's weights go where they belong, token by token in fp64, times the scale of what is added."""
    decoder = Decoder.random(config_with(sizes, residual_scale=0.3), torch.float32, "cpu")
    assert [layer.feed_forward is None for layer in decoder.layers] == [False, False, True]
    layer = decoder.layers[1].feed_forward
    assert isinstance(layer, ExpertFeedForward)
    for weight in layer.parameters():
        weight.normal_(0.0, 1.0, generator=torch.Generator().manual_seed(weight.numel()))
    x = torch.randn(11, 8, generator=torch.Generator().manual_seed(3))
    wide = {name: weight.double() for name, weight in layer.named_parameters()}
    router, route = sizes.router, {}
    for name in ("score", "normalise", "scale", "groups", "active_groups", "group_score"):
        route[name] = getattr(router, name)
    chosen, gates = routed(
        x, wide["centroids"], router.active, bias=wide.get("selection_bias"), logit_bias=wide.get("router_bias"), **route
    )
    names = ("up_bias", "down_bias", "shared_up", "shared_down", "shared_gate")
    due = mixture(
        x.double(), torch.tensor(chosen), torch.tensor(gates).double(), wide["up"], wide["down"], activation=sizes.activation,
        **{name: wide.get(name) for name in names},
    )  # fmt: skip
    found = layer(x, *((fused.linear,) if fixed else ()))
    torch.testing.assert_close(found.double(), 0.3 * due, rtol=1e-5, atol=1e-5)


def test_a_fixed_order_reaches_the_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a deterministic engine have the same bits whatever their neighbours are."""
    asked: list[Any] = []
    for name in ("route", "experts"):
        run = getattr(moe, name)
        monkeypatch.setattr(moe, name, lambda *x, run=run, **words: asked.append(words["deterministic"]) or run(*x, **words))
    layer = Decoder.random(config_with(SIZES), torch.float32, "cpu").layers[1].feed_forward
    assert layer is not None
    x = torch.randn(7, 8)
    layer(x)
    assert asked == [None, None]
    together = layer(x, fused.linear)
    assert asked[2:] == [True, True]
    assert torch.equal(together, torch.cat([layer(row, fused.linear) for row in x.split(1)]))


def test_experts_ask_for_no_codes_and_have_no_projections() -> None:
    layer = Decoder.random(config_with(SIZES), torch.float32, "cpu").layers[1]
    assert layer.feed_forward is not None
    assert layer.feed_forward.rows(torch.zeros(2, 8)) == (None, None)
    assert layer.projections == (layer.reader, layer.o)


def test_a_bias_of_the_choice_stays_in_fp32() -> None:
    layer = Decoder.random(config_with(EVERYTHING), torch.bfloat16, "cpu").layers[1].feed_forward
    assert isinstance(layer, ExpertFeedForward)
    assert layer.selection_bias is not None
    assert layer.selection_bias.dtype == torch.float32
    others = {weight.dtype for name, weight in layer.named_parameters() if name != "selection_bias"}
    assert others == {torch.bfloat16}


@pytest.mark.parametrize(
    ("changed", "due"),
    [
        ({"experts": None}, r"layer 1 has experts, and their sizes are None; must be ExpertSizes\(\)"),
        ({"feed_forwards": ("dense", "experts")}, "must be 'dense', 'experts' or None for each of 3 layers"),
        ({"feed_forwards": ("dense", "expert", None)}, "must be 'dense', 'experts' or None for each of 3 layers"),
        ({"experts": replace(SIZES, experts=1 << 14, hidden=1 << 24)}, "a matrix would be .* numbers; may have at most"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_one_sentence(changed: dict[str, Any], due: str) -> None:
    with pytest.raises(InvalidInput, match=due) as refused:
        ModelConfig(**GIVEN | {"feed_forwards": ("dense", "experts", None), "experts": SIZES} | changed)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changed", "due"),
    [
        ({"router": Router(active=6)}, "active is 6 and there are 5 experts; must be at most that"),
        ({"router": Router(active=2, groups=2)}, "groups is 2 and there are 5 experts; must divide that"),
        ({"router": 2}, r"router is 2; must be a rooftile\.moe\.Router"),
        ({"experts": 1 << 30}, "experts is 1,073,741,824; may be at most 16,384"),
        ({"hidden": 0}, "hidden is 0; must be"),
        ({"shared": -1}, "shared is -1; must be"),
        ({"shared_gate": True}, "shared_gate is on and shared 0; a gate needs a shared network to multiply"),
        ({"activation": "gelu"}, "activation is 'gelu'; "),
        ({"biases": 1}, "biases is 1; must be"),
    ],
)
def test_sizes_that_make_no_sense_are_one_sentence(changed: dict[str, Any], due: str) -> None:
    with pytest.raises(InvalidInput, match=due) as refused:
        replace(SIZES, **changed)
    assert "\n" not in str(refused.value)
