"""Reads the settings that nearly all families have in common."""

from __future__ import annotations

from typing import Any

from rooftile.models.positions import rotaries_of, rotary_of
from rooftile.weights.files.settings import Settings

Fields = dict[str, Any]


def decoder_fields(
    settings: Settings, family: str, *, head_dim: int | None = None, theta: float = 10_000.0, local_theta: float | None = None,
    partly: bool = False, **differences: Any,
) -> Fields:  # fmt: skip
    """Reads what all families with attention but GPT-2 have in common; `differences` are one family's own values."""
    heads, hidden = settings.size("num_attention_heads"), settings.size("hidden_size")
    head_dim = settings.size("head_dim", head_dim or hidden // heads)
    layers = settings.layers("num_hidden_layers")
    common: Fields = {}
    if local_theta is None:
        rotary, max_len = rotary_of(settings, head_dim, theta, partly=partly)
    else:
        rotary, max_len, common["local_rotary"] = rotaries_of(settings, head_dim, theta, local_theta)
    common |= {
        "windows": (None,) * layers,
        "scale": head_dim**-0.5,
        "norm_eps": settings.number("rms_norm_eps", 1e-6),
        "activation": settings.activation("hidden_act", "silu") if "activation" not in differences else None,
        "ffn": settings.size("intermediate_size") if "ffn" not in differences else None,
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
        max_len=max_len,
        rotary=rotary,
        dtype=settings.dtype(),
        **(common | differences),
    )
