"""Comparisons of an engine with Transformers, for models whose layers keep something else than keys and values of all heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rooftile.engine import LLM, SamplingParams
from tests.engine.asking import GREEDY, ROOM, TOKENS, prompts, tokens_of

# tokens per block of the cache
SIZE = 8
SETTINGS: dict[str, dict[str, Any]] = {
    "together": ROOM,
    "in chunks": ROOM | {"max_batched_tokens": 13},
    "chunks of one": ROOM | {"max_batched_tokens": 1, "max_num_seqs": 4},
    "preempted": {"max_model_len": 96, "num_blocks": 20},
    "preempted, in chunks": {"max_model_len": 96, "num_blocks": 16, "max_batched_tokens": 7},
    "three at once": ROOM | {"max_num_seqs": 3},
    "contiguous": ROOM | {"allocator": "contiguous", "num_blocks": 60},
    "no prefixes": ROOM | {"enable_prefix_caching": False},
}


def check_greedy(peer: Any, how: str) -> None:
    """Greedy tokens are the tokens of `generate`, however steps cut and preempt."""
    llm, asked = LLM(peer.folder, block_size=SIZE, **SETTINGS[how]), prompts(8)
    llm.engine._ahead = "preempted" in how
    due = peer.greedy(asked, TOKENS)
    assert tokens_of(llm, asked, GREEDY) == [[row] for row in due]
    assert (llm.engine.scheduler.preemptions > 0) == ("preempted" in how)
    assert max(len(set(row)) for row in due) > 8


def check_logprobs(peer: Any) -> None:
    """Logprobs of prompts and answers are within 1e-4."""
    asked = prompts(4)
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=3, prompt_logprobs=0)
    for output in LLM(peer.folder, block_size=SIZE, **ROOM | {"max_batched_tokens": 11}).generate(asked, params):
        (answer,), prompt = output.outputs, output.prompt_token_ids
        ids = torch.tensor([prompt + answer.token_ids])
        with torch.inference_mode():
            due = peer.model(ids, attention_mask=torch.ones_like(ids)).logits[0].double().log_softmax(-1)
        for place, (token, each) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True), len(prompt) - 1):
            best, values = due[place].topk(3)[::-1]
            assert list(each)[:3] == best.tolist()
            assert [each[one].logprob for one in best.tolist()] == pytest.approx(values.tolist(), abs=1e-4)
            assert token == best[0]
        read = [next(iter(each.values())).logprob for each in output.prompt_logprobs[1:]]
        assert read == pytest.approx([due[n, token].item() for n, token in enumerate(prompt[1:])], abs=1e-4)


def check_forks(peer: Any) -> None:
    """Several answers to a prompt are those that each seed gives alone."""
    prompt = (prompts(3)[2] * 8)[:21]
    params = SamplingParams(n=3, seed=11, max_tokens=12, ignore_eos=True)
    (found,) = tokens_of(LLM(peer.folder, block_size=SIZE, **ROOM), [prompt], params)
    single = [SamplingParams(seed=11 + n, max_tokens=12, ignore_eos=True) for n in range(3)]
    assert found == [tokens_of(LLM(peer.folder, block_size=SIZE, **ROOM), [prompt], one)[0][0] for one in single]
    assert len({tuple(row) for row in found}) == 3


def check_beams(peer: Any, room: dict[str, Any]) -> None:
    """Beams are the beams of `generate`; a room with a bound of tokens is one that preempts."""
    asked = prompts(6, seed=5)
    llm = LLM(peer.folder, block_size=SIZE, **room)
    found = tokens_of(llm, asked, SamplingParams(beam_width=3, n=2, max_tokens=12, ignore_eos=True))
    for prompt, answers in zip(asked, found, strict=True):
        due = peer.generate([prompt], max_new_tokens=12, num_beams=3, num_return_sequences=2, do_sample=False)
        assert answers == due
    assert (llm.engine.scheduler.preemptions > 0) == ("max_batched_tokens" in room)
