"""Converted models: they are saved so that others read them right, or refuse; and they go back to plain layers."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import rooftile as rt
from rooftile.errors import InvalidInput
from rooftile.weights.two_four import Recipe
from tests.qat.models import FORMATS, inputs, mlp
from tests.qat.test_read_weights import first, made, prepared

NAMES_SAVE = r"write rooftile\.qat\.save\(model, folder\)"
SAVED = ("bert", "albert", "vit", "beit", "t5", "t5 gated", "whisper", "gpt2", "mixtral")


@pytest.mark.parametrize("converted", [False, True], ids=["prepared", "converted"])
@pytest.mark.parametrize("name", SAVED)
def test_transformers_reads_what_save_writes(name: str, converted: bool, tmp_path: Path) -> None:
    plain, given = made(name)
    model = prepared(plain.eval(), name)
    with torch.no_grad():
        due = first(model(**given))
    if converted:
        rt.qat.convert(model)
    layout = "dense"
    if name.startswith("t5"):
        with pytest.raises(InvalidInput, match=r"Transformers cannot read a quantised t5.*write layout='numbers'"):
            rt.qat.save(model, tmp_path / "codes")
        layout = "numbers"
    rt.qat.save(model, tmp_path / "model", layout=layout)
    found, report = type(plain).from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(report.values())
    with torch.no_grad():
        torch.testing.assert_close(first(found.eval()(**given)), due, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("format", FORMATS)
def test_a_converted_model_is_saved_as_the_prepared_one(format: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=48, **sizes)).to(torch.bfloat16)
    rt.qat.prepare(model, format)
    rt.qat.save(model, tmp_path / "prepared")
    rt.qat.save(rt.qat.convert(model), tmp_path / "converted")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("prepared", "converted"))
    assert one.keys() == other.keys()
    for name, x in one.items():
        assert torch.equal(x.view(torch.uint8), other[name].view(torch.uint8)), name
    assert (tmp_path / "prepared" / "config.json").read_text() == (tmp_path / "converted" / "config.json").read_text()


@pytest.mark.parametrize("sparsity", [None, Recipe()], ids=["", "2:4"])
def test_save_pretrained_of_a_converted_model_names_save(sparsity: Recipe | None, tmp_path: Path) -> None:
    plain, _ = made("bert")
    model = rt.qat.prepare(copy.deepcopy(plain), None if sparsity else "int8", sparsity=sparsity)
    model.save_pretrained(tmp_path / "prepared")
    # also inside of another module, and of a copy
    whole = rt.qat.convert(nn.Sequential(model))
    for one in (whole[0], copy.deepcopy(whole)[0]):
        for call in (one.save_pretrained, one.push_to_hub):
            with pytest.raises(InvalidInput, match=NAMES_SAVE):
                call(str(tmp_path / "converted"))
    rt.qat.dequantise(whole)
    model.save_pretrained(tmp_path / "dequantised")
    found = type(plain).from_pretrained(tmp_path / "dequantised")
    assert torch.equal(found.encoder.layer[0].output.dense.weight, model.encoder.layer[0].output.dense.weight)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("format", ["int8", "int4:32", None])
def test_a_plain_model_takes_no_codes(format: str | None, strict: bool) -> None:
    model = rt.qat.convert(rt.qat.prepare(mlp(), format, sparsity=None if format else Recipe()))
    with pytest.raises(RuntimeError, match=r"size mismatch for 0.weight: copying a param with shape torch.Size\(\[1\]\)"):
        mlp().load_state_dict(model.state_dict(), strict=strict)
    again = copy.deepcopy(model)
    assert again.load_state_dict(model.state_dict(), strict=strict).unexpected_keys == []
    with pytest.raises(RuntimeError, match=r"0.weight is a plain weight, and the layer is converted: load it before rooftile"):
        again.load_state_dict(mlp().state_dict(), strict=strict)


def test_from_pretrained_takes_no_codes_either(tmp_path: Path) -> None:
    plain, _ = made("bert")
    model = rt.quantise_model(copy.deepcopy(plain), "int8", verbose=False)
    # as wrappers write it
    held = {name: x.clone().contiguous() for name, x in model.state_dict().items()}
    save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
    plain.config.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        type(plain).from_pretrained(tmp_path)


def test_a_pickled_model_computes_the_same() -> None:
    model, x = rt.qat.convert(rt.qat.prepare(mlp(), "int4:32")), inputs()
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(x), model(x))


@pytest.mark.parametrize("format", FORMATS)
def test_back_to_plain_layers(format: str) -> None:
    model, x = rt.qat.prepare(mlp(dtype=torch.float64), format), inputs(dtype=torch.float64)
    numbers = [layer.codes().dequantise(torch.float64) for layer in model if isinstance(layer, nn.Linear)]
    rt.qat.convert(model.eval())
    assert rt.qat.dequantise(model) is model
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    for layer, due in zip(layers, numbers, strict=True):
        assert type(layer) is nn.Linear
        assert torch.equal(layer.weight, due)
        assert layer.weight.requires_grad
        assert not layer.training
    assert torch.equal(model(x), nn.Sequential(*model)(x))
    model(x).sum().backward()
    assert layers[0].weight.grad is not None
    assert mlp().double().load_state_dict(model.state_dict()).missing_keys == []
    with pytest.raises(InvalidInput, match="the model has no converted layer"):
        rt.qat.dequantise(model)


def test_the_dtype_of_the_weight() -> None:
    model = rt.qat.convert(rt.qat.prepare(mlp(), "int8"))
    assert model[0].weight.dtype == torch.float32
    assert model.to(torch.bfloat16)[0].weight.dtype == torch.bfloat16
    assert model.half()[0].weight.dtype == torch.float16
    assert model[0].scales.dtype == torch.float32
    sparse = rt.qat.convert(rt.qat.prepare(mlp(), None, sparsity=Recipe()))
    assert sparse.double()[0].weight.dtype == torch.float64
    quantised = rt.quantise_weight(torch.randn(8, 64), "int8")
    assert rt.qat.QuantisedLinear(quantised).weight.dtype == torch.float32
    assert rt.qat.QuantisedLinear(quantised, dtype=torch.float16).weight.dtype == torch.float16
    assert rt.qat.QuantisedLinear(quantised).to("meta").weight.device.type == "meta"


@pytest.mark.parametrize("convert", [rt.qat.convert, lambda model: model])
def test_what_is_made_in_inference_mode_can_be_trained(convert) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    with torch.inference_mode():
        if convert is rt.qat.convert:
            rt.qat.convert(rt.qat.prepare(model, {"1": "int8"}))
        else:
            rt.quantise_model(model, {"1": "int8"}, verbose=False)
    model(torch.randn(3, 64)).sum().backward()
    assert model[0].weight.grad is not None
    with torch.inference_mode():
        rt.qat.dequantise(model)
    model(torch.randn(3, 64)).sum().backward()
    assert model[1].weight.grad is not None


def foreign() -> nn.Module:
    """A model as torchao leaves it: nn.Linear with weights of a class of its own."""
    weight = type("Int8Tensor", (Tensor,), {"__module__": "torchao.quantization"})
    model = mlp()
    model[0].weight = nn.Parameter(model[0].weight.detach().as_subclass(weight), requires_grad=False)
    return model


def fake() -> nn.Module:
    """A model as torchao prepares it."""
    kind = type("FakeQuantizedLinear", (nn.Linear,), {"__module__": "torchao.quantization.qat.linear"})
    return nn.Sequential(kind(8, 8), nn.Linear(8, 8))


def config(name: str, **values: object) -> object:
    """A configuration of torchao."""
    return type(name, (SimpleNamespace,), {"__module__": "torchao.quantization"})(**values)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: rt.qat.prepare(foreign(), "int8"), "0.weight is a Int8Tensor of torchao, so it is quantised already; give"),
        (lambda: rt.quantise_model(foreign(), "int8"), "0.weight is a Int8Tensor of torchao"),
        (lambda: rt.plan(foreign(), inputs(), measure=False), "0.weight is a Int8Tensor of torchao"),
        (lambda: rt.qat.prepare(fake(), "int8"), "0 is a FakeQuantizedLinear of torchao, which has quantised the model; give"),
        (lambda: rt.qat.prepare(rt.quantise_model(mlp(), "int8"), "int8"), "0 is converted already; call rooftile.qat.deq"),
        (lambda: rt.qat.prepare(mlp(), "W4A16"), "write 'int4'$"),
        (lambda: rt.quantise_model(mlp(), "FP8_DYNAMIC"), "write 'fp8'$"),
        (lambda: rt.qat.prepare(mlp(), torch.int8), "format is torch.int8; must be one of .*; write 'int8'$"),
        (lambda: rt.quantise_model(mlp(), torch.float8_e4m3fn), "write 'fp8'$"),
        (lambda: rt.quantise_model(mlp(), config("Int8WeightOnlyConfig")), "write 'w8'$"),
        (lambda: rt.qat.prepare(mlp(), config("QATConfig", base_config=config("Int4WeightOnlyConfig"))), "write 'int4'$"),
        (lambda: rt.qat.prepare(mlp(), config("UIntXConfig")), "UIntXConfig is another library's: write one of these words, or"),
        (lambda: rt.plan(mlp(), inputs(), formats=["W8A8"], measure=False), "write 'int8'"),
        (lambda: rt.qat.prepare(mlp(), "int8", filter_fn=len), "prepare has no argument filter_fn: write skip= with patterns"),
        (lambda: rt.quantise_model(mlp(), config="int8"), "quantise_model has no argument config: write the format as a word"),
        (lambda: rt.quantise_model(mlp(), "int8", ignore=["0"]), "quantise_model has no argument ignore: write skip="),
        (lambda: rt.qat.dequantise(3), "model is int; must be a torch.nn.Module"),
        (lambda: rt.qat.dequantise(rt.qat.convert(rt.qat.prepare(mlp(), "int8"))[0]), "is itself a converted layer.*to_linear"),
    ],
)  # fmt: skip
def test_words_of_others_and_models_of_others(call, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        call()
