"""Checkpoints of 2:4 models: with their zeros, and in our own layout. The engine says what the model says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import rooftile as rt
from rooftile.engine.caches.cost import weight_bytes
from rooftile.errors import InvalidInput
from rooftile.models import Decoder
from rooftile.weights.two_four import Recipe, TwoFour, two_four
from rooftile_lab.bench.models import formats_of
from tests.qat import test_save
from tests.qat.test_save import ROOM, VOCAB, decoder, greedy


def trained(format: Any = None, **recipe: Any) -> nn.Module:
    """A model after a few steps with masks."""
    return test_save.trained(format, sparsity=Recipe(**recipe))


@pytest.mark.parametrize("layout", ["dense", "two_four"])
@pytest.mark.parametrize("format", [None, "fp8", "int8", "int4:32"])
@pytest.mark.parametrize("transposable", [False, True])
def test_the_engine_serves_it(tmp_path: Path, format: str | None, layout: str, transposable: bool) -> None:
    model = trained(format, transposable=transposable)
    if layout == "two_four" and format == "int4:32":
        with pytest.raises(InvalidInput, match=r"is int4:32 2:4; the layout 'two_four' has 2:4 alone or with fp8 or int8"):
            rt.qat.save(model, tmp_path / "saved", layout=layout)
        return
    rt.qat.save(model, tmp_path / "saved", layout=layout)
    if layout == "two_four":
        (part,) = Decoder.from_folder(tmp_path / "saved", device="cpu", dtype=torch.bfloat16).layers[0].feed_forward.down.parts
        assert isinstance(part, TwoFour)
        assert part.dtype == {None: torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}[format]
    prompt = [3, 1, 4, 1, 5]
    asked = rt.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
    (output,) = rt.LLM(tmp_path / "saved", **ROOM).generate([prompt], asked)
    found = output.outputs[0]
    assert list(found.token_ids) == greedy(model, prompt, 12)
    with torch.no_grad():
        due = torch.log_softmax(model(torch.tensor([prompt]))[0, -1], 0)
    assert found.logprobs[0][found.token_ids[0]].logprob == pytest.approx(float(due[found.token_ids[0]]), abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_our_own_layout(tmp_path: Path, dtype: torch.dtype) -> None:
    model = trained()
    rt.qat.save(model, tmp_path / "sparse", layout="two_four")
    rt.qat.save(model, tmp_path / "dense")
    section = json.loads((tmp_path / "sparse/config.json").read_text())["quantization_config"]
    assert (section["quant_method"], section["format"]) == ("rooftile", "two_four")
    assert "model.layers.0.mlp.gate_proj" in section["modules"]
    assert "quantization_config" not in json.loads((tmp_path / "dense/config.json").read_text())
    read = Decoder.from_folder(tmp_path / "sparse", device="cpu", dtype=dtype)
    plain = Decoder.from_folder(tmp_path / "dense", device="cpu", dtype=dtype)
    layer = model.layers[0]
    mine = {
        "qkv": [layer.mixer.q, layer.mixer.k, layer.mixer.v],
        "feed_forward.up": [layer.gate, layer.up],
        "feed_forward.down": [layer.down],
    }
    for name, parts in mine.items():
        # parts that are one projection are one weight
        (part,) = read.layers[0].get_submodule(name).parts
        assert isinstance(part, TwoFour)
        due = torch.cat([one.kept_weight().detach() for one in parts]).to(dtype)
        assert torch.equal(part.dense(), due)
        assert torch.equal(plain.layers[0].get_submodule(name).weight, due)
        assert torch.equal(read.layers[0].get_submodule(name).dequantised(), due)
    share = 9 / 16 if dtype == torch.bfloat16 else 17 / 32
    layers = sum(x.nbytes for name, x in plain.named_parameters() if ".layers." in f".{name}" and x.ndim == 2)
    assert weight_bytes(plain)[0] - weight_bytes(read)[0] == pytest.approx((1 - share) * layers)
    assert formats_of(read).startswith("2:4 ")
    x = torch.randn(5, 128).to(dtype)
    found = read.layers[0].qkv(x)
    torch.testing.assert_close(found, plain.layers[0].qkv(x))


def test_a_model_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=128, vocab_size=VOCAB,
        max_position_embeddings=64, tie_word_embeddings=True, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    model = rt.qat.prepare(transformers.LlamaForCausalLM(config).eval(), None, sparsity=Recipe())
    tokens = torch.randint(VOCAB, (1, 9))
    with torch.no_grad():
        due = model(tokens).logits[0, -1].argmax()
    for layout in ("dense", "two_four"):
        rt.qat.save(model, tmp_path / layout, layout=layout)
        asked = rt.SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        (output,) = rt.LLM(tmp_path / layout, **ROOM).generate([tokens[0].tolist()], asked)
        assert output.outputs[0].token_ids[0] == int(due)
    read = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "dense").eval()
    with torch.no_grad():
        torch.testing.assert_close(read(tokens).logits, model(tokens).logits)
    assert not read.model.layers[0].mlp.up_proj.weight[~two_four(model.model.layers[0].mlp.up_proj.weight)].any()


def test_bad_checkpoints(tmp_path: Path) -> None:
    model = trained()
    with pytest.raises(InvalidInput, match="layout is '2:4'; must be 'dense', 'numbers' or 'two_four'"):
        rt.qat.save(model, tmp_path / "none", layout="2:4")
    with pytest.raises(InvalidInput, match=r"layers.0.mixer.q is int8; the layout 'two_four' has 2:4 alone"):
        rt.qat.save(rt.qat.prepare(decoder(), "int8", skip=("head",)), tmp_path / "none", layout="two_four")
    assert not (tmp_path / "none").exists()
    rt.qat.save(model, tmp_path / "saved", layout="two_four")
    with pytest.raises(InvalidInput, match=r"is quantised already \(rooftile\); leave weights out"):
        rt.LLM(tmp_path / "saved", weights="int4", **ROOM)
    file, settings = tmp_path / "saved/model.safetensors", tmp_path / "saved/config.json"
    tensors, name = load_file(file), "model.layers.0.mlp.up_proj.weight_places"
    save_file(tensors | {name: torch.zeros_like(tensors[name])}, file, metadata={"format": "pt"})
    with pytest.raises(InvalidInput, match=r"layers.0.mlp.up_proj.weight_places has two places in a wrong order"):
        rt.LLM(tmp_path / "saved", **ROOM)
    save_file(tensors | {name: tensors[name][:, :4].contiguous()}, file, metadata={"format": "pt"})
    with pytest.raises(InvalidInput, match=r"weight_places is \(256, 4\), due \(256, 16\)"):
        rt.LLM(tmp_path / "saved", **ROOM)
    said = json.loads(settings.read_text())
    said["quantization_config"]["format"] = "four_eight"
    settings.write_text(json.dumps(said))
    with pytest.raises(InvalidInput, match="has the format 'four_eight'; read is 'two_four', with a list of modules"):
        rt.LLM(tmp_path / "saved", **ROOM)
