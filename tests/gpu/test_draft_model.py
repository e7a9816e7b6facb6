"""A draft model on a GPU: in graphs and without, a step ahead, with the tokens that come without drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rooftile.engine.llm import LLM
from rooftile.engine.sampling.params import SamplingParams
from rooftile.engine.steps import graphs
from rooftile.models import Decoder
from tests.engine.asking import ROOM, assert_clean, prompts
from tests.engine.draft_heads import EaglePair, MtpPair
from tests.engine.test_draft_model import ALWAYS
from tests.engine.test_speculation import asked_params, told
from tests.gpu.test_speculation import decoder_of

pytestmark = pytest.mark.gpu


def loosened(decoder: Decoder, noise: float) -> Decoder:
    """A copy of a decoder with other weights, which are nearly the same."""
    found = Decoder.random(decoder.config, decoder.embedding.dtype, "cuda")
    generator = torch.Generator("cuda").manual_seed(3)
    with torch.no_grad():
        for ours, theirs in zip(found.parameters(), decoder.parameters(), strict=True):
            more = torch.randn(theirs.shape, generator=generator, device="cuda") * noise * theirs.std(correction=0)
            ours.copy_(theirs + more.to(theirs.dtype))
    return found


@pytest.mark.parametrize("settings", [{}, {"num_blocks": 14}, {"enforce_eager": True}, {"max_num_seqs": 5}], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_tokens_are_those_without_drafts(name: str, settings: dict[str, Any]) -> None:
    """In fp32; a sum in another order may turn the order of two tokens that are nearly alike."""
    decoder = decoder_of(name, torch.float32)
    plain = LLM(decoder, **ROOM).generate(prompts(52), asked_params(52))
    llm = LLM(decoder, speculative=ALWAYS | {"model": loosened(decoder, 0.02)}, **ROOM | settings)
    found = llm.generate(prompts(52), asked_params(52))
    assert sum(a == b for a, b in zip(told(found), told(plain), strict=True)) >= 50
    assert llm.engine.speculator.counts["accepted"] > 40
    assert_clean(llm)


@pytest.mark.parametrize("settings", [{}, {"kv_dtype": "fp8"}, {"enforce_eager": True}], ids=str)
def test_a_model_accepts_its_own_guesses(settings: dict[str, Any]) -> None:
    """In 16 bits rows of other numbers are rounded otherwise, so a few are refused."""
    decoder = decoder_of("llama", torch.bfloat16)
    llm = LLM(decoder, speculative=ALWAYS | {"model": decoder}, max_num_seqs=8, **ROOM | settings)
    params = [SamplingParams(temperature=n % 2, seed=n, max_tokens=30, ignore_eos=True) for n in range(24)]
    llm.generate(prompts(24), params)
    counts = llm.engine.speculator.counts
    assert counts["drafted"] > 300
    assert counts["accepted"] > 0.9 * counts["drafted"]
    assert_clean(llm)


def test_the_drafts_steps_are_graphs_that_were_captured_before(monkeypatch) -> None:
    decoder = decoder_of("llama", torch.float32)
    llm = LLM(decoder, speculative=ALWAYS | {"model": decoder}, max_num_seqs=4, **ROOM)
    runner = llm.engine.runner.draft
    captured, seen, again = len(runner._graphs._graphs), list[int](), list[int]()
    replay, repeat = graphs.DecodeGraphs.replay, graphs.DecodeGraphs.repeat

    def counted(self: graphs.DecodeGraphs, *given: Any) -> Any:
        if self is runner._graphs:
            seen.append(len(given[1].tokens))
        return replay(self, *given)

    def counted_again(self: graphs.DecodeGraphs, rows: int) -> Any:
        again.append(rows)
        return repeat(self, rows)

    monkeypatch.setattr(graphs.DecodeGraphs, "replay", counted)
    monkeypatch.setattr(graphs.DecodeGraphs, "repeat", counted_again)
    llm.generate(prompts(4), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    # one row or two of each answer first, then one
    assert 4 < max(seen) <= 8
    assert len(seen) > 10
    assert len(again) > 10
    assert len(runner._graphs._graphs) == captured
    assert llm.engine.speculator.counts["accepted"] > 100


@pytest.mark.parametrize("settings", [{}, {"enforce_eager": True}, {"num_blocks": 14}], ids=str)
@pytest.mark.parametrize("name", ["eagle3", "mimo", "glm4_moe_lite"])
def test_a_head_in_graphs(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Its guesses are those without graphs, and answers those without drafts."""
    pair = EaglePair(tmp_path) if name == "eagle3" else MtpPair(tmp_path, name)
    params = [SamplingParams(temperature=n % 2, seed=n, max_tokens=30, ignore_eos=True) for n in range(24)]
    due = LLM(pair.folder, dtype="fp32", **ROOM).generate(prompts(24), params)
    llm = LLM(pair.folder, dtype="fp32", speculative=pair.asked | {"max_batch": 9}, max_num_seqs=8, **ROOM | settings)
    drafter, seen = llm.engine.speculator.drafter, list[tuple[list[int], list[int]]]()
    guess = drafter.guess

    def watched(asked: Any, entries: Any) -> Any:
        found = guess(asked, entries)
        seen.extend((answer.ids.copy(), tokens) for answer, tokens in found.items() if not answer.request.params.temperature)
        return found

    drafter.guess = watched
    found = llm.generate(prompts(24), params)
    assert sum(a == b for a, b in zip(told(found), told(due), strict=True)) >= 23
    assert len(seen) > 30
    assert sum(tokens == pair.guesses(ids, len(tokens)) for ids, tokens in seen) >= 0.95 * len(seen)
    assert_clean(llm)
