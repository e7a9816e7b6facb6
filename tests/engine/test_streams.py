"""Answers while they grow: in streams side by side, left in the middle, and in steps that fail."""

from __future__ import annotations

import pytest

from rooftile.engine.llm import LLM
from rooftile.engine.requests import output as telling
from rooftile.engine.sampling.params import SamplingParams
from rooftile.engine.steps import runner
from tests.engine.asking import GREEDY, ROOM, TOKENS, assert_clean, prompts, tokens_of
from tests.models.checkpoints import VOCABULARY


def test_answers_grow_in_a_stream(peers) -> None:
    peer = peers("llama")
    llm = LLM(peer.folder, **ROOM)
    asked = prompts(5)
    seen: dict[int, list[int]] = {n: [] for n in range(5)}
    for place, output in llm.stream(asked, GREEDY):
        (answer,) = output.outputs
        assert answer.token_ids[: len(seen[place])] == seen[place]
        assert len(answer.token_ids) == len(seen[place]) + 1
        seen[place] = answer.token_ids
    assert list(seen.values()) == peer.greedy(asked, TOKENS)


@pytest.mark.parametrize("ahead", [False, True], ids=["", "a step ahead"])
@pytest.mark.parametrize("failing", ["run", "wait"])
@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_step_that_fails_leaves_nothing(at: int, failing: str, ahead: bool, peers, monkeypatch) -> None:
    """No block, no slot, and no prefix that was never written."""
    peer, asked = peers("llama"), [prompt for prompt in prompts() if len(prompt) > 16][:4]
    llm = LLM(peer.folder, **ROOM)
    llm.engine._ahead = ahead
    owner = llm.engine.runner if failing == "run" else runner.Result
    whole, fates = getattr(owner, failing), iter([*[False] * (at - 1), True])

    def fail(*given):
        if next(fates):
            raise KeyboardInterrupt
        return whole(*given)

    with monkeypatch.context() as patch:
        patch.setattr(owner, failing, fail)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(asked, GREEDY)
    assert_clean(llm)
    assert tokens_of(llm, asked, GREEDY) == [[row] for row in peer.greedy(asked, TOKENS)]


def test_streams_take_turns(peers) -> None:
    """One inside of the other, and one that is left in the middle while another goes on."""
    peer = peers("llama")
    llm = LLM(peer.folder, **ROOM)
    asked = prompts(6)
    due = peer.greedy(asked, TOKENS)
    for ahead in (False, True):
        llm.engine._ahead = ahead
        outer: dict[int, list[int]] = {}
        left = llm.stream(asked[4:], GREEDY)
        next(left)
        for place, output in llm.stream(asked[:2], GREEDY):
            outer[place] = output.outputs[0].token_ids
            if len(outer[place]) == 3:
                inner = llm.generate(asked[2:4], GREEDY)
                assert [one.outputs[0].token_ids for one in inner] == due[2:4]
        assert [outer[place] for place in (0, 1)] == due[:2]
        latest = dict(left)
        assert [latest[place].outputs[0].token_ids for place in (0, 1)] == due[4:]
        assert all(output.finished for output in latest.values())
        # a request of somebody who uses the engine itself
        request = llm.engine.add(asked[0], GREEDY)
        assert llm.generate(asked[1:2], GREEDY)[0].outputs[0].token_ids == due[1]
        while not llm.engine.idle:
            llm.engine.step()
        assert request.answers[0].ids[len(asked[0]) :] == due[0]
        assert_clean(llm)


def test_what_a_stream_has_told_is_not_made_again(peers, monkeypatch) -> None:
    """And what a caller does to its lists is its own affair."""
    llm = LLM(peers("llama").folder, **ROOM)
    prompt = [n % VOCABULARY for n in range(40)]
    params = SamplingParams(temperature=0, max_tokens=40, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    made, shown = [], telling.logprobs_at
    monkeypatch.setattr(telling, "logprobs_at", lambda *given: (made.append(given), shown(*given))[1])
    seen = [found for _, found in llm.stream(prompt, params)]
    assert len(made) == 39 + 40
    (due,) = llm.generate(prompt, params)
    for n, found in enumerate(seen, 1):
        (answer,) = found.outputs
        assert answer.token_ids == due.outputs[0].token_ids[:n]
        assert answer.logprobs == due.outputs[0].logprobs[:n]
        assert (found.prompt_token_ids, found.prompt_logprobs) == (prompt, due.prompt_logprobs)
    stream = llm.stream(prompt, params)
    _, first = next(stream)
    first.prompt_token_ids.clear()
    first.outputs[0].token_ids.clear()
    first.outputs[0].logprobs.clear()
    assert [found for _, found in stream][-1].outputs == due.outputs


def test_a_search_that_goes_on_shows_as_many_beams_as_come_back(peers) -> None:
    llm = LLM(peers("llama").folder, **ROOM)
    params = SamplingParams(beam_width=4, n=2, max_tokens=8, ignore_eos=True)
    assert {len(found.outputs) for _, found in llm.stream(prompts(1), params)} == {2}


def test_a_stream_that_is_left_leaves_nothing(peers) -> None:
    llm = LLM(peers("llama").folder, **ROOM)
    llm.engine._ahead = True
    stream = llm.stream(prompts(5), GREEDY)
    next(stream)
    stream.close()
    while not llm.engine.idle:
        llm.engine.step()
    assert_clean(llm)
