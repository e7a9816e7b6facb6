"""Models by their name on the Hub, and the sampling parameters that a checkpoint recommends."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import shutil
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from rooftile.cli import main
from rooftile.engine import LLM, AsyncEngine, SamplingParams
from rooftile.engine.start.checkpoint import FILES, find_folder
from rooftile.errors import InvalidInput
from tests.engine.asking import GREEDY, ROOM, tokens_of

NAME = "someone/tiny-llama"
MISSING = f"{NAME} is neither a folder nor in the Hugging Face Hub's cache here; run `hf download {NAME}`, or give download=True"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the Hub, without a network behind it."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def test_a_name_is_looked_up_in_the_cache(cache: Path, peers) -> None:
    with pytest.raises(InvalidInput) as raised:
        LLM(NAME, **ROOM)
    assert str(raised.value) == MISSING
    folder = peers("llama").folder
    snapshot = cache / "models--someone--tiny-llama" / "snapshots" / "c0ffee"
    shutil.copytree(folder, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("c0ffee")
    llm = LLM(NAME, **ROOM)
    assert repr(llm).startswith(f"LLM({NAME}: llama in float32")
    assert tokens_of(llm, [[1, 2]], GREEDY) == tokens_of(LLM(folder, **ROOM), [[1, 2]], GREEDY)


def test_only_download_downloads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    (tmp_path / "config.json").write_text("{}")
    asked, answers = [], [tmp_path, LocalEntryNotFoundError("offline"), OSError("no\nroute")]

    def snapshot_download(name: str, **given) -> str:
        asked.append((name, given))
        answer = answers[len(asked) - 1]
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert find_folder(NAME, download=True) == tmp_path
    assert asked == [(NAME, {"local_files_only": False, "allow_patterns": list(FILES)})]
    assert not any(pattern.endswith((".bin", ".py", "*")) for pattern in FILES)
    for sentence in ("cannot be downloaded: the Hugging Face Hub does not answer", "cannot be downloaded: no route"):
        with pytest.raises(InvalidInput, match=sentence):
            find_folder(NAME, download=True)
    answers.append(LocalEntryNotFoundError("not there"))
    with pytest.raises(SystemExit) as left:
        main(["generate", NAME, "-p", "a", "--device", "cpu"])
    assert left.value.code == 2
    assert MISSING.replace("download=True", "--download") in capsys.readouterr().err
    assert asked[-1][1]["local_files_only"] is True
    answers.append(tmp_path)
    with pytest.raises(SystemExit):
        main(["generate", NAME, "-p", "a", "--device", "cpu", "--download"])
    assert asked[-1][1]["local_files_only"] is False


@pytest.mark.parametrize("model", ["nowhere", "../a/b", "/a/b", "a/b/c", Path("a/b"), "~/b"])
def test_a_path_is_no_name(model: str | Path, cache: Path) -> None:
    with pytest.raises(InvalidInput, match=f"^{re.escape(str(model))} is not a folder; give one with config.json"):
        find_folder(model, download=True)


def test_a_folder_is_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert find_folder("a/b", download=True) == Path("a/b")


@pytest.fixture
def folder(tmp_path: Path, peers) -> Path:
    folder = shutil.copytree(peers("llama").folder, tmp_path / "model")
    said = {"temperature": 0.6, "top_p": 0.8, "top_k": 5, "repetition_penalty": None, "max_new_tokens": 3, "eos_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(said))
    return folder


def test_recommended_parameters_are_taken_and_told_once(folder: Path, caplog) -> None:
    due = SamplingParams(temperature=0.6, top_p=0.8, top_k=5)
    llm = LLM(folder, **ROOM, seed=4)
    with caplog.at_level(logging.WARNING):
        found = [llm.generate([1, 2, 3])[0].outputs[0].token_ids for _ in range(2)]
        assert llm.get_default_sampling_params() == due
    (told,) = caplog.messages
    assert told == (
        f"generation_config.json of {folder} gives requests without SamplingParams temperature=0.6, top_p=0.8, top_k=5, "
        'min_p=0.0, repetition_penalty=1.0; generation_config="none" turns this off'
    )
    again = LLM(folder, **ROOM, seed=4)
    assert [again.generate([1, 2, 3], due)[0].outputs[0].token_ids for _ in range(2)] == found

    async def ask() -> list[int]:
        async with AsyncEngine(LLM(folder, **ROOM, seed=4)) as engine:
            return (await engine.complete([1, 2, 3])).outputs[0].token_ids

    assert asyncio.run(ask()) == found[0]


def test_what_is_recommended_and_not_applied_is_told(folder: Path, caplog) -> None:
    said = {"suppress_tokens": [3, 4], "stop_strings": ["end"], "no_repeat_ngram_size": 3, "typical_p": 1.0, "min_length": None}
    (folder / "generation_config.json").write_text(json.dumps({"min_p": 0.2} | said))
    with caplog.at_level(logging.WARNING):
        assert LLM(folder, **ROOM)._default_params == SamplingParams(min_p=0.2)
    assert caplog.messages == [
        f"{folder / 'generation_config.json'}: not applied: suppress_tokens, stop_strings, no_repeat_ngram_size; "
        "SamplingParams have logit_bias for suppress_tokens, stop for stop_strings"
    ]
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        LLM(folder, **ROOM, generation_config="none")
    assert not caplog.messages


def test_recommended_parameters_are_turned_off_and_checked(folder: Path, caplog) -> None:
    llm = LLM(folder, **ROOM, generation_config="none")
    with caplog.at_level(logging.WARNING):
        assert llm.get_default_sampling_params() == SamplingParams()
    assert not caplog.messages
    (folder / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(InvalidInput, match=r"generation_config.json: temperature is 'hot'; must be .*; correct it, or give gen"):
        LLM(folder, **ROOM)
    assert LLM(folder, **ROOM, generation_config="none")
    with pytest.raises(InvalidInput, match="generation_config is 'vllm'; must be"):
        LLM(folder, generation_config="vllm")
