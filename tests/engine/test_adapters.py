"""A folder with an adapter is refused by everything that loads a folder: without the adapter a model answers differently."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import save_file
from torch import zeros

import rooftile as rt
from rooftile.cli import main
from rooftile.models import Decoder, ModelConfig
from rooftile.models.checkpoints.write import quantise_folder
from rooftile.server.settings import ServerSettings
from rooftile.weights.files.folder import check_folder
from tests.engine.asking import ROOM

BESIDE = "has an adapter beside the model (adapter_config.json, adapter_model.safetensors), which is not read there: move"
ALONE = "has an adapter for someone/base and no model: give the model's folder, and this one as LLM(adapters="


def add_adapter(folder: Path) -> Path:
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "someone/base"}))
    save_file({"base_model.model.q_proj.lora_A.weight": zeros(2, 4)}, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture
def both(tmp_path: Path, peers) -> Path:
    return add_adapter(shutil.copytree(peers("llama").folder, tmp_path / "both"))


@pytest.fixture
def alone(tmp_path: Path) -> Path:
    (tmp_path / "alone").mkdir()
    return add_adapter(tmp_path / "alone")


def test_whatever_loads_a_folder_refuses_it(both: Path, alone: Path, tmp_path: Path) -> None:
    for folder, due in ((both, BESIDE), (alone, ALONE)):
        for load in (
            lambda folder: rt.LLM(folder, **ROOM), lambda folder: rt.LLM(str(folder), **ROOM, weights="int8"),
            Decoder.from_folder, ModelConfig.from_folder, check_folder, lambda folder: rt.plan(folder, rows={"decode": 1}),
            lambda folder: quantise_folder(folder, tmp_path / "out", "int8"),
        ):  # fmt: skip
            with pytest.raises(rt.InvalidInput) as raised:
                load(folder)
            assert str(raised.value).startswith(f"{folder} {due}")
    # nothing of it is refused without the adapter
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (both / name).unlink()
    assert Decoder.from_folder(both).config.layers == 3


@pytest.mark.parametrize(
    "words",
    [
        ("serve",), ("generate", "-p", "a"), ("plan",), ("quantise", "OUT"), ("calibrate", "--text", "TEXT"),
        ("accuracy", "--data", "TEXT"), ("bench", "serving", "--model"), ("diagnose", "--checkpoint"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_every_command_refuses_it(words: tuple[str, ...], both: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("a roof")
    words = tuple({"OUT": str(tmp_path / "out"), "TEXT": str(tmp_path / "text")}.get(word, word) for word in words)
    names = 2 if words[0] in ("bench", "diagnose") else 1
    names = len(words) if words[-1] in ("--model", "--checkpoint") else names
    with pytest.raises(SystemExit) as left:
        main([*words[:names], str(both), *words[names:]])
    assert left.value.code == 2
    assert f"rooftile: {both} {BESIDE}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapters.safetensors", "adapter_config.json"])
def test_one_file_of_an_adapter_is_enough(name: str, tmp_path: Path, peers) -> None:
    folder = shutil.copytree(peers("llama").folder, tmp_path / "model")
    (folder / name).write_text("{}")
    with pytest.raises(rt.InvalidInput, match=f"has an adapter beside the model \\({name}\\)"):
        check_folder(folder)
    assert ServerSettings(model=str(folder)).served_model_name == "model"
