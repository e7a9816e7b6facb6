"""Checkpoints with experts: logits against Transformers, or against a definition where it has no class, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from rooftile import InvalidInput
from rooftile.models import Decoder
from rooftile.models.config import config_of
from tests.models.checkpoints import assert_same, loaded, logits_of_theirs, prompts, saved, theirs
from tests.models.experts import CONFIGS, DEEPSEEK, DeepSeek
from tests.models.recurrent import logits_of_ours

LENGTHS = (37, 1, 50, 13)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = theirs(name)
    decoder = Decoder.from_folder(saved(model, tmp_path))
    assert_same(logits_of_ours(decoder, prompts(LENGTHS)), logits_of_theirs(model, prompts(LENGTHS)))


@pytest.mark.parametrize(
    "changed",
    [{}, {"moe_layer_freq": 2, "first_k_dense_replace": 0, "norm_topk_prob": True}, {"n_shared_experts": None}],
    ids=["", "every second layer", "none shared"],
)  # fmt: skip
def test_logits_of_deepseek_are_the_definitions(changed: dict[str, Any], tmp_path: Path) -> None:
    model = DeepSeek(DEEPSEEK | changed)
    decoder = Decoder.from_folder(model.save(tmp_path))
    due = torch.cat([model.logits(ids) for ids in prompts(LENGTHS)]).float()
    assert_same(logits_of_ours(decoder, prompts(LENGTHS)), due)


def test_the_layer_of_deepseek_is_that_of_its_second_version(tmp_path: Path) -> None:
    """Transformers has a class for DeepSeek-V2: one group, a greedy choice, and gates that are not multiplied by a number."""
    from transformers.models.deepseek_v2 import DeepseekV2Config, modeling_deepseek_v2

    model = DeepSeek(DEEPSEEK)
    layer = Decoder.from_folder(model.save(tmp_path)).layers[2].feed_forward
    assert layer is not None
    names = ("hidden_size", "moe_intermediate_size", "n_routed_experts", "n_shared_experts", "num_experts_per_tok")
    config = DeepseekV2Config(
        **{name: DEEPSEEK[name] for name in names}, num_attention_heads=4, topk_method="greedy",
        n_group=1, topk_group=1, routed_scaling_factor=1.0,
        experts_implementation="eager",
    )  # fmt: skip
    theirs_ = modeling_deepseek_v2.DeepseekV2Moe(config)
    stored = {name.removeprefix("model.layers.2.mlp."): x for name, x in model.weights.items() if "layers.2.mlp" in name}
    up = [
        torch.cat([stored.pop(f"experts.{e}.{part}_proj.weight") for part in ("gate", "up")])
        for e in range(DEEPSEEK["n_routed_experts"])
    ]
    down = [stored.pop(f"experts.{e}.down_proj.weight") for e in range(DEEPSEEK["n_routed_experts"])]
    stored |= {"experts.gate_up_proj": torch.stack(up), "experts.down_proj": torch.stack(down)}
    theirs_.load_state_dict(stored)
    x = torch.randn(1, 19, DEEPSEEK["hidden_size"], generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        torch.testing.assert_close(layer(x[0]), theirs_(x)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "olmoe", "gpt_oss", "granitemoehybrid", "jamba"])
def test_shards_and_bfloat16(name: str, tmp_path: Path) -> None:
    """The logits are as close to exact as those of Transformers; an expert near another one in score may be exchanged."""
    saved(theirs(name).to(torch.bfloat16), tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    decoder = Decoder.from_folder(tmp_path)
    assert decoder.embedding.dtype == torch.bfloat16
    exact = logits_of_theirs(loaded(tmp_path, torch.float32), prompts(LENGTHS))
    plain = logits_of_theirs(loaded(tmp_path, torch.bfloat16), prompts(LENGTHS))
    ours = logits_of_ours(decoder, prompts(LENGTHS))
    assert (ours - exact).abs().mean() <= 2 * (plain - exact).abs().mean()
    assert_same(logits_of_ours(Decoder.from_folder(tmp_path, dtype=torch.float32), prompts(LENGTHS)), exact)


def in_mxfp4(folder: Path, name: str = "gpt_oss", model: PreTrainedModel | None = None) -> PreTrainedModel:
    """Saves a model whose experts are in MXFP4, and returns it as Transformers dequantises it."""
    model, generator = theirs(name) if model is None else model, torch.Generator().manual_seed(5)
    packed: dict[str, torch.Tensor] = {}
    for n, layer in enumerate(model.model.layers):
        for part in ("gate_up_proj", "down_proj"):
            weight = getattr(layer.mlp.experts, part)
            E, inputs, outputs = weight.shape
            blocks = torch.randint(256, (E, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(122, 126, (E, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
            weight.data.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
            module = f"model.layers.{n}.mlp.experts.{part}"
            packed |= {f"{module}_blocks": blocks, f"{module}_scales": scales}
    saved(model, folder)
    stored = load_file(folder / "model.safetensors")
    for module in {name.rsplit("_", 1)[0] for name in packed}:
        del stored[module]
    save_file(stored | packed, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    section = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (folder / "config.json").write_text(json.dumps(settings | {"quantization_config": section}))
    return model


def test_experts_in_mxfp4_stay_in_4_bits_and_are_those_of_transformers(tmp_path: Path) -> None:
    model = in_mxfp4(tmp_path)
    decoder = Decoder.from_folder(tmp_path)
    theirs_ = model.model.layers[1].mlp.experts
    ours = decoder.layers[1].feed_forward
    assert (ours.up.format, ours.down.format) == ("mxfp4", "mxfp4")
    assert torch.equal(ours.down.dequantise().view_as(theirs_.down_proj.mT), theirs_.down_proj.mT)
    due = torch.cat((theirs_.gate_up_proj[..., ::2], theirs_.gate_up_proj[..., 1::2]), -1).mT
    assert torch.equal(ours.up.dequantise().view_as(due), due)
    assert_same(logits_of_ours(decoder, prompts(LENGTHS)), logits_of_theirs(model, prompts(LENGTHS)))
    due = "the checkpoint .* is quantised already (mxfp4); leave weights out".replace("(", "\\(").replace(")", "\\)")
    with pytest.raises(InvalidInput, match=due):
        Decoder.from_folder(tmp_path, weights={"*self_attn*": "int8"})


@pytest.mark.parametrize(
    ("change", "due"),
    [
        (
            lambda x: x.pop("model.layers.1.mlp.experts.down_proj_scales"),
            r"lacks layers\.1\.mlp\.experts\.down_proj_scales, with",
        ),
        (lambda x: x.pop("model.layers.1.mlp.experts.gate_up_proj_blocks"), r"lacks layers\.1\.mlp\.experts\.gate_up_proj_block"),
        (
            lambda x: x.update({"model.layers.0.mlp.experts.down_proj_scales": torch.zeros(6, 64, 2, dtype=torch.uint8)}),
            r"down_proj_scales \(6, 64, 2\); due are \(E, out, in / 32, 16\) and \(E, out, in / 32\)",
        ),
        (
            lambda x: x.update({"model.layers.0.mlp.experts.down_proj_scales": torch.zeros(6, 64, 1)}),
            "down_proj_blocks is U8 and its scales F32; due are bytes",
        ),
        (
            lambda x: x.update({"model.layers.0.mlp.router.bias": torch.zeros(5)}),
            r"the checkpoint's shapes differ from its config\.json: .*router\.bias",
        ),
        (lambda x: x.pop("model.layers.2.self_attn.sinks"), r"the checkpoint lacks layers\.2\.self_attn\.sinks"),
    ],
)
def test_broken_files_in_mxfp4(change: Any, due: str, tmp_path: Path) -> None:
    in_mxfp4(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    change(stored)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidInput, match=due) as refused:
        Decoder.from_folder(tmp_path)
    assert "\n" not in str(refused.value)


def test_positions_of_gpt_oss_without_a_word_of_them() -> None:
    said = {name: value for name, value in CONFIGS["gpt_oss"]().to_dict().items() if not name.startswith("rope")}
    rotary = config_of(said, "here").rotary
    assert rotary is not None
    assert (rotary.scaling, rotary.theta, rotary.factor, rotary.truncate, rotary.original_len) == (
        "yarn",
        150_000,
        32,
        False,
        4096,
    )
    assert config_of(said, "here").windows == (7, None, 7)


SAID = {
    "mixtral": CONFIGS["mixtral"]().to_dict(), "qwen3_moe": CONFIGS["qwen3_moe, some dense"]().to_dict(),
    "olmoe": CONFIGS["olmoe"]().to_dict(), "deepseek": DEEPSEEK, "gpt_oss": CONFIGS["gpt_oss"]().to_dict(),
    "jamba": CONFIGS["jamba"]().to_dict(),
    "granitemoehybrid": CONFIGS["granitemoehybrid"]().to_dict(),
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "changed", "due"),
    [
        ("mixtral", {"num_experts_per_tok": 9}, "active is 9 and there are 5 experts; must be at most that"),
        ("mixtral", {"num_local_experts": 4, "num_experts": 5}, "has num_experts 5 and num_local_experts 4; must be alike"),
        ("mixtral", {"num_local_experts": 0}, "has num_local_experts 0; must be a whole number of at least 1"),
        ("mixtral", {"hidden_act": "gelu"}, "has hidden_act 'gelu'; supported is 'silu' where a layer has experts"),
        ("olmoe", {"clip_qkv": 0}, "has clip_qkv 0; must be above 0"),
        ("qwen3_moe", {"mlp_only_layers": [4]}, r"has mlp_only_layers \[4\]; must be a list of numbers from 0 to 3"),
        ("qwen3_moe", {"mlp_only_layers": 1}, "has mlp_only_layers 1; must be a list of numbers from 0 to 3"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "has decoder_sparse_step 0; must be a whole number of at least 1"),
        ("qwen3_moe", {"moe_intermediate_size": 1 << 40}, "a matrix would be .* numbers; may have at most"),
        ("gpt_oss", {"swiglu_limit": 6.0}, "has swiglu_limit 6.0; supported is 7.0, as gpt-oss was trained"),
        ("gpt_oss", {"experts_per_token": 2}, "has num_experts_per_tok 3 and experts_per_token 2"),
        ("gpt_oss", {"layer_types": ["chunked"] * 3}, "has layer_types of 'chunked'"),
        ("gpt_oss", {"quantization_config": {"quant_method": "hqq"}}, r"says the weights are quantised \(hqq\); read are"),
        ("mixtral", {"quantization_config": {"quant_method": "mxfp4"}}, r"says the weights are quantised \(mxfp4\); read are"),
        ("jamba", {"expert_layer_offset": 2}, "has expert_layer_offset 2 and expert_layer_period 2; the first must be less"),
        ("jamba", {"attn_layer_period": 0}, "has attn_layer_period 0; must be a whole number of at least 1"),
        ("jamba", {"mamba_inner_layernorms": False}, "has mamba_inner_layernorms false; supported is a Jamba with them"),
        ("jamba", {"hidden_act": "gelu"}, "has hidden_act 'gelu'; supported is 'silu'"),
        ("jamba", {"num_experts_per_tok": 6}, "active is 6 and there are 5 experts; must be at most that"),
        ("granitemoehybrid", {"position_embedding_type": "alibi"}, "has position_embedding_type 'alibi'; supported are null"),
        ("granitemoehybrid", {"layer_types": ["mamba"]}, r"has layer_types \['mamba'\]; must be a list, one for each of 4"),
        ("granitemoehybrid", {"layer_types": ["mamba", "conv"] * 2}, "has layer_types of 'conv'; supported are 'mamba', 'l"),
        ("granitemoehybrid", {"hidden_act": "gelu"}, "has hidden_act 'gelu'; supported is 'silu'"),
        ("granitemoehybrid", {"num_local_experts": 2}, "active is 3 and there are 2 experts; must be at most that"),
        ("granitemoehybrid", {"num_local_experts": -1}, "has num_local_experts -1; must be a whole number of at least 0"),
        ("granitemoehybrid", {"logits_scaling": 0}, "has logits_scaling 0; must be above 0"),
        ("deepseek", {"scoring_func": "sigmoid"}, "has scoring_func 'sigmoid'; supported is 'softmax'"),
        ("deepseek", {"first_k_dense_replace": -1}, "has first_k_dense_replace -1; must be a whole number of at least 0"),
        ("deepseek", {"num_experts_per_tok": None}, "has no num_experts_per_tok; it must be there"),
        ("deepseek", {"num_experts_per_tok": 9}, "active is 9 and there are 8 experts; must be at most that"),
        ("deepseek", {"n_shared_experts": 1.5}, "has n_shared_experts 1.5; must be a whole number of at least 0"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_one_sentence(family: str, changed: dict[str, Any], due: str) -> None:
    with pytest.raises(InvalidInput, match=due) as refused:
        config_of(SAID[family] | changed, "here")
    assert "\n" not in str(refused.value)


def test_a_deepseek_without_experts_is_dense(tmp_path: Path) -> None:
    config = config_of(DEEPSEEK | {"n_routed_experts": None}, "here")
    assert (config.feed_forwards, config.experts) == (("dense",) * 3, None)


@pytest.mark.parametrize("kinds", [["mamba", "attention"] * 2, ["linear_attention", "full_attention"] * 2], ids=["old", "new"])
@pytest.mark.parametrize("positions", [None, "nope"])
def test_words_of_granite(kinds: list[str], positions: str | None) -> None:
    config = config_of(SAID["granitemoehybrid"] | {"layer_types": kinds, "position_embedding_type": positions}, "here")
    assert (config.mixers, config.rotary) == (("mamba2", "attention") * 2, None)
    assert config == config_of(SAID["granitemoehybrid"], "here")


def test_layers_of_jamba() -> None:
    config = config_of(SAID["jamba"], "here")
    assert config.mixers == ("mamba", "attention", "mamba", "mamba")
    assert config.feed_forwards == ("dense", "experts") * 2
    assert config.rotary is None
    assert config_of(SAID["jamba"] | {"num_experts": 1, "num_experts_per_tok": 1}, "here").feed_forwards == ("dense",) * 4


def test_a_granite_without_experts_is_dense_and_quantised(tmp_path: Path) -> None:
    saved(theirs("granitemoehybrid, dense"), tmp_path)
    config = Decoder.from_folder(tmp_path).config
    assert (config.feed_forwards, config.ffn, config.experts) == (("dense",) * 4, 28, None)
    read = Decoder.from_folder(tmp_path, weights={"*.shared_mlp.*": "int8"})
    assert [part.format for part in read.layers[0].projections[2].parts] == ["int8"]


def test_layers_that_contradict_their_weights(tmp_path: Path) -> None:
    saved(theirs("qwen3_moe, some dense"), tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"mlp_only_layers": []}))
    with pytest.raises(InvalidInput, match=r"the checkpoint lacks layers\.3\.mlp\.gate\.weight, .*; its config\.json asks for"):
        Decoder.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("changed", "due"),
    [
        ({"intermediate_size": 25}, r"the checkpoint's shapes differ from its config\.json: .*experts\.0\.w1\.weight"),
        ({"num_local_experts": 4}, r"the checkpoint has model\.layers\.0\.block_sparse_moe\.experts\.4\.w1\.weight"),
        ({"num_local_experts": 6}, r"the checkpoint lacks layers\.0\.block_sparse_moe\.experts\.5\.w1\.weight"),
    ],
)
def test_experts_that_contradict_their_weights(changed: dict[str, Any], due: str, tmp_path: Path) -> None:
    saved(theirs("mixtral"), tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | changed))
    with pytest.raises(InvalidInput, match=due) as refused:
        Decoder.from_folder(tmp_path)
    assert "\n" not in str(refused.value)


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    saved(theirs("olmoe"), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    del stored["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidInput, match=r"lacks layers\.1\.mlp\.experts\.3\.up_proj\.weight; its config\.json asks for"):
        Decoder.from_folder(tmp_path)
