"""An engine begins, sleeps and ends: nobody waits for ever, and no thread is left."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from rooftile.engine import LLM, AsyncEngine, SamplingParams
from rooftile.errors import InvalidInput
from tests.engine.asking import GREEDY, ROOM, TOKENS, assert_clean, prompts
from tests.engine.async_engine.asking import LONG, SOON, read, run, slowed


def test_an_llm_has_one_user(llm: LLM) -> None:
    """An engine's thread and somebody else would each undo what the other does."""

    async def main() -> None:
        stream = llm.stream([[1, 2]], GREEDY)
        next(stream)
        with pytest.raises(InvalidInput, match="the LLM is answering 1 prompts; read their streams to the end, or close them"):
            AsyncEngine(llm)
        stream.close()
        async with AsyncEngine(llm) as engine:
            with pytest.raises(InvalidInput, match="the LLM is an AsyncEngine's until that is closed; ask that engine"):
                llm.generate([[1, 2]], GREEDY)
            with pytest.raises(InvalidInput, match="the LLM is an AsyncEngine's"):
                AsyncEngine(llm)
            assert len((await engine.complete([1, 2], GREEDY)).outputs[0].token_ids) == TOKENS
        async with AsyncEngine(llm):
            pass

    run(main())
    assert len(llm.generate([[1, 2]], GREEDY)[0].outputs[0].token_ids) == TOKENS


def test_two_event_loops_one_after_the_other_and_two_at_once(llm: LLM, peers) -> None:
    asked = prompts(4)
    due = peers("llama").greedy(asked, TOKENS)
    engine = AsyncEngine(llm)
    found: dict[int, list[int]] = {}

    async def one(n: int) -> None:
        found[n] = (await engine.complete(asked[n], GREEDY)).outputs[0].token_ids

    for n in (0, 1):
        run(one(n))
    threads = [threading.Thread(target=run, args=(one(n),)) for n in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[n] for n in range(4)] == due
    run(engine.close())
    assert_clean(llm)


@pytest.mark.parametrize("ahead", [False, True], ids=["", "a step ahead"])
def test_close_ends_what_runs(llm: LLM, ahead: bool) -> None:
    llm.engine._ahead = ahead
    slowed(llm)

    async def main() -> None:
        engine = AsyncEngine(llm)
        tasks = [asyncio.create_task(read(engine, prompt, LONG)) for prompt in prompts(5)]
        while llm.engine.steps["steps"] < 4:
            await asyncio.sleep(0.001)
        await engine.close()
        for task in tasks:
            last = (await task)[-1]
            assert last.finished
            assert last.outputs[0].finish_reason in ("abort", "length")
        assert_clean(llm)
        with pytest.raises(RuntimeError, match="the engine is closed"):
            await engine.complete([1], GREEDY)
        await engine.close()
        # the LLM is its owner's again
        assert len(llm.generate([[1, 2]], GREEDY)[0].outputs[0].token_ids) == TOKENS

    run(main())


def test_requests_that_close_overtakes_hear_of_it(llm: LLM) -> None:
    async def main() -> None:
        engine = AsyncEngine(llm)
        hold, go = threading.Event(), threading.Event()
        add = llm.engine.add

        def late(*arguments, **named):
            hold.set()
            go.wait(SOON)
            return add(*arguments, **named)

        llm.engine.add = late
        first = asyncio.create_task(engine.complete([1], LONG))
        await asyncio.to_thread(hold.wait, SOON)
        second = asyncio.create_task(engine.complete([2], LONG))
        await asyncio.sleep(0.01)
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0.05)
        go.set()
        await closing
        assert (await first).outputs[0].finish_reason == "abort"
        with pytest.raises(RuntimeError, match="the engine is closed"):
            await second

    run(main())
    assert_clean(llm)


def test_a_grammar_that_takes_long_holds_nobody_up(peers, monkeypatch) -> None:
    """It is compiled beside the engine's thread, and a close does not wait for it."""
    llm = LLM(peers("llama").folder, **ROOM)
    go, asked = threading.Event(), threading.Event()

    def slow(structured):
        asked.set()
        go.wait(SOON)
        raise InvalidInput("the grammar is too long")

    llm.engine.grammars = SimpleNamespace(compile=slow)
    structured = SamplingParams(structured={"regex": "a+"})

    async def main() -> None:
        engine = AsyncEngine(llm)
        late = asyncio.create_task(engine.complete([1], structured))
        await asyncio.to_thread(asked.wait, SOON)
        assert len((await engine.complete([1, 2], GREEDY)).outputs[0].token_ids) == TOKENS
        await engine.close()
        with pytest.raises(RuntimeError, match="the engine is closed"):
            await late
        go.set()
        async with AsyncEngine(llm) as engine:
            with pytest.raises(InvalidInput, match="the grammar is too long"):
                await engine.complete([1], structured)

    run(main())
    assert_clean(llm)


def test_an_idle_engine_sleeps(llm: LLM) -> None:
    async def main() -> None:
        async with AsyncEngine(llm) as engine:
            await engine.complete([1, 2], GREEDY)
            await asyncio.sleep(0.05)
            before = time.process_time()
            await asyncio.sleep(0.3)
            assert time.process_time() - before < 0.1

    run(main())


def test_a_program_that_does_not_close_ends(peers) -> None:
    program = f"""
import asyncio
from rooftile.engine import LLM, AsyncEngine, SamplingParams
engine = AsyncEngine(LLM({str(peers("llama").folder)!r}, max_model_len=96, num_blocks=100))
async def main():
    async for output in engine.generate([1, 2, 3], SamplingParams(max_tokens=90, ignore_eos=True)):
        print("began", flush=True)
        break
asyncio.run(main())
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "began\n", "")
