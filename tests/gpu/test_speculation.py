"""Drafts on a GPU: rows of one sequence in graphs and without, a step ahead, with the tokens that come without drafts."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from rooftile.engine.llm import LLM
from rooftile.engine.sampling.params import SamplingParams
from rooftile.engine.steps import graphs
from rooftile.models import Decoder
from rooftile.models.config import config_of
from tests.engine.asking import ROOM, assert_clean, prompts
from tests.engine.test_speculation import ALWAYS, Oracle, asked_params, told, whole
from tests.models.checkpoints import CONFIGS

pytestmark = pytest.mark.gpu


def decoder_of(name: str, dtype: torch.dtype) -> Decoder:
    decoder = Decoder.random(config_of(CONFIGS[name]().to_dict(), "here"), dtype, "cuda", seed=1)
    with torch.no_grad():
        for weight in decoder.parameters():
            if weight.ndim > 1:
                weight.mul_(10)
    return decoder


def engine(decoder: Decoder, known: Any = None, **settings: Any) -> LLM:
    llm = LLM(decoder, speculative=ALWAYS, **ROOM | settings)
    if known is not None:
        llm.engine.speculator.guesser = type("Known", (Oracle,), {"known": known})
    return llm


@pytest.mark.parametrize("settings", [{}, {"num_blocks": 14}, {"enforce_eager": True}, {"max_batched_tokens": 13}], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_tokens_are_those_without_drafts(name: str, settings: dict[str, Any]) -> None:
    """In fp32; a sum in another order may turn the order of two tokens that are nearly alike."""
    decoder = decoder_of(name, torch.float32)
    plain = LLM(decoder, **ROOM).generate(prompts(52), asked_params(52))
    llm = engine(decoder, whole(plain), **settings)
    found = llm.generate(prompts(52), asked_params(52))
    assert sum(a == b for a, b in zip(told(found), told(plain), strict=True)) >= 50
    # a step of 13 tokens leaves little room for drafts
    assert llm.engine.speculator.counts["accepted"] > (10 if "max_batched_tokens" in settings else 200)
    assert_clean(llm)


def test_the_same_bits_under_deterministic() -> None:
    decoder = decoder_of("llama", torch.bfloat16)
    params = [SamplingParams(max_tokens=20, seed=n, logprobs=2, ignore_eos=True, frequency_penalty=n % 2) for n in range(12)]
    due = LLM(decoder, deterministic=True, **ROOM).generate(prompts(12), params)
    llm = engine(decoder, whole(due), deterministic=True)
    found = llm.generate(prompts(12), params)
    assert [output.outputs[0].logprobs for output in found] == [output.outputs[0].logprobs for output in due]
    assert llm.engine.speculator.counts["accepted"] > 100


def test_steps_with_drafts_are_graphs_that_were_captured_before(monkeypatch) -> None:
    """Also where penalties have tokens drawn one after the other."""
    decoder = decoder_of("llama", torch.float32)
    known = whole(LLM(decoder, **ROOM).generate(prompts(4), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)))
    llm = engine(decoder, known, max_num_seqs=4)
    captured = len(llm.engine.runner._graphs._graphs)
    seen: list[int] = []
    replay = graphs.DecodeGraphs.replay
    monkeypatch.setattr(graphs.DecodeGraphs, "replay", lambda *given: (seen.append(len(given[2].tokens)), replay(*given))[1])
    for extra in ({}, {"frequency_penalty": 0.0001}):
        seen.clear()
        llm.generate(prompts(4), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, **extra))
        assert max(seen) > 4
        if not extra:
            assert len(llm.engine.runner._graphs._graphs) == captured
    assert llm.engine.speculator.counts["accepted"] > 100
    assert_clean(llm)


def test_the_answer_of_a_repeated_text_takes_few_steps() -> None:
    """A bias makes a text of two tokens in turn likely; look-up finds it."""
    llm = LLM(decoder_of("llama", torch.bfloat16), speculative="lookup", max_model_len=128, num_blocks=64)
    rng = random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logit_bias={7: 100.0})
    (output,) = llm.generate([[rng.randrange(90) for _ in range(40)]], params)
    assert output.outputs[0].token_ids == [7] * 64
    assert llm.engine.steps["steps"] < 30
