"""Reads config.json of models with multi-head latent attention: DeepSeek-V2 and V3."""

from __future__ import annotations

import math

from rooftile.models.common_fields import Fields, decoder_fields
from rooftile.models.latent.sizes import LatentSizes
from rooftile.weights.files.settings import Settings


def deepseek_v2(settings: Settings) -> Fields:
    """Reads a DeepSeek-V2."""
    return _deepseek(settings, "deepseek_v2", interleaved=True, bos=1, eos=2)


def deepseek_v3(settings: Settings) -> Fields:
    """Reads a DeepSeek-V3."""
    interleaved = settings.values.get("rope_interleave")
    return _deepseek(settings, "deepseek_v3", interleaved=interleaved is None or bool(interleaved), bos=0, eos=1)


def _deepseek(settings: Settings, family: str, *, interleaved: bool, bos: int, eos: int) -> Fields:
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
