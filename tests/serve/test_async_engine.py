"""Many callers at once get what `LLM.generate` gives; whoever leaves, leaves nothing; and nobody waits for ever."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace

import pytest
import transformers

from rooftile.errors import InvalidInput
from rooftile.serve import LLM, AsyncEngine, Overloaded, RequestOutput, SamplingParams
from tests.models.checkpoints import SMALL, saved
from tests.serve.asking import GREEDY, ROOM, TOKENS, assert_clean, preempted_or_not, prompts
from tests.serve.folders import save

LONG = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
SOON = 120.0


@pytest.fixture
def llm(peers) -> LLM:
    return LLM(peers("llama").folder, **ROOM)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name == "rooftile engine"] == []


def run(main) -> None:
    """A coroutine in an event loop of its own; one that hangs fails."""
    asyncio.run(asyncio.wait_for(main, SOON))


async def read(engine: AsyncEngine, prompt, params: SamplingParams) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params)]


async def at_rest(engine: AsyncEngine) -> None:
    """Waits until there is nothing to do."""
    while not engine.llm.engine.idle or engine._orders:
        await asyncio.sleep(0.001)


def slowed(llm: LLM, seconds: float = 0.005) -> None:
    """Steps take long enough to do something meanwhile."""
    step = llm.engine.step

    def slow():
        time.sleep(seconds)
        return step()

    llm.engine.step = slow


@preempted_or_not
def test_many_callers_get_what_generate_gives(settings, ahead: bool, peers) -> None:
    asked = prompts(24)
    params = [SamplingParams(temperature=0.9, seed=n, n=1 + n % 3, max_tokens=1 + n % 20, ignore_eos=True) for n in range(24)]
    due = [output.outputs for output in LLM(peers("llama").folder, **settings).generate(asked, params)]
    llm = LLM(peers("llama").folder, **settings)
    llm.engine._ahead = ahead

    async def main() -> None:
        async with AsyncEngine(llm) as engine:
            found = await asyncio.gather(*(read(engine, *each) for each in zip(asked, params, strict=True)))
            for prompt, outputs, answers in zip(asked, found, due, strict=True):
                assert outputs[-1].outputs == answers
                assert {tuple(output.prompt_token_ids) for output in outputs} == {tuple(prompt)}
                assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
                grown = [len(output.outputs[0].token_ids) for output in outputs]
                assert grown == sorted(grown)
            whole = await asyncio.gather(*(engine.complete(*each) for each in zip(asked, params, strict=True)))
            assert [output.outputs for output in whole] == due
            assert engine._calls == {}

    run(main())
    assert_clean(llm)


def test_a_reader_sees_the_answer_grow(llm: LLM, peers) -> None:
    slowed(llm)

    async def main() -> None:
        async with AsyncEngine(llm) as engine:
            lengths = [len(output.outputs[0].token_ids) for output in await read(engine, prompts()[0], GREEDY)]
            # a state may be missed by a loop that is late, but not most of them
            assert len(lengths) > TOKENS / 2
            assert lengths[-1] == TOKENS

    run(main())


def test_a_slow_reader_misses_states_and_keeps_none(llm: LLM) -> None:
    async def main() -> None:
        async with AsyncEngine(llm) as engine:
            seen = []
            async for output in engine.generate(prompts()[0], GREEDY):
                seen.append(output)
                await at_rest(engine)
            # the first may be the last already, if the loop was slow to look
            assert len(seen) <= 2
            assert len(seen[-1].outputs[0].token_ids) == TOKENS
            assert seen[-1].finished

    run(main())


def test_a_loop_that_stands_still_is_rung_at_once_only(llm: LLM, monkeypatch) -> None:
    """The queue of an event loop does not grow with the steps."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        rung = []
        ring = loop.call_soon_threadsafe
        async with AsyncEngine(llm) as engine:
            stream = engine.generate([1, 2, 3], LONG)
            await anext(stream)
            monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *all_: (rung.append(all_), ring(*all_))[1])
            # blocks the loop on purpose
            while not llm.engine.idle:
                time.sleep(0.001)
            assert len(rung) <= 1
            assert len([output async for output in stream][-1].outputs[0].token_ids) == 90

    run(main())


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
            assert engine._calls == {}

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


def test_a_queue_has_an_end(peers) -> None:
    """Whoever comes after it is told so at once, and the others are answered."""
    llm = LLM(peers("llama").folder, **ROOM, max_num_seqs=2)
    slowed(llm)

    async def main() -> None:
        async with AsyncEngine(llm, max_waiting=3) as engine:
            running = [asyncio.create_task(engine.complete([n], GREEDY)) for n in (1, 2)]
            while len(llm.engine.scheduler.running) < 2:
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


