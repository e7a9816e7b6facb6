"""A checkpoint that `save` writes: the engine's weights are the codes of training, and it says what the model says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

import rooftile as rt
from rooftile.errors import InvalidInput
from rooftile.models import Decoder, TrainableDecoder
from rooftile.qat.saving import checkpoint
from rooftile.weights.files.compressed_tensors import LAYOUTS
from rooftile.weights.two_four import Recipe
from tests.qat.models import mlp

VOCAB = 48
ROOM = {"num_blocks": 24, "device": "cpu", "max_num_seqs": 4}


def decoder(seed: int = 0) -> TrainableDecoder:
    torch.manual_seed(seed)
    return TrainableDecoder(VOCAB, hidden=128, heads=4, kv_heads=2, layers=2, ffn=256, max_len=64)


def trained(format, **options) -> TrainableDecoder:
    """A model after a few steps with rounding."""
    skip = {} if isinstance(format, dict) else {"skip": ("head",)}
    model = rt.qat.prepare(decoder(), format, **skip | options)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(VOCAB, (4, 20), generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        logits = model(tokens[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimiser.step()
        optimiser.zero_grad()
    return model.eval()


def greedy(model: nn.Module, prompt: list[int], count: int) -> list[int]:
    found = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            found.append(int(model(torch.tensor([found]))[0, -1].argmax()))
    return found[len(prompt) :]


@pytest.mark.parametrize("format", [*LAYOUTS, "int4:32", "int4:row"])
def test_the_engine_multiplies_with_the_codes_of_training(tmp_path: Path, format: str) -> None:
    model = trained(format)
    rt.qat.save(model, tmp_path / "saved")
    read = Decoder.from_folder(tmp_path / "saved", device="cpu")
    for n, layer in enumerate(model.layers):
        mine = {
            "qkv": [layer.mixer.q, layer.mixer.k, layer.mixer.v], "o": [layer.mixer.out],
            "feed_forward.up": [layer.gate, layer.up], "feed_forward.down": [layer.down],
        }  # fmt: skip
        for projection, parts in mine.items():
            stored = read.layers[n].get_submodule(projection).parts
            for name in ("codes", "scales"):
                due, found = (torch.cat([getattr(one, name) for one in x]) for x in ([part.codes() for part in parts], stored))
                assert torch.equal(found.view(torch.uint8), due.view(torch.uint8)), (projection, name)
            if format == "nvfp4":
                # each part has its own
                due = torch.cat([part.codes().outer.expand(part.out_features, 1) for part in parts])
                assert torch.equal(torch.cat([one.outer.expand(one.shape[0], 1) for one in stored]), due)


@pytest.mark.parametrize(
    ("format", "options", "layout"),
    [
        *((format, {}, "dense") for format in (*LAYOUTS, "int4:32", "int4:row")),
        *((format, {"estimator": "lsq"}, "dense") for format in ("int4:32", "w8", "int8")),
        *((format, {"sparsity": Recipe()}, layout) for format in (None, "fp8", "int8") for layout in ("dense", "two_four")),
        *((format, {"sparsity": Recipe(transposable=True)}, "dense") for format in (None, "int4:32", "mxfp4")),
    ],
)
def test_the_engine_says_what_the_converted_model_says_bit_for_bit(
    tmp_path: Path, format: str | None, options: dict[str, Any], layout: str
) -> None:
    model = trained(format, **options)
    rt.qat.save(model, tmp_path, layout=layout)
    rt.qat.convert(model)
    for layer in model.layers:
        # on a CPU the engine attends to its cache by this backend, and a dense call by PyTorch's, which rounds otherwise
        layer.mixer.backend = "tiled"
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    asked = rt.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=20, prompt_logprobs=20)
    (output,) = rt.LLM(tmp_path, **ROOM).generate([prompt], asked)
    answer = output.outputs[0]
    assert list(answer.token_ids) == greedy(model, prompt, 12)
    normed = []
    model.norm.register_forward_hook(lambda module, inputs, y: normed.append(y[0]))
    with torch.no_grad():
        logits = model(torch.tensor([prompt]))[0]
        # only the last row is multiplied again, alone: PyTorch's fp32 product of one row adds in another order
        due = torch.log_softmax(torch.cat([logits[:-1], model.head(normed[0][-1:])]), -1)
    for said, row in zip([*output.prompt_logprobs[1:], answer.logprobs[0]], due.tolist(), strict=True):
        assert len(said) >= 20
        assert {token: one.logprob for token, one in said.items()} == {token: row[token] for token in said}


def test_formats_are_mixed(tmp_path: Path) -> None:
    model = trained({"*.mixer.*": "int8", "*.down": "int4:32", "*.gate": "auto", "*.up": "mxfp4"})
    rt.qat.save(model, tmp_path)
    section = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert section["format"] == "mixed-precision"
    assert sorted(group["format"] for group in section["config_groups"].values()) == [
        "int-quantized", "mxfp4-pack-quantized", "pack-quantized",
    ]  # fmt: skip
    assert {"lm_head", "model.layers.0.mlp.gate_proj", "model.layers.1.mlp.gate_proj"} == set(section["ignore"])
    prompt = [7, 7, 2]
    (output,) = rt.LLM(tmp_path, **ROOM).generate([prompt], rt.SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))
    assert list(output.outputs[0].token_ids) == greedy(model, prompt, 10)


def llama(tie: bool) -> nn.Module:
    """A small Llama of Transformers; `tie`: its head is its embedding."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=256,
        vocab_size=VOCAB, max_position_embeddings=64, tie_word_embeddings=tie, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("tie", [False, True])
