"""Tiny models of Transformers that read images beside text."""

from __future__ import annotations

from typing import Any

import transformers

from tests.models.latent import LATENT

SMALL = {
    "vocab_size": 97, "hidden_size": 40, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 128, "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": None,
}  # fmt: skip
WIDE = SMALL | {"head_dim": 16}
DELTA = WIDE | {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}  # fmt: skip
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
# the image encoders of Qwen and of the other families
TOWER = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 40, "patch_size": 2,
    "spatial_merge_size": 1, "temporal_patch_size": 1,
}  # fmt: skip
POSED = TOWER | {"num_position_embeddings": 16}
VIT = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
SIGLIP = VIT | {"model_type": "siglip_vision_model"}
SECTIONS = {"rope_type": "default", "rope_theta": 900.0, "mrope_section": [2, 2, 1]}
INTERLEAVED = SECTIONS | {"mrope_interleaved": True, "mrope_section": [4, 2, 2]}


def _of(name: str, text: dict[str, Any], vision: dict[str, Any], **more: Any) -> Any:
    return lambda: getattr(transformers, f"{name}Config")(text_config=dict(text), vision_config=dict(vision), **more)


CONFIGS = {
    "qwen3_5": _of("Qwen3_5", DELTA, POSED),
    "qwen3_5_moe": _of("Qwen3_5Moe", DELTA | EXPERTS | {"shared_expert_intermediate_size": 12}, POSED),
    "qwen2_vl": _of("Qwen2VL", SMALL | {"rope_parameters": SECTIONS}, {
        "depth": 1, "embed_dim": 16, "hidden_size": 40, "num_heads": 2, "patch_size": 2, "mlp_ratio": 1,
    }),
    "qwen2_5_vl": _of("Qwen2_5_VL", SMALL | {"rope_parameters": SECTIONS}, TOWER, tie_word_embeddings=True),
    "qwen3_vl": _of("Qwen3VL", WIDE | {"rope_parameters": INTERLEAVED}, POSED | {"deepstack_visual_indexes": [0]}),
    "qwen3_vl_moe": _of(
        "Qwen3VLMoe", WIDE | EXPERTS | {"rope_parameters": INTERLEAVED}, POSED | {"deepstack_visual_indexes": [0]}
    ),
    "gemma3": _of("Gemma3", WIDE | {"sliding_window": 5, "query_pre_attn_scalar": 24}, VIT, tie_word_embeddings=False),
    "mistral3": _of("Mistral3", WIDE | {"model_type": "mistral"}, VIT | {"model_type": "pixtral"}),
    "mistral3, ministral3": _of("Mistral3", WIDE | {"model_type": "ministral3", "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 1.0,
        "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.7,
    }}, VIT | {"model_type": "pixtral"}, tie_word_embeddings=False),
    "llava": _of("Llava", SMALL | {"model_type": "llama"}, SIGLIP),
    "llava, deepseek_v3": _of("Llava", LATENT | {"model_type": "deepseek_v3"}, SIGLIP),
    "llava_next": _of("LlavaNext", SMALL | {"model_type": "mistral", "sliding_window": 7}, SIGLIP),
    "llava_onevision": _of("LlavaOnevision", SMALL | {"model_type": "qwen2"}, SIGLIP),
    "internvl": _of("InternVL", WIDE | {"model_type": "qwen3"}, VIT | {"image_size": [8, 8], "patch_size": [4, 4]}),
    "idefics3": _of("Idefics3", SMALL | {"model_type": "llama"}, VIT),
    "smolvlm": _of("SmolVLM", SMALL | {"model_type": "llama"}, VIT),
}  # fmt: skip
