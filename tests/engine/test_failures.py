"""An error of one request is its own, and an interruption anywhere leaves no block, slot or answer behind."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import sys
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import transformers

from rooftile.engine import AsyncEngine
from rooftile.engine.engine import Engine
from rooftile.engine.llm import LLM
from rooftile.engine.sampling.beam_search import BeamSearch
from rooftile.engine.sampling.params import SamplingParams
from rooftile.engine.steps.runner import Computed, Result
from rooftile.engine.steps.scheduler import Scheduler, StepPlan
from rooftile.engine.text.tokenizer import Tokenizer
from rooftile.errors import InvalidInput
from rooftile.kvcache import BlockPool
from tests.engine.asking import GREEDY, ROOM, assert_clean, prompts, tokens_of
from tests.engine.folders import save
from tests.models.checkpoints import SMALL, VOCABULARY, saved

TINY = 8
BEAMS = SamplingParams(n=4, beam_width=16, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[transformers.PreTrainedModel, LLM]:
    """A model with a vocabulary of 8 tokens."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**SMALL | {"vocab_size": TINY})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    # saved with an end of text, which the tests here do without
    folder = saved(model, tmp_path_factory.mktemp("tiny"))
    model.generation_config.eos_token_id = None
    return model, LLM(folder, **ROOM)


@pytest.mark.parametrize("ends", [[], [1, 2, 3, 4, 5, 6, 7]], ids=["no ends", "all tokens but one end"])
def test_a_search_goes_on_with_fewer_successors_than_beams(ends: list[int], tiny) -> None:
    model, llm = tiny
    params = SamplingParams(n=4, beam_width=16, max_tokens=5, ignore_eos=True, stop_token_ids=ends)
    ids = torch.tensor([[3, 1, 5]])
    settings = transformers.GenerationConfig(
        max_new_tokens=5, num_beams=16, num_return_sequences=4, do_sample=False, eos_token_id=ends or None, pad_token_id=0
    )
    due = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)[:, 3:].tolist()
    cut = [row[: next((n + 1 for n, token in enumerate(row) if token in ends), len(row))] for row in due]
    assert tokens_of(llm, [[3, 1, 5]], params) == [cut]


def test_beams_whose_candidates_are_of_unequal_number() -> None:
    """A preempted search may get the candidates of its beams in different steps, beside requests that ask for more of them."""
    search = BeamSearch(2, 9, frozenset(), 1.0, False)
    search.step([[5, 6, 7, 8]], [[-1.0, -1.5, -3.0, -4.0]])
    going = search.step([[1, 2, 3, 4, 9], [1, 2, 3, 4]], [[-1.0, -2.0, -2.5, -3.0, -5.0], [-0.1, -4.0, -5.0, -6.0]])
    assert [tuple(successor) for successor in going] == [(1, 1), (0, 1)]


def test_tokens_without_a_probability_are_never_taken(tiny, monkeypatch) -> None:
    """NaN counts as -inf in a search, too; a search with nothing left to take ends with a sentence."""
    _, llm = tiny
    decoder = llm.engine.runner.decoder
    logits = decoder.logits
    few = torch.tensor([0, 2, 7])
    for bad in (torch.nan, -torch.inf):
        monkeypatch.setattr(decoder, "logits", lambda hidden, bad=bad, **how: logits(hidden).index_fill(1, few, bad))
        (output,) = llm.generate([3, 1, 5], BEAMS)
        assert len(output.outputs) == 4
        for answer in output.outputs:
            assert set(answer.token_ids) <= {1, 3, 4, 5, 6}
            assert -100 < answer.score < 0
        (sampled,) = llm.generate([3, 1, 5], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=8))
        for told in sampled.outputs[0].logprobs:
            assert {token for token, one in told.items() if one.logprob == -torch.inf} == {0, 2, 7}
            assert sum(torch.tensor([one.logprob for one in told.values()]).exp()) == pytest.approx(1, abs=1e-4)
    monkeypatch.setattr(decoder, "logits", lambda hidden, **how: logits(hidden).fill_(torch.nan))
    (output,) = llm.generate([3, 1, 5], BEAMS)
    assert output.error == ("the beam search has found no answer: the logits of every token that it may take are NaN or -inf")
    assert output.outputs == []
    assert_clean(llm)


