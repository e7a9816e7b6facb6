"""Reads config.json of models with multi-head latent attention: DeepSeek-V2 and V3, and GLM-4.7-Flash."""

from __future__ import annotations

import math
from typing import Any

from rooftile.models.common_fields import Fields, decoder_fields
from rooftile.models.experts.families import behind_dense_layers, router_of_deepseek_v3
from rooftile.models.latent.sizes import LatentSizes
from rooftile.weights.files.settings import Settings

# Transformers' defaults where they differ from DeepSeek-V3's
_GLM_FLASH = {
    "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8, "num_experts_per_tok": 4, "n_routed_experts": 64,
    "moe_intermediate_size": 1536, "first_k_dense_replace": 1, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256,
    "rms_norm_eps": 1e-5, "num_nextn_predict_layers": 1,
}  # fmt: skip


def deepseek_v2(settings: Settings) -> Fields:
    """Reads a DeepSeek-V2."""
    if settings.flag("mlp_bias"):
        raise settings.refused("has mlp_bias; supported are feed-forwards without biases, as DeepSeek-V2 was trained")
    if settings.flag("norm_topk_prob"):
        raise settings.refused("has norm_topk_prob; supported are gates that are not divided by their sum, as V2 was trained")
    _check(settings, "scoring_func", "softmax")
    method, groups = settings.values.get("topk_method") or "greedy", Fields()
    if method == "group_limited_greedy":
        groups = Fields(groups=settings.size("n_group"), active_groups=settings.size("topk_group"))
    elif method != "greedy":
        raise settings.refused(f"has topk_method {str(method)[:40]!r}; supported are 'greedy' and 'group_limited_greedy'")
    scale = settings.positive("routed_scaling_factor", 1.0)
    experts = behind_dense_layers(settings, Fields(scale=scale, **groups), dense=0, active=None, experts=64, shared=2, width=1407)
    return _deepseek(settings, "deepseek_v2", interleaved=True, bos=1, eos=2, **experts)


def deepseek_v3(settings: Settings, family: str = "deepseek_v3") -> Fields:
    """Reads a DeepSeek-V3, or another family with its layers."""
    interleaved = settings.values.get("rope_interleave")
    _check(settings, "scoring_func", "sigmoid")
    _check(settings, "topk_method", "noaux_tc")
    experts = behind_dense_layers(
        settings, router_of_deepseek_v3(settings), dense=3, active=settings.size("num_experts_per_tok", 8), experts=256, shared=1,
        width=2048, selection_bias=True,
    )  # fmt: skip
    interleaved = interleaved is None or bool(interleaved)
    return _deepseek(
        settings, family, interleaved=interleaved, bos=0, eos=1, **experts,
        mtp_layers=settings.whole("num_nextn_predict_layers", 1),
    )  # fmt: skip


def glm4_moe_lite(settings: Settings) -> Fields:
    """Reads a GLM-4.7-Flash: the layers of DeepSeek-V3, with other sizes."""
    kinds = settings.values.get("mlp_layer_types")
    said: Fields = {}
    if kinds is not None:
        layers = settings.layers("num_hidden_layers")
        dense = kinds.count("dense") if isinstance(kinds, list) else 0
        if kinds != ["dense"] * dense + ["sparse"] * (layers - dense):
            raise settings.refused(f"has mlp_layer_types {repr(kinds)[:40]}; supported are 'dense' layers, then 'sparse' ones")
        said["first_k_dense_replace"] = dense
    return deepseek_v3(Settings({**_GLM_FLASH, **settings.values, **said}, settings.folder), "glm4_moe_lite")


def _check(settings: Settings, name: str, due: str) -> None:
    """Refuses a word of the router that the family was not trained with."""
    if settings.values.get(name) not in (None, due):
        raise settings.refused(f"has {name} {repr(settings.values[name])[:40]}; supported is {due!r}, as this family was trained")


def _deepseek(settings: Settings, family: str, *, interleaved: bool, bos: int, eos: int, **feed_forward: Any) -> Fields:
    rotated = settings.size("qk_rope_head_dim", 64)
    # a rank of null says that queries are not compressed; one that is missing has the class's default
    compressed = "q_lora_rank" not in settings.values or settings.values["q_lora_rank"] is not None
    bias = settings.flag("attention_bias")
    if bias and not compressed:
        raise settings.refused("has attention_bias and a q_lora_rank of null; supported is one of them")
    sizes = LatentSizes(
        rank=settings.size("kv_lora_rank", 512), query_rank=settings.size("q_lora_rank", 1536) if compressed else None,
        unrotated=settings.size("qk_nope_head_dim", 128), rotated=rotated, value_dim=settings.size("v_head_dim", 128),
        interleaved=interleaved, bias=bias,
    )  # fmt: skip
    layers = settings.layers("num_hidden_layers")
    # the numbers of a head that rotate are a head of their own to whoever reads positions
    whole = Settings({**settings.values, "head_dim": rotated, "num_key_value_heads": None}, settings.folder)
    fields = decoder_fields(
        whole, family, mixers=("latent",) * layers, latent=sizes, scale=sizes.head_dim**-0.5 * _magnitude(settings) ** 2,
        **feed_forward,
        bos_ids=settings.ids("bos_token_id", bos), eos_ids=settings.ids("eos_token_id", eos),
    )  # fmt: skip
    return fields | {"head_dim": sizes.head_dim}


def _magnitude(settings: Settings) -> float:
    """Returns what YaRN multiplies queries and keys by, beside the factor of the waves."""
    rope = Settings(settings.section("rope_scaling") or settings.section("rope_parameters"), settings.folder)
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    factor, weight = rope.number("factor", 1.0), rope.number("mscale_all_dim", 0)
    if kind == "default" or not weight or factor <= 1:
        return 1.0
    return 0.1 * float(weight) * math.log(factor) + 1.0
