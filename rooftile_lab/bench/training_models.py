"""The models and batches of `rooftile bench training`: shapes of published models of Transformers, with random weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor

from rooftile_lab.bench.needed import needed

# bytes that eager attention keeps of each score until the backward: weights in bf16 and fp32, and a little
SCORE_BYTES = 7


@dataclass(frozen=True, slots=True)
class Recipe:
    """A model's shape and the batch that it is trained on."""

    family: str  # "llama", "gpt2" or "bert"
    batch: int
    length: int
    layers: int
    heads: int
    shape: dict[str, Any] = field(default_factory=dict)  # other words of the family's configuration
    padded: bool = False
    steps: int = 5  # in one turn
    rounds: int = 4

    @property
    def score_bytes(self) -> int:
        """Bytes that eager attention keeps of its T x S matrices."""
        return SCORE_BYTES * self.layers * self.heads * self.batch * self.length**2


_LLAMA_1B = {
    "vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 8192, "num_key_value_heads": 8, "head_dim": 64,
    "max_position_embeddings": 32_768,
}  # fmt: skip


def _llama_1b(batch: int, length: int, **more: Any) -> Recipe:
    return Recipe("llama", batch, length, layers=16, heads=32, shape=_LLAMA_1B, **more)


RECIPES = {
    "gpt2-16x1k": Recipe("gpt2", 16, 1024, layers=12, heads=12, shape={"vocab_size": 50_257, "n_embd": 768}, steps=8),
    "bert-64x512": Recipe("bert", 64, 512, layers=12, heads=12, shape={"hidden_size": 768}, padded=True, steps=8),
    "llama-1b-1x4k": _llama_1b(1, 4096, steps=8),
    "llama-1b-2x4k": _llama_1b(2, 4096),
    "llama-1b-8x4k": _llama_1b(8, 4096, steps=3),
    "llama-1b-1x16k": _llama_1b(1, 16_384, steps=3),
    "llama-1b-1x32k": _llama_1b(1, 32_768, steps=2),
    # small enough for a CPU
    "tiny-llama-2x64": Recipe(
        "llama", 2, 64, layers=2, heads=4, steps=2, rounds=2,
        shape={"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 16},
    ),
    "tiny-gpt2-2x64": Recipe("gpt2", 2, 64, layers=2, heads=4, shape={"vocab_size": 128, "n_embd": 64}, steps=2, rounds=2),
    "tiny-bert-4x64": Recipe(
        "bert", 4, 64, layers=2, heads=4, padded=True, steps=2, rounds=2,
        shape={"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128},
    ),
}  # fmt: skip


def model_of(recipe: Recipe, attention: str) -> Any:
    """A model with random weights, the same ones each time, without dropout."""
    transformers = needed("training", "transformers")
    sizes: dict[str, Any] = {"num_hidden_layers": recipe.layers, "num_attention_heads": recipe.heads}
    sizes["attn_implementation"] = attention
    torch.manual_seed(0)
    if recipe.family == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**recipe.shape, **sizes, use_cache=False))
    if recipe.family == "gpt2":
        off: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        off |= {"bos_token_id": None, "eos_token_id": None}
        sizes = {"n_layer": recipe.layers, "n_head": recipe.heads, "attn_implementation": attention}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**recipe.shape, **sizes, **off, use_cache=False))
    off = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    return transformers.BertForMaskedLM(transformers.BertConfig(**recipe.shape, **sizes, **off))


def batch_of(recipe: Recipe, device: torch.device) -> dict[str, Tensor]:
    """Random tokens, which are their own labels. Padded batches have lengths between an eighth of the longest and all of it."""
    vocabulary = recipe.shape.get("vocab_size", 30_522)  # BERT's own
    tokens = torch.randint(vocabulary, (recipe.batch, recipe.length), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    if recipe.padded:
        rng = Random(0)
        lengths = [recipe.length, *(rng.randint(recipe.length // 8, recipe.length) for _ in range(recipe.batch - 1))]
        visible = torch.arange(recipe.length) < torch.tensor(lengths)[:, None]
        batch["attention_mask"] = visible.long()
        batch["labels"] = tokens.masked_fill(~visible, -100)
    return {name: x.to(device) for name, x in batch.items()}
