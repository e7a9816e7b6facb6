"""Nemotron-H: blocks of one part each become layers, and what makes no sense is a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rooftile import InvalidInput
from rooftile.models import Decoder
from rooftile.models.config import config_of
from tests.models.checkpoints import assert_same, logits_of_theirs, prompts, saved, theirs
from tests.models.recurrent import NEMOTRON, NEMOTRON_EXPERTS, logits_of_ours

LENGTHS = (37, 1, 50, 13)
SAID = NEMOTRON | {"model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"]}
WITH_EXPERTS = NEMOTRON_EXPERTS | {"model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"]}


@pytest.mark.parametrize("name", ["nemotron_h", "nemotron_h, biases", "nemotron_h, experts"])
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = theirs(name)
    decoder = Decoder.from_folder(saved(model, tmp_path))
    assert_same(logits_of_ours(decoder, prompts(LENGTHS)), logits_of_theirs(model, prompts(LENGTHS)))


def test_blocks_become_layers() -> None:
    config = config_of(SAID, "here")
    assert config.mixers == ("mamba2", "mamba2", "attention", "mamba2", "mamba2", "attention")
    assert config.feed_forwards == ("dense", None, "dense", None, "dense", None)
    words = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    for name in ("layers_block_type", "layer_types"):
        listed = {"hybrid_override_pattern": None, name: [words[letter] for letter in SAID["hybrid_override_pattern"]]}
        assert config_of(SAID | listed, "here") == config
    assert config_of(WITH_EXPERTS, "here").feed_forwards == ("experts", None, "experts", "dense")


def test_steps_have_the_bounds_that_config_json_gives() -> None:
    """And not `time_step_min`, to which Transformers clamps the steps of a prompt, and not those of an answer."""
    sizes = config_of(SAID | {"time_step_min": 0.001}, "here").mamba2
    assert sizes is not None
    assert sizes.step_limit == (0.0, float("inf"))


@pytest.mark.parametrize(
    ("said", "changed", "due"),
    [
        (SAID, {"hybrid_override_pattern": "MX"}, "has hybrid_override_pattern 'MX'; must be letters, M for Mamba-2"),
        (SAID, {"hybrid_override_pattern": ""}, "has hybrid_override_pattern ''; must be letters"),
        (SAID, {"hybrid_override_pattern": 3}, "has hybrid_override_pattern 3; must be letters"),
        (SAID, {"hybrid_override_pattern": None}, "has hybrid_override_pattern None; must be letters"),
        (
            SAID,
            {"hybrid_override_pattern": "-M"},
            "has the blocks -M; a feed-forward or experts must follow Mamba-2 or attention",
        ),
        (SAID, {"hybrid_override_pattern": "M-E"}, "has the blocks M-E; a feed-forward or experts must follow"),
        (SAID, {"hybrid_override_pattern": "M" * 2000}, "has 2,000 blocks; may have at most 1,000"),
        (SAID, {"num_hidden_layers": 8}, "has num_hidden_layers 8 and 9 blocks; must be alike"),
        (SAID, {"layers_block_type": ["mamba", "conv"]}, "has a block of 'conv'; supported are mamba, linear_attention"),
        (SAID, {"mlp_hidden_act": "silu"}, "has mlp_hidden_act 'silu'; supported is 'relu2', as it was trained"),
        (SAID, {"n_groups": 3}, "heads is 8 and groups 3; the second must divide the first"),
        (WITH_EXPERTS, {"moe_latent_size": 16}, "has moe_latent_size; supported are experts that read whole tokens"),
        (WITH_EXPERTS, {"mlp_bias": True}, "has mlp_bias and experts; supported are experts without biases"),
        (WITH_EXPERTS, {"num_experts_per_tok": 9}, "active is 9"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(said: dict, changed: dict[str, Any], due: str) -> None:
    with pytest.raises(InvalidInput, match=due) as refused:
        config_of(said | changed, "here")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "due"),
    [
        (
            "FalconH1ForCausalLM",
            "has FalconH1ForCausalLM, which is not served: it has Mamba-2 and attention side by side in each",
        ),
        ("Lfm2ForCausalLM", "it has short convolutions between two gates, and no layer here has that"),
        ("KimiLinearForCausalLM", "it has Kimi Delta Attention"),
    ],
)
def test_families_that_are_not_served_are_refused_by_what_they_have(name: str, due: str) -> None:
    with pytest.raises(InvalidInput, match=due):
        config_of({"architectures": [name], "hidden_size": 8}, "here")


@pytest.mark.parametrize(
    ("change", "due"),
    [
        (lambda x: x.pop("backbone.layers.0.mixer.A_log"), r"lacks layers\.0\.mamba\.A_log; its config\.json asks for"),
        (lambda x: x.update({"backbone.layers.9.norm.weight": torch.zeros(40)}), r"has backbone\.layers\.9\.norm\.weight, which"),
        (
            lambda x: x.update({"backbone.layers.1.mixer.up_proj.weight": torch.zeros(47, 40)}),
            r"layers\.1\.mixer\.up_proj\.weight ",
        ),
        (
            lambda x: x.update({"backbone.layers.0.mixer.q_proj.weight": torch.zeros(32, 40)}),
            r"says that block 0 is Mamba-2, and the checkpoint has backbone\.layers\.0\.mixer\.q_proj\.weight; correct",
        ),
    ],
)
def test_broken_files_are_one_sentence(change: Any, due: str, tmp_path: Path) -> None:
    saved(theirs("nemotron_h"), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    change(stored)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidInput, match=due) as refused:
        Decoder.from_folder(tmp_path)
    assert "\n" not in str(refused.value)


def test_a_pattern_that_contradicts_the_weights(tmp_path: Path) -> None:
    saved(theirs("nemotron_h"), tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings |= {"layers_block_type": None, "hybrid_override_pattern": "M-*M-MM-*"}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    due = r"config\.json says that block 2 is attention, and the checkpoint has backbone\.layers\.2\.mixer\.A_log; correct"
    with pytest.raises(InvalidInput, match=due):
        Decoder.from_folder(tmp_path)


def test_a_second_predictor_is_skipped_and_projections_are_quantised(tmp_path: Path) -> None:
    saved(theirs("nemotron_h, experts"), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored["mtp.layers.0.mixer.up_proj.weight"] = torch.zeros(3, 4)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    decoder = Decoder.from_folder(tmp_path, weights="w8")
    assert [decoder.layers[0].feed_forward.up.format, decoder.layers[0].o.parts[0].format] == ["w8", "w8"]
