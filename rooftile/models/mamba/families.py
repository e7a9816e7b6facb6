"""Reads config.json of models with recurrences.

Mamba-1, Falcon-Mamba and Mamba-2 have nothing else; Bamba, Jamba and Granite 4 have attention in some layers.
"""

from __future__ import annotations

import math
from typing import Any

from rooftile.models.common_fields import Fields, decoder_fields
from rooftile.models.experts.families import number_of_experts
from rooftile.models.experts.sizes import ExpertSizes
from rooftile.models.mamba.sizes import Mamba2Sizes, MambaSizes
from rooftile.moe.router import Router
from rooftile.weights.files.settings import Settings

# a recurrence has no positions, so a text may have any length: this bounds an engine's tables, unless config.json does
LONGEST = 1 << 18


def check_format(settings: Settings) -> None:
    """Refuses a checkpoint of the package mamba-ssm, which has a config.json of its own and a pickle.

    Raises:
        InvalidInput: it is one; the sentence says how to convert it.
    """
    if "d_model" in settings.values and "n_layer" in settings.values and "ssm_cfg" in settings.values:
        raise settings.refused(
            "has d_model, n_layer and ssm_cfg, as mamba-ssm writes them, with its weights in a pickle; read are checkpoints of "
            "Transformers: take the model's folder whose name ends in -hf from the Hub, or write a config.json with model_type "
            '"mamba2" or "mamba" and that class\'s words, rename backbone.embedding.weight to backbone.embeddings.weight, and '
            'save the tensors once by save_file(torch.load("pytorch_model.bin", weights_only=True), "model.safetensors")'
        )


def mamba(settings: Settings) -> Fields:
    """Reads a Mamba-1."""
    return _mamba1(settings, "mamba", eos=0)


def falcon_mamba(settings: Settings) -> Fields:
    """Reads a Falcon-Mamba, a Mamba-1 with norms of what a token selects by."""
    norms = {"selection_norms": "plain", "selection_eps": settings.number("mixer_rms_eps", 1e-6)}
    return _mamba1(settings, "falcon_mamba", eos=0, **norms)


