"""Checkpoints with gated delta nets: the words of their files and of config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rooftile import InvalidInput
from rooftile.models import Decoder, DeltaSizes, ModelConfig
from rooftile.models.config import config_of
from tests.models.checkpoints import assert_same, logits_of_theirs, prompts, saved, theirs
from tests.models.recurrent import DELTA, logits_of_ours


def rewritten(folder: Path, change: Any) -> None:
    stored = load_file(folder / "model.safetensors")
    change(stored)
    save_file({name: x.contiguous() for name, x in stored.items()}, folder / "model.safetensors", metadata={"format": "pt"})


def test_convolutions_in_pieces(tmp_path: Path) -> None:
    """OLMo Hybrid's files have one for queries, one for keys and one for values; what Transformers writes has other borders."""
    model = theirs("olmo_hybrid")
    saved(model, tmp_path)
    due = logits_of_theirs(model, prompts())
    names = [f"model.layers.0.linear_attn.{which}_conv1d.weight" for which in "qkv"]

    def cut(stored: dict[str, torch.Tensor]) -> None:
        whole = torch.cat([stored[name] for name in names])
        stored |= dict(zip(names, whole.split((16, 16, 30)), strict=True))

    for change in (lambda stored: None, cut):
        rewritten(tmp_path, change)
        assert_same(logits_of_ours(Decoder.from_folder(tmp_path), prompts()), due)
    rewritten(tmp_path, lambda stored: stored.update({names[0]: stored[names[0]][1:]}))
    with pytest.raises(InvalidInput, match=r"linear_attn.conv1d.weight \(61, 1, 4\), due \(62, 1, 4\)"):
        Decoder.from_folder(tmp_path)
    rewritten(tmp_path, lambda stored: stored.pop(names[1]))
    with pytest.raises(InvalidInput, match=r"lacks layers.0.linear_attn.conv1d.weight"):
        Decoder.from_folder(tmp_path)


def test_norms_of_olmo_have_two_names(tmp_path: Path) -> None:
    model = theirs("olmo_hybrid")
    saved(model, tmp_path)

    def renamed(stored: dict[str, torch.Tensor]) -> None:
        for n, (word, ours) in {
            0: ("attention_layer_norm", "input_layernorm"), 1: ("feedforward_layer_norm", "post_attention_layernorm"),
            2: ("feedforward_layer_norm", "post_attention_layernorm"),
        }.items():  # fmt: skip
            stored[f"model.layers.{n}.{ours}.weight"] = stored.pop(f"model.layers.{n}.{word}.weight")

    rewritten(tmp_path, renamed)
    assert_same(logits_of_ours(Decoder.from_folder(tmp_path), prompts()), logits_of_theirs(model, prompts()))


@pytest.mark.parametrize("name", ["qwen3_next, dense", "qwen3_5_text"])
def test_a_second_predictor_is_skipped(name: str, tmp_path: Path) -> None:
    model = theirs(name)
    saved(model, tmp_path)
    rewritten(tmp_path, lambda stored: stored.update({"mtp.layers.0.mlp.up_proj.weight": torch.ones(2, 2)}))
    assert_same(logits_of_ours(Decoder.from_folder(tmp_path), prompts()), logits_of_theirs(model, prompts()))


def test_positions_of_olmo_hybrid() -> None:
    """A theta of null says that queries and keys do not rotate; without a word they do, as in Transformers."""
    values = DELTA | {"model_type": "olmo_hybrid"}
    for said, rotates in (
        ({}, True), ({"rope_parameters": None}, True), ({"rope_theta": None}, False), ({"rope_theta": 500.0}, True),
        ({"rope_parameters": {"rope_theta": None, "rope_type": "default"}}, False),
    ):  # fmt: skip
        assert (config_of(values | said, "here").rotary is not None) == rotates


def test_layers_by_default() -> None:
    values = {name: value for name, value in DELTA.items() if name != "layer_types"} | {"num_hidden_layers": 8}
    for family, more, attends in (
        ("qwen3_next", {}, [3, 7]), ("qwen3_next", {"full_attention_interval": 3}, [2, 5]), ("olmo_hybrid", {}, [3, 7])
    ):  # fmt: skip
        mlp = {"mlp_only_layers": list(range(8))}
        config = config_of(values | mlp | more | {"model_type": family}, "here")
        assert [n for n, mixer in enumerate(config.mixers) if mixer == "attention"] == attends
        assert {config.norms_of(n) for n in attends} == {(family != "olmo_hybrid", family == "olmo_hybrid")}


@pytest.mark.parametrize(
    ("changed", "due"),
    [
        ({"linear_num_key_heads": 4}, "value_heads is 6 and key_heads 4; the second must divide the first"),
        ({"linear_conv_kernel_dim": 1}, "kernel is 1; must be at least 2"),
        ({"linear_key_head_dim": 0}, "has linear_key_head_dim 0; must be a whole number of at least 1"),
        ({"linear_value_head_dim": 1 << 40}, "a matrix would be .* numbers; may have at most"),
        ({"hidden_act": "gelu"}, "has hidden_act 'gelu'; supported is 'silu', which also the convolution has"),
        ({"layer_types": ["linear_attention"]}, r"has layer_types .*; must be a list, one for each of 3 layers"),
        ({"layer_types": ["conv"] * 3}, "has layer_types of 'conv'; supported are 'linear_attention' and 'full_attention'"),
        ({"layer_types": [[]] * 3}, r"has layer_types of \[\]; supported are"),
    ],
)
@pytest.mark.parametrize("family", ["qwen3_5_text", "olmo_hybrid"])
def test_what_makes_no_sense_is_one_sentence(family: str, changed: dict[str, Any], due: str) -> None:
    with pytest.raises(InvalidInput, match=due) as refused:
        config_of(DELTA | {"model_type": family} | changed, "here")
    assert "\n" not in str(refused.value)


def test_a_configuration_made_by_hand_is_checked_too() -> None:
    given = {
        "family": "qwen3_next", "vocab_size": 9, "layers": 1, "hidden": 8, "max_len": 16, "windows": (None,), "rotary": None,
        "mixers": ("delta",), "feed_forwards": (None,),
    }  # fmt: skip
    with pytest.raises(InvalidInput, match=r"layer 0 is delta, and its sizes are None; must be DeltaSizes\(\)"):
        ModelConfig(**given)
    with pytest.raises(InvalidInput, match=r"post_normed is \(1,\); must be numbers of layers, from 0 to 0"):
        ModelConfig(**given, post_normed=(1,), delta=DeltaSizes(key_heads=1, value_heads=1, key_dim=4, value_dim=4))
    with pytest.raises(InvalidInput, match="norm_eps is nan; must be at least 0"):
        DeltaSizes(key_heads=1, value_heads=1, key_dim=4, value_dim=4, norm_eps=float("nan"))


def test_layers_that_contradict_their_weights(tmp_path: Path) -> None:
    saved(theirs("qwen3_5_text"), tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"layer_types": ["full_attention"] * 3}))
    with pytest.raises(InvalidInput, match=r"says that layer 0 is attention, and the checkpoint has model.layers.0.linear_attn"):
        Decoder.from_folder(tmp_path)
