"""Decoders with recurrences: logits against Transformers, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rooftile import InvalidInput
from rooftile.models import Decoder, Mamba2Sizes, MambaSizes, ModelConfig
from rooftile.models.checkpoints.write import quantise_folder
from rooftile.models.config import config_of
from tests.models.checkpoints import assert_same, loaded, logits_of_theirs, made, prompts, saved, theirs
from tests.models.recurrent import BAMBA, CONFIGS, MAMBA, MAMBA2, logits_of_ours

LENGTHS = (37, 1, 50, 13)
SOME = ["mamba", "mamba2", "bamba", "qwen3_5_text", "olmo_hybrid"]


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = theirs(name)
    decoder = Decoder.from_folder(saved(model, tmp_path))
    assert_same(logits_of_ours(decoder, prompts(LENGTHS)), logits_of_theirs(model, prompts(LENGTHS)))


def test_each_group_is_normalised_by_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Mamba-2 was trained so, and Transformers computes it so from 5.24 on: unless config.json says otherwise."""
    model = made(type(CONFIGS["mamba2"]())(**MAMBA2 | {"n_groups": 4}))
    norm = type(model.backbone.layers[0].mixer.norm)

    def by_group(self: Any, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        gated = (y * torch.nn.functional.silu(gate)).unflatten(-1, (4, -1))
        return self.weight * (gated / (gated.square().mean(-1, keepdim=True) + self.variance_epsilon).sqrt()).flatten(-2)

    decoder = Decoder.from_folder(saved(model, tmp_path))
    together = logits_of_theirs(model, prompts(LENGTHS))
    assert (logits_of_ours(decoder, prompts(LENGTHS)) - together).abs().max() > 0.01 * together.abs().max()
    monkeypatch.setattr(norm, "forward", by_group)
    assert_same(logits_of_ours(decoder, prompts(LENGTHS)), logits_of_theirs(model, prompts(LENGTHS)))


def test_time_steps_have_bounds(tmp_path: Path) -> None:
    model = made(type(CONFIGS["mamba2"]())(**MAMBA2, time_step_limit=(0.3, 0.9)))
    decoder = Decoder.from_folder(saved(model, tmp_path))
    assert decoder.config.mamba2.step_limit == (0.3, 0.9)
    assert_same(logits_of_ours(decoder, prompts(LENGTHS)), logits_of_theirs(model, prompts(LENGTHS)))


@pytest.mark.parametrize("said", [None, [0.0, math.inf], [0, {"__float__": "Infinity"}]])
def test_no_bound_has_several_words(said: Any) -> None:
    assert config_of(MAMBA2 | {"model_type": "mamba2", "time_step_limit": said}, "here").mamba2.step_limit == (0.0, math.inf)


@pytest.mark.parametrize("name", SOME)
def test_bfloat16_is_as_close_to_exact_as_transformers_in_bfloat16(name: str, tmp_path: Path) -> None:
    saved(theirs(name).to(torch.bfloat16), tmp_path)
    decoder = Decoder.from_folder(tmp_path)
    assert decoder.embedding.dtype == torch.bfloat16
    plain = logits_of_theirs(loaded(tmp_path, torch.bfloat16), prompts(LENGTHS))
    exact = logits_of_theirs(loaded(tmp_path, torch.float32), prompts(LENGTHS))
    ours = logits_of_ours(decoder, prompts(LENGTHS))
    ulps = 8 * torch.finfo(torch.bfloat16).eps * exact.abs().max()
    assert (ours - exact).abs().max() <= 2 * (plain - exact).abs().max() + ulps
    assert (ours - exact).abs().mean() <= 2 * (plain - exact).abs().mean()


def test_a_wide_stream_is_not_rounded() -> None:
    """A stream in fp32 keeps what 16 bits lose: 8 equal additions of less than half an ulp each."""
    sizes = Mamba2Sizes(heads=2, head_dim=4, state=2)
    given = {
        "family": "mamba2", "vocab_size": 3, "layers": 8, "hidden": 4, "max_len": 9, "windows": (None,) * 8, "rotary": None,
        "mixers": ("mamba2",) * 8, "feed_forwards": (None,) * 8, "mamba2": sizes,
    }  # fmt: skip
    found = []
    for wide in (False, True):
        decoder = Decoder.random(ModelConfig(**given, wide_stream=wide), torch.bfloat16, "cpu")
        decoder.embedding.copy_(torch.tensor([1.0, -1.0, 1.0, -1.0]))
        for layer in decoder.layers:
            layer.o.weight.copy_(torch.tensor([[1 / 4096], [0.0], [0.0], [0.0]]).expand(4, 8))
            layer.into.weight.zero_()
            layer.into.bias = torch.nn.Parameter(torch.ones(sizes.projected, dtype=torch.bfloat16), requires_grad=False)
        one = torch.zeros(1, dtype=torch.int64)
        hidden = decoder(one, one, lambda layer, xBC, dt: xBC.new_full((1, 8), 1.0))
        found.append((hidden[0, 0] / hidden[0, 2]).item())
    # each of 8 layers adds 8 / 4096, a quarter of an ulp of 1
    assert found == [1.0, 1 + 8 * 8 / 4096]


def test_decays_stay_in_fp32(tmp_path: Path) -> None:
    model = theirs("mamba2").to(torch.bfloat16)
    saved(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    precise = torch.randn(8)
    stored["backbone.layers.1.mixer.A_log"] = precise
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    decoder = Decoder.from_folder(tmp_path)
    assert torch.equal(decoder.layers[1].A_log, precise)
    assert decoder.layers[1].conv_weight.dtype == torch.bfloat16


@pytest.mark.parametrize("name", SOME)
def test_random_weights_decay_as_a_training_begins(name: str) -> None:
    config = config_of(CONFIGS[name]().to_dict(), "here")
    decoder, again, other = (Decoder.random(config, torch.bfloat16, "cpu", seed=seed) for seed in (3, 3, 4))
    layers = [layer for layer, mixer in zip(decoder.layers, config.mixers, strict=True) if mixer != "attention"]
    assert layers
    for layer in layers:
        steps, rates = torch.nn.functional.softplus(layer.dt_bias), layer.A_log.exp()
        assert 0.99e-3 < steps.min() < steps.max() < 0.101
        assert 1 <= rates.min() < rates.max() <= 16
        # the factor of a token's own input, and the weights of norms
        ones = [layer.gated_norm.weight] if hasattr(layer, "gated_norm") else []
        ones += [getattr(layer, name) for name in ("D", "norm_weight") if hasattr(layer, name)]
        assert ones
        assert all(one.eq(1).all() for one in ones)
    assert all(map(torch.equal, decoder.parameters(), again.parameters()))
    assert not torch.equal(layers[0].A_log, next(one.A_log for one in other.layers if hasattr(one, "A_log")))


@pytest.mark.parametrize("name", SOME)
def test_quantised_projections(name: str, tmp_path: Path) -> None:
    """Written to a folder and read from it, or while the folder is read: both are the model with the rounded weights."""
    saved(theirs(name), tmp_path / "plain")
    quantise_folder(tmp_path / "plain", tmp_path / "written", "int8")
    written, read = Decoder.from_folder(tmp_path / "written"), Decoder.from_folder(tmp_path / "plain", weights="int8")
    found = [logits_of_ours(decoder, prompts(LENGTHS)) for decoder in (written, read)]
    assert torch.equal(*found)
    assert all(projection.weight is None for layer in read.layers for projection in layer.projections)
    plain = Decoder.from_folder(tmp_path / "plain")
    for ours, rounded in zip(plain.layers, read.layers, strict=True):
        for projection, its in zip(ours.projections, rounded.projections, strict=True):
            projection.weight.copy_(its.dequantised())
    # activations are rounded, too
    assert (found[0] - logits_of_ours(plain, prompts(LENGTHS))).abs().mean() < 0.1 * found[0].abs().mean()


@pytest.mark.parametrize(
    ("changed", "due"),
    [
        ({"num_heads": 9}, "has 9 heads of 10 for Mamba-2, and expand 2 times hidden_size 40; the products must agree"),
        ({"n_groups": 3}, "heads is 8 and groups 3; the second must divide the first"),
        ({"norm_groups": 7}, "norm_groups is 7; must divide heads times head_dim, 80"),
        ({"conv_kernel": 1}, "kernel is 1; must be at least 2"),
        ({"hidden_act": "gelu"}, "has hidden_act 'gelu'; supported is 'silu'"),
        ({"time_step_limit": [0.1]}, r"has time_step_limit \[0\.1\]; must be two numbers"),
        ({"time_step_limit": [0.0, {"__float__": "NaN"}]}, "has time_step_limit .*; must be two numbers"),
        ({"time_step_limit": [2, 1]}, r"step_limit is \(2\.0, 1\.0\); must be two numbers, of which the first"),
        ({"layer_mixers": ["attention"] * 3}, "heads is 0; must be at least 1"),
        ({"state_size": 0}, "has state_size 0; must be a whole number of at least 1"),
        ({"state_size": 1 << 40}, "a matrix would be .* numbers; may have at most"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(changed: dict[str, Any], due: str) -> None:
    with pytest.raises(InvalidInput, match=due) as refused:
        config_of(MAMBA2 | {"model_type": "mamba2"} | changed, "here")
    assert "\n" not in str(refused.value)


def test_norms_of_falcon_mamba() -> None:
    said = CONFIGS["falcon_mamba"]().to_dict()
    sizes = config_of(said, "here").mamba
    assert sizes is not None
    assert (sizes.selection_norms, sizes.selection_eps) == ("plain", 0.01)
    with pytest.raises(InvalidInput, match="selection_eps is -1; must be at least 0"):
        config_of(said | {"mixer_rms_eps": -1}, "here")
    with pytest.raises(InvalidInput, match="selection_norms is 'some'; "):
        MambaSizes(width=8, rank=1, selection_norms="some")


def test_sizes_of_mamba() -> None:
    config = config_of(MAMBA | {"model_type": "mamba"}, "here")
    assert (config.mamba, config.tie, config.wide_stream) == (MambaSizes(width=80, rank=3, state=6), True, True)
    for changed, due in (
        ({"conv_kernel": 1}, "kernel is 1; must be at least 2"),
        ({"expand": 0}, "has expand 0; must be above 0"),
        ({"time_step_rank": "full"}, "has time_step_rank 'full'; must be a number"),
        ({"hidden_act": "gelu"}, "has hidden_act 'gelu'; supported is 'silu'"),
    ):
        with pytest.raises(InvalidInput, match=due):
            config_of(MAMBA | {"model_type": "mamba"} | changed, "here")


@pytest.mark.parametrize("layers", [[3], [-1], ["1"], "1", [True]])
def test_layers_of_attention_that_are_no_layers(layers: Any) -> None:
    with pytest.raises(InvalidInput, match=r"has attn_layer_indices .*; must be a list of numbers from 0 to 2"):
        config_of(BAMBA | {"model_type": "bamba", "attn_layer_indices": layers}, "here")


def test_layers_that_contradict_their_weights(tmp_path: Path) -> None:
    saved(theirs("bamba"), tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"attn_layer_indices": [1, 2]}))
    due = "config.json says that layer 2 is attention, and the checkpoint has model.layers.2.mamba.A_log; correct config.json"
    with pytest.raises(InvalidInput, match=due):
        Decoder.from_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(settings | {"attn_layer_indices": None}))
    due = r"config.json says that layer 1 is mamba2, and the checkpoint has model.layers.1.self_attn.k_proj.weight; correct"
    with pytest.raises(InvalidInput, match=due):
        Decoder.from_folder(tmp_path)


def test_a_pickle_of_mamba_ssm(tmp_path: Path) -> None:
    settings = {"d_model": 40, "n_layer": 3, "vocab_size": 97, "ssm_cfg": {"layer": "Mamba2"}, "tie_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    torch.save({"backbone.embedding.weight": torch.zeros(97, 40)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(InvalidInput, match=r"as mamba-ssm writes them, .*rename backbone\.embedding\.weight to") as refused:
        Decoder.from_folder(tmp_path)
    assert "\n" not in str(refused.value)


def test_a_configuration_made_by_hand_is_checked_too() -> None:
    given = {
        "family": "mamba2", "vocab_size": 9, "layers": 2, "hidden": 8, "max_len": 16, "windows": (None, None), "rotary": None,
        "mixers": ("mamba2",) * 2,
    }  # fmt: skip
    sizes = Mamba2Sizes(heads=2, head_dim=4)
    config = ModelConfig(**given, feed_forwards=(None, None), mamba2=sizes)
    assert not config.attends
    for more, due in (
        ({"mamba2": sizes}, "ffn is 0; must be at least 1"),
        ({"feed_forwards": (None, None)}, "layer 0 is mamba2, and its sizes are None; must be Mamba2Sizes"),
        ({"feed_forwards": ("dense",), "mamba2": sizes}, r"must be 'dense', 'experts' or None for each of 2 layers"),
        ({"feed_forwards": (None, "soft"), "mamba2": sizes}, r"must be 'dense', 'experts' or None for each of 2 layers"),
        (
            {"feed_forwards": (None, None), "mamba2": sizes, "windows": (4, None)},
            "layer 0 is mamba2 and its window 4; must be None",
        ),
        ({"feed_forwards": (None, None), "mamba2": sizes, "softcap": 30.0}, r"layer 0 is mamba2 and softcap 30\.0; must be None"),
    ):
        with pytest.raises(InvalidInput, match=due):
            ModelConfig(**given | more)
