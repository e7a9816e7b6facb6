"""The diagnosis of Rooftile's own engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from rooftile.cli.app import app
from rooftile.diagnosis.programs.diagnose_checkpoint import diagnose_checkpoint
from rooftile.errors import InvalidInput
from rooftile.models import Decoder, ModelConfig

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.LlamaConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=2, intermediate_size=96, vocab_size=50,
        max_position_embeddings=512,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def test_a_decode_step_and_a_prompt(folder: Path) -> None:
    decoder = Decoder.random(ModelConfig.from_folder(folder), torch.float32, "cpu")
    decoded, read = diagnose_checkpoint(decoder, batch=3, context=40, device="cpu", budget=1)
    assert decoded.program.step == "decode step of 3 answers of 40 tokens"
    assert read.program.step == "prompt of 40 tokens"
    for found, tokens in ((decoded, 3), (read, 40)):
        up = next(op for op in found.ops if op.module == "Decoder.layers.*.feed_forward.up" and op.op == "aten::mm")
        assert (up.calls, up.flops) == (3, 3 * 2 * tokens * 64 * 2 * 96)
        attention = next(op for op in found.ops if op.op == "rooftile::attention_paged")
        assert attention.calls == 3
        assert attention.flops
        assert found.uncounted == ()
    assert torch.is_inference_mode_enabled() is False


def test_the_command(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "step.json"
    words = ["diagnose", "--checkpoint", str(folder), "--batch", "2", "--context", "20", "--device", "cpu", "--budget", "0.3"]
    result = CliRunner().invoke(app, [*words, "--json", str(out)])
    assert result.exit_code == 0, result.output
    assert json.loads(out.read_text())["program"]["step"].startswith("decode step of 2")
    assert json.loads((tmp_path / "step-prompt.json").read_text())["program"]["step"] == "prompt of 20 tokens"


def test_bad_arguments(folder: Path) -> None:
    with pytest.raises(InvalidInput, match="batch is 0; must be at least 1"):
        diagnose_checkpoint(folder, batch=0)
    with pytest.raises(InvalidInput):
        diagnose_checkpoint(folder, context=5000, device="cpu")
    result = CliRunner().invoke(app, ["diagnose"])
    assert isinstance(result.exception, InvalidInput)
    assert "a script, --checkpoint FOLDER, --from TRACE or --tour; give one of them" in str(result.exception)
