"""Answers with drafts are the answers without: the same tokens, whatever is guessed, cut, mixed, preempted and shared."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftile.cost.decoder import DecoderCost
from rooftile.engine.llm import LLM
from rooftile.engine.requests.output import RequestOutput
from rooftile.engine.sampling.params import SamplingParams
from rooftile.engine.speculation import speculator
from rooftile.engine.speculation.forecast import Forecast
from rooftile.engine.speculation.ngrams import NgramIndex
from rooftile.engine.speculation.pace import Pace
from rooftile.engine.speculation.settings import Speculation
from rooftile.errors import InvalidInput, Unsupported
from rooftile.hardware.chips import Rates
from rooftile.models import Decoder, ModelConfig
from tests.engine.asking import ROOM, assert_clean, prompts
from tests.engine.folders import save
from tests.models.checkpoints import SMALL, VOCABULARY, saved

ALWAYS = {"method": "lookup", "tokens": 7, "shortest": 1, "max_batch": 1000}
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0}, {"seed": 1}, {"seed": 2, "n": 3, "temperature": 0.8},
    {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.4}, {"seed": 3, "presence_penalty": 1.5, "n": 2},
    {"seed": 4, "top_k": 9, "top_p": 0.9, "logit_bias": {5: 2.0}}, {"seed": 5, "logprobs": 3, "frequency_penalty": -0.5},
    {"seed": 6, "min_tokens": 9, "stop_token_ids": list(range(20, 36))}, {"seed": 7, "speculative": False},
    {"temperature": 0, "prompt_logprobs": 1, "max_tokens": 5}, {"seed": 8, "allowed_token_ids": [3, 5, 7, 9]},
    {"seed": 9, "max_tokens": 1}, {"temperature": 0, "beam_width": 2, "n": 2},
)  # fmt: skip
SETTINGS = {
    "together": ROOM,
    "in chunks": ROOM | {"max_batched_tokens": 13},
    "preempted": {"max_model_len": 96, "num_blocks": 14},
    "three at once, small blocks": ROOM | {"max_num_seqs": 3, "block_size": 8, "max_batched_tokens": 40},
    "contiguous": ROOM | {"allocator": "contiguous", "num_blocks": 40},
}


class Oracle:
    """Guesses what the answers will be, and errs from time to time; a stand-in for `NgramIndex`."""

    right = 0.8
    known: tuple[list[int], ...] = ()

    def __init__(self, shortest: int, longest: int) -> None:
        self._rng = random.Random(0)

    def guess(self, ids: Sequence[int], count: int) -> list[int]:
        there = [row for row in self.known if row[: len(ids)] == list(ids)]
        found = self._rng.choice(there)[len(ids) :][:count] if there else []
        return [token if self._rng.random() < self.right else (token + 1) % VOCABULARY for token in found]


def asked_params(count: int) -> list[SamplingParams]:
    usual = {"max_tokens": 24, "ignore_eos": True}
    return [SamplingParams(**usual | KINDS[n % len(KINDS)]) for n in range(count)]


def told(outputs: Sequence[RequestOutput]) -> list[list[tuple[Any, ...]]]:
    return [[(a.token_ids, a.finish_reason, a.stop_reason, a.text) for a in output.outputs] for output in outputs]


def whole(outputs: Sequence[RequestOutput]) -> tuple[list[int], ...]:
    return tuple(output.prompt_token_ids + answer.token_ids for output in outputs for answer in output.outputs)


@pytest.fixture(scope="module")
def plain(peers) -> list[RequestOutput]:
    return LLM(peers("llama").folder, **ROOM).generate(prompts(), asked_params(64))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("how", SETTINGS)
def test_tokens_are_those_without_drafts(how: str, ahead: bool, peers, plain, monkeypatch) -> None:
    monkeypatch.setattr(speculator, "NgramIndex", Oracle)
    monkeypatch.setattr(Oracle, "known", whole(plain))
    llm = LLM(peers("llama").folder, speculative=ALWAYS, **SETTINGS[how])
    llm.engine._ahead = ahead
    found = llm.generate(prompts(), asked_params(64))
    assert told(found) == told(plain)
    for one, other in zip(found, plain, strict=True):
        assert (one.prompt_logprobs is None) == (other.prompt_logprobs is None)
        for answer, due in zip(one.outputs, other.outputs, strict=True):
            if due.logprobs is not None:
                assert [list(each) for each in answer.logprobs] == [list(each) for each in due.logprobs]
                assert answer.cumulative_logprob == pytest.approx(due.cumulative_logprob, abs=1e-3)
    assert_clean(llm)
    counts = llm.engine.speculator.counts
    assert 0.3 * counts["drafted"] < counts["accepted"] < 0.9 * counts["drafted"]
    if how == "together":
        # what is kept of sequences is what was computed: each goes on as a fresh engine says
        longer = [row[:50] for row in whole(plain)[::5]]
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
        again, due = llm.generate(longer, params), LLM(peers("llama").folder, **ROOM).generate(longer, params)
        assert told(again) == told(due)
        assert any(output.num_cached_tokens for output in again)
        for one, other in zip(again, due, strict=True):
            assert one.outputs[0].cumulative_logprob == pytest.approx(other.outputs[0].cumulative_logprob, abs=1e-3)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "gemma2"])
def test_lookup_reads_several_tokens_a_step_where_a_text_repeats(name: str, peers) -> None:
    """A model with random weights soon repeats itself: from then on a step has several tokens."""
    asked = prompts(6)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    longest = {"max_model_len": 124, "num_blocks": 100}
    slow, fast = (
        LLM(peers(name).folder, **longest),
        LLM(peers(name).folder, speculative={"shortest": 1, "max_batch": 9}, **longest),
    )
    assert told(fast.generate(asked, params)) == told(slow.generate(asked, params))
    counts = fast.engine.speculator.counts
    assert counts["drafts"] > 0
    assert fast.engine.steps["steps"] <= slow.engine.steps["steps"]
    if counts["accepted"] > 60:
        assert fast.engine.steps["steps"] < slow.engine.steps["steps"]


def test_the_same_bits_under_deterministic(peers, plain, monkeypatch) -> None:
    monkeypatch.setattr(speculator, "NgramIndex", Oracle)
    monkeypatch.setattr(Oracle, "known", whole(plain))
    params = [SamplingParams(max_tokens=12, seed=n, logprobs=2, ignore_eos=True, frequency_penalty=n % 2) for n in range(6)]
    due = LLM(peers("llama").folder, deterministic=True, **ROOM).generate(prompts(6), params)
    monkeypatch.setattr(Oracle, "known", whole(due))
    llm = LLM(peers("llama").folder, deterministic=True, speculative=ALWAYS, **ROOM)
    found = llm.generate(prompts(6), params)
    assert [output.outputs[0].logprobs for output in found] == [output.outputs[0].logprobs for output in due]
    assert llm.engine.speculator.counts["accepted"] > 20


def test_draws_have_the_distribution_of_the_model(tmp_path: Path) -> None:
    """36,000 tokens of a model whose tokens are drawn alike everywhere, without a seed of their own: 1 % more of one is seen."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL | {"vocab_size": 8, "num_hidden_layers": 1, "num_key_value_heads": 4})
    config.save_pretrained(tmp_path)
    decoder = Decoder.random(ModelConfig.from_folder(tmp_path))
    with torch.no_grad():
        decoder.embedding.copy_(decoder.embedding[:1].expand_as(decoder.embedding))
    llm = LLM(decoder, speculative=ALWAYS | {"tokens": 3}, max_model_len=128, num_blocks=4000, max_num_seqs=1200, seed=1)
    (first,) = llm.generate([[3]], SamplingParams(max_tokens=1, ignore_eos=True, logprobs=8))
    outputs = llm.generate([[n % 8, 3, n % 5] for n in range(300)], SamplingParams(max_tokens=120, ignore_eos=True))
    tokens = [output.outputs[0].token_ids for output in outputs]
    told = first.outputs[0].logprobs[0]
    p = torch.tensor([told[token].logprob for token in range(8)]).exp().double()
    assert p.max() < 0.9
    assert p.min() > 0.01
    counts = llm.engine.speculator.counts
    assert counts["drafted"] > 3000
    assert counts["accepted"] > 400
    total = Counter(token for row in tokens for token in row)
    N = sum(total.values())
    for token in range(8):
        assert abs(total[token] / N - p[token]) < 4 * (p[token] * (1 - p[token]) / N) ** 0.5 < 0.011
    # tokens do not depend on the ones before them, accepted or not
    pairs = Counter(pair for row in tokens for pair in pairwise(row))
    due = {(a, b): float(p[a] * p[b]) * sum(pairs.values()) for a in range(8) for b in range(8)}
    chi = sum((pairs[pair] - count) ** 2 / count for pair, count in due.items())
    assert chi < 63 + 4 * (2 * 63) ** 0.5


