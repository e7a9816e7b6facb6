"""Reads Nemotron-H: blocks of one part each, Mamba-2, attention without positions, a feed-forward or experts, by a pattern.

    "hybrid_override_pattern": "M-M*-ME"      M Mamba-2, * attention, - a feed-forward, E experts

A feed-forward belongs to the layer of the block before it, as in other families: so there are fewer layers here than blocks in
files.
"""

from __future__ import annotations

from rooftile.models.common_fields import Fields, decoder_fields
from rooftile.models.experts.sizes import ExpertSizes
from rooftile.models.mamba.families import step_limit
from rooftile.models.mamba.sizes import Mamba2Sizes
from rooftile.moe.router import Router
from rooftile.weights.files.settings import MOST_LAYERS, Settings

MIXERS = {"M": "mamba2", "*": "attention"}
FOLLOWING = {"-": "dense", "E": "experts"}
_WORDS = {
    "mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E",
}  # fmt: skip


def nemotron_h(settings: Settings) -> Fields:
    """Reads a Nemotron-H."""
    pattern = _pattern(settings)
    mixers = tuple(MIXERS[letter] for letter in pattern if letter in MIXERS)
    follows = tuple(FOLLOWING.get(after) for letter, after in zip(pattern, f"{pattern[1:]} ", strict=True) if letter in MIXERS)
    if settings.values.get("moe_latent_size") is not None and "E" in pattern:
        raise settings.refused("has moe_latent_size; supported are experts that read whole tokens")
    for name, due in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")):
        if settings.values.get(name) not in (None, due):
            raise settings.refused(f"has {name} {str(settings.values[name])[:40]!r}; supported is {due!r}, as it was trained")
    layers, eps = len(mixers), settings.number("layer_norm_epsilon", 1e-5)
    whole = Settings({**settings.values, "num_hidden_layers": layers}, settings.folder)
    fields = decoder_fields(
        whole, "nemotron_h", head_dim=128, mixers=mixers, feed_forwards=follows, mamba2=_mamba2(settings), norm_eps=eps,
        ffn=settings.size("intermediate_size", 21504) if "dense" in follows else 0, activation="relu2", gated=False,
        mlp_bias=settings.flag("mlp_bias"), experts=_experts(settings) if "experts" in follows else None,
        wide_stream=settings.flag("residual_in_fp32"), bos_ids=settings.ids("bos_token_id", 1),
        eos_ids=settings.ids("eos_token_id", 2),
    )  # fmt: skip
    return fields | {"rotary": None}


def _pattern(settings: Settings) -> str:
    """Returns the letters of the blocks."""
    said = settings.values.get("layers_block_type") or settings.values.get("layer_types")
    if isinstance(said, list):
        strange = next((word for word in said if word not in list(_WORDS)), None)
        if strange is not None:
            raise settings.refused(f"has a block of {str(strange)[:40]!r}; supported are {', '.join(_WORDS)}")
        pattern = "".join(_WORDS[word] for word in said)
    else:
        given = settings.values.get("hybrid_override_pattern")
        if not isinstance(given, str) or not given or set(given) - set("M*-E"):
            raise settings.refused(
                f"has hybrid_override_pattern {repr(given)[:40]}; must be letters, M for Mamba-2, * for attention, - for a "
                "feed-forward and E for experts"
            )
        pattern = given
    if not pattern or pattern[0] in FOLLOWING or any(pair[0] in FOLLOWING and pair[1] in FOLLOWING for pair in _pairs(pattern)):
        raise settings.refused(f"has the blocks {pattern[:60]}; a feed-forward or experts must follow Mamba-2 or attention")
    if len(pattern) > MOST_LAYERS:
        raise settings.refused(f"has {len(pattern):,} blocks; may have at most {MOST_LAYERS:,}")
    number = settings.values.get("num_hidden_layers")
    if number is not None and number != len(pattern):
        raise settings.refused(f"has num_hidden_layers {number!r} and {len(pattern)} blocks; must be alike")
    return pattern


def _pairs(pattern: str) -> list[str]:
    return [pattern[n : n + 2] for n in range(len(pattern) - 1)]


def _mamba2(settings: Settings) -> Mamba2Sizes:
    groups = settings.size("n_groups", 8)
    return Mamba2Sizes(
        heads=settings.size("mamba_num_heads", 128), head_dim=settings.size("mamba_head_dim", 64), groups=groups,
        state=settings.size("ssm_state_size", 128), kernel=settings.size("conv_kernel", 4), step_limit=step_limit(settings),
        bias=settings.flag("use_bias"), conv_bias=settings.flag("use_conv_bias", True), norm_groups=groups,
    )  # fmt: skip


def _experts(settings: Settings) -> ExpertSizes:
    if settings.flag("mlp_bias"):
        raise settings.refused("has mlp_bias and experts; supported are experts without biases")
    router = Router(
        active=settings.size("num_experts_per_tok", 2), score="sigmoid", normalise=settings.flag("norm_topk_prob", True),
        scale=settings.positive("routed_scaling_factor", 1.0), groups=settings.size("n_group", 1),
        active_groups=settings.size("topk_group", 1), group_score="sum of best two",
    )  # fmt: skip
    return ExpertSizes(
        experts=settings.size("n_routed_experts", 8), hidden=settings.size("moe_intermediate_size", 7688), router=router,
        shared=settings.size("moe_shared_expert_intermediate_size", 7688), activation="relu2", selection_bias=True,
    )  # fmt: skip
