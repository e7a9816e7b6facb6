"""`LLM(weights="2:4")`: an engine says what a decoder says whose weights keep the two largest of each four."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

import rooftile as rt
from rooftile.cli.app import app
from rooftile.engine.start import loading
from rooftile.models import Decoder
from rooftile.weights import QuantisedWeight
from rooftile.weights.two_four import TwoFour
from rooftile_lab.bench.models import decoder_named, formats_of
from tests.conformance.watching import watching
from tests.engine.asking import GREEDY, ROOM, prompts, tokens_of
from tests.models.checkpoints import CONFIGS, made, saved, theirs
from tests.models.quantised import PROJECTIONS, plain


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    plain(path)
    return path


def kept(w: Tensor) -> Tensor:
    """w (N, K) with zeros but for the two largest of each four, by sorting."""
    fours = w.unflatten(1, (-1, 4))
    places = fours.abs().sort(dim=-1, descending=True, stable=True).indices[..., :2]
    return torch.zeros_like(fours).scatter(-1, places, fours.gather(-1, places)).flatten(1)


def masked(folder: Path) -> Decoder:
    """A decoder with plain weights, which are masked."""
    decoder = Decoder.from_folder(folder)
    for layer in decoder.layers:
        for projection in (layer.qkv, layer.o, layer.feed_forward.up, layer.feed_forward.down):
            projection.weight.copy_(kept(projection.weight))
    return decoder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_projections_keep_the_two_largest_of_each_four_in_one_product(folder: Path, dtype: torch.dtype) -> None:
    read, plain = Decoder.from_folder(folder, dtype=dtype, weights="2:4"), Decoder.from_folder(folder)
    for ours, layer in zip(read.layers, plain.layers, strict=True):
        for name in PROJECTIONS:
            (part,) = ours.get_submodule(name).parts
            assert isinstance(part, TwoFour)
            # masks are those of the checkpoint's own dtype
            assert torch.equal(part.dense(), kept(layer.get_submodule(name).weight).to(dtype))
            share = 9 / 16 if dtype == torch.bfloat16 else 17 / 32
            assert part.nbytes == share * part.shape[0] * part.shape[1] * dtype.itemsize


def test_greedy_tokens_are_those_of_the_masked_model(folder: Path) -> None:
    asked = prompts(16)
    due = tokens_of(rt.LLM(masked(folder), **ROOM), asked, GREEDY)
    assert tokens_of(rt.LLM(folder, weights="2:4", **ROOM), asked, GREEDY) == due
    assert tokens_of(rt.LLM(Decoder.from_folder(folder), weights="2:4", **ROOM), asked, GREEDY) == due
    assert tokens_of(rt.LLM(folder, weights="2:4", deterministic=True, **ROOM), asked, GREEDY) == due
    assert tokens_of(rt.LLM(folder, **ROOM), asked, GREEDY) != due


def test_it_goes_into_a_dictionary_of_patterns(folder: Path) -> None:
    weights = {"*k_proj": "2:4", "*v_proj": "2:4", "*q_proj": "int8", "*.mlp.*": "2:4", "*": "auto"}
    first, *_ = Decoder.from_folder(folder, weights=weights).layers
    q, kv = first.qkv.parts
    assert isinstance(q, QuantisedWeight)
    assert isinstance(kv, TwoFour), "k and v are one product"
    assert [type(part) for part in first.feed_forward.up.parts] == [TwoFour]
    assert first.o.weight is not None
    assert tokens_of(rt.LLM(folder, weights=weights, **ROOM), prompts(2), GREEDY)


def test_gpt2_keeps_its_weights_the_other_way_round(tmp_path: Path) -> None:
    model = theirs("gpt2")
    saved(model, tmp_path)
    for ours, layer in zip(Decoder.from_folder(tmp_path, weights="2:4").layers, model.transformer.h, strict=True):
        assert torch.equal(ours.feed_forward.up.dequantised(), kept(layer.mlp.c_fc.weight.detach().T))
        assert torch.equal(ours.qkv.dequantised(), kept(layer.attn.c_attn.weight.detach().T))


def test_rows_that_have_no_whole_fours_are_refused_by_name(tmp_path: Path) -> None:
    plain(tmp_path, intermediate_size=90)
    due = r"layers.0.mlp.down_proj.weight cannot be 2:4: rows have 90 numbers, and 2:4 needs a multiple of 4: leave this layer"
    with pytest.raises(rt.InvalidInput, match=due):
        rt.LLM(tmp_path, weights="2:4", **ROOM)
    with pytest.raises(rt.InvalidInput, match=due):
        rt.LLM(Decoder.from_folder(tmp_path), weights="2:4", **ROOM)
    # what a pattern leaves out is compiled as it is, too
    assert tokens_of(rt.LLM(tmp_path, weights={"*down_proj": "auto", "*": "2:4"}, **ROOM), prompts(2), GREEDY)
    found = CliRunner().invoke(app, ["quantise", str(tmp_path), str(tmp_path / "out"), "--format", "2:4"])
    assert "model.layers.0.mlp.down_proj.weight cannot be 2:4" in str(found.exception)
    assert not (tmp_path / "out").exists(), "nothing is left behind"


def test_weights_without_a_size_and_words_that_are_none(tmp_path: Path, folder: Path) -> None:
    plain(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"][3, 5] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(rt.InvalidInput, match=r"self_attn.k_proj.weight cannot be 2:4: weight is NaN at row 3, column 5"):
        rt.LLM(tmp_path, weights="2:4", **ROOM)
    for word in ("2:8", "2:4:row", "two_four", "24"):
        with pytest.raises(rt.InvalidInput, match=f"'{word}'; must be one of auto, fp8, .*nvfp4, 2:4|'{word}'; "):
            rt.LLM(folder, weights=word, **ROOM)


def test_the_command_writes_what_the_engine_reads(folder: Path, tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["quantise", str(folder), str(tmp_path / "out"), "--format", "2:4"])
    assert found.exit_code == 0, found.output
    section = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert (section["quant_method"], section["format"], len(section["modules"])) == ("rooftile", "two_four", 14)
    stored = load_file(tmp_path / "out/model.safetensors")
    w = load_file(folder / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    assert stored["model.layers.1.mlp.down_proj.weight_values"].nbytes == w.nbytes // 2
    asked = prompts(8)
    due = tokens_of(rt.LLM(folder, weights="2:4", **ROOM), asked, GREEDY)
    assert tokens_of(rt.LLM(tmp_path / "out", **ROOM), asked, GREEDY) == due
    with pytest.raises(rt.InvalidInput, match=r"is quantised already \(rooftile\); leave weights out"):
        rt.LLM(tmp_path / "out", weights="2:4", **ROOM)


def test_commands_take_the_word(tmp_path: Path) -> None:
    saved(made(CONFIGS["llama"]()), tmp_path)
    shown = CliRunner().invoke(app, ["quantise", str(tmp_path), str(tmp_path / "out"), "--format", "2:4", "--group", "32"])
    assert "group is 32 and format '2:4'; only int4 has groups" in str(shown.exception)
    assert formats_of(decoder_named("tiny", torch.device("cpu"), "2:4")) == "2:4 fp32"


def test_each_2_4_projection_runs_once_before_graphs_are_captured(folder: Path) -> None:
    """A library lays a weight out at its first product with many rows, which may not be inside of a graph."""
    decoder = Decoder.from_folder(folder, weights={"*.mlp.*": "2:4"})
    with watching() as watch:
        loading.lay_out(decoder)
    assert [call.name for call in watch.calls].count("linear_two_four") == 2 * len(decoder.layers)


def test_transformers_names_are_the_same(folder: Path) -> None:
    """The names of `LLM(weights=...)` are those of the model of Transformers, with or without "model."."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    (name,) = [name for name, _ in model.named_modules() if name.endswith("layers.1.mlp.up_proj")]
    first, second = Decoder.from_folder(folder, weights={name: "2:4"}).layers
    assert first.feed_forward.up.weight is not None
    assert [isinstance(part, TwoFour) for part in second.feed_forward.up.parts] == [False, True]
