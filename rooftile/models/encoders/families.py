"""Reads config.json of each family of encoders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rooftile.models.common_fields import Fields
from rooftile.models.encoders.sizes import EncoderSizes, HeadSizes
from rooftile.models.positions import rotaries_of, windows_of
from rooftile.weights.files.settings import Settings

_POOLINGS = ("cls", "mean")


def encoder_family(settings: Settings) -> str | None:
    """Returns the family of a config.json that describes an encoder; None for any other."""
    said = settings.values.get("architectures") or []
    names = [str(name) for name in said] if isinstance(said, list) else [str(said)]
    if not names:
        kind = settings.values.get("model_type")
        return kind if isinstance(kind, str) and kind in ENCODERS else None
    for name in names:
        family, _, task = name.removesuffix("Model").partition("For")
        if family in _CLASSES and task in ("", "MaskedLM", "PreTraining", "SequenceClassification"):
            return _CLASSES[family]
    return None


def _bert(settings: Settings, family: str = "bert", *, first_position: int = 0) -> Fields:
    for name in ("is_decoder", "add_cross_attention"):
        if settings.flag(name):
            raise settings.refused(f"has {name}; supported are encoders, whose tokens see all others")
    kind = settings.values.get("position_embedding_type") or "absolute"
    if kind != "absolute":
        raise settings.refused(f"has position_embedding_type {kind!r}; supported is 'absolute'")
    rows = settings.size("max_position_embeddings")
    if rows <= first_position:
        raise settings.refused(f"has max_position_embeddings {rows}; must be more than pad_token_id + 1, {first_position}")
    sizes = EncoderSizes(
        token_types=settings.size("type_vocab_size", 2 if family == "bert" else 1), first_position=first_position,
        head=_head(settings),
    )  # fmt: skip
    return _common(settings, family) | {
        "windows": (None,) * settings.layers("num_hidden_layers"), "rotary": None, "learned_positions": True,
        "max_len": rows - first_position, "pre_norms": False, "post_norms": True, "qkv_bias": True, "o_bias": True,
        "mlp_bias": True, "gated": False, "norm_eps": settings.number("layer_norm_eps", 1e-12),
        "activation": settings.activation("hidden_act", "gelu"), "encoder": sizes,
    }  # fmt: skip


def _roberta(settings: Settings) -> Fields:
    # no text reads the rows up to the padding token's row
    return _bert(settings, "roberta", first_position=settings.whole("pad_token_id", 1) + 1)


def _modernbert(settings: Settings) -> Fields:
    values, layers = settings.values, settings.layers("num_hidden_layers")
    if settings.section("rope_scaling"):
        raise settings.refused("has rope_scaling, which stretches both kinds of layers; supported is ModernBERT without it")
    every = settings.size("global_attn_every_n_layers", 3)
    kinds = ["sliding_attention" if n % every else "full_attention" for n in range(layers)]
    # as many tokens on each side, and the token itself
    windows = windows_of(settings, kinds, settings.size("local_attention", 128) // 2 + 1)
    older = {"rope_theta": values.get("global_rope_theta"), "rope_local_base_freq": values.get("local_rope_theta")}
    named = Settings({**values, **{name: value for name, value in older.items() if value is not None}}, settings.folder)
    bias, common = settings.flag("attention_bias"), _common(settings, "modernbert")
    rotary, max_len, local = rotaries_of(named, common["head_dim"], 160_000.0, 10_000.0)
    pooling = values.get("classifier_pooling") or "cls"
    if pooling not in _POOLINGS:
        raise settings.refused(f"has classifier_pooling {pooling!r}; must be one of {', '.join(_POOLINGS)}")
    head = _head(
        settings, activation=settings.activation("classifier_activation", "gelu"), norm=True,
        bias=settings.flag("classifier_bias"), pooling=pooling,
    )  # fmt: skip
    sizes = EncoderSizes(norms_sums=False, norm_bias=settings.flag("norm_bias"), head=head)
    return common | {
        "windows": windows, "rotary": rotary, "local_rotary": local, "max_len": max_len, "qkv_bias": bias, "o_bias": bias,
        "mlp_bias": settings.flag("mlp_bias"), "norm_eps": settings.number("norm_eps", 1e-5),
        "activation": settings.activation("hidden_activation", "gelu"), "encoder": sizes,
    }  # fmt: skip


def _common(settings: Settings, family: str) -> Fields:
    heads, hidden = settings.size("num_attention_heads"), settings.size("hidden_size")
    if hidden % heads:
        raise settings.refused(f"has hidden_size {hidden} and num_attention_heads {heads}; the second must divide the first")
    return Fields(
        family=family, vocab_size=settings.size("vocab_size"), layers=settings.layers("num_hidden_layers"), hidden=hidden,
        heads=heads, kv_heads=heads, head_dim=hidden // heads, ffn=settings.size("intermediate_size"),
        scale=(hidden // heads) ** -0.5, norm="layer", tie=True, dtype=settings.dtype(),
    )  # fmt: skip


def _head(settings: Settings, **differences: Any) -> HeadSizes | None:
    """Returns the head of a checkpoint for sequence classification; None for any other."""
    said = settings.values.get("architectures") or []
    if not any(str(name).endswith("ForSequenceClassification") for name in ([said] if isinstance(said, str) else said)):
        return None
    named = settings.section("id2label")
    return HeadSizes(labels=len(named) or settings.size("num_labels", 2), **differences)


ENCODERS: dict[str, Callable[[Settings], Fields]] = {
    "bert": _bert, "roberta": _roberta, "xlm-roberta": _roberta, "modernbert": _modernbert,
}  # fmt: skip
_CLASSES = {"Bert": "bert", "Roberta": "roberta", "XLMRoberta": "roberta", "ModernBert": "modernbert"}
