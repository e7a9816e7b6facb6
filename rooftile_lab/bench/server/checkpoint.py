"""A checkpoint with random weights, and a tokenizer whose every token has a text."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rooftile_lab.bench.models import MODELS
from rooftile_lab.bench.needed import needed


def make_checkpoint(folder: Path, name: str, device: torch.device) -> None:
    """Writes a Llama of `MODELS` with random weights, and its tokenizer."""
    transformers, model = needed("server", "transformers"), MODELS[name]
    config = transformers.LlamaConfig(
        vocab_size=model.vocab_size, hidden_size=model.hidden, intermediate_size=model.ffn, num_hidden_layers=model.layers,
        num_attention_heads=model.heads, num_key_value_heads=model.kv_heads, head_dim=model.head_dim,
        max_position_embeddings=min(model.max_len, 16_384), tie_word_embeddings=model.tie, bos_token_id=None, eos_token_id=None,
        pad_token_id=None,
        # a small model whose weights are as small says one token for ever
        initializer_range=0.2 if model.hidden < 1024 else 0.02,
    )  # fmt: skip
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            transformers.LlamaForCausalLM(config).save_pretrained(folder)
    finally:
        torch.set_default_dtype(before)
    _tokenizer(model.vocab_size).save(str(folder / "tokenizer.json"))


def _tokenizer(size: int) -> Tokenizer:
    """Returns a tokenizer of bytes, and of words that texts are decoded to and never encoded to."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = (f"Ġ{first}{second}{third}" for first in alphabet[:80] for second in alphabet[:80] for third in alphabet[:80])
    vocabulary = {token: n for n, token in enumerate([*alphabet, *(next(words) for _ in range(size - len(alphabet)))])}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made