@contextmanager
def broken_search(monkeypatch):
    """Every beam search raises in its second step."""
    step = BeamSearch.step

    def fails(self, *given):
        if self._tokens[0]:
            raise ZeroDivisionError("no such beam")
        return step(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(BeamSearch, "step", fails)
        yield


def test_an_error_of_one_request_is_its_own(peers, monkeypatch, caplog) -> None:
    llm = LLM(peers("llama").folder, **ROOM)
    asked = prompts(3)
    due = [answers[0] for answers in tokens_of(llm, asked, GREEDY)]
    beams = SamplingParams(beam_width=3, max_tokens=9)
    sentence = "the request has failed: ZeroDivisionError: no such beam"

    async def ask() -> None:
        async with AsyncEngine(llm) as engine:
            found = await asyncio.gather(
                engine.complete(asked[0], GREEDY), engine.complete(asked[1], beams), engine.complete(asked[2], GREEDY),
                return_exceptions=True,
            )  # fmt: skip
            assert [found[n].outputs[0].token_ids for n in (0, 2)] == [due[0], due[2]]
            assert (type(found[1]), str(found[1])) == (RuntimeError, sentence)

    with broken_search(monkeypatch), caplog.at_level(logging.CRITICAL):
        outputs = llm.generate(asked, [GREEDY, beams, GREEDY])
        assert [outputs[n].outputs[0].token_ids for n in (0, 2)] == [due[0], due[2]]
        assert (outputs[1].error, outputs[1].outputs) == (sentence, [])
        assert_clean(llm)
        asyncio.run(ask())
    assert_clean(llm)


def test_a_text_that_cannot_be_made_is_one_requests_own(tmp_path, monkeypatch, caplog) -> None:
    """Text is made when it is read, which is outside of a step."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL | {"vocab_size": 420})
    save("byte_level", saved(transformers.AutoModelForCausalLM.from_config(config), tmp_path))
    llm = LLM(tmp_path, **ROOM)
    asked = prompts(3)
    due = [answers[0] for answers in tokens_of(llm, asked, GREEDY)]
    # a token that only one of the answers has
    decode, lost = Tokenizer.decode, next(token for token in due[1] if token not in due[0] + due[2])

    def fails(self, ids, *given):
        if lost in ids:
            raise ZeroDivisionError("no such text")
        return decode(self, ids, *given)

    sentence = "the request has failed: ZeroDivisionError: no such text"

    async def ask() -> None:
        async with AsyncEngine(llm) as engine:
            found = await asyncio.gather(*(engine.complete(prompt, GREEDY) for prompt in asked), return_exceptions=True)
            assert [found[n].outputs[0].token_ids for n in (0, 2)] == [due[0], due[2]]
            assert (type(found[1]), str(found[1])) == (RuntimeError, sentence)

    monkeypatch.setattr(Tokenizer, "decode", fails)
    with caplog.at_level(logging.CRITICAL):
        outputs = llm.generate(asked, GREEDY)
        assert [outputs[n].outputs[0].token_ids for n in (0, 2)] == [due[0], due[2]]
        assert (outputs[1].error, outputs[1].outputs) == (sentence, [])
        streamed = [output for place, output in llm.stream(asked, GREEDY) if place == 1]
        assert streamed[-1].error == sentence
        assert_clean(llm)
        asyncio.run(ask())
    assert_clean(llm)


def test_an_order_about_no_request_does_not_end_the_engine(peers) -> None:
    llm = LLM(peers("llama").folder, **ROOM)

    async def ask() -> None:
        async with AsyncEngine(llm) as engine:
            with pytest.raises(InvalidInput, match="request_id is 'x'; must be the whole number that an output has"):
                engine.abort("x")
            assert (await engine.complete([1, 2], GREEDY)).finished

    asyncio.run(ask())


@pytest.mark.parametrize("value", ["a", 0, True, 2.5])
@pytest.mark.parametrize("name", ["max_waiting", "max_waiting_tokens"])
def test_bounds_of_the_queue_are_whole_numbers(name: str, value: object, peers) -> None:
    llm = LLM(peers("llama").folder, **ROOM)
    with pytest.raises(InvalidInput, match=f"{name} is {value!r}; must be a whole number of at least 1"):
        AsyncEngine(llm, **{name: value})
    assert not llm.owned


BOOKS = [
    BlockPool.begin, BlockPool.append, BlockPool.seal, BlockPool.fork, BlockPool.free, BlockPool._take, BlockPool._give_up,
    BlockPool._forget, Scheduler.fork_beams, Scheduler._admit, Scheduler._reserve, Scheduler._preempt, Scheduler._release,
    Scheduler._remove, Scheduler.abort, Scheduler.finish,
]  # fmt: skip


def lines_of(function: Callable) -> list[int]:
    code = function.__code__
    return sorted({line for _, _, line in code.co_lines() if line} - {code.co_firstlineno})


@contextmanager
def interruption(function: Callable, line: int):
    """Raises KeyboardInterrupt as soon as `function` reaches a line; yields a list that is then not empty."""
    reached = []

    def count(frame, event, arg):
        if event == "line" and frame.f_lineno == line and not reached:
            reached.append(line)
            raise KeyboardInterrupt
        return count

    before = sys.gettrace()
    sys.settrace(lambda frame, event, arg: count if frame.f_code is function.__code__ else None)
    try:
        yield reached
    finally:
        sys.settrace(before)


class Model:
    """Stands in for a runner: next tokens depend on an answer's length and place, and nothing is computed."""

    device = torch.device("cpu")
    decoder = SimpleNamespace(config=SimpleNamespace(vocab_size=VOCABULARY, eos_ids=()))
    adapters = None

    def run(self, plan: StepPlan) -> Result:
        answers = [answer for work in plan.work for answer in work.outputs]
        tokens = torch.tensor([(7 * len(answer.ids) + 3 * answer.index) % VOCABULARY for answer in answers], dtype=torch.int64)
        ids = (tokens[:, None] + torch.arange(9)) % VOCABULARY
        logprobs = -torch.arange(1.0, 10.0).expand(ids.shape)
        found = Computed(tokens, (logprobs[:, 0], ids, logprobs, torch.ones_like(tokens)), [], None)
        return Result([(answer, ()) for answer in answers], [], found)


SEVERAL = SamplingParams(n=2, max_tokens=12, seed=1)


def answers_of(engine: Engine) -> list[list[list[int]]]:
    """Runs samples and a search in a cache that is too small for all."""
    asked = [list(range(17)), list(range(17)), [5] * 9, [7] * 20]
    search = SamplingParams(beam_width=3, max_tokens=4)
    requests = [engine.add(prompt, params) for prompt, params in zip(asked, [SEVERAL, search, SEVERAL, SEVERAL], strict=True)]
    while not engine.idle:
        engine.step()
    return [[answer.ids for answer in request.answers] for request in requests]


def assert_nobody_owns_anything(engine: Engine) -> None:
    engine.pool.check()
    assert engine.pool.used_blocks == 0
    assert engine.idle
    assert sorted(engine.scheduler._slots) == list(range(engine.max_answers))


@pytest.mark.parametrize("function", BOOKS, ids=lambda function: function.__qualname__)
def test_an_interruption_in_the_books_leaves_nothing_behind(function: Callable) -> None:
    engine = Engine(Model(), BlockPool(10, 8), max_len=64, max_answers=8, max_batched_tokens=40)
    due = answers_of(engine)
    assert engine.scheduler.preemptions
    lines, missed = lines_of(function), []
    for line in lines:
        with interruption(function, line) as reached:
            try:
                answers_of(engine)
            except KeyboardInterrupt:
                assert reached
        if not reached:
            missed.append(line)
        assert_nobody_owns_anything(engine)
    assert len(missed) < len(lines) / 2
    assert answers_of(engine) == due


@pytest.mark.parametrize("function", [Scheduler.abort, Scheduler._release, BlockPool.free], ids=lambda f: f.__qualname__)
def test_an_interrupted_abort_leaves_nothing_behind(function: Callable) -> None:
    """A caller's loop is left by Ctrl-C, and then the abort of its requests is interrupted as well."""
    engine = Engine(Model(), BlockPool(10, 8), max_len=64, max_answers=8, max_batched_tokens=40)
    requests = [engine.add(prompt, SEVERAL) for prompt in ([1] * 9, [2] * 9)]
    engine.step()
    with pytest.raises(KeyboardInterrupt), interruption(function, lines_of(function)[-1]):
        engine.abort(requests[0])
    assert_nobody_owns_anything(engine)
    assert [answer.finish_reason for request in requests for answer in request.answers] == ["abort"] * 4


def _in_a_child(llm: LLM, engine: AsyncEngine | None, told) -> None:
    try:
        if engine is None:
            llm.generate([1, 2], GREEDY)
        else:
            asyncio.run(engine.complete([1, 2], GREEDY))
    except InvalidInput as error:
        told.send(str(error))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("owned", [False, True])
def test_a_forked_process_is_refused(owned: bool, peers) -> None:
    """While another thread is in a step, the lock is held, and would be held in the child for ever."""
    llm = LLM(peers("llama").folder, **ROOM)
    engine = AsyncEngine(llm) if owned else None
    fork = multiprocessing.get_context("fork")
    heard, told = fork.Pipe(duplex=False)
    with llm._lock:
        child = fork.Process(target=_in_a_child, args=(llm, engine, told))
        child.start()
    assert heard.poll(30), "the child waits for ever"
    assert heard.recv().endswith("forked from it: make an LLM here, or start this process by spawn instead of fork")
    child.join(30)
    assert child.exitcode == 0
    if engine is not None:
        asyncio.run(engine.close())
    assert_clean(llm)