def _mamba1(settings: Settings, family: str, *, eos: int, **norms: Any) -> Fields:
    hidden, rank = settings.size("hidden_size"), settings.values.get("time_step_rank", "auto")
    _check_silu(settings)
    # Falcon-Mamba's config.json says expand 16 and a width of twice the hidden size: Transformers goes by the width
    width = settings.size("intermediate_size", max(int(settings.positive("expand", 2) * hidden), 1))
    sizes = MambaSizes(
        width=width,
        rank=-(-hidden // 16) if rank == "auto" else settings.size("time_step_rank"), state=settings.size("state_size", 16),
        kernel=settings.size("conv_kernel", 4), bias=settings.flag("use_bias"), conv_bias=settings.flag("use_conv_bias", True),
        **norms,
    )  # fmt: skip
    return _without_attention(settings, family, "mamba", tied=True, bos=0, eos=eos) | {"mamba": sizes}


def mamba2(settings: Settings) -> Fields:
    """Reads a Mamba-2."""
    hidden = settings.size("hidden_size")
    heads, dim, groups = settings.size("num_heads", 128), settings.size("head_dim", 64), settings.size("n_groups", 8)
    _check_silu(settings)
    _check_width(settings, settings.number("expand", 2), hidden, heads, dim)
    sizes = Mamba2Sizes(
        heads=heads, head_dim=dim, groups=groups, state=settings.size("state_size", 128), kernel=settings.size("conv_kernel", 4),
        step_limit=step_limit(settings), bias=settings.flag("use_bias"), conv_bias=settings.flag("use_conv_bias", True),
        norm_groups=settings.size("norm_groups", groups),
    )  # fmt: skip
    return _without_attention(settings, "mamba2", "mamba2", tied=False, bos=0, eos=2) | {"mamba2": sizes}


def _without_attention(settings: Settings, family: str, mixer: str, *, tied: bool, bos: int, eos: int) -> Fields:
    """Reads what Mamba-1 and 2 have in common: layers of one part each, a norm and a recurrence."""
    layers = settings.layers("num_hidden_layers")
    return Fields(
        family=family, vocab_size=settings.size("vocab_size"), layers=layers, hidden=settings.size("hidden_size"),
        max_len=settings.size("max_position_embeddings", LONGEST), windows=(None,) * layers, rotary=None,
        mixers=(mixer,) * layers, feed_forwards=(None,) * layers, norm_eps=settings.number("layer_norm_epsilon", 1e-5),
        wide_stream=settings.flag("residual_in_fp32", True), tie=settings.flag("tie_word_embeddings", tied),
        bos_ids=settings.ids("bos_token_id", bos), eos_ids=settings.ids("eos_token_id", eos), dtype=settings.dtype(),
    )  # fmt: skip


def bamba(settings: Settings) -> Fields:
    """Reads a Bamba: each layer has Mamba-2 or attention, and a feed-forward. Half of each head of attention is rotated."""
    settings = Settings({"partial_rotary_factor": 0.5, **settings.values}, settings.folder)
    layers, bias = settings.layers("num_hidden_layers"), settings.flag("attention_bias")
    attends = _attention_layers(settings, layers)
    return decoder_fields(
        settings, "bamba", partly=True, qkv_bias=bias, o_bias=bias, mlp_bias=settings.flag("mlp_bias"),
        mamba2=_beside_attention(settings), mixers=tuple("attention" if n in attends else "mamba2" for n in range(layers)),
        norm_eps=settings.number("rms_norm_eps", 1e-5),
        bos_ids=settings.ids("bos_token_id", 1), eos_ids=settings.ids("eos_token_id", 2),
    )  # fmt: skip


def jamba(settings: Settings) -> Fields:
    """Reads a Jamba: layers with Mamba-1 and some with attention, without positions; every second feed-forward has experts."""
    layers, hidden, rank = (
        settings.layers("num_hidden_layers"),
        settings.size("hidden_size"),
        settings.values.get("mamba_dt_rank"),
    )
    _check_silu(settings)
    if not settings.flag("mamba_inner_layernorms", True):
        raise settings.refused("has mamba_inner_layernorms false; supported is a Jamba with them")
    eps = settings.number("rms_norm_eps", 1e-6)
    sizes = MambaSizes(
        width=int(settings.positive("mamba_expand", 2) * hidden),
        rank=-(-hidden // 16) if rank in (None, "auto") else settings.size("mamba_dt_rank"),
        state=settings.size("mamba_d_state", 16), kernel=settings.size("mamba_d_conv", 4), bias=settings.flag("mamba_proj_bias"),
        conv_bias=settings.flag("mamba_conv_bias", True), selection_norms="weighted", selection_eps=eps,
    )  # fmt: skip
    attends, sparse = _every(settings, "attn_layer", 8, 4, layers), _every(settings, "expert_layer", 2, 1, layers)
    follows: Fields = {}
    if (experts := number_of_experts(settings, 16)) > 1:
        router = Router(active=settings.size("num_experts_per_tok", 2), round_gates=True)
        follows = {
            "experts": ExpertSizes(experts=experts, hidden=settings.size("intermediate_size"), router=router),
            "feed_forwards": tuple("experts" if here else "dense" for here in sparse),
        }
    return decoder_fields(
        settings, "jamba", mixers=tuple("attention" if here else "mamba" for here in attends), mamba=sizes, norm_eps=eps,
        bos_ids=settings.ids("bos_token_id", 1), eos_ids=settings.ids("eos_token_id", 2), **follows,
    ) | {"rotary": None}  # fmt: skip


def _every(settings: Settings, what: str, period: int, offset: int, layers: int) -> list[bool]:
    """Returns which layers are of a kind that comes once in a period."""
    period, offset = settings.size(f"{what}_period", period), settings.whole(f"{what}_offset", offset)
    if offset >= period:
        raise settings.refused(f"has {what}_offset {offset} and {what}_period {period}; the first must be less")
    return [n % period == offset for n in range(layers)]


def granite_hybrid(settings: Settings) -> Fields:
    """Reads a Granite 4: each layer has Mamba-2 or attention, and experts with a shared network, or that network alone."""
    layers, bias = settings.layers("num_hidden_layers"), settings.flag("attention_bias")
    positions = settings.values.get("position_embedding_type")
    if positions not in (None, "nope", "rope"):
        raise settings.refused(f"has position_embedding_type {repr(positions)[:40]}; supported are null, 'nope' and 'rope'")
    shared, experts = settings.size("shared_intermediate_size", 1024), settings.whole("num_local_experts", 8)
    follows: Fields = {"ffn": shared}
    if experts:
        router = Router(active=settings.size("num_experts_per_tok", 2), score="chosen softmax", round_gates=True)
        sizes = ExpertSizes(experts=experts, hidden=settings.size("intermediate_size"), router=router, shared=shared)
        follows = {"ffn": 0, "feed_forwards": ("experts",) * layers, "experts": sizes}
    fields = decoder_fields(
        settings, "granitemoehybrid", qkv_bias=bias, o_bias=bias, mamba2=_beside_attention(settings),
        mixers=_granite_mixers(settings, layers), scale=settings.positive("attention_multiplier", 1.0),
        embedding_scale=settings.positive("embedding_multiplier", 1.0),
        residual_scale=settings.positive("residual_multiplier", 1.0), logit_divisor=settings.positive("logits_scaling", 1.0),
        bos_ids=settings.ids("bos_token_id", 1), eos_ids=settings.ids("eos_token_id", 2),
    )  # fmt: skip
    return fields | follows | ({} if positions == "rope" else {"rotary": None})


def _granite_mixers(settings: Settings, layers: int) -> tuple[str, ...]:
    """Returns what mixes the tokens of each layer; older files and newer ones have other words for it."""
    words = {"mamba": "mamba2", "linear_attention": "mamba2", "attention": "attention", "full_attention": "attention"}
    said = settings.values.get("layer_types") or ["mamba"] * layers
    if not isinstance(said, list) or len(said) != layers:
        raise settings.refused(f"has layer_types {repr(said)[:40]}; must be a list, one for each of {layers} layers")
    strange = [kind for kind in said if kind not in list(words)]
    if strange:
        raise settings.refused(f"has layer_types of {repr(strange[0])[:40]}; supported are {', '.join(map(repr, words))}")
    return tuple(words[kind] for kind in said)


def _beside_attention(settings: Settings) -> Mamba2Sizes:
    """Reads the sizes of Mamba-2 in a model that has attention, too: all groups are normalised together there."""
    hidden, heads, expand = (
        settings.size("hidden_size"), settings.size("mamba_n_heads", 128), settings.number("mamba_expand", 2)
    )  # fmt: skip
    dim = settings.values.get("mamba_d_head", "auto")
    dim = int(expand * hidden) // heads if dim == "auto" else settings.size("mamba_d_head")
    _check_silu(settings)
    _check_width(settings, expand, hidden, heads, dim)
    return Mamba2Sizes(
        heads=heads, head_dim=dim, groups=settings.size("mamba_n_groups", 1), state=settings.size("mamba_d_state", 256),
        kernel=settings.size("mamba_d_conv", 4), step_limit=step_limit(settings), bias=settings.flag("mamba_proj_bias"),
        conv_bias=settings.flag("mamba_conv_bias", True), norm_groups=1,
    )  # fmt: skip


def _attention_layers(settings: Settings, layers: int) -> list[int]:
    """Returns the numbers of the layers that have attention."""
    said = settings.values.get("attn_layer_indices") or []
    if not isinstance(said, list) or any(type(n) is not int or not 0 <= n < layers for n in said):
        raise settings.refused(f"has attn_layer_indices {repr(said)[:40]}; must be a list of numbers from 0 to {layers - 1}")
    return said


def _check_silu(settings: Settings) -> None:
    activation = settings.values.get("hidden_act") or "silu"
    if activation != "silu":
        raise settings.refused(f"has hidden_act {str(activation)[:40]!r}; supported is 'silu', which Mamba was trained with")


def _check_width(settings: Settings, expand: float, hidden: int, heads: int, dim: int) -> None:
    if expand * hidden != heads * dim:
        raise settings.refused(
            f"has {heads} heads of {dim} for Mamba-2, and expand {expand} times hidden_size {hidden}; the products must agree"
        )


def step_limit(settings: Settings) -> tuple[float, float]:
    """Returns the bounds of the time step. JSON has no infinity: Transformers writes it in either of two ways."""
    said: Any = settings.values.get("time_step_limit")
    if said is None:
        return 0.0, math.inf
    found = [_finite_or_not(bound) for bound in said] if isinstance(said, list | tuple) else []
    if len(found) != 2 or None in found:
        raise settings.refused(f"has time_step_limit {repr(said)[:60]}; must be two numbers, the least and the largest step")
    return found[0], found[1]


def _finite_or_not(bound: Any) -> Any:
    if isinstance(bound, dict):
        bound = {"Infinity": math.inf}.get(str(bound.get("__float__")))
    return float(bound) if isinstance(bound, int | float) and not isinstance(bound, bool) else None
