"""A budget costs nothing where it is not due, and answers with drafts close their thoughts as answers without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rooftile.engine import LLM, SamplingParams
from rooftile.engine.requests.output import RequestOutput
from rooftile.engine.speculation import speculator
from rooftile.engine.steps.step import Step
from tests.engine.asking import assert_clean
from tests.engine.chat.test_thought_matcher import TEMPLATE
from tests.engine.chat.test_thought_matcher import speaker as speaker
from tests.engine.test_speculation import ALWAYS, Oracle, told, whole
from tests.server.harmony import harmony_folder

OPENED = "<|user|>the stop<|end|><|user|><think>"
CHANNEL = "<|start|>user<|message|>the stop<|end|><|start|>assistant<|channel|>analysis<|message|>"
ROOM = {"device": "cpu", "max_model_len": 256, "num_blocks": 200}


@pytest.fixture(scope="module", params=["think", "harmony"])
def served(request: Any, speaker: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Any], str, str]]:
    """The keywords of a model, a prompt that ends in a thought, and what closes it."""
    if request.param == "think":
        yield {"model": speaker, "chat_template": TEMPLATE}, OPENED, "\n</think>\n\n"
    else:
        folder = harmony_folder(tmp_path_factory.mktemp("channels") / "tiny")
        yield {"model": folder}, CHANNEL, "<|end|><|start|>assistant<|channel|>"


def made(served: Any, **settings: Any) -> LLM:
    words = dict(served[0])
    return LLM(words.pop("model"), **ROOM | words | settings)


def steps_of(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    found: list[Step] = []
    execute = llm.engine.runner.execute

    def noting(step: Step) -> Any:
        found.append(step)
        return execute(step)

    monkeypatch.setattr(llm.engine.runner, "execute", noting)
    return found


@pytest.mark.parametrize("ahead", [False, True])
def test_masks_are_sent_where_tokens_are_forced(served: Any, ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = made(served)
    llm.engine._ahead = ahead
    own, prompt = llm.get_tokenizer(), served[1]
    ids, closing = own.encode(prompt, special=False), own.encode(served[2], special=False)
    steps = steps_of(llm, monkeypatch)
    params = SamplingParams(temperature=0, max_tokens=60, thinking_token_budget=12, ignore_eos=True)
    (output,) = llm.generate([ids], params)
    (answer,) = output.outputs
    place = next(n for n in range(13) if answer.token_ids[n : n + len(closing)] == closing)
    # a thought's own channel is none that may be opened behind it
    due = len(closing) + (served[1] is CHANNEL)
    assert place == 12
    # a mask for each token that is forced, and one that frees the rest; no step computes with one before or after
    assert sum(len(step.masks) for step in steps) == due + 1
    assert sum(step.features.mask for step in steps) == due
    assert len(steps) >= 60
    steps.clear()
    # one that is not spent sends none
    free = llm.generate([ids], SamplingParams(temperature=0, max_tokens=30, thinking_token_budget=100, ignore_eos=True))
    assert sum(len(step.masks) for step in steps) == sum(step.features.mask for step in steps) == 0
    assert free[0].outputs[0].token_ids[:12] == answer.token_ids[:12]
    # a slot that had a mask is free for the next answer
    llm.generate([ids], SamplingParams(temperature=0, max_tokens=13, thinking_token_budget=12, ignore_eos=True))
    again = llm.generate([ids], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    assert again[0].outputs[0].token_ids == free[0].outputs[0].token_ids


def asked(count: int) -> list[SamplingParams]:
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 0}, {"seed": 1, "n": 2}, {"temperature": 0, "frequency_penalty": 0.4}, {"seed": 3, "logprobs": 1},
        {"seed": 4, "thinking_token_budget": None}, {"temperature": 0, "thinking_token_budget": 0},
    )  # fmt: skip
    usual = {"max_tokens": 30, "ignore_eos": True, "thinking_token_budget": 9}
    return [SamplingParams(**usual | kinds[n % len(kinds)]) for n in range(count)]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("blocks", [200, 9])
def test_drafts_change_no_token(served: Any, blocks: int, ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and sampled, also where answers are preempted and begin again within their thoughts."""
    count = 12
    plain = made(served)
    own = plain.get_tokenizer()
    asks = [own.encode(served[1] + word, special=False) for word in ("", "a cat", " of strings")] * 4
    due: list[RequestOutput] = plain.generate(asks, asked(count))
    closing = own.encode(served[2], special=False)
    for output, params in zip(due, asked(count), strict=True):
        for answer in output.outputs if params.thinking_token_budget is not None else ():
            assert any(answer.token_ids[n : n + len(closing)] == closing for n in range(params.thinking_token_budget + 1))
    monkeypatch.setattr(speculator, "NgramIndex", Oracle)
    # some guesses know nothing of the budget
    free = plain.generate(asks, [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)] * count)
    monkeypatch.setattr(Oracle, "known", (*whole(due), *whole(due), *whole(free)))
    llm = made(served, speculative=ALWAYS, num_blocks=blocks, max_model_len=96)
    llm.engine._ahead = ahead
    assert told(llm.generate(asks, asked(count))) == told(due)
    counts = llm.engine.speculator.counts
    assert 0 < counts["accepted"] < counts["drafted"]
    assert (llm.engine.scheduler.preemptions > 0) == (blocks == 9)
    assert_clean(llm)
