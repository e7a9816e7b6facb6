"""Reads windows and rotary positions from a config.json, whose names for them have changed over the years."""

from __future__ import annotations

import math
from typing import Any, cast

from rooftile.models.rotary import Rotary, Scaling
from rooftile.weights.files.settings import Settings

_SCALINGS = ("linear", "dynamic", "llama3", "longrope", "yarn")


def qwen_windows(settings: Settings) -> tuple[int | None, ...]:
    """Returns the windows of Qwen's layers, whose first layers have no window."""
    window = settings.optional("sliding_window", 4096) if settings.flag("use_sliding_window") else None
    first = settings.number("max_window_layers", 28)
    kinds = ["sliding_attention" if n >= first else "full_attention" for n in range(settings.layers("num_hidden_layers"))]
    return windows_of(settings, kinds, window)


def windows_of(settings: Settings, default: list[str], window: int | None) -> tuple[int | None, ...]:
    """Returns the window of each layer, by layer_types or by the family's default for them."""
    kinds = settings.values.get("layer_types") or default
    if not isinstance(kinds, list) or len(kinds) != len(default):
        raise settings.refused(f"has layer_types {repr(kinds)[:40]}; must be a list, one for each of {len(default)} layers")
    strange = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
    if strange:
        raise settings.refused(f"has layer_types of {strange[0]!r}; supported are 'full_attention' and 'sliding_attention'")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def rotary_of(
    settings: Settings, dim: int, default_theta: float = 10_000.0, *, partly: bool = False
) -> tuple[Rotary, int]:  # fmt: skip
    """Returns the rotary positions that all layers share, and the longest sequence.

    `partly` says that the family's attention rotates a partial_rotary_factor of each head.
    """
    said = settings.section("rope_scaling") or settings.section("rope_parameters")
    if any(isinstance(value, dict) for value in said.values()):
        raise settings.refused("has rope_parameters for each type of layer; supported is one for all")
    return _rotary(settings, said, dim, settings.positive("rope_theta", default_theta), partly=partly)


def rotaries_of(settings: Settings, dim: int, default_theta: float, local_theta: float) -> tuple[Rotary, int, Rotary]:
    """Returns the rotary positions of layers without a window, the longest sequence, and the positions of layers with one.

    Only the first are ever stretched.
    """
    said = settings.section("rope_parameters")
    each = Settings(said, settings.folder)
    whole, local = each.section("full_attention"), each.section("sliding_attention")
    if said and not (whole or local):
        raise settings.refused("has one rope_parameters for all layers; must have them for each type of layer")
    scaling = whole or settings.section("rope_scaling")
    rotary, max_len = _rotary(settings, scaling, dim, settings.positive("rope_theta", default_theta))
    local_rotary, _ = _rotary(settings, local, dim, settings.positive("rope_local_base_freq", local_theta))
    return rotary, max_len, local_rotary


def _rotary(
    settings: Settings, said: dict[str, Any], dim: int, theta: float, *, partly: bool = False
) -> tuple[Rotary, int]:  # fmt: skip
    max_len = settings.size("max_position_embeddings")
    rope = Settings(said, settings.folder)
    kind = said.get("rope_type", said.get("type", "default"))
    theta = rope.positive("rope_theta", theta)
    share = rope.positive("partial_rotary_factor", settings.positive("partial_rotary_factor", 1.0))
    if share != 1 and not partly:
        raise settings.refused("has a partial_rotary_factor; supported is one with Llama and Phi, whose attention reads it")
    dim = int(dim * share)
    if kind == "default":
        return Rotary(dim=dim, theta=theta), max_len
    if kind not in _SCALINGS:
        raise settings.refused(f"has rope_type {kind!r}; supported are default, {', '.join(_SCALINGS)}")
    trained = settings.size("original_max_position_embeddings", rope.size("original_max_position_embeddings", max_len))
    if kind == "longrope":
        return _longrope(rope, dim, theta, trained, max_len), max_len
    factor = rope.positive("factor")
    options: dict[str, Any]
    if kind == "llama3":
        options = {
            "low_freq_factor": rope.positive("low_freq_factor"),
            "high_freq_factor": rope.positive("high_freq_factor"),
        }
    elif kind == "yarn":
        # older checkpoints give the training length where the stretched one belongs
        max_len = max(max_len, int(factor * trained))
        options = _yarn_options(rope, factor)
    elif kind == "dynamic":
        # Transformers has no other training length here
        trained = max_len
        max_len, options = max(max_len, int(factor * trained)), {}
    else:
        options = {}
    return Rotary(dim=dim, theta=theta, scaling=cast(Scaling, kind), factor=factor, original_len=trained, **options), max_len


def _longrope(rope: Settings, dim: int, theta: float, trained: int, max_len: int) -> Rotary:
    factor = rope.positive("factor", max_len / trained)
    default = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 and trained > 1 else 1.0
    return Rotary(
        dim=dim, theta=theta, scaling="longrope", original_len=trained,
        short_factors=rope.numbers("short_factor"), long_factors=rope.numbers("long_factor"),
        attention_factor=rope.positive("attention_factor", default),
    )  # fmt: skip


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
