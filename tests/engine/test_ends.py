"""An answer ends at every end of text that a checkpoint names, and at stop strings that are special tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rooftile.engine import LLM, SamplingParams
from tests.engine.asking import ROOM
from tests.engine.folders import core, save
from tests.models.checkpoints import SMALL

KINDS = ["byte_level", "byte_fallback", "unigram"]
PLAIN: dict[str, Any] = {"temperature": 0, "max_tokens": 6}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint with each tokenizer, whose config.json names no end of text."""
    found = {}
    for kind in KINDS:
        folder, size = tmp_path_factory.mktemp(kind), core(kind).get_vocab_size()
        sizes = {"vocab_size": size + 9, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SMALL | sizes)).save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        found[kind] = save(kind, folder)
    return found


@pytest.fixture(scope="module")
def llms(folders: dict[str, Path]) -> dict[str, LLM]:
    return {kind: LLM(folder, **ROOM) for kind, folder in folders.items()}


def spoken(llm: LLM, text: str, **params: Any) -> Any:
    """The answer of a model that says a text, token by token, and then ends of text."""
    tokenizer, prompt = llm.get_tokenizer(), [5, 6]
    ids = tokenizer.encode(text, special=False)
    grown: list[int] = []
    run = llm.engine.runner._sample

    def forced(logits: torch.Tensor, slots: Any, positions: torch.Tensor, features: Any) -> torch.Tensor:
        tokens = run(logits, slots, positions, features)
        for row, position in enumerate(positions.tolist()):
            place = position - len(prompt)
            tokens[row] = ids[place] if 0 <= place < len(ids) else tokenizer.eos_ids[0]
            grown.append(place)
        llm.engine.runner.sampling.last.index_copy_(0, slots, tokens)
        return tokens

    llm.engine.runner._sample = forced  # type: ignore[method-assign]
    try:
        params = PLAIN | {"max_tokens": len(ids) + 3} | params
        parts = [output.outputs[0] for _, output in llm.stream([prompt], SamplingParams(**params))]
    finally:
        del llm.engine.runner._sample
    assert grown, "the model was not asked"
    last = parts[-1]
    # what was shown stays
    assert all(last.text.startswith(part.text) for part in parts)
    return last


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_that_is_a_special_token_stops_and_is_not_shown(llms: dict[str, LLM], kind: str, skip: bool) -> None:
    llm = llms[kind]
    user = llm.get_tokenizer().encode("<|user|>", special=False)[-1]
    plain = spoken(llm, "the stop 日本<|user|>more", skip_special_tokens=skip)
    last = spoken(llm, "the stop 日本<|user|>more", stop=["<|user|>"], skip_special_tokens=skip)
    assert (last.finish_reason, last.stop_reason) == ("stop", "<|user|>")
    assert last.text.endswith("the stop 日本")
    assert plain.text.startswith(last.text)
    assert last.token_ids == plain.token_ids[: plain.token_ids.index(user)]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", ["<|user|>", "p<|user|>", "<|user|>m", "p<|user|>m"])
def test_a_stop_string_with_a_special_token_in_it(llms: dict[str, LLM], kind: str, skip: bool, stop: str) -> None:
    """include_stop shows the whole stop string: it was asked for by its name."""
    # sentencepiece writes a space behind a special token: the vocabulary's "m" has none
    hidden = spoken(llms[kind], "the stop<|user|>more", stop=stop, skip_special_tokens=skip)
    if kind != "byte_level" and stop.endswith("m"):
        assert hidden.stop_reason is None
        return
    shown = spoken(llms[kind], "the stop<|user|>more", stop=stop, skip_special_tokens=skip, include_stop=True)
    before = "the stop"[: len("the stop") - stop.startswith("p")]
    assert (hidden.text.lstrip(), hidden.stop_reason) == (before, stop)
    assert (shown.text.lstrip(), shown.stop_reason) == (before + stop, stop)


def test_text_that_was_held_back_for_another_stop_string(llms: dict[str, LLM]) -> None:
    for stop, due in (("p<|user|>m", "ab the sto"), ("<|user|><|user|>m", "ab the stop"), ("<|user|>", "ab the stop")):
        last = spoken(llms["byte_level"], "ab the stop<|user|>" + stop.removeprefix("p<|user|>"), stop=["the stopped", stop])
        assert (last.text, last.stop_reason) == (due, stop)


@pytest.mark.parametrize("kind", KINDS)
def test_other_stop_strings_do_not_see_what_is_hidden(llms: dict[str, LLM], kind: str) -> None:
    last = spoken(llms[kind], "the stop<|user|>more", stop=["user", "|>", "<|", "p<"])
    assert (last.finish_reason, last.stop_reason) == ("stop", None)
    assert last.text.replace(" ", "") == "thestopmore"


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_that_is_the_end_of_text(llms: dict[str, LLM], kind: str, include: bool, skip: bool) -> None:
    asked = {"stop": ["x", "<|end|>"], "include_stop": include, "skip_special_tokens": skip}
    last = spoken(llms[kind], "the stop", **asked)
    assert last.text.lstrip() == "the stop" + ("<|end|>" if include else "")
    assert (last.finish_reason, last.stop_reason) == ("stop", "<|end|>" if include else None)
    assert last.token_ids[-1] == llms[kind].get_tokenizer().eos_ids[0]
    # without that stop string nobody sees an end of text, and include_stop is about stop strings
    assert spoken(llms[kind], "the stop", stop=["x"], include_stop=include).text.lstrip() == "the stop"


def test_min_tokens_hold_for_special_stop_strings(llms: dict[str, LLM]) -> None:
    llm = llms["byte_level"]
    text = "a<|user|>b<|user|>c"
    for least, due in ((0, "a"), (1, "a"), (2, "ab"), (3, "ab"), (4, "abc")):
        last = spoken(llm, text, stop="<|user|>", min_tokens=least)
        assert last.text == due, least


@pytest.mark.parametrize("source", ["tokenizer", "generation_config.json", "config.json", "another tokenizer's folder"])
def test_every_end_of_text_that_a_checkpoint_names_counts(folders: dict[str, Path], tmp_path: Path, source: str) -> None:
    folder, more = folders["byte_level"], {}
    settings: dict[str, Any] = json.loads((folder / "config.json").read_text())
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    end = 77
    if source == "config.json":
        (tmp_path / "config.json").write_text(json.dumps(settings | {"eos_token_id": [end, 9]}))
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 78}))
    elif source == "generation_config.json":
        (tmp_path / "config.json").write_text(json.dumps(settings | {"eos_token_id": 78}))
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, end]}))
    elif source == "tokenizer":
        (tmp_path / "config.json").write_text(json.dumps(settings | {"eos_token_id": 78}))
        end = core("byte_level").token_to_id("<|end|>")
    else:
        end = core("byte_fallback").token_to_id("<|end|>")
        more["tokenizer"] = folders["byte_fallback"]
    llm = LLM(tmp_path, **ROOM, **more)
    for params, due in (({}, ["stop", 1]), ({"ignore_eos": True}, ["length", 6]), ({"min_tokens": 3}, ["stop", 4])):
        # the only tokens: an end of text, and one that is none
        asked = PLAIN | params | {"allowed_token_ids": [end, 99], "logit_bias": {end: 100.0}}
        (output,) = llm.generate([[5, 6]], SamplingParams(**asked))
        answer = output.outputs[0]
        assert [answer.finish_reason, len(answer.token_ids)] == due
        assert answer.token_ids[-1] == end