@pytest.fixture(scope="module")
def with_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL | {"vocab_size": 427, "initializer_range": 0.2})
    saved(transformers.AutoModelForCausalLM.from_config(config), path)
    return save("byte_level", path)


@pytest.mark.parametrize("ahead", [False, True])
def test_grammars_stop_strings_and_bad_words(ahead: bool, with_text: Path, monkeypatch) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}, "required": ["name"]}
    asked = [
        SamplingParams(max_tokens=30, seed=2, structured={"json": schema}),
        SamplingParams(max_tokens=30, seed=3, n=2, structured={"regex": "[a-f]{9}(stop|the)"}, top_p=0.9),
        SamplingParams(max_tokens=30, seed=4, ignore_eos=True, bad_words=["the", "stop", "an", "ing of"]),
        SamplingParams(max_tokens=9, seed=5, structured={"choice": ["a", "stop", "naïve"]}, presence_penalty=0.5),
        *(SamplingParams(max_tokens=30, seed=n, ignore_eos=True, stop=["e", "s t"], min_tokens=4) for n in range(6, 10)),
        SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, stop=["a"], include_stop=True),
    ]
    texts = ["cat", "the stop", "naïve and a cat of tiles", "stop", "a", "b", "roof", "stream of", "1234"]
    due = LLM(with_text, **ROOM).generate(texts, asked)
    free = LLM(with_text, **ROOM).generate(texts, [SamplingParams(max_tokens=40, seed=n, ignore_eos=True) for n in range(9)])
    monkeypatch.setattr(speculator, "NgramIndex", Oracle)
    # what is guessed goes past stops, and leaves grammars
    monkeypatch.setattr(Oracle, "known", (*whole(due), *([*row, 7, 8, 9] for row in whole(due)), *whole(free)))
    llm = LLM(with_text, speculative=ALWAYS, **ROOM)
    llm.engine._ahead = ahead
    assert told(llm.generate(texts, asked)) == told(due)
    counts = llm.engine.speculator.counts
    assert 0 < counts["accepted"] < counts["drafted"]
    assert_clean(llm)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40), st.lists(st.integers(1, 6), max_size=8), st.integers(1, 3),
    st.integers(0, 2),
)  # fmt: skip
def test_the_index_finds_the_latest_of_the_longest(ids: list[int], steps: list[int], shortest: int, more: int) -> None:
    index, longest, length = NgramIndex(shortest, shortest + more), shortest + more, 0
    for step in [*steps, len(ids)]:
        length = min(length + step, len(ids))
        known = ids[:length]
        places = [
            place for size in range(longest, shortest - 1, -1) for place in range(length - 1, size - 1, -1)
            if size <= length and known[place - size : place] == known[length - size :]
        ]  # fmt: skip
        due = list(known)
        for n in range(7 if places else 0):
            due.append(due[places[0] + n])
        assert index.guess(known, 7) == due[length:]


