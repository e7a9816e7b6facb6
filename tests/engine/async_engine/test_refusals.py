"""A refusal is its caller's alone, a queue has an end, and a step that fails is heard by all."""

from __future__ import annotations

import asyncio

import pytest

from rooftile.engine import LLM, AsyncEngine, Overloaded, SamplingParams
from rooftile.errors import InvalidInput
from tests.engine.asking import GREEDY, ROOM, TOKENS, assert_clean, prompts
from tests.engine.async_engine.asking import LONG, at_rest, read, run, slowed


@pytest.mark.parametrize(
    ("prompt", "error", "sentence"),
    [
        ([], InvalidInput, "the prompt has no token"),
        ([1] * 96, InvalidInput, "the prompt has 96 tokens"),
        ("text", InvalidInput, "the prompt is text and the model has no tokenizer"),
        (5, InvalidInput, "the prompt is '5', of type int; must be a list of token ids"),
        ({"prompt_token_ids": [1], "cache_salt": 5}, InvalidInput, "the salt is 5; must be a string"),
    ],
)
def test_a_refusal_is_its_callers_alone(prompt, error: type[Exception], sentence: str, llm: LLM, peers) -> None:
    async def main() -> None:
        async with AsyncEngine(llm) as engine:
            good = asyncio.create_task(engine.complete(prompts()[0], GREEDY))
            with pytest.raises(error, match=sentence):
                await anext(engine.generate(prompt, GREEDY))
            with pytest.raises(error, match=sentence):
                await engine.complete(prompt, GREEDY)
            assert (await good).outputs[0].token_ids == peers("llama").greedy(prompts()[:1], TOKENS)[0]

    run(main())
    assert_clean(llm)


def test_parameters_of_another_kind_are_refused(llm: LLM) -> None:
    async def main() -> None:
        async with AsyncEngine(llm) as engine:
            for params in ({"max_tokens": 3}, [GREEDY]):
                with pytest.raises(InvalidInput, match=r"params is .*; must be SamplingParams"):
                    await engine.complete([1], params)
                with pytest.raises(InvalidInput, match=r"params is .*; must be SamplingParams"):
                    await anext(engine.generate([1], params, deltas=True))

    run(main())


def test_no_salt_ends_the_engine(llm: LLM, peers) -> None:
    """Whatever string a stranger sends for one."""

    async def main() -> None:
        async with AsyncEngine(llm) as engine:
            for salt in ("\ud800", "\x00", "a" * 10_000):
                asked = {"prompt_token_ids": prompts()[0], "cache_salt": salt}
                due = peers("llama").greedy(prompts()[:1], TOKENS)[0]
                assert (await engine.complete(prompts()[0], GREEDY, salt=salt)).outputs[0].token_ids == due
                assert (await engine.complete(asked, GREEDY)).outputs[0].token_ids == due

    run(main())
    assert_clean(llm)


