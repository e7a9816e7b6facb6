"""Models that read images beside text, of which the text part is served: `Qwen3_5ForConditionalGeneration` and its like.

Their config.json has the text model's settings in a section of its own, or, in older files of Qwen2-VL, beside those of the
vision tower. A text without images has one position a token, so what rotates by time, height and width rotates as any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rooftile.weights.files.settings import Settings


class Wrapper(NamedTuple):
    """A class of Transformers with a text model inside.

    Args:
        architecture: the class.
        text: the family of the text model, None for one that the section names.
        tied: whether the head is the embedding where no section says so.
    """

    architecture: str
    text: str | None = None
    tied: bool = False


WRAPPERS: dict[str, Wrapper] = {
    "qwen3_5": Wrapper("Qwen3_5ForConditionalGeneration", "qwen3_5_text"),
    "qwen3_5_moe": Wrapper("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text"),
    "qwen2_vl": Wrapper("Qwen2VLForConditionalGeneration", "qwen2"),
    "qwen2_5_vl": Wrapper("Qwen2_5_VLForConditionalGeneration", "qwen2"),
    "qwen3_vl": Wrapper("Qwen3VLForConditionalGeneration", "qwen3"),
    "qwen3_vl_moe": Wrapper("Qwen3VLMoeForConditionalGeneration", "qwen3_moe"),
    "gemma3": Wrapper("Gemma3ForConditionalGeneration", "gemma3_text", tied=True),
    "mistral3": Wrapper("Mistral3ForConditionalGeneration"),
    "llava": Wrapper("LlavaForConditionalGeneration"),
    "llava_next": Wrapper("LlavaNextForConditionalGeneration"),
    "llava_onevision": Wrapper("LlavaOnevisionForConditionalGeneration"),
    "internvl": Wrapper("InternVLForConditionalGeneration"),
    "idefics3": Wrapper("Idefics3ForConditionalGeneration"),
    "smolvlm": Wrapper("SmolVLMForConditionalGeneration"),
}
# the names of tensors of text models begin with one of these, the first that fits
# the last is the head's, which lies in the text model of some
PREFIXES = ("model.language_model.", "language_model.model.", "model.text_model.", "language_model.")
# ... and the tensors of the image encoder, behind "model." or without
VISION = ("visual.", "vision_tower.", "vision_model.", "multi_modal_projector.", "connector.", "image_newline")

_QWEN_VL = {"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "max_window_layers": 80}
_QWEN3_VL = {"rope_theta": 500_000.0, "head_dim": 128}
# values that a section may leave out: sizes, and defaults of Transformers that differ from the family's reader
_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2_vl": _QWEN_VL,
    "qwen2_5_vl": _QWEN_VL,
    "qwen3_vl": _QWEN3_VL,
    # these gates are always divided by their sum
    "qwen3_vl_moe": _QWEN3_VL | {"moe_intermediate_size": 1408, "num_experts_per_tok": 4, "norm_topk_prob": True},
    "gemma3_text": {
        "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
        "num_key_value_heads": 4, "max_position_embeddings": 131_072,
    },
    "llama": {
        "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "max_position_embeddings": 2048,
    },
    "mistral": {
        "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131_072,
    },
}  # fmt: skip
# settings of the whole model that hold for its text
_SHARED = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "quantization_config")


def wrapper_of(settings: Settings) -> str | None:
    """Returns the model type of a config.json whose model has a text model inside; None for a text model by itself."""
    said = settings.values.get("architectures") or []
    names = [str(name) for name in said] if isinstance(said, list) else [str(said)]
    by_class = {wrapper.architecture: kind for kind, wrapper in WRAPPERS.items()}
    if names:
        return next((by_class[name] for name in names if name in by_class), None)
    kind = settings.values.get("model_type")
    return kind if isinstance(kind, str) and kind in WRAPPERS else None


def text_settings(settings: Settings, kind: str) -> Settings:
    """Returns the settings of the text model in a config.json, as its own config.json would have them.

    Raises:
        InvalidInput: there is no section with them.
    """
    wrapper, whole = WRAPPERS[kind], settings.values
    section = settings.section("text_config")
    if not section and "hidden_size" not in whole:
        raise settings.refused(f"has no text_config; a {kind} must have one, with the settings of its text model")
    text = dict(section or whole)
    text.pop("architectures", None)
    # a wrapper by itself says nothing of its text model's type
    text["model_type"] = wrapper.text or text.get("model_type")
    text |= {name: whole[name] for name in _SHARED if whole.get(name) is not None and text.get(name) is None}
    tied = whole.get("tie_word_embeddings")
    text["tie_word_embeddings"] = text.get("tie_word_embeddings", wrapper.tied) if tied is None else tied
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(text.get(name), Mapping):
            text[name] = _without_sections(text[name])
    defaults = _DEFAULTS.get(kind, {}) | _DEFAULTS.get(str(text["model_type"]), {})
    said = {name: value for name, value in text.items() if value is not None or name not in defaults}
    return Settings(defaults | said, settings.folder)


def _without_sections(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Positions of a text: those by time, height and width are one."""
    return {name: "default" if name in ("rope_type", "type") and kind == "mrope" else kind for name, kind in rope.items()}