def test_drafts_are_made_where_they_pay() -> None:
    """8B in 16 bits on an H100: many tokens for one answer, few for some, none for 256, since a step then computes."""
    cost = DecoderCost(weight_bytes=15_000_000_000, token_bytes=131_072, token_flops=14_000_000_000)
    forecast = Forecast(cost, Rates(989e12, 3352e9))
    for _ in range(20):
        forecast.note(15, 13)
    most = [forecast.most(answers, answers * 1000, 15) for answers in (1, 8, 64, 256)]
    assert most == sorted(most, reverse=True)
    assert (most[0], most[-1]) == (15, 0)
    # a long context is read once more by each row
    assert forecast.most(8, 8 * 100_000, 15) < most[1]
    for _ in range(50):
        forecast.note(4, 0)
    assert forecast.most(1, 1000, 15) > 0


def test_a_large_batch_has_none(peers) -> None:
    llm = LLM(peers("llama").folder, speculative=ALWAYS | {"max_batch": 2}, **ROOM)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    llm.generate([[5, 6, 5, 6, 5, 6]] * 3, params)
    assert llm.engine.speculator.counts["drafts"] == 0
    llm.generate([[5, 6, 5, 6, 5, 6]] * 2, params)
    assert llm.engine.speculator.counts["drafts"] > 0


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ("lookout", InvalidInput, "speculative has the method 'lookout'"), (3, InvalidInput, 'must be "lookup"'),
        ({"tokens": 0}, InvalidInput, "tokens = 0; must be a whole number from 1 to 31"),
        ({"tokens": True}, InvalidInput, "tokens = True"), ({"speed": 2}, InvalidInput, "has 'speed'; may have method"),
        ({"shortest": 5}, InvalidInput, "shortest = 5 and longest = 4"), ("{", InvalidInput, "which is no JSON"),
        ({"method": ["lookup"]}, InvalidInput, "has the method ['lookup']"), ({"method": {}}, InvalidInput, "has the method {}"),
        ({"method": "medusa"}, Unsupported, 'the method "medusa"'), ({"max_batch": "all"}, InvalidInput, "max_batch = 'all'"),
    ],
)  # fmt: skip
def test_wrong_settings_get_a_sentence(given: object, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind) as error:
        Speculation.of(given)
    assert said in str(error.value)


