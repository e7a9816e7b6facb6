"""Samples that do not all fit at once: they follow one another, read their prompt once, and are what they would have been."""

from __future__ import annotations

import asyncio
from itertools import product

import pytest

from rooftile.engine.async_engine import AsyncEngine
from rooftile.engine.llm import LLM
from rooftile.engine.requests.stats import stats_of
from rooftile.engine.sampling.params import SamplingParams
from tests.engine.asking import ROOM, assert_clean, prompts, tokens_of
from tests.grids import swept
from tests.models.checkpoints import VOCABULARY

PROMPT = [n * 7 % VOCABULARY for n in range(50)]
TOKENS = 9
SAMPLES = SamplingParams(n=7, temperature=1.0, seed=5, max_tokens=TOKENS, ignore_eos=True)
# seven fit nowhere here, and in the last one sample barely does: 50 and 9 tokens are four blocks
SETTINGS = {
    "one at a time": ROOM | {"max_num_seqs": 1},
    "three at a time": ROOM | {"max_num_seqs": 3},
    "without a prefix cache": ROOM | {"max_num_seqs": 2, "enable_prefix_caching": False},
    "in chunks": ROOM | {"max_num_seqs": 3, "max_batched_tokens": 9},
    "contiguous": ROOM | {"max_num_seqs": 3, "allocator": "contiguous", "num_blocks": 18},
    "few blocks": {"max_model_len": 96, "num_blocks": 8, "max_num_seqs": 5},
    "few blocks, nothing cached": {"max_model_len": 96, "num_blocks": 8, "max_num_seqs": 5, "enable_prefix_caching": False},
    "room for one": {"max_model_len": 64, "num_blocks": 4, "max_num_seqs": 5},
}


@pytest.fixture(scope="module")
def together(peers) -> dict[str, list[list[list[int]]]]:
    """The samples of several prompts, when all run at once."""
    asked = [PROMPT[:length] for length in (1, 16, 17, 50)]
    return {name: tokens_of(LLM(peers(name).folder, **ROOM), asked, SAMPLES) for name in ("llama", "mistral", "gemma2")}


# each setting with a step ahead or without, in turn
@pytest.mark.parametrize(
    ("how", "ahead"),
    swept(product(SETTINGS, (False, True)), lambda case: [case[0]] if case[1] == [*SETTINGS].index(case[0]) % 2 else []),
)
def test_samples_in_turn_are_those_of_samples_together(how: str, ahead: bool, peers, together) -> None:
    for name in ("llama", "mistral", "gemma2") if how in ("three at a time", "in chunks") else ("llama",):
        llm = LLM(peers(name).folder, **SETTINGS[how])
        llm.engine._ahead = ahead
        found = tokens_of(llm, [PROMPT[:length] for length in (1, 16, 17, 50)], SAMPLES)
        assert found == together[name]
        assert len({tuple(row) for row in found[3]}) == 7


def test_the_bits_do_not_depend_on_the_turn(peers) -> None:
    folder, asked = peers("llama").folder, SamplingParams(n=5, seed=3, max_tokens=9, logprobs=3, ignore_eos=True)
    whole, in_turn = (
        LLM(folder, **ROOM, max_num_seqs=most, deterministic=True).generate(PROMPT, asked)[0].outputs for most in (8, 2)
    )
    assert [answer.logprobs for answer in in_turn] == [answer.logprobs for answer in whole]
    assert [answer.cumulative_logprob for answer in in_turn] == [answer.cumulative_logprob for answer in whole]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 50])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("chunk", [8192, 9])
def test_the_prompt_is_read_once(chunk: int, caching: bool, length: int, peers) -> None:
    """Each sample that begins later reads the prompt's last token again, and no other."""
    settings = ROOM | {"max_num_seqs": 2, "enable_prefix_caching": caching, "max_batched_tokens": chunk}
    llm = LLM(peers("llama").folder, **settings)
    tokens_of(llm, [PROMPT[:length]], SAMPLES)
    assert llm.engine.steps["tokens"] == length + 7 * (TOKENS - 1) + 5


def test_samples_in_turn_share_the_blocks_of_their_prompt(peers) -> None:
    llm = LLM(peers("llama").folder, **ROOM, max_num_seqs=2)
    engine = llm.engine
    request = engine.add(PROMPT, SAMPLES)
    most = 0
    while not engine.idle:
        engine.step()
        engine.pool.check()
        most = max(most, engine.pool.used_blocks)
        stats = stats_of(engine)
        assert stats.running + stats.waiting + sum(answer.finish_reason is not None for answer in request.answers) == 7
    # three full blocks once; a last one of each of both, and that of the prompt
    assert most == 3 + 2 + 1
    assert_clean(llm)


