"""Several threads ask one LLM: all get the tokens that each would get alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from rooftile.engine.llm import LLM
from rooftile.engine.requests.output import RequestOutput
from rooftile.errors import InvalidInput
from tests.engine.asking import GREEDY, ROOM, TOKENS, assert_clean, preempted_or_not, prompts

THREADS = 4


@pytest.fixture(autouse=True)
def _turns_are_short() -> Iterator[None]:
    """Threads are interrupted wherever they can be."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def generated(llm: LLM, asked: list[list[int]]) -> list[list[list[int]]]:
    return [[answer.token_ids for answer in output.outputs] for output in llm.generate(asked, GREEDY)]


def streamed(llm: LLM, asked: list[list[int]]) -> list[list[list[int]]]:
    """The tokens, each state of an answer checked on its way."""
    outputs: dict[int, RequestOutput] = {}
    for place, output in llm.stream(asked, GREEDY):
        if place in outputs:
            before, now = (x.outputs[0].token_ids for x in (outputs[place], output))
            assert now[: len(before)] == before
        outputs[place] = output
    return [[answer.token_ids for answer in outputs[place].outputs] for place in sorted(outputs)]


@preempted_or_not
def test_threads_share_an_llm(settings: dict[str, int], ahead: bool, peers) -> None:
    peer = peers("llama")
    due = peer.greedy(prompts(THREADS * 5), TOKENS)
    llm = LLM(peer.folder, **settings)
    llm.engine._ahead = ahead

    def ask(n: int) -> None:
        mine = slice(n * 5, n * 5 + 5)
        wanted = [[row] for row in due[mine]]
        for _ in range(2):
            assert (streamed if n % 2 else generated)(llm, prompts()[mine]) == wanted

    with ThreadPoolExecutor(THREADS) as threads:
        for done in [threads.submit(ask, n) for n in range(THREADS)]:
            done.result()
    assert_clean(llm)


def test_a_step_that_fails_ends_the_answers_of_all_threads(peers, monkeypatch) -> None:
    """Also while a third thread keeps the engine busy."""
    llm = LLM(peers("llama").folder, **ROOM)
    first, second = llm.stream(prompts()[0], GREEDY), llm.stream(prompts()[1], GREEDY)
    next(first), next(second)

    def fail(plan: object) -> None:
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "run", fail)
        with pytest.raises(RuntimeError, match="no"):
            list(first)
    busy = llm.engine.add(prompts()[2], GREEDY)
    states = [output.outputs[0].finish_reason for _, output in second]
    assert states == ["abort"]
    assert busy.live
    llm.engine.abort(busy)


def test_an_llm_that_answers_a_thread_is_lent_to_nobody(peers) -> None:
    llm = LLM(peers("llama").folder, **ROOM)
    stream = llm.stream(prompts()[0], GREEDY)
    next(stream)
    with ThreadPoolExecutor(1) as threads, pytest.raises(InvalidInput, match="the LLM is answering 1 prompts"):
        threads.submit(llm.lend).result()
    stream.close()
    llm.lend()
    with pytest.raises(InvalidInput, match="the LLM is an AsyncEngine's"):
        llm.generate(prompts()[0], GREEDY)