def test_settings_are_words_dictionaries_and_json() -> None:
    assert Speculation.of("lookup") == Speculation.of({}) == Speculation.of('{"method": "ngram"}') == Speculation()
    vllm = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3, "prompt_lookup_min": 3}
    assert Speculation.of(vllm) == Speculation(tokens=5, longest=3, shortest=3)
    assert Speculation.of("mtp") == Speculation.of({"method": "deepseek_mtp"}) == Speculation(method="mtp", tokens=3)
    assert Speculation.of({"longest": 1}) == Speculation(longest=1, shortest=1)


def test_what_cannot_take_tokens_back_is_refused(peers) -> None:
    with pytest.raises(Unsupported, match="layers of the kind 'mamba2', which cannot take"):
        LLM(peers("mamba2").folder, speculative="lookup", **ROOM)
    with pytest.raises(Unsupported, match="speculative is given and tensor_parallel_size is 2"):
        LLM(peers("llama").folder, speculative="lookup", tensor_parallel_size=2, **ROOM)


def test_the_prefix_cache_never_has_a_refused_token(peers, plain, monkeypatch) -> None:
    """Blocks are found by others only up to what was read of accepted tokens: an answer may be aborted after each step."""
    monkeypatch.setattr(speculator, "NgramIndex", Oracle)
    monkeypatch.setattr(Oracle, "known", whole(plain))
    llm = LLM(peers("llama").folder, speculative=ALWAYS, **ROOM | {"block_size": 8})
    engine, sealed = llm.engine, 0
    for prompt, params in zip(prompts(20), asked_params(20), strict=True):
        engine.add(prompt, params)
    while not engine.idle:
        engine.step()
        for request in engine.scheduler.running:
            for answer in request.answers:
                if answer.table is not None and request.search is None:
                    assert answer.table.sealed * 8 <= answer.planned == len(answer.ids) - 1 or not request.prefilled
                    sealed += answer.table.sealed
    assert sealed > 100
    assert engine.speculator.counts["accepted"] < engine.speculator.counts["drafted"]


def test_a_pace_keeps_trying_between_quotations_and_pauses_elsewhere() -> None:
    pace, lengths = Pace(15), list[int]()
    for accepted in (4, 8, 15, 6, 0, 0, 2):
        pace.note(pace.length, min(accepted, pace.length), 10)
        lengths.append(pace.length)
        assert not pace.pauses(10)
    assert lengths == [8, 15, 15, 7, 4, 4, 4]
    pauses = []
    for n in range(8):
        pace.note(4, 0, 100 * n)
        pauses.append(next(count for count in range(100) if not pace.pauses(100 * n + count)))
    assert pauses == [0, 0, 1, 2, 4, 8, 16, 32]
    short = Pace(2)
    short.note(2, 1, 5)
    assert short.length == 2


class Doubtful:
    """Guesses tokens of which every other one is right, by chance."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._random = random.Random(0)

    def guess(self, ids: Sequence[int], count: int) -> list[int]:
        # answers of other prompts have other chances
        self._random.seed(sum(ids) + len(ids))
        return [self._random.choice((7, 8)) for _ in range(count)]


def test_answers_with_drafts_and_without_share_their_steps(tmp_path: Path, monkeypatch) -> None:
    """A step ahead, answers without drafts would be in steps of their own, and each step reads all weights."""
    monkeypatch.setattr(speculator, "NgramIndex", Doubtful)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL)
    llm = LLM(saved(transformers.AutoModelForCausalLM.from_config(config), tmp_path), speculative=ALWAYS, **ROOM)
    llm.engine._ahead = True
    usual: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "temperature": 0}
    one_token, plain = SamplingParams(**usual, logit_bias={7: 100.0}), SamplingParams(**usual, speculative=False)
    steps = []
    for params in ([one_token, one_token, plain, plain], [one_token] * 4, [plain] * 4):
        before = llm.engine.steps["steps"]
        llm.generate([[n, 2 * n, 5] for n in range(1, 5)], params)
        steps.append(llm.engine.steps["steps"] - before)
    mixed, drafted, without = steps
    assert llm.engine.speculator.counts["accepted"] > 60
    assert mixed <= without
    assert drafted < 0.85 * without
    assert_clean(llm)
