"""Whoever leaves an engine leaves nothing in it: a cancelled task, a closed iterator, an abort."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from rooftile.engine import LLM, AsyncEngine
from tests.engine.asking import GREEDY, TOKENS, assert_clean, prompts
from tests.engine.async_engine.asking import LONG, at_rest, read, run, slowed


@pytest.mark.parametrize("ahead", [False, True], ids=["", "a step ahead"])
def test_who_is_cancelled_leaves_nothing(llm: LLM, ahead: bool, peers) -> None:
    llm.engine._ahead = ahead
    slowed(llm)
    asked = prompts(9)

    async def main() -> None:
        async with AsyncEngine(llm) as engine:
            tasks = [asyncio.create_task(read(engine, prompt, LONG)) for prompt in asked[1:]]
            kept = asyncio.create_task(read(engine, asked[0], GREEDY))
            while llm.engine.steps["steps"] < 4:
                await asyncio.sleep(0.001)
            assert llm.engine.pool.used_blocks > 0
            for task in tasks:
                task.cancel()
            assert {type(left) for left in await asyncio.gather(*tasks, return_exceptions=True)} == {asyncio.CancelledError}
            assert (await kept)[-1].outputs[0].token_ids == peers("llama").greedy(asked[:1], TOKENS)[0]
            await at_rest(engine)
            # nobody ran to the end
            assert llm.engine.steps["steps"] < 60
            assert_clean(llm)
            assert engine._callers._calls == {}

    run(main())


def test_a_closed_iterator_aborts_its_request(llm: LLM) -> None:
    slowed(llm)

    async def main() -> None:
        async with AsyncEngine(llm) as engine:
            async with aclosing(engine.generate([1, 2, 3], LONG)) as stream:
                await anext(stream)
            await at_rest(engine)
            assert llm.engine.steps["steps"] < 60
            assert_clean(llm)
            # and one whose caller has gone before it began
            task = asyncio.create_task(engine.complete([1, 2, 3], LONG))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await at_rest(engine)
            assert_clean(llm)

    run(main())


def test_abort_gives_what_there_is(llm: LLM) -> None:
    slowed(llm)

    async def main() -> None:
        async with AsyncEngine(llm) as engine:
            seen = []
            async for output in engine.generate([1, 2, 3], LONG):
                seen.append(output)
                if len(seen) == 3:
                    engine.abort(output.request_id)
                    engine.abort(999)
            (answer,) = seen[-1].outputs
            assert (answer.finish_reason, seen[-1].finished) == ("abort", True)
            assert 3 <= len(answer.token_ids) < 90
            # a request that is finished
            engine.abort(seen[-1].request_id)
            assert len((await engine.complete([1, 2, 3], GREEDY)).outputs[0].token_ids) == TOKENS

    run(main())
    assert_clean(llm)


def test_closing_a_stream_of_deltas_aborts_its_request(llm: LLM) -> None:
    slowed(llm)

    async def main() -> None:
        async with AsyncEngine(llm) as engine:
            async with aclosing(engine.generate([1, 2, 3], LONG, deltas=True)) as outputs:
                await anext(outputs)
            await at_rest(engine)
            assert llm.engine.steps["steps"] < 60

    run(main())
    assert_clean(llm)


def test_a_loop_that_is_gone_leaves_nothing(llm: LLM) -> None:
    slowed(llm)
    engine = AsyncEngine(llm)
    loop = asyncio.new_event_loop()
    stream = engine.generate([1, 2, 3], LONG)
    loop.run_until_complete(anext(stream))
    # not how one leaves a loop: its generators are not closed
    loop.close()
    run(at_rest(engine))
    assert llm.engine.steps["steps"] < 60
    assert_clean(llm)
    run(engine.close())
