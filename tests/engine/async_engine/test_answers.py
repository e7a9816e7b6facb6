"""Many callers at once get what `LLM.generate` gives, whole or in pieces, and a slow reader keeps nothing."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace

import pytest
import transformers

from rooftile.engine import LLM, AsyncEngine, SamplingParams
from tests.engine.asking import GREEDY, ROOM, TOKENS, assert_clean, preempted_or_not, prompts
from tests.engine.async_engine.asking import LONG, at_rest, read, run, slowed
from tests.engine.folders import save
from tests.models.checkpoints import SMALL, saved


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
            assert engine._callers._calls == {}

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
            # the first may be the last already, if the loop was slow to look; an engine is at rest a moment before its last state
            # is told, and then the reader sees the state before the last, too
            assert len(seen) <= 3 < TOKENS
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