def test_no_sample_begins_from_a_prompt_that_is_being_read(peers, together) -> None:
    """A slot is free in the step that reads the prompt's end: the last block is copied when it has been written."""
    llm = LLM(peers("llama").folder, **ROOM, max_num_seqs=2, max_batched_tokens=20)
    engine = llm.engine
    other = engine.add([3, 4, 5], SamplingParams(max_tokens=2, ignore_eos=True, seed=1))
    request = engine.add(PROMPT, SAMPLES)
    engine.step()
    engine.step()
    assert other.answers[0].finish_reason is not None
    assert not request.prefilled
    engine.step()
    assert request.prefilled
    while not engine.idle:
        engine.step()
    assert [answer.ids[50:] for answer in request.answers] == together["llama"][3]
    assert_clean(llm)


def test_they_come_before_what_was_asked_later(peers) -> None:
    llm = LLM(peers("llama").folder, **ROOM, max_num_seqs=2)
    engine = llm.engine
    first = engine.add(PROMPT, SAMPLES)
    later = engine.add(PROMPT[::-1], SamplingParams(max_tokens=2, ignore_eos=True, seed=1))
    while later.answers[0].generated == 0:
        engine.step()
    assert all(answer.slot >= 0 or answer.finish_reason is not None for answer in first.answers)
    engine.abort(first)
    while not engine.idle:
        engine.step()
    assert_clean(llm)


@pytest.mark.parametrize("ahead", [False, True])
def test_many_requests_in_a_small_pool(ahead: bool, peers) -> None:
    """Whatever is preempted, dropped and begun again, nothing stands still and every token is right."""
    asked = prompts(12, seed=3)
    params = [
        SamplingParams(n=1 + n % 6, seed=n, max_tokens=1 + 5 * n % 23, ignore_eos=True, presence_penalty=0.5 * (n % 2))
        if n % 4 else SamplingParams(beam_width=2, max_tokens=6, ignore_eos=True)
        for n in range(len(asked))
    ]  # fmt: skip
    free = tokens_of(LLM(peers("llama").folder, **ROOM), asked, params)
    preempted = 0
    for settings in (
        {"num_blocks": 8, "max_num_seqs": 5}, {"num_blocks": 9, "max_num_seqs": 4, "max_batched_tokens": 11},
        {"num_blocks": 10, "max_num_seqs": 8, "enable_prefix_caching": False},
    ):  # fmt: skip
        llm = LLM(peers("llama").folder, max_model_len=96, **settings)
        llm.engine._ahead = ahead
        assert tokens_of(llm, asked, params) == free
        preempted += llm.engine.scheduler.preemptions
    assert preempted > 3


def test_an_abort_and_a_failed_step_leave_nothing(peers, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(peers("llama").folder, **ROOM, max_num_seqs=2)
    engine = llm.engine
    for steps in range(1, 20):
        request = engine.add(PROMPT, SAMPLES)
        for _ in range(steps):
            engine.step()
        engine.abort(request)
        assert_clean(llm)
    engine.add(PROMPT, SAMPLES)
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "run", lambda plan: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert_clean(llm)
    assert len(tokens_of(llm, [PROMPT], SAMPLES)[0]) == 7


def test_one_sample_that_can_never_fit_is_refused(peers) -> None:
    llm = LLM(peers("llama").folder, max_model_len=64, num_blocks=4)
    assert llm.generate(PROMPT, SamplingParams(n=16, max_tokens=14, ignore_eos=True))[0].error is None
    assert "a sequence at most 64" in str(llm.generate(PROMPT + PROMPT, SAMPLES)[0].error)
    # the beams of a search run together
    said = str(llm.generate(PROMPT, SamplingParams(beam_width=4, max_tokens=14))[0].error)
    assert said.startswith("50 tokens of prompt and 4 x 14 of beams take 7 blocks of 16; the pool has 4")


def test_streams_of_samples_in_turn(peers) -> None:
    """Each answer grows by itself; the others have nothing to show yet."""
    llm = LLM(peers("llama").folder, **ROOM, max_num_seqs=2)
    (due,) = tokens_of(llm, [PROMPT], SAMPLES)
    seen = [output for _, output in llm.stream(PROMPT, SAMPLES)]
    assert [answer.token_ids for answer in seen[-1].outputs] == due
    assert seen[0].outputs[6].token_ids == []

    async def ask() -> tuple[list[list[int]], list[list[int]]]:
        grown: list[list[int]] = [[] for _ in due]
        async with AsyncEngine(llm) as engine:
            async for output in engine.generate(PROMPT, SAMPLES, deltas=True):
                for answer in output.outputs:
                    grown[answer.index] += answer.token_ids
            return grown, [answer.token_ids for answer in (await engine.complete(PROMPT, SAMPLES)).outputs]

    assert asyncio.run(asyncio.wait_for(ask(), 300)) == (due, due)
