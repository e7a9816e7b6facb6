"""Reads config.json for each family of decoders: its names for things, and its defaults.

A setting that config.json leaves out has Transformers' default; sizes must be there.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

from rooftile.models.rotary import Rotary, Scaling
from rooftile.models.settings import Settings

_SCALINGS = ("linear", "llama3", "yarn")


Fields = dict[str, Any]


def fields_of(values: Mapping[str, Any], folder: str) -> Fields:
    """Turns the settings of a config.json into the fields of a `ModelConfig`.

    Args:
        values: the settings.
        folder: the checkpoint folder, for error messages.

    Raises:
        InvalidInput: the model belongs to no family here, is quantised, or asks for something that is not supported.
    """
    settings = Settings(values, folder)
    family = _family(settings)
    quantised = settings.section("quantization_config")
    if quantised:
        method = quantised.get("quant_method", "no method named")
        raise settings.refused(
            f"says the weights are quantised ({method}); give a checkpoint in bfloat16, float16 or float32"
        )
    return FAMILIES[family](settings)


def _family(settings: Settings) -> str:
    said = settings.values.get("architectures") or []
    architectures = [str(name) for name in said] if isinstance(said, list) else [str(said)]
    for name in architectures:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    what, known = ("architecture", ARCHITECTURES) if architectures else ("model_type", FAMILIES)
    named = architectures[0] if architectures else str(settings.values.get("model_type"))
    if not architectures and named in FAMILIES:
        return named
    nearest = difflib.get_close_matches(named, known, n=1, cutoff=0)[0]
    raise settings.refused(f"has {what} {named}; nearest is {nearest}, of {', '.join(known)}")


def _decoder(settings: Settings, family: str, *, head_dim: int | None = None, **differences: Any) -> Fields:
    """Reads what all families but GPT-2 have in common; `differences` are one family's own values."""
    heads, hidden = settings.size("num_attention_heads"), settings.size("hidden_size")
    head_dim = settings.size("head_dim", head_dim or hidden // heads)
    layers = settings.layers("num_hidden_layers")
    rotary, max_len = _rotary(settings, head_dim)
    common = {
        "windows": (None,) * layers,
        "scale": head_dim**-0.5,
        "activation": settings.activation("hidden_act", "silu") if "activation" not in differences else None,
        "tie": settings.flag("tie_word_embeddings"),
        "bos_ids": settings.ids("bos_token_id"),
        "eos_ids": settings.ids("eos_token_id"),
    }
    return Fields(
        family=family,
        vocab_size=settings.size("vocab_size"),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=settings.size("num_key_value_heads", heads),
        head_dim=head_dim,
        ffn=settings.size("intermediate_size"),
        max_len=max_len,
        rotary=rotary,
        norm_eps=settings.number("rms_norm_eps", 1e-6),
        dtype=settings.dtype(),
        **(common | differences),
    )


def _llama(settings: Settings) -> Fields:
    bias = settings.flag("attention_bias")
    bos, eos = settings.ids("bos_token_id", 1), settings.ids("eos_token_id", 2)
    return _decoder(
        settings, "llama", qkv_bias=bias, o_bias=bias, mlp_bias=settings.flag("mlp_bias"), bos_ids=bos, eos_ids=eos
    )


def _mistral(settings: Settings) -> Fields:
    if settings.values.get("layer_types"):
        raise settings.refused(
            "has layer_types, which Mistral's attention does not read; supported is one window for all layers"
        )
    windows = (settings.optional("sliding_window", 4096),) * settings.layers("num_hidden_layers")
    bos, eos = settings.ids("bos_token_id", 1), settings.ids("eos_token_id", 2)
    return _decoder(settings, "mistral", windows=windows, bos_ids=bos, eos_ids=eos)


def _qwen2(settings: Settings) -> Fields:
    return _decoder(settings, "qwen2", windows=_qwen_windows(settings), qkv_bias=True)


def _qwen3(settings: Settings) -> Fields:
    bias = settings.flag("attention_bias")
    windows = _qwen_windows(settings)
    return _decoder(settings, "qwen3", head_dim=128, windows=windows, qkv_bias=bias, o_bias=bias, qk_norm=True)


def _gemma2(settings: Settings) -> Fields:
    if settings.flag("use_bidirectional_attention"):
        raise settings.refused("has use_bidirectional_attention; supported is causal attention")
    layers, bias = settings.layers("num_hidden_layers"), settings.flag("attention_bias")
    alternating = ["full_attention" if n % 2 else "sliding_attention" for n in range(layers)]
    return _decoder(
        settings, "gemma2", head_dim=256, qkv_bias=bias, o_bias=bias, norm_plus_one=True, post_norms=True,
        windows=_windows(settings, alternating, settings.optional("sliding_window", 4096)),
        scale=settings.positive("query_pre_attn_scalar", 256) ** -0.5,
        softcap=settings.optional("attn_logit_softcapping", 50.0),
        logit_softcap=settings.optional("final_logit_softcapping", 30.0),
        activation=settings.activation("hidden_activation", "gelu_pytorch_tanh"),
        embedding_scale=settings.size("hidden_size") ** 0.5,
        tie=settings.flag("tie_word_embeddings", True),
        bos_ids=settings.ids("bos_token_id", 2), eos_ids=settings.ids("eos_token_id", 1),
    )  # fmt: skip


def _gpt2(settings: Settings) -> Fields:
    for name in ("add_cross_attention", "scale_attn_by_inverse_layer_idx"):
        if settings.flag(name):
            raise settings.refused(f"has {name}; supported is GPT-2 without it")
    heads, hidden, layers = settings.size("n_head"), settings.size("n_embd"), settings.layers("n_layer")
    if hidden % heads:
        raise settings.refused(f"has n_embd {hidden} and n_head {heads}; the second must divide the first")
    return Fields(
        family="gpt2", vocab_size=settings.size("vocab_size"), layers=layers, hidden=hidden, heads=heads, kv_heads=heads,
        head_dim=hidden // heads, ffn=settings.size("n_inner", 4 * hidden), max_len=settings.size("n_positions"),
        scale=(hidden // heads) ** -0.5 if settings.flag("scale_attn_weights", True) else 1.0,
        windows=(None,) * layers, rotary=None, norm="layer", norm_eps=settings.number("layer_norm_epsilon", 1e-5),
        activation=settings.activation("activation_function", "gelu_new"), gated=False,
        qkv_bias=True, o_bias=True, mlp_bias=True, tie=settings.flag("tie_word_embeddings", True),
        bos_ids=settings.ids("bos_token_id", 50256), eos_ids=settings.ids("eos_token_id", 50256), dtype=settings.dtype(),
    )  # fmt: skip


def _qwen_windows(settings: Settings) -> tuple[int | None, ...]:
    window = settings.optional("sliding_window", 4096) if settings.flag("use_sliding_window") else None
    first = settings.number("max_window_layers", 28)
    kinds = ["sliding_attention" if n >= first else "full_attention" for n in range(settings.layers("num_hidden_layers"))]
    return _windows(settings, kinds, window)


def _windows(settings: Settings, default: list[str], window: int | None) -> tuple[int | None, ...]:
    kinds = settings.values.get("layer_types") or default
    if not isinstance(kinds, list) or len(kinds) != len(default):
        raise settings.refused(f"has layer_types {repr(kinds)[:40]}; must be a list, one for each of {len(default)} layers")
    strange = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
    if strange:
        raise settings.refused(
            f"has layer_types of {strange[0]!r}; supported are 'full_attention' and 'sliding_attention'"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rotary(settings: Settings, dim: int) -> tuple[Rotary, int]:
    """Reads the rotary positions, from newer or older names of the settings, and the longest sequence."""
    max_len = settings.size("max_position_embeddings")
    said = settings.section("rope_scaling") or settings.section("rope_parameters")
    if any(isinstance(value, dict) for value in said.values()):
        raise settings.refused("has rope_parameters for each type of layer; supported is one for all")
    rope = Settings(said, settings.folder)
    kind = said.get("rope_type", said.get("type", "default"))
    theta = rope.positive("rope_theta", settings.positive("rope_theta", 10_000.0))
    if rope.number("partial_rotary_factor", settings.number("partial_rotary_factor", 1.0)) != 1:
        raise settings.refused("has a partial_rotary_factor; supported are heads that turn as a whole")
    if kind == "default":
        return Rotary(dim=dim, theta=theta), max_len
    if kind not in _SCALINGS:
        raise settings.refused(f"has rope_type {kind!r}; supported are default, {', '.join(_SCALINGS)}")
    trained = settings.size("original_max_position_embeddings", rope.size("original_max_position_embeddings", max_len))
    factor = rope.positive("factor")
    if kind == "llama3":
        options = {
            "low_freq_factor": rope.positive("low_freq_factor"),
            "high_freq_factor": rope.positive("high_freq_factor"),
        }
    elif kind == "yarn":
        # older checkpoints give the training length where the stretched one belongs
        max_len = max(max_len, int(factor * trained))
        options = _yarn_options(rope, factor)
    else:
        options = {}
    return Rotary(
        dim=dim, theta=theta, scaling=cast(Scaling, kind), factor=factor, original_len=trained, **options
    ), max_len


def _yarn_options(rope: Settings, factor: float) -> dict[str, Any]:
    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    of_some, of_all = rope.number("mscale", 0), rope.number("mscale_all_dim", 0)
    default = magnitude(of_some) / magnitude(of_all) if of_some and of_all else magnitude(1.0)
    return {
        "attention_factor": rope.number("attention_factor", default),
        "beta_fast": rope.number("beta_fast", 0) or 32.0,
        "beta_slow": rope.number("beta_slow", 0) or 1.0,
        "truncate": rope.flag("truncate", True),
    }


FAMILIES: dict[str, Callable[[Settings], Fields]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gpt2": _gpt2,
}
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma2ForCausalLM": "gemma2",
    "GPT2LMHeadModel": "gpt2",
}
