"""Answers that the host steers: grammars, beams and bad words sit steps out, and the others go on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from rooftile.engine.llm import LLM
from rooftile.engine.sampling import grammar
from rooftile.engine.sampling.params import SamplingParams
from tests.engine.asking import ROOM, assert_clean
from tests.engine.folders import save
from tests.models.checkpoints import SMALL, saved

pytest.importorskip("llguidance", reason="llguidance is not installed")

SCHEMA = {
    "type": "object", "properties": {"name": {"type": "string", "maxLength": 6}, "tiles": {"type": "integer", "maximum": 99}},
    "required": ["name", "tiles"], "additionalProperties": False,
}  # fmt: skip
ASKED = {
    "free": SamplingParams(max_tokens=20, seed=1, ignore_eos=True),
    "schema": SamplingParams(max_tokens=40, seed=2, structured={"json": SCHEMA}),
    "greedy": SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, repetition_penalty=1.3),
    "regex": SamplingParams(max_tokens=30, seed=3, n=2, structured={"regex": "[a-f]{9}(stop|the)"}, top_p=0.9),
    "words": SamplingParams(max_tokens=20, seed=4, ignore_eos=True, bad_words=["the", "stop", "an"]),
    "beams": SamplingParams(beam_width=3, n=2, max_tokens=8, ignore_eos=True),
    "choice": SamplingParams(max_tokens=9, seed=5, structured={"choice": ["a", "stop", "naïve"]}, presence_penalty=0.5),
}
TEXTS = ["cat", "the stop", "naïve and a cat of tiles, the stop", "a", "roof of the cat", "cat cat", "stop"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("constrained")
    torch.manual_seed(0)
    # with more logits than the tokenizer has tokens
    config = transformers.LlamaConfig(**SMALL | {"vocab_size": 427, "initializer_range": 0.2})
    saved(transformers.AutoModelForCausalLM.from_config(config), path)
    return save("byte_level", path)


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[list[int]]]:
    """Returns the tokens of each request when nothing runs beside it, and nothing ahead."""
    llm = LLM(folder, **ROOM)
    asked = zip(TEXTS, ASKED.values(), strict=True)
    return [[answer.token_ids for answer in llm.generate(text, params)[0].outputs] for text, params in asked]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    "settings",
    [ROOM, ROOM | {"num_blocks": 8}, ROOM | {"max_batched_tokens": 7}],
    ids=["", "preempted", "in chunks"],
)
def test_all_get_the_tokens_that_they_get_alone(settings: dict, ahead: bool, folder: Path, alone) -> None:
    llm = LLM(folder, **settings)
    llm.engine._ahead = ahead
    outputs = llm.generate(TEXTS, list(ASKED.values()))
    assert [output.error for output in outputs] == [None] * len(TEXTS)
    assert [[answer.token_ids for answer in output.outputs] for output in outputs] == alone
    assert (llm.engine.scheduler.preemptions > 0) == (settings["num_blocks"] < 20)
    assert_clean(llm)
    said = json.loads(outputs[1].outputs[0].text)
    assert said.keys() == {"name", "tiles"}
    assert outputs[6].outputs[0].text in ("a", "stop", "naïve")


@pytest.mark.parametrize("name", ["schema", "words", "beams"])
def test_the_others_go_on_while_one_sits_out(name: str, folder: Path) -> None:
    llm = LLM(folder, **ROOM)
    engine = llm.engine
    engine._ahead = True
    free = engine.add([3, 4], SamplingParams(max_tokens=30, ignore_eos=True, seed=0))
    steered = engine.add([5, 6], ASKED[name])
    rows, run = [], engine.runner.run

    def recorded(plan):
        rows.append({work.answer.request for work in plan.work})
        return run(plan)

    engine.runner.run = recorded
    while not engine.idle:
        engine.step()
    assert [free in each for each in rows[:30]] == [True] * 30
    there = [steered in each for each in rows[:16]]
    assert there == [n % 2 == 0 for n in range(16)]


def test_one_that_runs_by_itself_loses_no_step(folder: Path) -> None:
    llm = LLM(folder, **ROOM)
    llm.engine._ahead = True
    (output,) = llm.generate("cat", SamplingParams(seed=2, max_tokens=40, structured={"json": SCHEMA}))
    assert llm.engine.steps["steps"] == len(output.outputs[0].token_ids)


def test_compiled_grammars_are_bounded_in_number_and_in_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = LLM(folder, **ROOM).engine.grammars
    assert grammars is not None
    for n in range(grammar.KEPT + 5):
        grammars.compile({"choice": [str(n)]})
    assert len(grammars._kept) == grammar.KEPT
    monkeypatch.setattr(grammar, "KEPT_BYTES", 5000 * grammar.BYTES_PER_CHARACTER)
    for n in range(5):
        grammars.compile({"regex": "a" * (2000 + n)})
    assert list(grammars._kept) == [json.dumps({"regex": "a" * (2000 + n)}) for n in (3, 4)]
    # one that is larger than the bound by itself is used, and not kept
    assert grammars.compile({"regex": "b" * 6000}).mask.any()
    assert not grammars._kept


def test_an_old_version_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(folder, **ROOM)
    for version in ("1.8.4", "0.7.30", "1.6.1rc2"):
        monkeypatch.setattr(grammar, "version", lambda name, version=version: version)
        answered, free = llm.generate(["cat", "cat"], [SamplingParams(structured={"regex": "[a-f]{9}"}), SamplingParams()])
        assert f"needs llguidance 1.9 or newer, and {version} is installed; pip install -U" in str(answered.error)
        assert free.error is None
    for version in ("1.9", "1.10.0rc1", "2.0"):
        grammar.check_version(version)


def allows(folder: Path, structured: dict, text: str) -> bool:
    """Whether a grammar lets an answer begin with a text."""
    llm = LLM(folder, **ROOM)
    assert llm.engine.grammars is not None
    place = llm.engine.grammars.compile(structured)
    for token in llm.get_tokenizer().encode(text, special=False):
        if not place.mask[token // 32] >> token % 32 & 1:
            return False
        place.take(token)
    return True


def test_classes_of_a_regex_are_those_of_a_pattern(folder: Path) -> None:
    """The digits and letters of ASCII: `\\d` let an Arabic three through, which no JSON schema's pattern has."""
    for regex, good, bad in (
        (r"\d", "3", "٣"), (r"[\d.]{2}", "3.", ".٣"), (r"\w\W", "a-", "é-"), (r"[^\W\d]", "a", "é"), (r"\D", "٣", "3"),
        (r"\\d", "\\d", "3"), (r"\p{L}", "é", "3"), (r"[\d&&1-4]", "4", "5"),
    ):  # fmt: skip
        assert allows(folder, {"regex": regex}, good), regex
        assert not allows(folder, {"regex": regex}, bad), regex
        if "&&" not in regex:
            schema = {"type": "string", "pattern": f"^{regex}$"}
            assert allows(folder, {"json": schema}, json.dumps(good, ensure_ascii=False)), regex


@pytest.mark.parametrize("schema", [True, {}, "true", {"type": "object", "x-guidance": {"whitespace_pattern": " *"}}])
def test_white_space_in_json_is_bounded(schema: object, folder: Path) -> None:
    for before in ("{", '{"a":'):
        for space in " \n":
            assert allows(folder, {"json": schema}, before + space * 20)
            assert not allows(folder, {"json": schema}, before + space * 21)
