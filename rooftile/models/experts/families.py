"""Reads config.json of decoders with experts in place of dense feed-forwards: Mixtral, Qwen 3 MoE, OLMoE, DeepSeekMoE,
GLM-4.5 and gpt-oss.

What config.json says of a router's training is not read: its loss (`router_aux_loss_coef`, `aux_loss_alpha`, `seq_aux`), noise
(`router_jitter_noise`), and whether logits are returned (`output_router_logits`). No answer depends on them.
"""

from __future__ import annotations

from typing import Any

from rooftile.models.common_fields import Fields, decoder_fields
from rooftile.models.experts.sizes import ExpertSizes
from rooftile.models.positions import windows_of
from rooftile.moe.activations import LIMIT
from rooftile.moe.router import Router
from rooftile.weights.files.settings import Settings

# the positions of a config.json that says nothing of them
_ROPE_OF_GPT_OSS = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
# Transformers' defaults of GLM-4.5 where they differ from DeepSeek-V3's
_GLM = {
    "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5,
    "num_nextn_predict_layers": 1,
}  # fmt: skip


def mixtral(settings: Settings) -> Fields:
    """Reads a Mixtral: experts in all layers."""
    layers = settings.layers("num_hidden_layers")
    router = Router(active=settings.size("num_experts_per_tok", 2), normalise=True)
    fields = decoder_fields(
        settings, "mixtral", theta=1_000_000.0, windows=(settings.optional("sliding_window", None),) * layers,
        norm_eps=settings.number("rms_norm_eps", 1e-5), feed_forwards=("experts",) * layers,
        experts=sizes_of(settings, router, hidden="intermediate_size", experts=8),
        bos_ids=settings.ids("bos_token_id", 1), eos_ids=settings.ids("eos_token_id", 2),
    )  # fmt: skip
    return fields | {"ffn": 0}


def qwen3_moe(settings: Settings) -> Fields:
    """Reads a Qwen 3 with experts, which some layers may leave out."""
    # a window is for all layers here, whatever max_window_layers says
    layers, bias = settings.layers("num_hidden_layers"), settings.flag("attention_bias")
    window = settings.optional("sliding_window", 4096) if settings.flag("use_sliding_window") else None
    router = Router(active=settings.size("num_experts_per_tok", 8), normalise=settings.flag("norm_topk_prob"), round_gates=True)
    return decoder_fields(
        settings, "qwen3_moe", windows=(window,) * layers, qkv_bias=bias, o_bias=bias, qk_norm=True,
        feed_forwards=feed_forwards_of_qwen(settings, layers), experts=sizes_of(settings, router, experts=128, width=768),
    )  # fmt: skip


def olmoe(settings: Settings) -> Fields:
    """Reads an OLMoE: experts in all layers, norms of queries and keys over all heads, and a bound of what attention reads."""
    layers, bias = settings.layers("num_hidden_layers"), settings.flag("attention_bias")
    router = Router(active=settings.size("num_experts_per_tok", 8), normalise=settings.flag("norm_topk_prob"), round_gates=True)
    fields = decoder_fields(
        settings, "olmoe", norm_eps=settings.number("rms_norm_eps", 1e-5), qkv_bias=bias, o_bias=bias, qk_norm=True,
        qk_norm_of_all_heads=True, qkv_bound=settings.optional("clip_qkv", None), feed_forwards=("experts",) * layers,
        experts=sizes_of(settings, router, hidden="intermediate_size", experts=64), eos_ids=settings.ids("eos_token_id", 50279),
    )  # fmt: skip
    return fields | {"ffn": 0}


def deepseek(settings: Settings) -> Fields:
    """Reads a DeepSeekMoE: dense layers first, then experts, some of which all tokens share."""
    layers, bias = settings.layers("num_hidden_layers"), settings.flag("attention_bias")
    score = settings.values.get("scoring_func", "softmax")
    if score != "softmax":
        raise settings.refused(f"has scoring_func {repr(score)[:40]}; supported is 'softmax', as DeepSeekMoE was trained")
    routed = settings.values.get("n_routed_experts")
    first, every = settings.whole("first_k_dense_replace", 0), settings.size("moe_layer_freq", 1)
    sparse = [routed is not None and n >= first and n % every == 0 for n in range(layers)]
    sizes = None
    if any(sparse):
        check_silu(settings)
        active, shared = settings.size("num_experts_per_tok"), settings.whole("n_shared_experts", 0)
        width = settings.size("moe_intermediate_size")
        # a single gate is not divided by itself
        router = Router(active=active, normalise=active > 1 and settings.flag("norm_topk_prob"))
        sizes = ExpertSizes(experts=settings.size("n_routed_experts"), hidden=width, router=router, shared=shared * width)
    return decoder_fields(
        settings, "deepseek", qkv_bias=bias, o_bias=bias, experts=sizes,
        feed_forwards=tuple("experts" if here else "dense" for here in sparse),
        bos_ids=settings.ids("bos_token_id", 100000), eos_ids=settings.ids("eos_token_id", 100001),
    )  # fmt: skip


def glm4_moe(settings: Settings) -> Fields:
    """Reads a GLM-4.5: attention that rotates half of each head, and the experts of DeepSeek-V3."""
    settings = Settings({**_GLM, **settings.values}, settings.folder)
    experts = behind_dense_layers(
        settings, router_of_deepseek_v3(settings), dense=1, active=settings.size("num_experts_per_tok", 8), experts=128, shared=1,
        width=1408, selection_bias=True,
    )  # fmt: skip
    return decoder_fields(
        settings, "glm4_moe", partly=True, qkv_bias=settings.flag("attention_bias"), qk_norm=settings.flag("use_qk_norm"),
        mtp_layers=settings.whole("num_nextn_predict_layers"), **experts,
    )  # fmt: skip


