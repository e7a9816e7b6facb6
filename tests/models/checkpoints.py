"""Tiny models of Transformers with random weights, one for each thing that families do differently."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch
import transformers
from torch import Tensor

import rooftile
from rooftile.fused.rope import Rotation, rotate
from rooftile.models import Decoder
from tests.models import experts, latent, recurrent, wrappers

VOCABULARY = 97
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 128, "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": None,
}  # fmt: skip
GPT2 = {
    "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128, "initializer_range": 0.2,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
THETA = {"rope_type": "default", "rope_theta": 500.0}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32}
YARN_IN_FULL = YARN | {"beta_fast": 8.0, "beta_slow": 2.0, "truncate": False, "mscale": 0.7, "mscale_all_dim": 1.1}
YARN_SHORT = YARN | {"attention_factor": 1.5, "original_max_position_embeddings": 4}
# for heads of 10 numbers, of which 4 turn
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1000.0, "partial_rotary_factor": 0.4, "factor": 3.2, "short_factor": [1.0, 1.3],
    "long_factor": [1.7, 6.0],
}  # fmt: skip
MINISTRAL3 = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.7}
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]

CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL, rope_parameters=THETA),
    "llama, tied": lambda: transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama, biases": lambda: transformers.LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True, head_dim=16),
    "llama, llama3": lambda: transformers.LlamaConfig(**SMALL, rope_parameters=LLAMA3),
    "llama, linear": lambda: transformers.LlamaConfig(**SMALL, rope_parameters=LINEAR),
    "llama, yarn in full": lambda: transformers.LlamaConfig(**SMALL, rope_parameters=YARN_IN_FULL),
    "llama, yarn of short training": lambda: transformers.LlamaConfig(**SMALL, rope_parameters=YARN_SHORT),
    "llama, gelu": lambda: transformers.LlamaConfig(**SMALL, hidden_act="gelu"),
    "mistral": lambda: transformers.MistralConfig(**SMALL, sliding_window=7),
    "mistral, no window": lambda: transformers.MistralConfig(**SMALL, sliding_window=None),
    "qwen2": lambda: transformers.Qwen2Config(**SMALL, rope_parameters=THETA),
    "qwen2, of 2.5": lambda: transformers.Qwen2Config(
        **SMALL, rope_parameters=THETA, tie_word_embeddings=True, use_sliding_window=False, sliding_window=7, max_window_layers=1
    ),
    "qwen2, yarn": lambda: transformers.Qwen2Config(**SMALL, rope_parameters=YARN),
    "qwen2, windows": lambda: transformers.Qwen2Config(
        **SMALL, use_sliding_window=True, sliding_window=6, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=True),
    "qwen3, biases, windows": lambda: transformers.Qwen3Config(
        **SMALL, head_dim=8, attention_bias=True, use_sliding_window=True, sliding_window=5, layer_types=LAYER_TYPES
    ),
    "gemma2": lambda: transformers.Gemma2Config(
        **SMALL, head_dim=16, sliding_window=5, query_pre_attn_scalar=24, attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
    ),
    "gemma2, untied, no caps": lambda: transformers.Gemma2Config(
        **SMALL, head_dim=8, sliding_window=9, tie_word_embeddings=False, attn_logit_softcapping=None,
        final_logit_softcapping=None, layer_types=LAYER_TYPES,
    ),
    "gemma3_text": lambda: transformers.Gemma3TextConfig(
        **SMALL, head_dim=16, sliding_window=5, query_pre_attn_scalar=24, sliding_window_pattern=2
    ),
    "gemma3_text, stretched": lambda: transformers.Gemma3TextConfig(
        **SMALL, head_dim=8, sliding_window=9, layer_types=LAYER_TYPES, final_logit_softcapping=5.0,
        rope_parameters={"full_attention": LINEAR, "sliding_attention": THETA},
    ),
    "granite": lambda: transformers.GraniteConfig(
        **SMALL, embedding_multiplier=3.0, residual_multiplier=0.4, attention_multiplier=0.2, logits_scaling=2.5
    ),
    "ministral": lambda: transformers.MinistralConfig(
        **SMALL, head_dim=16, sliding_window=6, layer_types=LAYER_TYPES, rope_parameters=THETA
    ),
    "ministral3": lambda: transformers.Ministral3Config(**SMALL, head_dim=16, rope_parameters=dict(MINISTRAL3)),
    "ministral3, windows": lambda: transformers.Ministral3Config(
        **SMALL, head_dim=8, sliding_window=6, rope_parameters=dict(MINISTRAL3)
    ),
    "olmo2": lambda: transformers.Olmo2Config(**SMALL, rope_parameters=THETA),
    "olmo3": lambda: transformers.Olmo3Config(**SMALL, sliding_window=6, layer_types=LAYER_TYPES),
    "olmo3, yarn": lambda: transformers.Olmo3Config(
        **SMALL, sliding_window=6, layer_types=LAYER_TYPES, attention_bias=True,
        rope_parameters={"full_attention": YARN, "sliding_attention": THETA},
    ),
    "phi3": lambda: transformers.Phi3Config(**SMALL, sliding_window=7),
    "phi3, no window": lambda: transformers.Phi3Config(**SMALL, rope_parameters=THETA),
    "phi3, partly": lambda: transformers.Phi3Config(**SMALL, rope_parameters=THETA | {"partial_rotary_factor": 0.6}),
    # no sequence here is longer than the training was; `test_families.py` has longer ones
    "phi3, longrope": lambda: longrope(128),
    "smollm3": lambda: transformers.SmolLM3Config(**SMALL, no_rope_layer_interval=2),
    "smollm3, windows": lambda: transformers.SmolLM3Config(
        **SMALL, no_rope_layers=[0, 1, 0], use_sliding_window=True, sliding_window=6, attention_bias=True, mlp_bias=True
    ),
    "gpt2": lambda: transformers.GPT2Config(**GPT2),
    "gpt2, untied, unscaled": lambda: transformers.GPT2Config(
        **GPT2, n_inner=24, tie_word_embeddings=False, scale_attn_weights=False, activation_function="relu"
    ),
}  # fmt: skip


def longrope(trained: int) -> transformers.PretrainedConfig:
    """A Phi-3 with other positions for sequences of more than `trained` tokens."""
    rope = LONGROPE | {"original_max_position_embeddings": trained}
    return transformers.Phi3Config(**SMALL, original_max_position_embeddings=trained, rope_parameters=rope)


def theirs(name: str) -> transformers.PreTrainedModel:
    """The model of Transformers of that name, with biases and norms that are no zeros and ones."""
    every = CONFIGS | recurrent.CONFIGS | experts.CONFIGS | latent.CONFIGS | wrappers.CONFIGS
    return made(every[name]())


def made(config: transformers.PretrainedConfig) -> transformers.PreTrainedModel:
    """The model of a configuration."""
    torch.manual_seed(7)
    # other ways to compute experts ask for rows of whole 16 bytes
    config._experts_implementation = "eager"
    reads_images = hasattr(config, "vision_config")
    if reads_images:
        config.text_config._experts_implementation = "eager"
    kind = transformers.AutoModelForImageTextToText if reads_images else transformers.AutoModelForCausalLM
    model = kind.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1 or name.endswith("_bias"):
                weight.add_(0.3 * torch.randn_like(weight))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.3 * torch.randn_like(buffer))
    return model


def loaded(folder: Path, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """The model of Transformers from a folder; model.to(dtype) would round the frequencies of rotary positions, too."""
    ways = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **ways).eval()


def saved(model: transformers.PreTrainedModel, folder: Path, *, max_shard_size: str = "1GB") -> Path:
    """The folder, with the model in it."""
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def prompts(lengths: Sequence[int] = (37, 1, 70, 13)) -> list[Tensor]:
    """Sequences of tokens, of odd lengths and longer than windows and trainings here."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths]


