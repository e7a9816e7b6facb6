"""Lists what the rules of `sizes` and `inputs` cannot know, by family or class."""

from typing import Any

import torch

# configurations that take their parts as dictionaries
AS_DICTS = {"Qwen3OmniMoeTalkerConfig", "MusicgenConfig", "MusicgenMelodyConfig"}

_TIMES = {"default": {"prediction_length": 4}, "context_length": 8, "lags_sequence": [1, 2], "num_time_features": 1}
_RESNET = {
    "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1],
    "out_features": ["stage4"], "num_channels": 3,
}  # fmt: skip
_BACKBONE = {
    "default": {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "backbone_config": _RESNET},
    "num_feature_levels": 1,
    "num_queries": 8,
}

_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}

# "default" is given to the configuration before it is made small, all else afterwards
SIZES: dict[str, dict[str, Any]] = {
    "autoformer": _TIMES,
    "bamba": {"attn_layer_indices": [1]},
    "bit": {"num_groups": 4},
    "cohere_compass_text": {"default": {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}},
    "conditional_detr": _BACKBONE,
    "deformable_detr": _BACKBONE,
    "detr": _BACKBONE,
    "distilbert": {"dim": 32},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "esm": {"default": {"vocab_size": 64}},
    "esmc": {"num_key_value_heads": 4},
    "glm4v_moe_text": {"rope_parameters": _ROPE["rope_parameters"] | {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}},
    "glm4v_text": _ROPE,
    "glm_image_text": _ROPE,
    "glm_ocr_text": _ROPE,
    "glm5_next_text": {"num_key_value_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"default": {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2}},
    "granite_speech5_encoder": {"context_size": 32},
    "informer": _TIMES,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "perceiver": {"d_latents": 32, "num_latents": 8},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 8]},
    "table-transformer": _BACKBONE,
    "time_series_transformer": _TIMES,
    "zaya": {"num_experts_per_tok": 1},
}


def _series(config: Any) -> torch.Tensor:
    return torch.rand(2, config.context_length + max(config.lags_sequence))


_TIME_INPUTS = {
    "past_values": _series,
    "past_time_features": lambda config: _series(config)[..., None],
    "past_observed_mask": lambda config: torch.ones_like(_series(config)),
    "future_values": lambda config: torch.rand(2, config.prediction_length),
    "future_time_features": lambda config: torch.rand(2, config.prediction_length, 1),
}

# arguments of forward that no rule can make: tensors, or functions of the configuration
INPUTS: dict[str, dict[str, Any]] = {
    "audio-spectrogram-transformer": {"input_values": lambda config: torch.randn(2, config.max_length, config.num_mel_bins)},
    "autoformer": _TIME_INPUTS,
    "blip_2_qformer": {"encoder_hidden_states": lambda config: torch.randn(2, 7, config.encoder_hidden_size)},
    "blt": {"use_cache": False},
    "convnext": {"pixel_values": lambda config: torch.randn(2, 3, 64, 64)},
    "convnextv2": {"pixel_values": lambda config: torch.randn(2, 3, 64, 64)},
    "dac": {"input_values": lambda config: torch.randn(2, 1, 4000)},
    "decision_transformer": {
        "states": lambda config: torch.randn(2, 5, config.state_dim),
        "actions": lambda config: torch.randn(2, 5, config.act_dim),
        "rewards": lambda config: torch.randn(2, 5, 1),
        "returns_to_go": lambda config: torch.randn(2, 5, 1),
        "timesteps": lambda config: torch.arange(5).expand(2, 5),
        "attention_mask": lambda config: torch.ones(2, 5).long(),
    },
    "encodec": {"input_values": lambda config: torch.randn(2, 1, 4000)},
    "gemma3n_audio": {
        "audio_mel": lambda config: torch.randn(2, 32, config.input_feat_size),
        "audio_mel_mask": lambda config: torch.zeros(2, 32, dtype=torch.bool),
    },
    "informer": _TIME_INPUTS,
    "mimi": {"input_values": lambda config: torch.randn(2, 1, 4000)},
    "time_series_transformer": _TIME_INPUTS,
}
# classes that cannot be run here at all, with the reason
OTHER_REASONS: dict[str, str] = {
    "EdgeTamModel": "its vision tower's configuration is downloaded from the hub",
    "EdgeTamVisionModel": "its vision tower's configuration is downloaded from the hub",
}
