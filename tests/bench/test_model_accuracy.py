"""`rooftile accuracy MODEL --data FILE`: bytes, losses and changes of logits are those of the model that is served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import rooftile as rt
from rooftile.cli import main
from rooftile.errors import InvalidInput
from rooftile.models import TrainableDecoder
from rooftile_lab.bench import model_accuracy
from rooftile_lab.bench.model_accuracy import measure
from tests.models.checkpoints import CONFIGS, logits_of_ours, logits_of_theirs, made, saved

CPU = torch.device("cpu")
TEXT = "The mean of a row is subtracted before its square is taken. " * 6


def decoder() -> TrainableDecoder:
    torch.manual_seed(0)
    return TrainableDecoder(256, hidden=64, heads=4, layers=2, ffn=128, max_len=128)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    decoder().save(tmp_path / "model")
    return tmp_path / "model"


def test_numbers_are_those_of_the_rounded_model(folder: Path) -> None:
    plain, word, bad = measure(folder, TEXT, CPU, formats=("int4:32", "int4"), length=64, pieces=3)
    tokens = torch.tensor(list(TEXT.encode()))
    pieces = torch.stack([tokens[n * 64 : n * 64 + 65] for n in range(3)])
    model, rounded = decoder().eval(), rt.quantise_model(decoder().eval(), "int4:32", skip=["head"])
    with torch.no_grad():
        logits, others = model(pieces[:, :-1]), rounded(pieces[:, :-1])
    losses = [functional.cross_entropy(x.flatten(0, 1), pieces[:, 1:].flatten()).item() for x in (logits, others)]
    assert plain.format == "float32"
    assert plain.nats == pytest.approx(losses[0], abs=1e-5)
    assert (plain.above, plain.largest_change) == (0.0, 0.0)
    assert word.nats == pytest.approx(losses[1], abs=1e-5)
    assert word.above == pytest.approx(losses[1] - losses[0], abs=1e-5)
    assert word.largest_change == pytest.approx((others - logits).abs().max().item(), rel=1e-3)
    parameters = sum(p.nbytes for p in model.parameters())
    assert plain.nbytes == parameters
    linear = {name: layer for name, layer in rounded.named_modules() if isinstance(layer, rt.qat.QuantisedLinear)}
    weights = dict(model.named_modules())
    saved_bytes = sum(weights[name].weight.nbytes - layer.quantised.nbytes for name, layer in linear.items())
    assert word.nbytes == parameters - saved_bytes
    assert bad.nbytes is None
    assert "must be a multiple" in bad.reason


@pytest.mark.parametrize("name", ["gemma2", "qwen2, windows"])
def test_windows_and_caps_are_those_of_the_model(tmp_path: Path, name: str) -> None:
    from rooftile.models import Decoder

    model = made(CONFIGS[name]())
    saved(model, tmp_path)
    mine, tokens = Decoder.from_folder(tmp_path), torch.arange(40) % 90
    with torch.inference_mode():
        found = mine.logits(model_accuracy.hidden_states(mine, tokens)).float()
    torch.testing.assert_close(found, logits_of_ours(mine, [tokens]), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found, logits_of_theirs(model, [tokens]), rtol=1e-3, atol=1e-3)


def test_a_text_is_cut_into_pieces(folder: Path) -> None:
    found = model_accuracy.tokens_of(folder, "abcdefghij", 256, 4, 8)
    assert found.tolist() == [list(b"abcde"), list(b"efghi")]
    assert model_accuracy.tokens_of(folder, "abcdefghij", 256, 4, 1).shape == (1, 5)
    assert model_accuracy.tokens_of(folder, "abc", 256, 512, 8).tolist() == [list(b"abc")]


def test_every_format_but_those_of_long_groups_fits_a_small_model(folder: Path) -> None:
    found = measure(folder, TEXT, CPU, length=32, pieces=1)
    assert [one.format for one in found] == ["float32", *model_accuracy.FORMATS]
    assert [one.format for one in found if one.reason] == ["int4"]
    nbytes = {one.format: one.nbytes for one in found if one.nbytes}
    # a weight in fp32 keeps two numbers of four, and two bits for each
    linear = sum(layer.weight.nbytes for name, layer in decoder().named_modules() if type(layer) is nn.Linear and name != "head")
    assert nbytes["float32"] - nbytes["2:4"] == linear - linear * 17 // 32
    assert nbytes["int4:row"] < nbytes["mxfp4"] < nbytes["nvfp4"] < nbytes["fp8"] < nbytes["float32"]


def call(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in ("accuracy", *words)])
    found = capsys.readouterr()
    return int(left.value.code or 0), found.out, found.err


def test_the_command_prints_a_table_and_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = folder.parent / "text.txt"
    data.write_text(TEXT)
    words = (folder, "--data", data, "--device", "cpu", "--format", "int8", "--format", "int4", "--length", "32")
    code, out, _ = call(capsys, *words)
    assert code == 0
    assert "nats per token above float32" in out
    assert "largest change of a logit" in out
    assert "tokens per second" not in out
    assert "int4: " in out
    code, out, _ = call(capsys, *words, "--json")
    formats = json.loads(out)["formats"]
    assert (code, [one["format"] for one in formats]) == (0, ["float32", "int8", "int4"])
    assert formats[1]["above"] == formats[1]["nats"] - formats[0]["nats"]


def test_tokens_per_second_are_measured_on_a_gpu_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(model_accuracy, "tokens_per_second", lambda where, word, device: asked.append((word, device)) or 7.0)
    found = model_accuracy.Accuracy(format="int8", nbytes=3, nats=1.0, above=0.5, largest_change=0.1)
    timed = model_accuracy._timed(found, folder, "int8", torch.device("cuda"), lambda words: None)
    assert (timed.tokens_s, timed.nbytes, asked) == (7.0, 3, [("int8", "cuda")])
    skipped = model_accuracy.Accuracy(format="int4", reason="does not fit")
    assert model_accuracy._timed(skipped, folder, "int4", torch.device("cuda"), lambda words: None) is skipped


def test_bad_input(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "text.txt"
    data.write_text(TEXT)
    (tmp_path / "short.txt").write_text("x")
    rt.qat.save(rt.qat.prepare(decoder(), "int8", skip=["head"], verbose=False), tmp_path / "quantised")
    saved(made(CONFIGS["llama"]()), tmp_path / "tokens")
    for words, sentence in (
        ((folder,), "a model is given and no --data; write rooftile accuracy MODEL --data FILE"),
        (("--data", data), "--data is given and no model"),
        ((folder, "--data", tmp_path / "none.txt"), "none.txt, which is no file; give a text"),
        ((folder, "--data", data, "--methods"), "--methods is for tensors, and a model reads --data"),
        ((folder, "--data", data, "--mask", "causal"), "--mask is for tensors"),
        ((folder, "--data", data, "--format", "int5"), "format is 'int5'; must be one of fp8"),
        ((folder, "--data", tmp_path / "short.txt"), "the text has 1 tokens; must have 2 or more"),
        ((tmp_path / "quantised", "--data", data), "is quantised already; give the one in 16 bits"),
        ((tmp_path / "tokens", "--data", data), "has no tokenizer and 97 tokens"),
    ):
        code, out, err = call(capsys, *words, "--device", "cpu")
        assert (code, out) == (2, ""), words
        assert sentence in " ".join(err.split())


def test_a_model_without_exact_attention_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rooftile.models import Decoder

    read = Decoder.from_folder(folder)
    object.__setattr__(read.config, "mixers", ("attention", "native_sparse"))
    monkeypatch.setattr(Decoder, "from_folder", lambda *args, **kwargs: read)
    with pytest.raises(InvalidInput, match="layers without exact attention"):
        measure(folder, TEXT, CPU)
