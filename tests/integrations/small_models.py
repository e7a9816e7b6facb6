"""Configurations of small models of Transformers."""

import inspect
from typing import Any

import transformers

VOCABULARY = 64
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
TOKENS = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
DECODER = SMALL | TOKENS | {"num_key_value_heads": 2}
HEADS = {"head_dim": 8}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}

CAUSAL_MODELS = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0, attn_pdrop=0,
        embd_pdrop=0, **TOKENS,
    ),
    "llama": lambda: transformers.LlamaConfig(**DECODER),
    "mistral (window)": lambda: transformers.MistralConfig(**DECODER, sliding_window=6),
    "gemma2 (window, softcap)": lambda: transformers.Gemma2Config(
        **DECODER, **HEADS, sliding_window=5, attn_logit_softcapping=0.5, query_pre_attn_scalar=8
    ),
    "gpt-oss (window, sinks)": lambda: transformers.GptOssConfig(**DECODER, **HEADS, **EXPERTS, sliding_window=5),
    "llama4 (chunks)": lambda: transformers.Llama4TextConfig(
        **DECODER, **HEADS, **EXPERTS, attention_chunk_size=6, intermediate_size_mlp=48, no_rope_layers=[1, 0]
    ),
}  # fmt: skip


def recompute(model: Any) -> None:
    """Switches gradient checkpointing on, under the name that this version of Transformers has for it."""
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()


def cache_word(model: Any) -> str:
    """The name of a model's argument for its cache: `cache` since Transformers 5.24, which warns of the earlier one."""
    return next(word for word in ("cache", "past_key_values") if word in inspect.signature(model.forward).parameters)
