"""Decoders with multi-head latent attention: logits against Transformers, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config

from rooftile import InvalidInput
from rooftile.models import Decoder, LatentSizes, ModelConfig
from rooftile.models.checkpoints.write import quantise_folder
from rooftile.models.config import config_of
from rooftile.moe.router import Router
from rooftile.weights.formats import TILE
from tests.models.checkpoints import assert_same, loaded, logits_of_theirs, made, prompts, saved, theirs
from tests.models.latent import CONFIGS, LATENT, V2, V3, YARN, logits_of_ours

OLD_WORDS = {name: value for name, value in YARN.items() if name != "rope_type"} | {"type": "yarn"}
LENGTHS = (37, 1, 50, 13)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = theirs(name)
    decoder = Decoder.from_folder(saved(model, tmp_path))
    assert_same(logits_of_ours(decoder, prompts(LENGTHS)), logits_of_theirs(model, prompts(LENGTHS)))


@pytest.mark.parametrize("name", ["deepseek_v3, yarn", "deepseek_v2, whole queries"])
def test_bfloat16_is_as_close_to_exact_as_transformers_in_bfloat16(name: str, tmp_path: Path) -> None:
    saved(theirs(name).to(torch.bfloat16), tmp_path)
    decoder = Decoder.from_folder(tmp_path)
    plain = logits_of_theirs(loaded(tmp_path, torch.bfloat16), prompts(LENGTHS))
    exact = logits_of_theirs(loaded(tmp_path, torch.float32), prompts(LENGTHS))
    ours = logits_of_ours(decoder, prompts(LENGTHS))
    assert (ours - exact).abs().mean() <= 1.5 * (plain - exact).abs().mean()


def test_scores_have_yarns_factor() -> None:
    """Beside cosines and sines, which have the quotient of both factors."""
    config = config_of(LATENT | {"model_type": "deepseek_v3", "rope_scaling": OLD_WORDS}, "here")
    assert config.scale == pytest.approx(16**-0.5 * (0.1 * 1.1 * math.log(4) + 1) ** 2)
    assert config.rotary.attention_factor == pytest.approx((0.07 * math.log(4) + 1) / (0.11 * math.log(4) + 1))
    assert config.rotary.dim == 6
    for rope in ({}, YARN | {"mscale_all_dim": 0}, YARN | {"factor": 1.0}):
        assert config_of(LATENT | {"model_type": "deepseek_v3", "rope_parameters": rope}, "here").scale == 16**-0.5


def test_a_second_predictor_is_skipped(tmp_path: Path) -> None:
    model = theirs("deepseek_v3, dense")
    saved(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors") | {"model.layers.3.eh_proj.weight": torch.ones(2, 2)}
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_same(logits_of_ours(Decoder.from_folder(tmp_path), prompts()), logits_of_theirs(model, prompts()))
    save_file(stored | {"model.layers.2.x": torch.ones(2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidInput, match=r"the checkpoint has model.layers.2.x, which its config.json has no place for"):
        Decoder.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["deepseek_v3, dense", "deepseek_v2, whole queries"])
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
        assert len(ours.projections) == (6 if "whole" not in name else 5)
        for projection, its in zip(ours.projections, rounded.projections, strict=True):
            projection.weight.copy_(its.dequantised())
    # activations are rounded, too
    assert (found[0] - logits_of_ours(plain, prompts(LENGTHS))).abs().mean() < 0.1 * found[0].abs().mean()


def test_tiles_in_fp8_are_read(tmp_path: Path) -> None:
    """DeepSeek's own files: weights in FP8 with a factor for each tile of 128 x 128, by which they are multiplied."""
    wide = LATENT | {"hidden_size": 192, "intermediate_size": 136, "kv_lora_rank": 130, "q_lora_rank": 72, "num_hidden_layers": 2}
    model = made(DeepseekV3Config(**wide | {"initializer_range": 0.05}))
    stored = load_file(saved(model, tmp_path) / "model.safetensors")
    for name in [name for name in stored if name.endswith(("_proj.weight", "_with_mqa.weight"))]:
        w = stored[name]
        rows, columns = (-(-n // TILE) for n in w.shape)
        padded = torch.zeros(rows * TILE, columns * TILE)
        padded[: w.shape[0], : w.shape[1]] = w
        tiles = padded.view(rows, TILE, columns, TILE)
        factors = tiles.abs().amax((1, 3)) / 448
        codes = (tiles / factors[:, None, :, None]).to(torch.float8_e4m3fn)
        stored[name] = codes.view(padded.shape)[: w.shape[0], : w.shape[1]].contiguous()
        stored[f"{name}_scale_inv"] = factors
        with torch.no_grad():
            module = model.get_submodule(name.removesuffix(".weight"))
            module.weight.copy_((codes.float() * factors[:, None, :, None]).view(padded.shape)[: w.shape[0], : w.shape[1]])
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["quantization_config"] = {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(settings))
    decoder = Decoder.from_folder(tmp_path)
    for layer, its in zip(decoder.layers, model.model.layers, strict=True):
        assert torch.equal(layer.keys_values.dequantised(), its.self_attn.kv_b_proj.weight)
    found, due = logits_of_ours(decoder, prompts(LENGTHS)), logits_of_theirs(model, prompts(LENGTHS))
    # activations are rounded, too
    assert 0 < (found - due).abs().mean() <= 0.1 * due.abs().mean()


@pytest.mark.parametrize(
    ("family", "changed", "due"),
    [
        ("deepseek_v2", {"mlp_bias": True}, "has mlp_bias; supported are feed-forwards without biases"),
        ("deepseek_v2", {"norm_topk_prob": True}, "has norm_topk_prob; supported are gates that are not divided by their sum"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "has topk_method 'noaux_tc'; supported are 'greedy' and 'group_limited_gre"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "has scoring_func 'sigmoid'; supported is 'softmax'"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "has scoring_func 'softmax'; supported is 'sigmoid'"),
        ("deepseek_v3", {"topk_method": "greedy"}, "has topk_method 'greedy'; supported is 'noaux_tc'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "has moe_layer_freq 2; supported is 1: experts in all further layers"),
        ("deepseek_v3", {"num_nextn_predict_layers": 10**9}, "mtp_layers is 1,000,000,000; must be from 0 to 64"),
        (
            "glm4_moe_lite",
            {"mlp_layer_types": ["sparse", "dense", "sparse"]},
            "has mlp_layer_types .* supported are 'dense' layers, then",
        ),
        ("deepseek_v3", {"n_group": 5}, "groups is 5 and there are 12 experts; must divide that"),
        ("deepseek_v3", {"hidden_act": "gelu"}, "has hidden_act 'gelu'; supported is 'silu' where a layer has experts"),
        ("deepseek_v2", {"num_experts_per_tok": None}, "has no num_experts_per_tok; it must be there, a number"),
    ],
)
def test_routers_that_are_not_the_familys(family: str, changed: dict[str, Any], due: str) -> None:
    values = (V2 if family == "deepseek_v2" else V3) | {"model_type": family}
    assert config_of(values, "here").experts.shared == 24
    with pytest.raises(InvalidInput, match=due) as refused:
        config_of(values | changed, "here")
    assert "\n" not in str(refused.value)


def test_routers() -> None:
    third = config_of(V3 | {"model_type": "deepseek_v3"}, "here").experts
    assert third.router == Router(
        active=3, groups=4, active_groups=2, group_score="sum of best two", score="sigmoid", normalise=True, scale=2.5
    )
    assert third.selection_bias
    second = config_of(V2 | {"model_type": "deepseek_v2"}, "here").experts
    assert second.router == Router(active=3, groups=4, active_groups=2, scale=1.7)
    assert config_of(V2 | {"model_type": "deepseek_v2", "topk_method": "greedy"}, "here").experts.router.groups == 1


def test_a_folder_that_says_fp8_and_has_none_is_refused(tmp_path: Path) -> None:
    saved(theirs("deepseek_v3"), tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(
        InvalidInput, match=r"the checkpoint lacks layers.0.self_attn.q_a_proj.weight_scale_inv, which its quantization_config"
    ) as refused:
        Decoder.from_folder(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changed", "due"),
    [
        ({"kv_lora_rank": 13}, "rank is 13; must be even"),
        ({"qk_rope_head_dim": 7}, "must be even"),
        ({"qk_nope_head_dim": 0}, "has qk_nope_head_dim 0; must be a whole number of at least 1"),
        ({"q_lora_rank": 0}, "has q_lora_rank 0; must be a whole number of at least 1"),
        ({"kv_lora_rank": 1 << 40}, "a matrix would be .* numbers; may have at most"),
        ({"attention_bias": True, "q_lora_rank": None}, "has attention_bias and a q_lora_rank of null; supported is one of them"),
        ({"rope_scaling": {"type": "ntk"}}, "has rope_type 'ntk'; supported are"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(changed: dict[str, Any], due: str) -> None:
    with pytest.raises(InvalidInput, match=due) as refused:
        config_of(LATENT | {"model_type": "deepseek_v3"} | changed, "here")
    assert "\n" not in str(refused.value)


def test_a_configuration_made_by_hand_is_checked_too() -> None:
    given = {
        "family": "deepseek_v3", "vocab_size": 9, "layers": 1, "hidden": 8, "max_len": 16, "windows": (None,), "rotary": None,
        "heads": 2, "kv_heads": 2, "head_dim": 8, "mixers": ("latent",), "feed_forwards": (None,),
    }  # fmt: skip
    sizes = LatentSizes(rank=4, query_rank=None, unrotated=6, rotated=2, value_dim=3)
    for more, due in (
        ({}, r"layer 0 is latent, and its sizes are None; must be LatentSizes\(\)"),
        ({"latent": sizes, "windows": (4,)}, "layer 0 is latent and its window 4; must be None"),
        ({"latent": sizes, "softcap": 3.0}, "layer 0 is latent and softcap 3.0; must be None"),
        ({"latent": sizes, "head_dim": 10}, "head_dim is 10 and the latent sizes have 8 numbers a head; must be alike"),
    ):
        with pytest.raises(InvalidInput, match=due):
            ModelConfig(**given | more)
