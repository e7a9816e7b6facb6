"""A thought is closed when its tokens are spent, and a grammar begins behind it: on masks alone, and in an engine."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import AddedToken

from rooftile.engine import LLM, SamplingParams
from rooftile.engine.chat.parts import PlainReader, read_whole
from rooftile.engine.chat.thinking import ThoughtReader
from rooftile.engine.chat.thought_formats import FORMATS, HARMONY, Stage, ThoughtFormat
from rooftile.engine.sampling.steering import allows, mask_of, mask_without
from rooftile.engine.sampling.thought_matcher import ThoughtMatcher
from rooftile.engine.text.tokenizer import Tokenizer
from rooftile.errors import InvalidInput
from tests.engine.folders import core, save

BLOCKS = [form for form in FORMATS if form is not HARMONY]
BY_NAME = {form.name: form for form in FORMATS}
THINK, GRANITE = BY_NAME["think"], BY_NAME["granite"]
SPARE = 5
END = "<|end|>"


class Letters:
    """A grammar of one text, token by token."""

    def __init__(self, tokenizer: Tokenizer, text: str, vocabulary: int) -> None:
        self.left, self.vocabulary, self.free = tokenizer.encode(text, special=False), vocabulary, 0

    @property
    def over(self) -> bool:
        return not self.left

    @property
    def mask(self) -> Any:
        return mask_of(self.left[:1], self.vocabulary)

    def fork(self) -> Letters:
        other = copy.copy(self)
        other.left = [*self.left]
        return other

    def take(self, token: int) -> None:
        assert token == self.left.pop(0), "the grammar got a token that it does not have"


def made(single: bool = True) -> Tokenizer:
    """A tokenizer in which the marks are tokens, or spelt."""
    tokens = core("byte_level")
    if single:
        tokens.add_tokens([AddedToken("</think>", special=False, normalized=False)])
    return Tokenizer(tokens, named={"eos_token": END})


def matcher(
    own: Tokenizer, *, form: ThoughtFormat = THINK, stage: Stage = "inside", budget: int | None = None, grammar: str | None = None
) -> ThoughtMatcher:
    vocabulary = own.vocab_size + SPARE
    follows = None if grammar is None else Letters(own, grammar, vocabulary)
    return ThoughtMatcher(
        own, form, stage, own.encode("<|user|>why <think>\n", special=False), vocabulary=vocabulary,
        ends=frozenset(own.eos_ids), budget=budget, grammar=follows,
    )  # fmt: skip


def walk(
    steered: ThoughtMatcher, own: Tokenizer, said: str, *, most: int = 60, seed: int | None = None
) -> tuple[list[int], list[int]]:
    """The tokens of a model that says a text while it may, and otherwise the first token that may come, or any with a seed.

    Returns them with the numbers of tokens that were free before each.
    """
    wanted, draw = own.encode(said, special=False), random.Random(seed)
    found: list[int] = []
    free: list[int] = []
    while len(found) < most and not steered.over:
        allowed = np.flatnonzero(np.unpackbits(steered.mask.view(np.uint8), bitorder="little")).tolist()
        assert allowed
        assert max(allowed) < own.vocab_size + SPARE
        if wanted and allows(steered.mask, wanted[0]):
            token = wanted.pop(0)
        elif wanted or seed is None:
            token = allowed[0] if len(allowed) == 1 or seed is None else draw.choice(allowed)
        else:
            token = draw.choice([each for each in allowed if each not in own.eos_ids])
        free.append(steered.free)
        steered.take(token)
        found.append(token)
        if not wanted and seed is None and steered.free > 1000:
            break
    return found, free


def split(own: Tokenizer, ids: list[int], form: ThoughtFormat = THINK, stage: Stage = "inside") -> tuple[str, str]:
    answer = read_whole(ThoughtReader(form, stage, PlainReader()), own.decode(ids, skip_special=False))
    return answer.thought, answer.content


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("budget", [0, 1, 7, 30])
def test_a_budget_closes_the_thought(single: bool, budget: int) -> None:
    own, said = made(single), "the stop string stops the stream of strings and never ends " * 4
    ids, free = walk(matcher(own, budget=budget), own, said)
    thought = own.encode(said, special=False)[:budget]
    closing = own.encode("\n</think>\n\n", special=False)
    assert ids[: budget + len(closing)] == thought + closing
    assert split(own, ids)[0] == own.decode(thought).strip()
    # free tokens need not wait for the ones before them, and behind the thought all are free
    assert free[:budget] == list(range(budget, 0, -1))
    assert set(free[budget : budget + len(closing)]) == {0}
    assert all(each > 10**6 for each in free[budget + len(closing) :])


def test_a_thought_that_ends_in_time_is_left_alone() -> None:
    own, said = made(), "the stop</think>string " * 3
    steered = matcher(own, budget=8)
    ids, free = walk(steered, own, said)
    assert ids == own.encode(said, special=False)[: len(ids)]
    assert free[-1] > 10**6


def test_a_mark_that_the_model_has_begun_is_completed() -> None:
    own = made(single=False)
    said = "ab cd</thi"
    budget = len(own.encode(said, special=False))
    ids, _ = walk(matcher(own, budget=budget), own, said + "x")
    assert own.decode(ids).startswith("ab cd</think>\n\n")


@pytest.mark.parametrize("said", ["<think>the stop string stops the stream", "the stop string"])
def test_a_budget_counts_from_where_the_model_opens_its_thought(said: str) -> None:
    own = made()
    ids, free = walk(matcher(own, stage="before", budget=2), own, said, most=20)
    if said.startswith("<"):
        assert ids[:3] == own.encode(said, special=False)[:3]
        assert own.decode(ids[3:]).startswith("\n</think>")
        assert free[:4] == [3, 2, 1, 0]
    else:
        assert ids[:3] == own.encode(said, special=False)[:3]
        assert free[0] == 3
        assert free[-1] > 10**6


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize(("stage", "opening"), [("inside", ""), ("before", "<think>\n")])
def test_a_grammar_begins_behind_the_thought(single: bool, stage: Stage, opening: str) -> None:
    own, content = made(single), "cd 12"
    said = f"{opening}ab! any words</think>\n\n{content}"
    ids, free = walk(matcher(own, stage=stage, grammar=content), own, said)
    assert split(own, ids, stage=stage) == ("ab! any words", content)
    assert set(free) == {0}
    # without spaces behind the mark
    said = said.replace("\n\n", "")
    assert split(own, walk(matcher(own, stage=stage, grammar=content), own, said)[0], stage=stage) == ("ab! any words", content)


def test_without_a_thought_the_grammar_has_the_whole_answer() -> None:
    own = made()
    steered = matcher(own, stage="before", grammar="cd 12")
    assert allows(steered.mask, own.encode("<think>", special=False)[0])
    assert not allows(steered.mask, own.encode("x", special=False)[0])
    ids, _ = walk(steered, own, "cd 12")
    assert own.decode(ids) == "cd 12"


def test_a_grammar_keeps_its_own_beginning() -> None:
    """The grammar decides about a text that begins like a mark, where it allows the same token."""
    own = made()
    ids, _ = walk(matcher(own, form=GRANITE, stage="before", grammar="Here is my dog"), own, "Here is my dog")
    assert own.decode(ids) == "Here is my dog"
    said = "Here is my thought process: ab\nHere is my response: cd"
    ids, _ = walk(matcher(own, form=GRANITE, stage="before", grammar="cd"), own, said)
    assert split(own, ids, GRANITE, "before") == ("ab", "cd")


def test_the_end_of_text_ends_no_thought_before_a_grammar() -> None:
    own = made()
    (end,) = own.eos_ids
    steered = matcher(own, grammar="ab")
    assert not allows(steered.mask, end)
    assert allows(matcher(own, budget=3).mask, end)
    for token in own.encode("x</think>", special=False):
        steered.take(token)
    assert not allows(steered.mask, end)


@pytest.mark.parametrize("form", BLOCKS, ids=lambda form: form.name)
@pytest.mark.parametrize("seed", range(4))
def test_random_models(form: ThoughtFormat, seed: int) -> None:
    """Whatever a model draws, the thought is closed in time, and the content is the grammar's."""
    own, budget = made(single=seed % 2 == 0), (0, 3, 11, 20)[seed]
    steered = matcher(own, form=form, budget=budget, grammar="cd 12")
    ids, _ = walk(steered, own, "", most=200, seed=seed)
    assert steered.over
    closing = len(own.encode(form.close, special=False))
    assert len(ids) <= budget + closing + len(own.encode("cd 12", special=False)) + 1
    assert split(own, ids, form)[1] == "cd 12"