def gpt_oss(settings: Settings) -> Fields:
    """Reads a gpt-oss: experts in all layers, attention with sinks, and a window in every second layer from the first."""
    layers, bias = settings.layers("num_hidden_layers"), settings.flag("attention_bias", True)
    active = settings.size("num_experts_per_tok", 4)
    if settings.size("experts_per_token", active) != active:
        raise settings.refused(f"has num_experts_per_tok {active} and experts_per_token {settings.number('experts_per_token')}")
    if (limit := settings.number("swiglu_limit", LIMIT)) != LIMIT:
        raise settings.refused(f"has swiglu_limit {limit}; supported is {LIMIT}, as gpt-oss was trained")
    check_silu(settings)
    sizes = ExpertSizes(
        experts=number_of_experts(settings, 128), hidden=settings.size("intermediate_size", 2880), activation="clamped",
        biases=True, router_bias=True, router=Router(active=active, score="chosen softmax", round_gates=True),
    )  # fmt: skip
    if not (settings.section("rope_scaling") or settings.section("rope_parameters")):
        settings = Settings({**settings.values, "rope_scaling": _ROPE_OF_GPT_OSS}, settings.folder)
    alternating = ["full_attention" if n % 2 else "sliding_attention" for n in range(layers)]
    fields = decoder_fields(
        settings, "gpt_oss", head_dim=64, theta=150_000.0, norm_eps=settings.number("rms_norm_eps", 1e-5), norm_rounds_once=True,
        qkv_bias=bias, o_bias=bias, sinks=True, feed_forwards=("experts",) * layers, experts=sizes,
        windows=windows_of(settings, alternating, settings.optional("sliding_window", 128)),
    )  # fmt: skip
    return fields | {"ffn": 0}


def sizes_of(
    settings: Settings, router: Router, *, experts: int, hidden: str = "moe_intermediate_size", width: int | None = None
) -> ExpertSizes:
    """Reads the sizes of experts with SwiGLU; `hidden` names their width; `experts` and `width` are defaults of Transformers."""
    check_silu(settings)
    return ExpertSizes(
        experts=number_of_experts(settings, experts), router=router,
        hidden=settings.size(hidden) if width is None else settings.size(hidden, width),
    )  # fmt: skip


def router_of_deepseek_v3(settings: Settings) -> Fields:
    """Reads how DeepSeek-V3 finds a token's experts and gates, but for how many they are."""
    return Fields(
        groups=settings.size("n_group", 8), active_groups=settings.size("topk_group", 4), group_score="sum of best two",
        score="sigmoid",
        normalise=settings.flag("norm_topk_prob", True), scale=settings.positive("routed_scaling_factor", 2.5),
    )  # fmt: skip


def behind_dense_layers(
    settings: Settings, router: Fields, *, dense: int, active: int | None, experts: int, shared: int, width: int, **more: Any
) -> Fields:
    """Reads which layers have experts, and their sizes; the first `dense` have none, unless config.json says how many."""
    layers, first = settings.layers("num_hidden_layers"), settings.whole("first_k_dense_replace", dense)
    if settings.size("moe_layer_freq", 1) != 1:
        raise settings.refused(
            f"has moe_layer_freq {settings.size('moe_layer_freq')}; supported is 1: experts in all further layers"
        )
    feed_forwards = tuple("dense" if n < first else "experts" for n in range(layers))
    if "experts" not in feed_forwards:
        return {"feed_forwards": feed_forwards}
    check_silu(settings)
    if active is None:
        active = settings.size("num_experts_per_tok")
    hidden = settings.size("moe_intermediate_size", width)
    sizes = ExpertSizes(
        experts=settings.size("n_routed_experts", experts), hidden=hidden, router=Router(active=active, **router),
        shared=settings.whole("n_shared_experts", shared) * hidden, **more,
    )  # fmt: skip
    return {"feed_forwards": feed_forwards, "experts": sizes}


def number_of_experts(settings: Settings, default: int) -> int:
    """Reads the number of a layer's experts, for which config.json has two names.

    Raises:
        InvalidInput: it has both, and they differ.
    """
    names = ("num_experts", "num_local_experts")
    found = {name: settings.size(name) for name in names if settings.values.get(name) is not None}
    if len(set(found.values())) > 1:
        raise settings.refused(f"has num_experts {found[names[0]]} and num_local_experts {found[names[1]]}; must be alike")
    return next(iter(found.values()), default)


def check_silu(settings: Settings) -> None:
    """Refuses an activation that the experts do not have.

    Raises:
        InvalidInput: it is another one than SiLU.
    """
    activation = settings.values.get("hidden_act") or "silu"
    if activation != "silu":
        raise settings.refused(f"has hidden_act {str(activation)[:40]!r}; supported is 'silu' where a layer has experts")


def feed_forwards_of_qwen(settings: Settings, layers: int) -> tuple[str, ...]:
    """Reads which layers are dense, by their numbers or by a step from one layer with experts to the next.

    Raises:
        InvalidInput: a number is no layer's.
    """
    said, every = settings.values.get("mlp_only_layers") or [], settings.size("decoder_sparse_step", 1)
    if not isinstance(said, list) or any(type(n) is not int or not 0 <= n < layers for n in said):
        raise settings.refused(f"has mlp_only_layers {repr(said)[:40]}; must be a list of numbers from 0 to {layers - 1}")
    return tuple("dense" if n in said or (n + 1) % every else "experts" for n in range(layers))
