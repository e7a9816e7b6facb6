"""Hidden states and scores of encoders against those of Transformers; packed texts against single ones."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.models import Decoder, Encoder, ModelConfig
from tests.models.checkpoints import saved

VOCABULARY, LENGTHS = 97, (23, 1, 60, 2, 7)
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 40, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48,
    "initializer_range": 0.2, "pad_token_id": 0,
}  # fmt: skip
MODERN = SMALL | {
    "max_position_embeddings": 64, "local_attention": 12, "global_attn_every_n_layers": 3, "bos_token_id": 1,
    "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
}  # fmt: skip
CONFIGS = {
    "bert": lambda: transformers.BertConfig(**SMALL, max_position_embeddings=64),
    "bert, tanh gelu": lambda: transformers.BertConfig(
        **SMALL, max_position_embeddings=60, hidden_act="gelu_new", type_vocab_size=3, layer_norm_eps=1e-3
    ),
    "xlm-roberta": lambda: transformers.XLMRobertaConfig(
        **SMALL | {"pad_token_id": 1}, max_position_embeddings=64, type_vocab_size=1
    ),
    "roberta": lambda: transformers.RobertaConfig(**SMALL | {"pad_token_id": 4}, max_position_embeddings=65),
    "modernbert": lambda: transformers.ModernBertConfig(**MODERN),
    "modernbert, biases": lambda: transformers.ModernBertConfig(
        **MODERN, norm_bias=True, attention_bias=True, mlp_bias=True, classifier_bias=True, classifier_pooling="mean"
    ),
}


def theirs(name: str, kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = CONFIGS[name]()
    config.num_labels = 3
    model = getattr(transformers, f"AutoModel{kind}").from_config(config, attn_implementation="eager").eval()
    for part in model.modules():
        if isinstance(part, torch.nn.LayerNorm | torch.nn.Linear):
            for weight in part.parameters(recurse=False):
                weight.data += 0.2 * torch.randn_like(weight)
    return model


def texts() -> list[Tensor]:
    # without the ids of padding, which RoBERTa gives no position
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(5, VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def packed(several: list[Tensor]) -> tuple[Tensor, Tensor]:
    return torch.cat(several), torch.tensor([0, *accumulate(map(len, several))], dtype=torch.int32)


@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_hidden_states_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = theirs(name, "")
    encoder = Encoder.from_folder(saved(model, tmp_path))
    several = texts()
    hidden = encoder(*packed(several)).split([len(text) for text in several])
    for text, ours in zip(several, hidden, strict=True):
        expected = model(text[None]).last_hidden_state[0]
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(encoder(*packed([text])), ours, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_scores_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = theirs(name, "ForSequenceClassification")
    encoder = Encoder.from_folder(saved(model, tmp_path))
    several = texts()
    count = model.config.type_vocab_size if "bert" in name and "modern" not in name and "roberta" not in name else 1
    types = [torch.arange(len(text)) * count // len(text) for text in several]
    tokens, cu = packed(several)
    scores = encoder.scores(encoder(tokens, cu, torch.cat(types) if count > 1 else None), cu)
    for text, kinds, ours in zip(several, types, scores, strict=True):
        expected = model(text[None], **({"token_type_ids": kinds[None]} if count > 1 else {})).logits[0]
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert"])
@torch.inference_mode()
def test_a_model_for_masks_or_of_older_files_is_the_same_encoder(name: str, tmp_path: Path) -> None:
    model = theirs(name, "ForMaskedLM")
    encoder = Encoder.from_folder(saved(model, tmp_path))
    tokens, cu = packed(texts()[:1])
    expected = model.base_model(tokens[None]).last_hidden_state[0]
    torch.testing.assert_close(encoder(tokens, cu), expected, atol=1e-5, rtol=1e-5)
    # files once had other names for norms
    from safetensors.torch import load_file, save_file

    file = tmp_path / "model.safetensors"
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"} if name == "bert" else {}
    tensors = load_file(file)
    for new, older in old.items():
        tensors = {key.replace(new, older): value for key, value in tensors.items()}
    save_file(tensors, file)
    assert torch.equal(Encoder.from_folder(tmp_path)(tokens, cu), encoder(tokens, cu))


def test_settings_that_older_files_of_modernbert_have(tmp_path: Path) -> None:
    saved(theirs("modernbert", ""), tmp_path)
    file = tmp_path / "config.json"
    said = json.loads(file.read_text())
    new = ModelConfig.from_folder(tmp_path)
    for name in ("rope_parameters", "layer_types"):
        said.pop(name, None)
    file.write_text(json.dumps(said | {"global_rope_theta": 777.0, "local_rope_theta": 55.0}))
    old = ModelConfig.from_folder(tmp_path)
    assert (old.rotary.theta, old.local_rotary.theta) == (777.0, 55.0)
    assert old.windows == new.windows == (None, 7, 7, None)
    assert (new.rotary.theta, new.local_rotary.theta) == (160_000.0, 10_000.0)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"is_decoder": True}, "is_decoder"), ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"architectures": ["MPNetModel"]}, "MPNetModel"), ({"num_attention_heads": 3}, "divide"),
        ({"hidden_act": "mish"}, "mish"), ({"max_position_embeddings": 70}, "shapes differ"),
    ],
)  # fmt: skip
def test_refusals(changed: dict[str, object], said: str, tmp_path: Path) -> None:
    file = saved(theirs("bert", ""), tmp_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    with pytest.raises(InvalidInput, match=said):
        Encoder.from_folder(tmp_path)


def test_each_class_refuses_the_other_kind_of_model(tmp_path: Path) -> None:
    saved(theirs("bert", ""), tmp_path)
    with pytest.raises(InvalidInput, match="is an encoder, bert"):
        Decoder.from_folder(tmp_path)
    decoder = ModelConfig(
        family="llama", vocab_size=9, layers=1, hidden=8, heads=1, kv_heads=1, head_dim=8, ffn=8, max_len=8, windows=(None,),
        rotary=None,
    )  # fmt: skip
    with pytest.raises(InvalidInput, match="is a decoder, llama"):
        Encoder.random(decoder)