@pytest.mark.parametrize("single", [True, False])
def test_a_fork_changes_nothing_in_its_origin(single: bool) -> None:
    """Drafts walk along a fork; the answer then takes the same tokens, or others."""
    own = made(single)
    steered, alone = (matcher(own, budget=5, grammar="cd 12") for _ in range(2))
    for token in walk(matcher(own, budget=5, grammar="cd 12"), own, "the stop string stops the stream cd 12")[0]:
        ahead = steered.fork()
        for _ in range(3):
            if not ahead.over:
                ahead.take(int(np.flatnonzero(np.unpackbits(ahead.mask.view(np.uint8), bitorder="little"))[0]))
        assert (steered.mask == alone.mask).all()
        steered.take(token)
        alone.take(token)
    assert steered.over
    assert alone.over


def test_masks() -> None:
    for size in (31, 32, 33, 64, 100):
        some = {0, size // 2, size - 1}
        mask, rest = mask_of(some, size), mask_without(some, size)
        assert [allows(mask, token) for token in range(size)] == [token in some for token in range(size)]
        assert [allows(rest, token) for token in range(size)] == [token not in some for token in range(size)]
        assert int(np.unpackbits(rest.view(np.uint8)).sum()) == size - len(some)


TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}<|user|>{{ '<think>' if thinking else '</think>' }}"
)
ASKED = [{"role": "user", "content": "the stop"}]
ON = {"chat_template_kwargs": {"thinking": True}}
SIZES = {"device": "cpu", "max_model_len": 512, "chat_template": TEMPLATE}


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer."""
    folder, tokens = tmp_path_factory.mktemp("speaker"), core("byte_level")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=tokens.get_vocab_size() + SPARE, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=512, initializer_range=0.2, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return save("byte_level", folder)


@pytest.fixture(scope="module")
def llm(speaker: Path) -> LLM:
    return LLM(speaker, num_blocks=200, **SIZES)


def told(output: Any) -> list[tuple[str | None, str | None]]:
    return [(one.reasoning, one.content) for one in output.outputs]


@pytest.mark.parametrize(("chance", "ahead"), [({"temperature": 0}, True), ({"seed": 5}, False)])
def test_answers_with_a_budget_and_a_grammar(
    llm: LLM, chance: dict[str, Any], ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.engine, "_ahead", ahead)
    pytest.importorskip("llguidance")
    choice = ["yes", "no, never"]
    params = SamplingParams(
        n=3, max_tokens=60, thinking_token_budget=6, structured={"choice": choice}, logprobs=1, **chance
    )  # fmt: skip
    (output,) = llm.chat(ASKED, params, **ON)
    closing = llm.get_tokenizer().encode("\n</think>\n\n", special=False)
    for one in output.outputs:
        assert one.content in choice
        assert one.finish_reason == "stop"
        assert one.token_ids[6 : 6 + len(closing)] == closing
        assert len(one.logprobs) == len(one.token_ids)
    # the same answers one by one, and where there is no room for all: answers are preempted, and begin again
    narrow = LLM(llm.model, num_blocks=7, **SIZES | {"max_model_len": 96})
    outputs = narrow.chat([ASKED] * 2, params, **ON)
    assert narrow.engine.scheduler.preemptions > 0
    assert [told(each) for each in outputs] == [told(output)] * 2
    # without its thought the grammar has the whole answer; a prompt of `generate` has no thought that is free
    (off,) = llm.chat(ASKED, params)
    assert {one.reasoning for one in off.outputs} == {None}
    assert all(one.text in choice for one in off.outputs)
    (raw,) = llm.generate(output.prompt_token_ids and [output.prompt_token_ids], SamplingParams(structured={"choice": choice}))
    assert raw.outputs[0].text in choice


@pytest.mark.parametrize("ahead", [False, True])
def test_a_budget_without_a_grammar(llm: LLM, ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a step is launched before the tokens of the step before it are known, as on a GPU."""
    monkeypatch.setattr(llm.engine, "_ahead", ahead)
    free = llm.chat(ASKED, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), **ON)[0].outputs[0]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, thinking_token_budget=6)
    streamed = [each.outputs[0].token_ids for _, each in llm.stream([llm.get_tokenizer().chat(ASKED, **ON)], params)]
    (output,) = llm.chat(ASKED, params, **ON)
    ids = output.outputs[0].token_ids
    closing = llm.get_tokenizer().encode("\n</think>\n\n", special=False)
    assert ids[:6] == free.token_ids[:6]
    assert ids[6 : 6 + len(closing)] == closing
    assert (len(ids), streamed[-1]) == (40, ids)
    assert output.outputs[0].content
    # one that is not spent changes nothing
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, thinking_token_budget=1000)
    assert llm.chat(ASKED, params, **ON)[0].outputs[0].token_ids == free.token_ids


def test_what_does_not_go_together(llm: LLM, speaker: Path) -> None:
    with pytest.raises(InvalidInput, match="thinking_token_budget is 3 with beam_width 2; a search closes no thought"):
        SamplingParams(beam_width=2, thinking_token_budget=3)
    with pytest.raises(InvalidInput, match="thinking_token_budget is -2; must be a whole number of at least 0"):
        SamplingParams(thinking_token_budget=-2)
    assert SamplingParams(thinking_token_budget=-1).thinking_token_budget is None
    own = llm.get_tokenizer()
    closing = own.encode("\n</think>\n\n", special=False)
    params = SamplingParams(max_tokens=20, thinking_token_budget=2, logit_bias={closing[0]: -float("inf")})
    one = llm.chat(ASKED, params, **ON)[0].outputs[0]
    assert (one.finish_reason, one.stop_reason) == (
        "abort",
        "every token is forbidden here, by logit_bias and thinking_token_budget",
    )
    none = LLM(speaker, num_blocks=20, device="cpu")
    assert "the model marks no thoughts" in none.generate("a", SamplingParams(thinking_token_budget=2))[0].error
