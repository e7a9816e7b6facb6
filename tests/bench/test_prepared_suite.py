"""The suite of prepared training steps: every contestant takes the steps of the model in 16 bits, or says why not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from rooftile.qat.prepared.layers import Prepared
from rooftile_lab.bench.suites import SUITES, prepared
from tests.bench.session import SESSION


def test_steps_of_a_tiny_model_are_timed_beside_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "PREPARED", {name: prepared.PREPARED[name] for name in ("int4-2:4", "fp8")})
    monkeypatch.setattr(prepared, "CONTESTANTS", ("int4-2:4", "fp8", "torchao-int4"))
    monkeypatch.setattr(prepared, "find_spec", lambda name: None)
    recipe = prepared.RECIPES["tiny-llama-2x64"]
    rows = list(SUITES["prepared"].run(SESSION))
    names = ["bf16", "int4-2:4", "fp8", "torchao-int4"]
    assert [(row.backend, row.phase) for row in rows] == [(name, phase) for name in names for phase in ("step", "fwd+bwd")]
    for row in rows:
        if row.backend == "torchao-int4":
            assert (row.reason, row.samples) == ("refused: torchao is not installed", None)
            continue
        assert row.samples == recipe.steps * (1 if row.backend == "bf16" else recipe.rounds)
        assert row.measures["tok_s"] == pytest.approx(128 / row.median_us * 1e6, rel=1e-4)
        assert (row.measures["step_ratio"] == 1.0) or row.backend != "bf16"
        assert row.measures["step_ratio"] > 0


@pytest.mark.parametrize("name", ["bf16", "int4", "2:4"])
def test_a_trainee_is_prepared_and_learns(name: str) -> None:
    recipe = prepared.RECIPES["tiny-llama-2x64"]
    batch = prepared.batch_of(recipe, SESSION.device)
    trainee = prepared.Trainee(name, recipe, SESSION, batch)
    layers = [layer for layer in trainee.model.modules() if isinstance(layer, Prepared)]
    # seven products in each of two layers; the head stays
    assert len(layers) == (0 if name == "bf16" else 14)
    assert all(layer.qat.steps >= 3 for layer in layers)
    assert trainee.most_bytes is None
    first = trainee.loss.item()
    trainee.train(4)
    assert trainee.loss.item() < first


@pytest.mark.parametrize("name", [name for name in prepared.CONTESTANTS if name.startswith("torchao")])
def test_what_torchao_is_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torchao is not installed: its names are those of version 0.18, and what they are given is looked at."""
    asked: list[Any] = []

    def record(*arguments: Any, **named: Any) -> Any:
        asked.append((arguments, named))
        return named

    config = {"IntxFakeQuantizeConfig": record, "Float8FakeQuantizeConfig": record, "QATConfig": record}
    layers: list[str] = []
    model = nn.Sequential()
    model.add_module("up", nn.Linear(4, 4))
    model.add_module("lm_head", nn.Linear(4, 4))

    def quantize_(model: nn.Module, config: Any, *, filter_fn: Any) -> None:
        assert config["step"] == "prepare"
        layers.extend(name for name, layer in model.named_modules() if filter_fn(layer, name))

    found = {"torchao.quantization": SimpleNamespace(quantize_=quantize_), "torchao.quantization.qat": SimpleNamespace(**config)}
    monkeypatch.setattr(prepared, "import_module", found.__getitem__)
    compiled: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda model: compiled.append(model))
    prepared.prepare(model, name)
    assert layers == ["up"]
    assert compiled == ([model] if name.endswith("compiled") else [])
    activations = asked[-1][1].get("activation_config")
    assert (activations is None) == ("int4" in name)
    dtypes = [arguments[0] for arguments, _ in asked if arguments]
    assert dtypes == {"int4": [torch.int4], "int8": [torch.int8] * 2, "fp8": []}[name.split("-")[1]]


def test_a_torchao_that_does_not_load_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Any:
        raise ImportError("undefined symbol\nmore")

    monkeypatch.setattr(prepared, "find_spec", lambda name: object())
    monkeypatch.setattr(prepared, "import_module", fail)
    assert prepared.lack_of("torchao-fp8") == "refused: torchao does not load (undefined symbol)"
    assert prepared.lack_of("fp8") == ""


@pytest.mark.parametrize(
    ("name", "error", "due"),
    [
        ("fp8", torch.OutOfMemoryError("no room\nmore"), "refused: OutOfMemoryError (no room)"),
        ("torchao-fp8", RuntimeError("its compiler"), "refused: RuntimeError (its compiler)"),
        ("fp8", RuntimeError("ours"), None),
    ],
)  # fmt: skip
def test_only_peers_and_full_memory_become_reasons(
    name: str, error: RuntimeError, due: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(model: nn.Module, contestant: str) -> None:
        if contestant != "bf16":
            raise error

    monkeypatch.setattr(prepared, "prepare", fail)
    monkeypatch.setattr(prepared, "lack_of", lambda contestant: "")
    monkeypatch.setattr(prepared, "CONTESTANTS", (name,))
    if due is None:
        with pytest.raises(RuntimeError, match="ours"):
            list(SUITES["prepared"].run(SESSION))
        return
    assert [row.reason for row in SUITES["prepared"].run(SESSION)] == ["", "", due, due]
