"""Reads config.json for each family of decoders: its names for things, and its defaults.

A setting that config.json leaves out has Transformers' default; sizes must be there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rooftile.models.common_fields import Fields, decoder_fields
from rooftile.models.delta.families import olmo_hybrid, qwen3_5, qwen3_5_moe, qwen3_next
from rooftile.models.encoders.families import ENCODERS, encoder_family
from rooftile.models.experts.families import deepseek, glm4_moe, gpt_oss, mixtral, olmoe, qwen3_moe
from rooftile.models.hybrid import hybrid
from rooftile.models.latent.families import deepseek_v2, deepseek_v3, glm4_moe_lite
from rooftile.models.mamba.families import bamba, check_format, falcon_mamba, granite_hybrid, jamba, mamba, mamba2
from rooftile.models.mixers import mixers_of
from rooftile.models.nemotron import nemotron_h
from rooftile.models.positions import qwen_windows, windows_of
from rooftile.models.wrappers import text_settings, wrapper_of
from rooftile.weights.files.methods import check_method
from rooftile.weights.files.settings import Settings


def fields_of(values: Mapping[str, Any], folder: str) -> Fields:
    """Turns the settings of a config.json into the fields of a `ModelConfig`.

    Args:
        values: the settings.
        folder: the checkpoint folder, for error messages.

    Raises:
        InvalidInput: the model belongs to no family here, is quantised, or asks for something that is not supported.
    """
    settings = Settings(values, folder)
    check_format(settings)
    encoder = encoder_family(settings)
    if encoder is not None:
        check_method(settings)
        return ENCODERS[encoder](settings)
    wrapper = wrapper_of(settings)
    if wrapper is not None:
        settings = text_settings(settings, wrapper)
    family = _family(settings)
    # its experts in MXFP4 are read as plain tensors
    check_method(settings, also=("mxfp4",) if family == "gpt_oss" else ())
    fields = FAMILIES[family](settings)
    if not _has_head(settings):
        fields |= {"head": False, "tie": True}
    if family == "rooftile":
        return fields
    return fields | mixers_of(settings, fields["layers"]) | ({} if wrapper is None else {"wrapper": wrapper})


def with_head(architecture: str) -> str:
    """Returns the class with an output head for one without: `Qwen3ForCausalLM` for `Qwen3Model`."""
    return architecture if _is_headed(architecture) else architecture.removesuffix("Model") + "ForCausalLM"


def _is_headed(architecture: str) -> bool:
    # GPT2LMHeadModel has one
    return not architecture.endswith("Model") or architecture.endswith("LMHeadModel")


def _has_head(settings: Settings) -> bool:
    said = settings.values.get("architectures") or []
    return all(_is_headed(str(name)) for name in ([said] if isinstance(said, str) else said))


def _family(settings: Settings) -> str:
    said = settings.values.get("architectures") or []
    architectures = [str(name) for name in said] if isinstance(said, list) else [str(said)]
    for name in architectures:
        if with_head(name) in ARCHITECTURES:
            return ARCHITECTURES[with_head(name)]
    for name in (*architectures, str(settings.values.get("model_type"))):
        if name in LACKING:
            raise settings.refused(f"has {name}, which is not served: it has {LACKING[name]}, and no layer here has that")
    what = "architecture" if architectures else "model_type"
    named = architectures[0] if architectures else str(settings.values.get("model_type"))
    if not architectures and named in FAMILIES:
        return named
    raise settings.refused(
        f"has {what} {named[:80]}; supported are the families {', '.join(FAMILIES)}, encoders, and text parts of "
        "models that read images"
    )


def _llama(settings: Settings, *, partly: bool = True) -> Fields:
    # Transformers' Llama leaves partial_rotary_factor out where nothing is stretched, and fails where it is; vLLM reads it
    bias = settings.flag("attention_bias")
    bos, eos = settings.ids("bos_token_id", 1), settings.ids("eos_token_id", 2)
    return decoder_fields(
        settings, "llama", partly=partly, qkv_bias=bias, o_bias=bias, mlp_bias=settings.flag("mlp_bias"), bos_ids=bos, eos_ids=eos
    )


def _mistral(settings: Settings) -> Fields:
    if settings.values.get("layer_types"):
        raise settings.refused("has layer_types, which Mistral's attention does not read; supported is one window for all layers")
    windows = (settings.optional("sliding_window", 4096),) * settings.layers("num_hidden_layers")
    bos, eos = settings.ids("bos_token_id", 1), settings.ids("eos_token_id", 2)
    return decoder_fields(settings, "mistral", windows=windows, bos_ids=bos, eos_ids=eos)


def _qwen2(settings: Settings) -> Fields:
    return decoder_fields(settings, "qwen2", windows=qwen_windows(settings), qkv_bias=True)


def _mimo(settings: Settings) -> Fields:
    return _qwen2(settings) | {"family": "mimo", "mtp_layers": settings.whole("num_nextn_predict_layers", 0)}


def _qwen3(settings: Settings) -> Fields:
    bias = settings.flag("attention_bias")
    windows = qwen_windows(settings)
    return decoder_fields(settings, "qwen3", head_dim=128, windows=windows, qkv_bias=bias, o_bias=bias, qk_norm=True)


def _gemma2(settings: Settings, family: str = "gemma2", **differences: Any) -> Fields:
    if settings.flag("use_bidirectional_attention"):
        raise settings.refused("has use_bidirectional_attention; supported is causal attention")
    layers, bias = settings.layers("num_hidden_layers"), settings.flag("attention_bias")
    alternating = ["full_attention" if n % 2 else "sliding_attention" for n in range(layers)]
    return decoder_fields(
        settings, family, head_dim=256, qkv_bias=bias, o_bias=bias, norm_plus_one=True, post_norms=True,
        windows=windows_of(settings, alternating, settings.optional("sliding_window", 4096)),
        scale=settings.positive("query_pre_attn_scalar", 256) ** -0.5,
        softcap=settings.optional("attn_logit_softcapping", 50.0),
        logit_softcap=settings.optional("final_logit_softcapping", 30.0),
        activation=settings.activation("hidden_activation", "gelu_pytorch_tanh"),
        embedding_scale=settings.size("hidden_size") ** 0.5,
        tie=settings.flag("tie_word_embeddings", True),
        bos_ids=settings.ids("bos_token_id", 2), eos_ids=settings.ids("eos_token_id", 1), **differences,
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
        windows=(None,) * layers, rotary=None, learned_positions=True, norm="layer",
        norm_eps=settings.number("layer_norm_epsilon", 1e-5),
        activation=settings.activation("activation_function", "gelu_new"), gated=False,
        qkv_bias=True, o_bias=True, mlp_bias=True, tie=settings.flag("tie_word_embeddings", True),
        bos_ids=settings.ids("bos_token_id", 50256), eos_ids=settings.ids("eos_token_id", 50256), dtype=settings.dtype(),
    )  # fmt: skip


def _gemma3(settings: Settings) -> Fields:
    fields = _gemma2(settings, "gemma3_text", theta=1_000_000.0, local_theta=10_000.0, qk_norm=True)
    layers, every = settings.layers("num_hidden_layers"), settings.size("sliding_window_pattern", 6)
    kinds = ["sliding_attention" if (n + 1) % every else "full_attention" for n in range(layers)]
    fields |= {
        "windows": windows_of(settings, kinds, settings.size("sliding_window", 4096)),
        "softcap": settings.positive("attn_logit_softcapping", None),
        "logit_softcap": settings.positive("final_logit_softcapping", None),
    }  # fmt: skip
    if fields["softcap"] is not None:
        raise settings.refused("has attn_logit_softcapping, which Gemma 3's attention does not apply; must be null")
    return fields


def _ministral(settings: Settings) -> Fields:
    layers, window = settings.layers("num_hidden_layers"), settings.optional("sliding_window", 4096)
    windows = windows_of(settings, ["full_attention" if window is None else "sliding_attention"] * layers, window)
    bos, eos = settings.ids("bos_token_id", 1), settings.ids("eos_token_id", 2)
    return decoder_fields(settings, "ministral", windows=windows, bos_ids=bos, eos_ids=eos)


def _ministral3(settings: Settings) -> Fields:
    rope = Settings(settings.section("rope_parameters") or settings.section("rope_scaling"), settings.folder)
    bos, eos = settings.ids("bos_token_id", 1), settings.ids("eos_token_id", 2)
    return decoder_fields(
        settings, "ministral3", head_dim=128, theta=1_000_000.0, norm_eps=settings.number("rms_norm_eps", 1e-5),
        windows=(settings.optional("sliding_window", None),) * settings.layers("num_hidden_layers"),
        query_growth=(rope.number("llama_4_scaling_beta"), rope.size("original_max_position_embeddings")),
        bos_ids=bos, eos_ids=eos,
    )  # fmt: skip


def _granite(settings: Settings) -> Fields:
    return _llama(settings, partly=False) | {
        "family": "granite",
        "scale": settings.positive("attention_multiplier", 1.0),
        "embedding_scale": settings.positive("embedding_multiplier", 1.0),
        "residual_scale": settings.positive("residual_multiplier", 1.0),
        "logit_divisor": settings.positive("logits_scaling", 1.0),
    }


def _smollm3(settings: Settings) -> Fields:
    layers, bias = settings.layers("num_hidden_layers"), settings.flag("attention_bias")
    every = settings.size("no_rope_layer_interval", 4)
    turns = settings.values.get("no_rope_layers") or [int((n + 1) % every != 0) for n in range(layers)]
    if not isinstance(turns, list) or len(turns) != layers or any(turn not in (0, 1) for turn in turns):
        raise settings.refused(f"has no_rope_layers {repr(turns)[:40]}; must be 0 or 1 for each of {layers} layers")
    window = settings.optional("sliding_window", None) if settings.flag("use_sliding_window") else None
    kinds = ["full_attention" if turn or window is None else "sliding_attention" for turn in turns]
    return decoder_fields(
        settings, "smollm3", theta=2_000_000.0, qkv_bias=bias, o_bias=bias, mlp_bias=settings.flag("mlp_bias"),
        windows=windows_of(settings, kinds, window), unrotated=tuple(n for n, turn in enumerate(turns) if not turn),
        tie=settings.flag("tie_word_embeddings", True),
        bos_ids=settings.ids("bos_token_id", 128000), eos_ids=settings.ids("eos_token_id", 128001),
    )  # fmt: skip


def _olmo2(settings: Settings) -> Fields:
    bias = settings.flag("attention_bias")
    return decoder_fields(
        settings, "olmo2", qkv_bias=bias, o_bias=bias, pre_norms=False, post_norms=True, qk_norm=True, qk_norm_of_all_heads=True,
        norm_rounds_once=True, norm_eps=settings.number("rms_norm_eps", 1e-5), eos_ids=settings.ids("eos_token_id", 50279),
    )  # fmt: skip


def _olmo3(settings: Settings) -> Fields:
    layers = settings.layers("num_hidden_layers")
    kinds = ["full_attention" if (n + 1) % 4 == 0 else "sliding_attention" for n in range(layers)]
    bias = settings.flag("attention_bias")
    theta = settings.positive("rope_theta", 500_000.0)
    return decoder_fields(
        settings, "olmo3", theta=theta, local_theta=theta, qkv_bias=bias, o_bias=bias, pre_norms=False, post_norms=True,
        qk_norm=True, qk_norm_of_all_heads=True, windows=windows_of(settings, kinds, settings.size("sliding_window", 4096)),
        norm_rounds_once=True, norm_eps=settings.number("rms_norm_eps", 1e-5), eos_ids=settings.ids("eos_token_id", 50279),
    )  # fmt: skip


def _phi3(settings: Settings) -> Fields:
    rope = settings.section("rope_scaling") or settings.section("rope_parameters")
    if rope.get("rope_type", rope.get("type")) in ("su", "yarn"):
        # names that early checkpoints have for it
        settings = Settings({**settings.values, "rope_scaling": rope | {"rope_type": "longrope"}}, settings.folder)
    windows = (settings.optional("sliding_window", None),) * settings.layers("num_hidden_layers")
    return decoder_fields(
        settings, "phi3", partly=True, windows=windows, norm_eps=settings.number("rms_norm_eps", 1e-5),
        bos_ids=settings.ids("bos_token_id", 1), eos_ids=settings.ids("eos_token_id", 32000),
    )  # fmt: skip


FAMILIES: dict[str, Callable[[Settings], Fields]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
    "granite": _granite,
    "ministral": _ministral,
    "ministral3": _ministral3,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "phi3": _phi3,
    "smollm3": _smollm3,
    "mamba": mamba,
    "mamba2": mamba2,
    "falcon_mamba": falcon_mamba,
    "bamba": bamba,
    "jamba": jamba,
    "granitemoehybrid": granite_hybrid,
    "nemotron_h": nemotron_h,
    "rooftile": hybrid,
    "qwen3_next": qwen3_next,
    "qwen3_5_text": qwen3_5,
    "qwen3_5_moe_text": qwen3_5_moe,
    "olmo_hybrid": olmo_hybrid,
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "olmoe": olmoe,
    "deepseek": deepseek,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "gpt_oss": gpt_oss,
    "glm4_moe": glm4_moe,
    "glm4_moe_lite": glm4_moe_lite,
    "mimo": _mimo,
}
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "GPT2LMHeadModel": "gpt2",
    "GraniteForCausalLM": "granite",
    "MinistralForCausalLM": "ministral",
    "Ministral3ForCausalLM": "ministral3",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "Phi3ForCausalLM": "phi3",
    "SmolLM3ForCausalLM": "smollm3",
    "MambaForCausalLM": "mamba",
    "Mamba2ForCausalLM": "mamba2",
    "FalconMambaForCausalLM": "falcon_mamba",
    "BambaForCausalLM": "bamba",
    "JambaForCausalLM": "jamba",
    "GraniteMoeHybridForCausalLM": "granitemoehybrid",
    "NemotronHForCausalLM": "nemotron_h",
    "RooftileForCausalLM": "rooftile",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "OlmoHybridForCausalLM": "olmo_hybrid",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "OlmoeForCausalLM": "olmoe",
    "DeepseekForCausalLM": "deepseek",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "GptOssForCausalLM": "gpt_oss",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "MiMoForCausalLM": "mimo",
}
# parts of other families' models that no layer here has, by model type and by class
_OTHERS = {
    ("falcon_h1", "FalconH1ForCausalLM"): "Mamba-2 and attention side by side in each layer",
    ("zamba", "ZambaForCausalLM"): "attention whose weights several layers share",
    ("zamba2", "Zamba2ForCausalLM"): "attention whose weights several layers share, with adapters",
    ("lfm2", "Lfm2ForCausalLM"): "short convolutions between two gates",
    ("lfm2_moe", "Lfm2MoeForCausalLM"): "short convolutions between two gates",
    ("kimi_linear", "KimiLinearForCausalLM"): "Kimi Delta Attention, with a decay for each channel, beside latents",
    ("minimax", "MiniMaxForCausalLM"): "lightning attention",
    ("recurrent_gemma", "RecurrentGemmaForCausalLM"): "real-gated linear recurrent units",
    ("rwkv", "RwkvForCausalLM"): "RWKV's time mixing",
    ("xlstm", "xLSTMForCausalLM"): "xLSTM's matrix memory",
    ("deepseek_v32", "DeepseekV32ForCausalLM"): "sparse attention with an indexer (DSA)",
    ("llama4", "Llama4ForConditionalGeneration"): "attention in chunks, and experts whose inputs are scaled",
}
LACKING = {name: what for names, what in _OTHERS.items() for name in names}