def logits_of_theirs(model: transformers.PreTrainedModel, sequences: Sequence[Tensor]) -> Tensor:
    """(total, vocab) in fp32: one sequence at a time."""
    with torch.inference_mode():
        rows = [model(x[None], attention_mask=torch.ones_like(x[None]), use_cache=False).logits[0].float() for x in sequences]
    return torch.cat(rows)


def logits_of_ours(decoder: Decoder, sequences: Sequence[Tensor]) -> Tensor:
    """(total, vocab) in fp32: all sequences at once, back to back."""
    config = decoder.config
    cu = torch.tensor([0, *accumulate(len(x) for x in sequences)])

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None) -> Tensor:
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        window = config.windows[layer]
        mask = rooftile.CAUSAL if window is None else rooftile.CAUSAL & rooftile.Window(window - 1)
        return rooftile.attention_packed(q, k, v, cu, cu, mask, scale=config.scale, softcap=config.softcap)

    with torch.inference_mode():
        positions = torch.cat([torch.arange(len(x)) for x in sequences])
        return decoder.logits(decoder(torch.cat(list(sequences)), positions, attend)).float()


def assert_same(ours: Tensor, due: Tensor) -> None:
    """The same logits, but for rounding in fp32, and the same tokens."""
    assert ours.shape == due.shape
    assert ours.dtype == torch.float32
    assert (ours - due).abs().max() <= 1e-4 * due.abs().max()
    assert torch.equal(ours.argmax(-1), due.argmax(-1))