def test_a_step_that_fails_is_heard_by_all_who_wait_and_all_who_come(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    step, left = llm.engine.step, [3]

    def failing():
        left[0] -= 1
        if not left[0]:
            raise ValueError("no such page")
        return step()

    llm.engine.step = failing

    async def main() -> None:
        async with AsyncEngine(llm) as engine:
            found = await asyncio.gather(*(read(engine, prompt, LONG) for prompt in prompts(5)), return_exceptions=True)
            for error in found:
                assert isinstance(error, RuntimeError)
                assert str(error) == "the engine has failed, and takes no more requests: ValueError: no such page"
                assert isinstance(error.__cause__, ValueError)
            assert len({id(error) for error in found}) == 5
            for _ in range(2):
                with pytest.raises(RuntimeError, match="no such page"):
                    await engine.complete([1], LONG)
            engine.abort(0)

    run(main())
    llm.engine.step = step
    assert_clean(llm)
    assert len(llm.generate([[1, 2]], GREEDY)[0].outputs[0].token_ids) == TOKENS
    assert "no such page" in caplog.text
    assert "Traceback" in caplog.text


def test_an_output_that_cannot_be_made_is_its_callers_alone(llm: LLM, monkeypatch, caplog, peers) -> None:
    real, count = llm.engine.output_of, 0

    def broken(*given):
        nonlocal count
        count += 1
        if count == 2:
            raise ValueError("a mistake of ours")
        return real(*given)

    async def main() -> None:
        async with AsyncEngine(llm) as engine:
            # both end in one step; the first has its output when the second fails
            monkeypatch.setattr(llm.engine, "output_of", broken)
            first, second = await asyncio.gather(*(engine.complete([n], GREEDY) for n in (1, 2)), return_exceptions=True)
            assert (type(second), str(second)) == (RuntimeError, "the request has failed: ValueError: a mistake of ours")
            assert isinstance(second.__cause__, ValueError)
            third = await engine.complete([2], GREEDY)
            assert [each.outputs[0].token_ids for each in (first, third)] == peers("llama").greedy([[1], [2]], TOKENS)

    run(main())
    assert_clean(llm)
    assert "a mistake of ours" in caplog.text


def test_a_failure_between_two_steps_is_heard_by_all(llm: LLM, monkeypatch, caplog) -> None:
    """Also by callers whose orders are behind it."""

    def broken(*given):
        monkeypatch.undo()
        raise ValueError("a mistake of ours")

    async def main() -> None:
        async with AsyncEngine(llm) as engine:
            monkeypatch.setattr(llm.engine, "abort", broken)
            first = asyncio.create_task(engine.complete([1], LONG))
            while llm.engine.idle:
                await asyncio.sleep(0.001)
            callers = engine._callers
            with callers._wake:
                (call,) = callers._calls.values()
                # in one batch of orders: the abort that fails, and a request behind it
                engine.abort(call.request.id)
                second = asyncio.create_task(engine.complete([2], LONG))
                for _ in range(5):
                    await asyncio.sleep(0)
            found = await asyncio.gather(first, second, return_exceptions=True)
            assert [str(error) for error in found] == [
                "the engine has failed, and takes no more requests: ValueError: a mistake of ours"
            ] * 2

    run(main())
    assert "a mistake of ours" in caplog.text


def test_blocks_that_have_leaked_end_an_idle_engine(llm: LLM, monkeypatch, caplog) -> None:
    monkeypatch.setattr("rooftile.engine.loop.loop.IDLE_S", 0.02)

    async def main() -> None:
        async with AsyncEngine(llm) as engine:
            await engine.complete([1, 2], GREEDY)
            while not engine._loop._checked:
                await asyncio.sleep(0.001)
            lost = llm.engine.pool.begin([5, 6])
            llm.engine.pool.append(lost, 2)
            await engine.complete([1, 2], GREEDY)
            while not engine._callers._over:
                await asyncio.sleep(0.001)
            with pytest.raises(RuntimeError, match="1 of 600 blocks of the KV cache are held, and no request runs"):
                await engine.complete([1, 2], GREEDY)
            llm.engine.pool.free(lost)

    run(main())
    assert_clean(llm)
    assert "they have leaked" in caplog.text


def test_a_queue_has_an_end(peers) -> None:
    """Whoever comes after it is told so at once, and the others are answered."""
    llm = LLM(peers("llama").folder, **ROOM, max_num_seqs=2)
    slowed(llm)

    async def main() -> None:
        async with AsyncEngine(llm, max_waiting=3) as engine:
            running = [asyncio.create_task(engine.complete([n], GREEDY)) for n in (1, 2)]
            while engine.stats().running < 2:
                await asyncio.sleep(0.001)
            many = await asyncio.gather(*(engine.complete([n], GREEDY) for n in range(3, 13)), return_exceptions=True)
            refused = [error for error in many if isinstance(error, Overloaded)]
            assert len(refused) == 10 - 3
            due = "3 answers wait already and the request has 1; 3 may wait (max_waiting): try again later"
            assert str(refused[0]) == due
            for output in [*(one for one in many if one not in refused), *await asyncio.gather(*running)]:
                assert len(output.outputs[0].token_ids) == TOKENS
            assert len((await engine.complete([1], GREEDY)).outputs[0].token_ids) == TOKENS
        with pytest.raises(InvalidInput, match="max_waiting is 0; must be a whole number of at least 1"):
            AsyncEngine(llm, max_waiting=0)

    run(main())
    assert_clean(llm)


def test_answers_and_prompt_tokens_that_wait_are_bounded(peers) -> None:
    """Each of n answers counts; where nothing waits, a request that is too large by itself is taken."""
    llm = LLM(peers("llama").folder, **ROOM, max_num_seqs=1)
    slowed(llm)

    async def main() -> None:
        async with AsyncEngine(llm, max_waiting=3, max_waiting_tokens=10) as engine:
            running = asyncio.create_task(engine.complete([1], GREEDY))
            while engine.stats().running < 1:
                await asyncio.sleep(0.001)
            waiting = asyncio.create_task(engine.complete([2] * 4, GREEDY))
            while engine.stats().waiting < 1:
                await asyncio.sleep(0.001)
            assert engine.stats().waiting_tokens == 4
            with pytest.raises(Overloaded, match="1 answers wait already and the request has 3; 3 may wait"):
                await engine.complete([3], SamplingParams(n=3, max_tokens=2))
            with pytest.raises(Overloaded, match="4 prompt tokens wait already and the request has 7; 10 may wait"):
                await engine.complete([3] * 7, GREEDY)
            await asyncio.gather(running, waiting)
            await at_rest(engine)
            assert (await engine.complete([3] * 12, GREEDY)).finished

    run(main())
    assert_clean(llm)
