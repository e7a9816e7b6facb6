"""Small folders of models that embed and score, with tokenizers, as sentence-transformers publishes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import nn

WORDS = [
    "the", "a", "roof", "tile", "is", "on", "house", "rain", "falls", "query", "document", ":", "hello", "world", "and", "then",
    "some", "more",
]  # fmt: skip
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
TEXTS = ["the roof", "Rain falls on the tile of the house and then some", "", "hello world hello", "roof " * 60]
SIZES = {
    "vocab_size": len(VOCABULARY), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip
PROMPTS = {"query": "query : ", "document": "document : "}
LONGEST = 40


def tokenizer(pair: str = "[CLS] $A [SEP] $B:1 [SEP]:1", single: str = "[CLS] $A [SEP]") -> Any:
    own = Tokenizer(models.WordLevel({word: id for id, word in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    own.pre_tokenizer, own.normalizer = pre_tokenizers.Whitespace(), normalizers.Lowercase()
    own.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=own, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]",
        model_max_length=LONGEST, model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip


def encoder_folder(folder: Path, kind: str = "BertModel", **differences: Any) -> Path:
    """Writes a BERT; of another class of Transformers if `kind` says so."""
    torch.manual_seed(0)
    model = getattr(transformers, kind)(transformers.BertConfig(**SIZES | {"pad_token_id": 0} | differences))
    for part in model.modules():
        if isinstance(part, nn.LayerNorm | nn.Linear):
            part.bias.data.normal_(0.0, 0.2)
    return written(model, folder)


def decoder_folder(folder: Path, kind: str = "Qwen3Model") -> Path:
    """Writes a decoder, whose tokenizer ends each text with [SEP]."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True)
    return written(getattr(transformers, kind)(config), folder, single="$A [SEP]")


def described(folder: Path, *modules: tuple[str, dict[str, Any]], prompts: dict[str, str] | None = None) -> Path:
    """Writes the files of sentence-transformers: modules by their last names, with their settings."""
    listed = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for place, (kind, said) in enumerate(modules, 1):
        own = folder / f"{place}_{kind}"
        own.mkdir(exist_ok=True)
        (own / "config.json").write_text(json.dumps(said))
        listed.append({"idx": place, "name": str(place), "path": own.name, "type": f"sentence_transformers.models.{kind}"})
    (folder / "modules.json").write_text(json.dumps(listed))
    if prompts is not None:
        (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts, "default_prompt_name": None}))
    return folder


def written(model: Any, folder: Path, **differences: str) -> Path:
    """Writes a model with a tokenizer."""
    model.eval().save_pretrained(folder)
    tokenizer(**differences).save_pretrained(folder)
    return folder
