"""Requests with priorities: which begins first, which is preempted, and that none starves."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from rooftile.engine import AsyncEngine
from rooftile.engine.llm import LLM
from rooftile.engine.requests.request import Request
from rooftile.engine.sampling.params import SamplingParams
from rooftile.engine.steps.waiting_queue import OVERTAKING, WaitingQueue
from rooftile.errors import InvalidInput
from tests.engine.asking import GREEDY, ROOM, assert_clean, prompts


def request_of(number: int, priority: int) -> Request:
    return Request(number, [1], SamplingParams(priority=priority), 1, frozenset())


@pytest.mark.parametrize("seed", range(20))
def test_no_request_starves(seed: int) -> None:
    """Each begins by the turn that the queue promises, while more urgent ones come without end."""
    rng, queue = random.Random(seed), WaitingQueue()
    due: dict[int, int] = {}
    begun, number = 0, 0
    for _ in range(2000):
        while len(queue) < rng.randrange(2, 12):
            # most requests that come are more urgent than all that wait
            priority = 5 if rng.random() < 0.2 else -number
            due[number] = begun + (len(queue) + 1) * (OVERTAKING + 1)
            queue.add(request_of(number, priority))
            number += 1
        head = queue.head()
        assert queue.head() is head
        queue.note_begun(head)
        if rng.random() < 0.1:
            # it was preempted
            queue.add(head)
        else:
            begun += 1
            del due[head.id]
        assert begun <= min(due.values(), default=begun)
    assert len(due) == len(queue)
    assert begun > 1000


def test_the_same_priority_is_first_come_first_served() -> None:
    queue = WaitingQueue()
    for number, priority in enumerate((3, 0, 3, -1, 0, 3)):
        queue.add(request_of(number, priority))
    order = []
    while queue:
        head = queue.head()
        order.append(head.id)
        queue.note_begun(head)
    assert order == [3, 1, 4, 0, 2, 5]


def test_urgent_requests_begin_first_and_are_preempted_last(peers) -> None:
    peer = peers("llama")
    asked = prompts(24)
    due = [[tokens] for tokens in peer.greedy(asked, GREEDY.max_tokens)]
    llm = LLM(peer.folder, max_model_len=96, num_blocks=14)
    scheduler, ended, preempted = llm.engine.scheduler, [], []
    finish, preempt = scheduler.finish, scheduler._preempt

    def note_preemption(request, answers) -> None:
        preempted.append(request.order == max(each.order for each in scheduler.running))
        preempt(request, answers)

    scheduler.finish = lambda answer: (ended.append(answer.request.id), finish(answer))
    scheduler._preempt = note_preemption
    rng = random.Random(1)
    priorities = [rng.randrange(-3, 4) for _ in asked]
    found = llm.generate(asked, GREEDY, priority=priorities)
    assert [[answer.token_ids for answer in output.outputs] for output in found] == due
    assert len(preempted) > 2
    assert all(preempted)
    # all wait from the beginning
    urgent = [number for number, priority in enumerate(priorities) if priority < 0]
    assert {*ended[: len(urgent) // 2]} <= {*urgent}
    assert_clean(llm)


def test_an_old_request_is_served_beside_a_stream_of_urgent_ones(peers) -> None:
    peer = peers("llama")
    llm = LLM(peer.folder, **ROOM, max_num_seqs=1)
    engine, prompt = llm.engine, prompts(1)[0]
    one = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, priority=-7)
    engine.add(prompt, one)
    old, steps = engine.add(prompt, SamplingParams(temperature=0, max_tokens=2, priority=10**9)), 0
    while old.live:
        if len(engine.scheduler.waiting) < 3:
            engine.add(prompt, one)
        engine.step()
        steps += 1
        assert steps < 10 * (OVERTAKING + 2)
    for request in [*engine.scheduler.running, *engine.scheduler.waiting]:
        engine.abort(request)
    while not engine.idle:
        engine.step()
    assert_clean(llm)


def test_callers_of_an_async_engine_give_a_priority(peers) -> None:
    llm = LLM(peers("llama").folder, **ROOM, max_num_seqs=1)
    ended: list[int] = []

    async def ask(engine: AsyncEngine, priority: int | None, params: SamplingParams) -> None:
        if priority == 3:
            await engine.complete([5, 6, 7], params, priority=priority)
        else:
            async for _ in engine.generate([5, 6, 7], params, priority=priority):
                pass
        ended.append(params.priority if priority is None else priority)

    async def main() -> None:
        async with AsyncEngine(llm) as engine:
            first = asyncio.create_task(ask(engine, None, replace(GREEDY, max_tokens=60, priority=-9)))
            while not engine.stats().running:
                await asyncio.sleep(0.001)
            await asyncio.gather(first, *(ask(engine, priority, replace(GREEDY, priority=8)) for priority in (3, -2, None, 0)))
            with pytest.raises(InvalidInput, match="priority is 'high'; must be a whole number"):
                await engine.complete([5], GREEDY, priority="high")

    asyncio.run(main())
    assert ended == [-9, -2, 0, 3, 8]
    assert_clean(llm)


def test_priorities_are_whole_numbers_one_for_each(peers) -> None:
    llm = LLM(peers("llama").folder, **ROOM)
    with pytest.raises(InvalidInput, match="there are 1 priorities for 2 prompts"):
        llm.generate(prompts(2), GREEDY, priority=[1])
    for given in (True, 1.5, "high", 10**9 + 1):
        with pytest.raises(InvalidInput, match=r"priority is .*; must be a whole number from -1000000000 to 1000000000"):
            llm.generate(prompts(1), GREEDY, priority=given)
    assert_clean(llm)
