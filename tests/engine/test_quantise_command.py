"""`rooftile quantise` writes a checkpoint that says what `LLM(weights=...)` says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from typer.testing import CliRunner

import rooftile as rt
from rooftile.cli.app import app
from rooftile.models import Decoder
from tests.engine.asking import GREEDY, ROOM, prompts, tokens_of
from tests.models.checkpoints import saved, theirs
from tests.models.quantised import plain, quantised


def run(*arguments: object) -> str:
    found = CliRunner().invoke(app, ["quantise", *map(str, arguments)])
    assert found.exit_code == 0, found.output
    return found.output


@pytest.mark.parametrize("format", ["fp8", "fp8_tile", "int8", "w8", "int4", "mxfp8", "mxfp4", "nvfp4"])
def test_the_same_tokens(format: str, tmp_path: Path) -> None:
    plain(tmp_path / "model")
    group = ["--group", "32"] if format == "int4" else []
    said = run(tmp_path / "model", tmp_path / "out", "--format", format, *group)
    assert "wrote" in said
    asked = prompts(8)
    word = "int4:32" if format == "int4" else format
    due = tokens_of(rt.LLM(tmp_path / "model", weights=word, **ROOM), asked, GREEDY)
    assert tokens_of(rt.LLM(tmp_path / "out", **ROOM), asked, GREEDY) == due


@pytest.mark.parametrize("format", ["fp8", "fp8_tile", "int8", "w8", "int4", "mxfp8", "mxfp4", "nvfp4"])
def test_transformers_reads_the_folder(format: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="pip install compressed-tensors")
    plain(tmp_path / "model", hidden_size=128)
    run(tmp_path / "model", tmp_path / "out", "--format", format)
    # scales of block formats come as bf16, and of FP8 and INT8 they would be rounded to it
    dtype = torch.bfloat16 if format.startswith(("mx", "nv")) else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype)
    # its first call dequantises
    model(torch.arange(5)[None])
    for ours, layer in zip(Decoder.from_folder(tmp_path / "out").layers, model.model.layers, strict=True):
        due = torch.cat([part.weight for part in (layer.mlp.gate_proj, layer.mlp.up_proj)])
        assert torch.equal(ours.feed_forward.up.dequantised().to(dtype), due)
        assert torch.equal(ours.o.dequantised().to(dtype), layer.self_attn.o_proj.weight)


def test_shards(tmp_path: Path) -> None:
    model = plain(tmp_path / "model")
    for path in (tmp_path / "model").glob("*.safetensors"):
        path.unlink()
    saved(model, tmp_path / "model", max_shard_size="100KB")
    found = json.loads(run(tmp_path / "model", tmp_path / "out", "--format", "w8", "--json"))
    assert found["bytes_after"] < 0.6 * found["bytes_before"]
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    due = tokens_of(rt.LLM(tmp_path / "model", weights="w8", **ROOM), prompts(2), GREEDY)
    assert tokens_of(rt.LLM(tmp_path / "out", **ROOM), prompts(2), GREEDY) == due


def test_refusals(tmp_path: Path) -> None:
    plain(tmp_path / "model")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").write_text("")
    quantised("gptq", tmp_path / "gptq")
    saved(theirs("gpt2"), tmp_path / "gpt2")
    for arguments, sentence in (
        (("model", "out", "--format", "int4"), "_proj.weight cannot be quantised to int4"),
        (("model", "out2", "--format", "nvfp5"), "format is 'nvfp5'; must be one of fp8"),
        (("model", "full"), "is there already; give a new folder"),
        (("gptq", "out3"), "is quantised already; give the 16-bit checkpoint"),
        (("gpt2", "out4"), "GPT-2 keeps its weights the other way round"),
    ):
        folders = [str(tmp_path / each) for each in arguments[:2]]
        found = CliRunner().invoke(app, ["quantise", *folders, *arguments[2:]])
        assert found.exit_code != 0
        assert sentence in " ".join((found.output + str(found.exception)).split())
