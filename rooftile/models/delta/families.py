"""Reads config.json of models with gated delta nets beside attention: Qwen3-Next, Qwen3.5 (text) and OLMo Hybrid."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rooftile.models.common_fields import Fields, decoder_fields
from rooftile.models.delta.sizes import DeltaSizes
from rooftile.models.experts.families import feed_forwards_of_qwen, sizes_of
from rooftile.moe.router import Router
from rooftile.weights.files.settings import Settings

KINDS = {"linear_attention": "delta", "full_attention": "attention"}


def qwen3_next(settings: Settings) -> Fields:
    """Reads a Qwen3-Next: experts, unless a layer is said to be dense."""
    feed_forwards = feed_forwards_of_qwen(settings, settings.layers("num_hidden_layers"))
    router = Router(
        active=settings.size("num_experts_per_tok", 10), normalise=settings.flag("norm_topk_prob", True), round_gates=True
    )  # fmt: skip
    return _qwen(settings, "qwen3_next", by_key_head=True, **_experts(settings, feed_forwards, router, experts=512))


def qwen3_5(settings: Settings) -> Fields:
    """Reads the text model of a Qwen3.5."""
    return _qwen(settings, "qwen3_5_text", by_key_head=False)


def qwen3_5_moe(settings: Settings) -> Fields:
    """Reads the text model of a Qwen3.5 with experts in all layers."""
    feed_forwards = ("experts",) * settings.layers("num_hidden_layers")
    router = Router(active=settings.size("num_experts_per_tok", 8), normalise=True, round_gates=True)
    experts = _experts(settings, feed_forwards, router, experts=256)
    return _qwen(settings, "qwen3_5_moe_text", by_key_head=False, ffn=0, **experts)


def _experts(settings: Settings, feed_forwards: tuple[str, ...], router: Router, *, experts: int) -> Fields:
    """Reads the sizes of experts, beside a network that all tokens share, with a gate of its own."""
    if "experts" not in feed_forwards:
        return {"feed_forwards": feed_forwards}
    sizes = sizes_of(settings, router, experts=experts, width=512)
    shared = settings.size("shared_expert_intermediate_size", 512)
    return {"feed_forwards": feed_forwards, "experts": replace(sizes, shared=shared, shared_gate=True)}


def _qwen(settings: Settings, family: str, *, by_key_head: bool, **feed_forward: Any) -> Fields:
    # a quarter of each head of attention is rotated
    settings = Settings({"partial_rotary_factor": 0.25, **settings.values}, settings.folder)
    layers, bias, eps = (
        settings.layers("num_hidden_layers"),
        settings.flag("attention_bias"),
        settings.number("rms_norm_eps", 1e-6),
    )
    sizes = DeltaSizes(
        key_heads=settings.size("linear_num_key_heads", 16), value_heads=settings.size("linear_num_value_heads", 32),
        key_dim=settings.size("linear_key_head_dim", 128), value_dim=settings.size("linear_value_head_dim", 128),
        kernel=settings.size("linear_conv_kernel_dim", 4), by_key_head=by_key_head, norm_eps=eps,
    )  # fmt: skip
    return decoder_fields(
        settings, family, head_dim=256, partly=True, qkv_bias=bias, o_bias=bias, qk_norm=True, norm_plus_one=True,
        attention_gate=True, delta=sizes, mixers=_mixers(settings, layers, settings.size("full_attention_interval", 4)),
        activation=_silu(settings), norm_eps=eps, **feed_forward,
    )  # fmt: skip


def olmo_hybrid(settings: Settings) -> Fields:
    """Reads an OLMo Hybrid: layers with a gated delta net have norms before their parts, layers with attention behind."""
    layers, hidden, heads = (
        settings.layers("num_hidden_layers"),
        settings.size("hidden_size"),
        settings.size("num_attention_heads"),
    )
    key_heads, bias = settings.size("linear_num_key_heads", heads), settings.flag("attention_bias")
    key_dim = settings.size("linear_key_head_dim", max(int(0.75 * hidden / key_heads), 1))
    sizes = DeltaSizes(
        key_heads=key_heads, value_heads=settings.size("linear_num_value_heads", heads), key_dim=key_dim,
        value_dim=settings.size("linear_value_head_dim", 2 * key_dim), kernel=settings.size("linear_conv_kernel_dim", 4),
        # the norm's own, whatever config.json says of the others
        norm_eps=1e-5, double_beta=settings.flag("linear_allow_neg_eigval", True),
    )  # fmt: skip
    mixers = _mixers(settings, layers, 4)
    fields = decoder_fields(
        settings, "olmo_hybrid", qkv_bias=bias, o_bias=bias, qk_norm=True, qk_norm_of_all_heads=True, norm_rounds_once=True,
        mixers=mixers, post_normed=tuple(n for n, mixer in enumerate(mixers) if mixer == "attention"), delta=sizes,
        activation=_silu(settings), eos_ids=settings.ids("eos_token_id", 100257),
    )  # fmt: skip
    return fields | ({} if _rotates(settings) else {"rotary": None})


def _rotates(settings: Settings) -> bool:
    """Whether queries and keys of attention rotate: not where theta is null, as in released checkpoints."""
    rope = settings.section("rope_parameters")
    said = rope if "rope_theta" in rope else settings.values
    return said.get("rope_theta", "default") is not None


def _mixers(settings: Settings, layers: int, every: int) -> tuple[str, ...]:
    """Returns what mixes the tokens of each layer: by layer_types, or attention in each layer whose number `every` divides."""
    default = ["full_attention" if (n + 1) % every == 0 else "linear_attention" for n in range(layers)]
    kinds: Any = settings.values.get("layer_types") or default
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise settings.refused(f"has layer_types {repr(kinds)[:40]}; must be a list, one for each of {layers} layers")
    strange = [kind for kind in kinds if kind not in list(KINDS)]
    if strange:
        raise settings.refused(f"has layer_types of {strange[0]!r}; supported are {' and '.join(map(repr, KINDS))}")
    return tuple(KINDS[kind] for kind in kinds)


def _silu(settings: Settings) -> str:
    activation = settings.values.get("hidden_act") or "silu"
    if activation != "silu":
        raise settings.refused(f"has hidden_act {str(activation)[:40]!r}; supported is 'silu', which also the convolution has")
    return "silu"