def test_stats_are_those_of_the_last_step(llm: LLM) -> None:
    async def main() -> None:
        async with AsyncEngine(llm) as engine:
            assert engine.stats()[:3] == (0, 0, 0)
            await engine.complete([1, 2, 3], SamplingParams(n=2, max_tokens=5, ignore_eos=True))
            await at_rest(engine)
            stats = engine.stats()
            assert stats[:3] == (0, 0, 0)
            assert stats.steps == llm.engine.steps["steps"] > 0
            assert stats.tokens == llm.engine.steps["tokens"]
            pool = llm.engine.pool
            assert (stats.free_blocks, stats.used_blocks, stats.cached_blocks) == (
                pool.free_blocks, 0, pool.cached_blocks,
            )  # fmt: skip

    run(main())


@pytest.mark.parametrize(
    "params",
    [
        LONG,
        SamplingParams(temperature=0.9, seed=3, n=3, max_tokens=40, logprobs=2, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=1, min_tokens=30, max_tokens=80, ignore_eos=True, stop=["e", "th"]),
        SamplingParams(beam_width=3, n=2, max_tokens=12, ignore_eos=True),
    ],
    ids=["greedy", "three with logprobs", "stop strings", "beams"],
)
def test_deltas_are_the_complete_answers_in_pieces(params: SamplingParams, tmp_path) -> None:
    config = transformers.LlamaConfig(**SMALL | {"vocab_size": 420})
    saved(transformers.AutoModelForCausalLM.from_config(config), tmp_path)
    llm = LLM(save("byte_level", tmp_path), **ROOM)
    (whole,) = llm.generate(["The roof of a house"], params)
    if params.stop:
        # a stop string of four tokens, which are withheld one by one, and taken away
        (free,) = llm.generate(["The roof of a house"], replace(params, stop=[]))
        params = replace(params, stop=[llm.tokenizer.decode(free.outputs[0].token_ids[34:38])])
        (whole,) = llm.generate(["The roof of a house"], params)
        assert whole.outputs[0].finish_reason == "stop"
        assert len(whole.outputs[0].token_ids) <= 35

    async def main() -> None:
        async with AsyncEngine(llm) as engine:
            pieces = [output async for output in engine.generate("The roof of a house", params, deltas=True)]
            assert [output.finished for output in pieces] == [False] * (len(pieces) - 1) + [True]
            for due in whole.outputs:
                own = [each for output in pieces for each in output.outputs if each.index == due.index]
                assert "".join(each.text for each in own) == due.text
                assert [token for each in own for token in each.token_ids] == due.token_ids
                if params.logprobs is not None:
                    assert [one for each in own for one in each.logprobs] == due.logprobs
                last = own[-1]
                assert (last.finish_reason, last.stop_reason, last.score) == (due.finish_reason, due.stop_reason, due.score)
                assert all(each.finish_reason is None for each in own[:-1])
                # a search has nothing to show before its end
                assert (len(own) == 1) == (params.beam_width is not None)

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


def test_an_idle_engine_sleeps(llm: LLM) -> None:
    async def main() -> None:
        async with AsyncEngine(llm) as engine:
            await engine.complete([1, 2], GREEDY)
            await asyncio.sleep(0.05)
            before = time.process_time()
            await asyncio.sleep(0.3)
            assert time.process_time() - before < 0.1

    run(main())


def test_texts_are_read_off_the_loop(tmp_path) -> None:
    config = transformers.LlamaConfig(**SMALL | {"vocab_size": 420})
    saved(transformers.AutoModelForCausalLM.from_config(config), tmp_path)
    save("byte_level", tmp_path)
    llm = LLM(tmp_path, **ROOM)
    due = llm.generate("the roof", GREEDY)[0]
    encode, threads = llm.tokenizer.encode, []

    def noted(text: str) -> list[int]:
        threads.append(threading.current_thread())
        return encode(text)

    llm.tokenizer.encode = noted

    async def main() -> None:
        async with AsyncEngine(llm) as engine:
            outputs = await read(engine, "the roof", GREEDY)
            assert outputs[-1].outputs == due.outputs
            assert {output.prompt for output in outputs} == {"the roof"}

    run(main())
    assert threads
    assert threads[0] is not threading.main_thread()


def test_a_program_that_does_not_close_ends(peers) -> None:
    program = f"""
import asyncio
from rooftile.serve import LLM, AsyncEngine, SamplingParams
engine = AsyncEngine(LLM({str(peers("llama").folder)!r}, max_model_len=96, num_blocks=100))
async def main():
    async for output in engine.generate([1, 2, 3], SamplingParams(max_tokens=90, ignore_eos=True)):
        print("began", flush=True)
        break
asyncio.run(main())
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "began\n", "")
