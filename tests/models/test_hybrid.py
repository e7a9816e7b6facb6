"""config.json of decoders of our own: what it says, and the sentence where it contradicts itself or the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from rooftile import moe
from rooftile.errors import InvalidInput
from rooftile.models import Decoder, ExpertSizes, Mamba2Sizes, MambaSizes, ModelConfig, PerformerSizes, TrainableDecoder
from rooftile.models.config import config_of
from rooftile.moe import Router

EXPERTS = {"name": "experts", "experts": 6, "active": 2, "hidden": 12, "shared": 2}
SAID = {
    "model_type": "rooftile", "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "layer_mixers": ["mamba2", "attention", "performer"], "layer_feed_forwards": ["experts", None, "dense"],
    "mamba2": {"heads": 8, "head_dim": 8, "state": 12}, "performer": {"m": 16},
    "experts": {"experts": 6, "hidden": 12, "shared": 24, "router": {"active": 2}},
}  # fmt: skip


def decoder(**options: Any) -> TrainableDecoder:
    torch.manual_seed(0)
    return TrainableDecoder(40, **{"hidden": 32, "heads": 4, "kv_heads": 2, "max_len": 64} | options)


def test_each_layer_has_what_is_named_for_it() -> None:
    config = config_of(SAID, "here")
    assert config.mixers == ("mamba2", "attention", "performer")
    assert config.feed_forwards == ("experts", None, "dense")
    assert config.mamba2 == Mamba2Sizes(heads=8, head_dim=8, state=12)
    assert config.performer == PerformerSizes(m=16)
    assert config.experts == ExpertSizes(experts=6, hidden=12, shared=24, router=Router(active=2))
    assert config.mamba is config.linear is None
    names = [name for name, _ in Decoder(config, dtype=torch.float32, device="meta").tensors()]
    assert "layers.0.mamba.in_proj.weight" in names
    assert "layers.0.mlp.experts.5.gate_proj.weight" in names
    assert "layers.2.self_attn.projection" in names
    assert not any(name.startswith("layers.1.mlp") for name in names)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"layer_mixers": None}, "has no layer_mixers; served are attention, native_sparse, linear, performer, mamba, mamba2"),
        ({"layer_mixers": None, "mixers": [{"name": "routing"}]}, "has layers that mix tokens by routing; served are attention"),
        ({"layer_mixers": ["mamba2", "attention"]}, "'mamba2' or 'delta' for each of 3 layers"),
        ({"layer_mixers": ["mamba3", "attention", "performer"]}, "has layer_mixers .*'mamba3', .*; must be 'attention'"),
        ({"layer_mixers": ["attention"] * 3}, "has performer and no layer with it in layer_mixers; name its layers there"),
        ({"layer_feed_forwards": ["dense"] * 2}, "must be 'dense', 'experts' or null for each of 3 layers"),
        ({"layer_feed_forwards": ["dense"] * 3}, "has experts and no layer with them in layer_feed_forwards"),
        ({"experts": None}, "has no router.active; it must be there, as layers have router"),
        ({"experts": {"router": {"active": 2}}}, "has no experts.experts; it must be there, as layers have experts"),
        ({"experts": SAID["experts"] | {"router": {"active": 7}}}, "has experts of which active is 7 and there are 6 experts"),
        ({"experts": SAID["experts"] | {"biases": True}}, "has experts with biases, router_bias or activation 'relu2'"),
        ({"mamba2": {"heads": 8}}, "has no mamba2.head_dim; it must be there, as layers have mamba2"),
        ({"mamba2": SAID["mamba2"] | {"groups": 3}}, "has mamba2 of which heads is 8 and groups 3; the second must divide"),
        ({"mamba2": SAID["mamba2"] | {"step_limit": [0.1]}}, r"has mamba2 of which step_limit is \[0.1\]; must be two numbers"),
        ({"mamba2": SAID["mamba2"] | {"step_limit": [0.1, "x"]}}, "must be two numbers, the least and the largest step"),
        ({"mamba2": SAID["mamba2"] | {"bias": 1}}, "has mamba2 of which bias is 1"),
        ({"mamba2": SAID["mamba2"] | {"expand": 2}}, "has mamba2.expand; has heads, head_dim, groups"),
        ({"performer": {"m": 15, "kind": "hyperbolic"}}, "has performer of which m is 15; must be even"),
        ({"performer": {"kind": "softmax"}}, "has performer of which kind is 'softmax'"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_a_sentence(changed: dict, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=rf"config.json of here {sentence}" if sentence.startswith("has") else sentence):
        config_of(SAID | changed, "here")


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (
            {"layer_mixers": ["mamba2", "linear"]},
            "has model.layers.1.self_attn.projection, which its config.json has no",
        ),
        (
            {"layer_mixers": ["attention", "mamba2"]},
            "says that layer 0 is attention, and the checkpoint has model.layers.0.mamba",
        ),
        ({"mamba2": {"heads": 8, "head_dim": 8, "state": 13}}, "the checkpoint's shapes differ from its config.json"),
        ({"layer_feed_forwards": ["dense", "dense"], "experts": None}, "the checkpoint lacks layers.0.mlp.gate_proj.weight"),
        ({"performer": {"m": 32}}, r"layers.1.self_attn.projection \(16, 8\), due \(32, 8\)"),
    ],
)
def test_what_contradicts_the_weights_is_a_sentence(changed: dict, sentence: str, tmp_path: Path) -> None:
    mixers = [{"name": "mamba2", "head_dim": 8, "state_size": 12}, {"name": "performer", "m": 16}]
    decoder(mixers=mixers, feed_forwards=[EXPERTS, "dense"]).save(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    unnamed = {name for name in ("performer", "mamba2") if "layer_mixers" in changed and name not in changed["layer_mixers"]}
    (tmp_path / "config.json").write_text(json.dumps({n: x for n, x in (said | changed).items() if n not in unnamed}))
    with pytest.raises(InvalidInput, match=sentence):
        Decoder.from_folder(tmp_path)


def test_sizes_and_windows_that_layers_have_not_are_sentences() -> None:
    sizes = {"vocab_size": 9, "layers": 1, "hidden": 8, "heads": 2, "kv_heads": 2, "head_dim": 4, "ffn": 8, "max_len": 9}
    common = {"family": "llama", "rotary": None, "windows": (None,)} | sizes
    for mixer, name in (("linear", "LinearSizes"), ("performer", "PerformerSizes"), ("mamba", "MambaSizes")):
        with pytest.raises(InvalidInput, match=rf"layer 0 is {mixer}, and its sizes are None; must be {name}\(\)"):
            ModelConfig(**common | {"mixers": (mixer,)})
    given = {"mixers": ("performer",), "performer": PerformerSizes()}
    with pytest.raises(InvalidInput, match="layer 0 is performer and its window 4; must be None"):
        ModelConfig(**common | given | {"windows": (4,)})
    with pytest.raises(InvalidInput, match=r"layer 0 is performer and softcap 3\.0; must be None: no kernel of it caps scores"):
        ModelConfig(**common | given | {"softcap": 3.0})
    with pytest.raises(InvalidInput, match="layer 0 is performer and the model has sinks; must have none"):
        ModelConfig(**common | given | {"sinks": True})
    with pytest.raises(InvalidInput, match="conv_bias is 2"):
        MambaSizes(width=4, rank=1, conv_bias=2)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (3, "feed_forwards is 3; must be a feed-forward, or one for each layer"),
        (["dense"], "feed_forwards are 1; must be one for all layers, or one for each of 2"),
        ("sparse", "a feed-forward is 'sparse'; must be 'dense', None, or a dictionary with the name 'experts'"),
        ({"name": "dense", "bias": True}, "a feed-forward is .*; must be 'dense', None, or a dictionary"),
        ("experts", "the experts are .*; must have active, the experts that each token uses"),
        (EXPERTS | {"router": 1}, "the experts has the option router, which the decoder decides; leave it out"),
        (EXPERTS | {"active": 7}, "active is 7 and there are 6 experts"),
        (EXPERTS | {"activation": "relu2"}, "the experts have activation='relu2'; must have a gate"),
        ([EXPERTS, EXPERTS | {"hidden": 8}], "feed_forwards have experts with several options; must be alike"),
        (EXPERTS | {"width": 8}, "the experts has the option width"),
    ],
)
def test_feed_forwards_that_do_not_fit_are_sentences(given: Any, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        decoder(feed_forwards=given)


def test_the_balance_of_experts_is_trained() -> None:
    """The loss is the sum over layers, and its gradient reaches centroids, and a training with it evens the load."""
    tokens = torch.randint(40, (4, 20), generator=torch.Generator().manual_seed(1))
    loads = []
    for alpha in (0.0, 1.0):
        model = decoder(feed_forwards=[EXPERTS, EXPERTS])
        assert model.balance_loss() is None
        optimiser = torch.optim.AdamW(model.parameters(), 1e-2)
        for _ in range(15):
            loss, balance = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()), model.balance_loss(alpha)
            assert balance is not None
            optimiser.zero_grad()
            (loss + balance).backward()
            optimiser.step()
        due = sum(float(moe.balance_loss(routing, alpha=alpha).detach()) for routing in model.routings)
        torch.testing.assert_close(float(balance.detach()), due)
        assert [tuple(routing.experts.shape) for routing in model.routings] == [(4, 19, 2)] * 2
        counts = torch.stack([routing.experts.flatten().bincount(minlength=6) for routing in model.routings])
        loads.append(float(counts.max() / counts.float().mean()))
    assert loads[1] < loads[0]


def test_nothing_may_follow() -> None:
    model = decoder(mixers={"name": "mamba", "state_size": 4}, feed_forwards=None)
    assert not any("ffn" in name or "gate" in name for name, _ in model.named_parameters())
    tokens = torch.randint(40, (2, 10))
    cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    assert all(weight.grad is not None for weight in model.parameters())
