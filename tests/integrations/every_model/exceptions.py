"""What the rules of `sizes` cannot know, by family."""

from typing import Any

# configurations that take their parts as dictionaries
AS_DICTS = {"Qwen3OmniMoeTalkerConfig", "MusicgenConfig", "MusicgenMelodyConfig"}

_TIMES = {"default": {"prediction_length": 4}, "context_length": 8}
SIZES: dict[str, dict[str, Any]] = {
    "autoformer": _TIMES,
    "informer": _TIMES,
    "time_series_transformer": _TIMES,
    "bridgetower": {"hidden_size": 64},
    "distilbert": {"dim": 32},
    "esm": {"default": {"vocab_size": 64}},
    "esmc": {"num_key_value_heads": 4},
    "glm5_next_text": {"num_key_value_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granite_speech5_encoder": {"context_size": 32},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "perceiver": {"d_latents": 32, "num_latents": 8},
    "reformer": {"is_decoder": True},
    "zaya": {"num_experts_per_tok": 1},
}

# arguments of forward that no rule can make: tensors, or functions of the configuration
INPUTS: dict[str, dict[str, Any]] = {}
# families that cannot be run here at all
OTHER_REASONS: dict[str, str] = {}