def test_a_model_of_transformers(tmp_path: Path, tie: bool) -> None:
    model = rt.qat.prepare(llama(tie), "int4", group=32)
    assert not any(one.name == "lm_head" for one in rt.qat.status(model).layers)
    tokens = torch.randint(VOCAB, (2, 16))
    model(input_ids=tokens, labels=tokens).loss.backward()
    torch.optim.AdamW(model.parameters(), lr=1e-3).step()
    rt.qat.save(model, tmp_path)
    prompt = [5, 9, 2, 6]
    (output,) = rt.LLM(tmp_path, **ROOM).generate([prompt], rt.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert list(output.outputs[0].token_ids) == greedy(lambda x: model(input_ids=x).logits, prompt, 8)
    # Transformers quantises what is not named here, and asks for a head that is stored under the embedding's name
    section = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert "lm_head" in section["ignore"]


@pytest.mark.parametrize("format", ["int8", "int4:32", {"*": "int8"}], ids=str)
def test_transformers_reads_a_model_whose_head_is_its_embedding(tmp_path: Path, format) -> None:
    transformers = pytest.importorskip("transformers")
    model = rt.qat.prepare(llama(tie=True), format)
    rt.qat.save(model, tmp_path)
    tokens = torch.randint(VOCAB, (2, 16))
    with torch.no_grad():
        due = model(tokens).logits
        found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(tokens).logits
    # theirs rounds activations of int8 by another rule
    assert (found - due).norm() < 0.02 * due.norm()


@pytest.mark.parametrize("format", ["int4:32", "w8", "int8"])
def test_learned_scales_are_stored_as_codes_were_taken_with_them(tmp_path: Path, format: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128, vocab_size=VOCAB,
        max_position_embeddings=64, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    rt.qat.prepare(model, format, estimator="lsq")
    tokens = torch.randint(VOCAB, (2, 16))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    rt.qat.save(model, tmp_path)
    layer = model.model.layers[0].mlp.down_proj
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        found = file.get_tensor("model.layers.0.mlp.down_proj.weight_scale")
    assert torch.equal(found, layer.codes().scales)
    assert found.dtype == (torch.float32 if format == "int8" else torch.bfloat16)
    assert not torch.equal(found.float(), layer.weight_scale) or format == "int8"
    prompt = [5, 9, 2, 6]
    (output,) = rt.LLM(tmp_path, **ROOM).generate([prompt], rt.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert list(output.outputs[0].token_ids) == greedy(lambda x: model(input_ids=x).logits, prompt, 8)


def test_shards_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "SHARD", 100_000)
    model = trained("int8")
    rt.qat.save(model, tmp_path)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    prompt = [1, 2, 3]
    (output,) = rt.LLM(tmp_path, **ROOM).generate([prompt], rt.SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    assert list(output.outputs[0].token_ids) == greedy(model, prompt, 6)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 64), nn.Linear(64, 8, bias=False)
        self.head.weight = self.embedding.weight


def used(folder: Path) -> Path:
    (folder / "here").write_text("x")
    return folder


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda folder: rt.qat.save(decoder(), folder), "the model is not prepared"),
        (lambda folder: rt.qat.save(trained("int8"), used(folder)), "is there already; give a new folder"),
        (lambda folder: rt.qat.save(rt.qat.prepare(mlp(), "int8"), folder), "Sequential has no configuration of Transformers"),
        (lambda folder: rt.qat.save(rt.qat.prepare(Shared(), {"head": "int8"}), folder), "head and embedding share a weight"),
        (lambda folder: rt.qat.save(rt.qat.convert(trained("int8")), folder), "the TrainableDecoder is converted, so it has"),
    ],
)  # fmt: skip
def test_bad_input(tmp_path: Path, call, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        call(tmp_path)


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8"])
def test_activations_that_are_not_rounded_when_served_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, format: str
) -> None:
    rt.qat.save(trained(format), tmp_path / "weights")
    Decoder.from_folder(tmp_path / "weights")
    assert not caplog.messages
    rt.qat.save(trained(format, activations=format), tmp_path / "both")
    Decoder.from_folder(tmp_path / "both")
    (said,) = caplog.messages
    assert f"both: its activations in {format} are not rounded: no kernel here multiplies them, so they stay in 16 bits" in said
