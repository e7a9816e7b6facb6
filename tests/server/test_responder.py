"""A request on its way to the engine and back: whatever ends it, all that was sent for it is taken back."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from rooftile.engine.chat.parts import PlainReader
from rooftile.engine.requests.stats import EngineStats
from rooftile.server.admission import Admission
from rooftile.server.engine.calls import EngineRefused, RemoteCall
from rooftile.server.engine.messages import AnswerPiece, News, StepNews
from rooftile.server.engine.remote import RemoteEngine
from rooftile.server.http.openai.chat_answers import ChatReaders
from rooftile.server.http.openai.generation import GenerationRequest
from rooftile.server.http.openai.objects import Objects
from rooftile.server.http.responder import Responder
from rooftile.server.http.sse import chunks_of, events_of
from rooftile.server.observe.log import AccessRecord
from rooftile.server.observe.metrics import Metrics
from rooftile.server.refusals import Refusal

LATE = Refusal("deadline_exceeded", "the time is over")


class FakeEngine:
    """Keeps the calls that were sent, and notes who leaves."""

    def __init__(self) -> None:
        self.sent: list[RemoteCall] = []
        self.left: list[RemoteCall] = []

    def send(self, prompt: list[int], params: dict[str, Any], **how: Any) -> RemoteCall:
        self.sent.append(RemoteCall(len(self.sent)))
        return self.sent[-1]

    def leave(self, call: RemoteCall) -> bool:
        if call in self.left:
            return False
        self.left.append(call)
        return True


def made(engine: FakeEngine, prompts: int = 2, deadline_s: float = 60.0) -> Responder:
    ready = SimpleNamespace(max_len=100)
    service: Any = SimpleNamespace(
        check=lambda: (engine, None, ready), live=set(), admission=Admission(9, 99), metrics=Metrics("test", "tiny")
    )
    generation = GenerationRequest(chat=False, prompts=[[5]] * prompts, params={}, salt="", n=1, sampled=1, stream=True)
    return Responder(service, generation, AccessRecord(id="abc"), asyncio.get_running_loop().time() + deadline_s)


async def waiting_for_the_second(responder: Responder, engine: FakeEngine) -> asyncio.Task[None]:
    """Returns the task of a request whose first prompt the engine has taken, and whose second it has not."""
    task = asyncio.create_task(responder.begin())
    while len(engine.sent) < 2 and not task.done():
        await asyncio.sleep(0)
    engine.sent[0].taken.set_result(None)
    await asyncio.sleep(0)
    return task


def test_a_client_that_leaves_while_its_second_prompt_waits_takes_the_first_with_it() -> None:
    async def test() -> None:
        engine = FakeEngine()
        responder = made(engine)
        task = await waiting_for_the_second(responder, engine)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        responder.close()
        assert engine.left == engine.sent
        assert responder._service.admission.waiting == 0

    asyncio.run(test())


def test_the_end_of_the_server_is_told_to_who_waits_to_be_taken() -> None:
    async def test() -> None:
        engine = FakeEngine()
        responder = made(engine)
        task = await waiting_for_the_second(responder, engine)
        responder.stop(Refusal("shutting_down", "the server is shutting down"))
        with pytest.raises(Refusal, match="shutting down"):
            await task
        assert engine.left == engine.sent

    asyncio.run(test())


def test_what_is_late_is_aborted_also_where_its_client_reads_nothing() -> None:
    async def test() -> None:
        engine = FakeEngine()
        responder = made(engine, prompts=1, deadline_s=0.2)
        task = asyncio.create_task(responder.begin())
        while not engine.sent and not task.done():
            await asyncio.sleep(0)
        (call,) = engine.sent
        call.taken.set_result(None)
        await task
        news = responder.news()
        call.take(News(0, [AnswerPiece(0, "a", 1)]))
        assert (await anext(news))[1].pieces[0].text == "a"
        # from here on the client takes nothing, so nobody asks for more
        call.take(News(0, [AnswerPiece(0, "b", 2)]))
        while not engine.left:
            await asyncio.sleep(0.01)
        # it has what came before, and then the reason
        assert (await anext(news))[1].pieces[0].text == "b"
        with pytest.raises(Refusal, match="ask for fewer tokens"):
            await anext(news)
        responder.close()

    asyncio.run(asyncio.wait_for(test(), 300))


def test_an_answer_that_is_complete_is_given_although_the_time_is_over() -> None:
    async def test() -> None:
        engine = FakeEngine()
        responder = made(engine, prompts=1)
        responder._engines = engine  # type: ignore[assignment]
        responder._calls = [RemoteCall(0)]
        responder._calls[0].take(News(0, [AnswerPiece(0, "all", 1, finish="stop")], finished=True))
        responder.stop(LATE)
        assert [news.pieces[0].text async for _, news in responder.news()] == ["all"]

    asyncio.run(asyncio.wait_for(test(), 300))


def test_events_that_come_together_are_sent_together_and_all_tokens_are_counted() -> None:
    async def test() -> None:
        responder = made(FakeEngine(), prompts=1)
        responder.generation.n, responder.generation.chat = 2, True
        responder.tokens, responder._readers = [[5]], ChatReaders(lambda place: PlainReader(), lambda answer, place: None)
        (call,) = responder._calls = [RemoteCall(0)]
        access = responder._access
        events = events_of(chunks_of(responder, Objects("abc", "tiny", 0, chat=True)), access)
        first = await anext(events)
        assert first.count(b'"role":"assistant"') == first.count(b"data: ") == 2
        call.take(News(0, [AnswerPiece(0, "a", 1), AnswerPiece(1, "b", 1)], cached=16))
        call.take(News(0, [AnswerPiece(0, "c", 3), AnswerPiece(1, "", 2)], cached=16))
        two = await anext(events)
        deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in two.splitlines() if line]
        assert deltas == [{"content": "ac"}, {"content": "b"}]
        assert (access.completion_tokens, access.cached_tokens) == (5, 16)
        assert responder.usage.object()["prompt_tokens_details"] == {"cached_tokens": 16}
        call.take(News(0, [AnswerPiece(0, "", 3), AnswerPiece(1, "", 4)], cached=16))
        call.take(
            News(
                0,
                [AnswerPiece(0, "", 3, finish="stop"), AnswerPiece(1, "d", 5, finish="stop")],
                finished=True,
                cached=16,
                paged=48,
            )
        )
        rest = [event async for event in events]
        assert [event.count(b"data: ") for event in rest] == [2, 1]
        assert rest[-1] == b"data: [DONE]\n\n"
        assert access.completion_tokens == sum(responder.usage.completion.values()) == 8
        # blocks of more tokens than there was a state for
        assert responder.usage.object()["prompt_tokens_details"] == {"cached_tokens": 16, "paged_tokens": 48}
        assert (access.cached_tokens, access.paged_tokens) == (16, 48)

    asyncio.run(asyncio.wait_for(test(), 300))


@pytest.mark.parametrize(("ours", "code"), [(False, "invalid_value"), (True, "server_error")])
def test_a_refusal_of_the_engine_says_whose_mistake_it_is(ours, code) -> None:
    async def test() -> None:
        engine = FakeEngine()
        responder = made(engine, prompts=1)
        task = asyncio.create_task(responder.begin())
        while not engine.sent and not task.done():
            await asyncio.sleep(0)
        engine.sent[0].fail(EngineRefused("the detail", ours=ours))
        with pytest.raises(Refusal) as refused:
            await task
        assert refused.value.code == code
        assert ("the detail" in refused.value.message) is not ours

    asyncio.run(asyncio.wait_for(test(), 300))


def test_a_token_does_not_wait_for_the_metrics() -> None:
    async def test() -> None:
        order: list[str] = []
        engine: Any = object.__new__(RemoteEngine)
        engine._calls, engine._on_start, engine._noted = {1: RemoteCall(1)}, {}, lambda state: order.append("metrics")

        async def read() -> None:
            news = await anext(engine._calls[1])
            order.append(news.pieces[0].text)

        reading = asyncio.create_task(read())
        await asyncio.sleep(0)
        engine._take(StepNews(EngineStats(), news=[News(1, [AnswerPiece(0, "a", 1)])]))
        await reading
        await asyncio.sleep(0)
        assert order == ["a", "metrics"]

    asyncio.run(test())


def test_the_text_of_an_echo_is_made_within_the_time_and_before_the_engine_is_asked() -> None:
    class SlowTexts:
        async def prompt_text(self, ids: list[int], *, skip_special: bool) -> str:
            return await asyncio.Event().wait() or ""

    async def test() -> None:
        engine = FakeEngine()
        responder = made(engine, deadline_s=0.05)
        responder.generation.echo = True
        service: Any = responder._service
        found, _, ready = service.check()
        service.check = lambda: (found, SlowTexts(), ready)
        with pytest.raises(Refusal) as late:
            await responder.begin()
        responder.close()
        assert (late.value.code, engine.sent) == ("deadline_exceeded", [])

    asyncio.run(asyncio.wait_for(test(), 300))


@pytest.mark.parametrize(
    ("speculative", "method"),
    [("lookup", "lookup"), ('{"model": "small"}', "draft"), ({"method": "eagle3", "model": "a"}, "eagle3"), ("mtp", "mtp")],
)
def test_metrics_name_the_method_of_drafts(speculative: object, method: str) -> None:
    assert f'test:draft_method{{method="{method}",model_name="tiny"}} 1.0' in Metrics("test", "tiny", speculative).text().decode()
    assert "draft_method" not in Metrics("test", "tiny").text().decode()
