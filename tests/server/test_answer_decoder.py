"""The server's process makes the text of tokens, as the engine would have made it."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from rooftile.engine import SamplingParams
from rooftile.engine.text.detokenizer import Detokenizer
from rooftile.engine.text.tokenizer import Tokenizer
from rooftile.server import limits
from rooftile.server.engine.calls import RemoteCall
from rooftile.server.engine.messages import Add, AnswerPiece, News
from rooftile.server.http.texts import AnswerDecoder, Texts
from tests.engine.folders import KINDS
from tests.engine.test_detokenizer import chunks, stream
from tests.engine.test_detokenizer_lazy import NEVER, made
from tests.server.test_loop import GREEDY, play


def pieces_of(link: Any) -> list[AnswerPiece]:
    return [piece for step in link.sent for news in step.news for piece in news.pieces]


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("more", [{}, {"n": 2}, {"skip_special_tokens": False}])
def test_the_engine_sends_tokens(llm, more, streams) -> None:
    (due,) = llm.generate([[5, 6, 7]], SamplingParams(**GREEDY | more))
    found = pieces_of(play(llm, [Add(1, [5, 6, 7], GREEDY | more, streams=streams)]))
    assert {piece.text for piece in found} == {""}
    for answer in due.outputs:
        own = [piece for piece in found if piece.index == answer.index]
        assert [token for piece in own for token in piece.ids] == answer.token_ids
        assert [piece.tokens for piece in own] == (list(range(1, 13)) if streams else [12])


@pytest.mark.parametrize("more", [{"stop": "zzz"}, {"logprobs": 0}])
def test_the_engine_sends_text_that_may_end_an_answer_or_goes_with_logprobs(llm, more) -> None:
    (due,) = llm.generate([[5, 6, 7]], SamplingParams(**GREEDY | more))
    found = pieces_of(play(llm, [Add(1, [5, 6, 7], GREEDY | more)]))
    assert {piece.ids for piece in found} == {None}
    assert "".join(piece.text for piece in found if piece.index == 0) == due.outputs[0].text


def test_a_token_that_ends_an_answer_belongs_to_no_text(llm) -> None:
    (due,) = llm.generate([[5, 6, 7]], SamplingParams(**GREEDY))
    ids = due.outputs[0].token_ids
    end = next(place for place, token in enumerate(ids) if place > 2 and token not in ids[:place])
    found = pieces_of(play(llm, [Add(1, [5, 6, 7], GREEDY | {"stop_token_ids": [ids[end]]})]))
    assert [token for piece in found for token in piece.ids] == ids[:end]
    assert (found[-1].tokens, found[-1].finish, found[-1].stop) == (end + 1, "stop", ids[end])


def test_an_engine_without_a_tokenizer_sends_neither(llm, monkeypatch) -> None:
    monkeypatch.setattr(llm.engine, "tokenizer", None)
    found = pieces_of(play(llm, [Add(1, [5, 6, 7], GREEDY)]))
    assert [(piece.text, piece.ids, piece.tokens) for piece in found] == [("", None, count) for count in range(1, 13)]


@pytest.mark.parametrize("kind", KINDS)
@hypothesis.given(seed=st.integers(0, 2**32), skip=st.booleans())
def test_pieces_are_those_of_a_detokenizer_in_the_engine(kind: str, seed: int, skip: bool) -> None:
    draw, tokenizer, params = random.Random(seed), made(kind), {"skip_special_tokens": skip}
    answers = [chunks(stream(tokenizer, draw), draw) for _ in range(2)]
    prompt = stream(tokenizer, draw)
    due = [Detokenizer(tokenizer, SamplingParams(stop=NEVER, **params), prompt) for _ in answers]
    for text in due:
        text.follow()

    async def test() -> None:
        call, decoder, steps = RemoteCall(1), AnswerDecoder(Texts(tokenizer), params, [prompt]), max(map(len, answers))
        tokens = [0, 0]
        for step in range(steps):
            last, pieces = step + 1 == steps, []
            for index, parts in enumerate(answers):
                ids = parts[step] if step < len(parts) else []
                tokens[index] += len(ids)
                due[index].add(ids)
                pieces.append(AnswerPiece(index, "", tokens[index], finish="length" if last else None, ids=list(ids)))
            call.take(News(1, pieces, finished=last))
            # news that is not read in time is joined
            if last or draw.random() < 0.5:
                news = await anext(call)
                await decoder.fill(0, news)
                for piece in news.pieces:
                    text = due[piece.index]
                    if last:
                        text.finish()
                    assert piece.text == text.take()
                    assert piece.tokens == (tokens[piece.index] if last else text.tokens_released)

    asyncio.run(test())


def texts_of(tokenizer: Tokenizer, parts: Sequence[list[int]]) -> list[str]:
    """The texts of one answer whose tokens come in these parts."""

    async def go() -> list[str]:
        texts, found = Texts(tokenizer), []
        decoder = AnswerDecoder(texts, {}, [[]])
        for part in parts:
            news = News(1, [AnswerPiece(0, "", 0, ids=part)])
            await decoder.fill(0, news)
            found.append(news.pieces[0].text)
        texts.close()
        return found

    return asyncio.run(go())


def test_a_client_never_gets_half_a_character() -> None:
    ids = made("byte_level").encode("a😀é", special=False)
    assert texts_of(made("byte_level"), [[id] for id in ids]) == ["a", "", "", "", "😀", "é"]


def test_a_long_text_is_made_in_a_thread(monkeypatch) -> None:
    tokenizer = made("byte_level")
    ids = tokenizer.encode("the roof " * 1000, special=False)[: limits.DECODED_AT_ONCE]
    threads, add = [], Detokenizer.add

    def noted(self: Detokenizer, ids: Sequence[int]) -> None:
        threads.append(threading.current_thread() is threading.main_thread())
        add(self, ids)

    monkeypatch.setattr(Detokenizer, "add", noted)
    found = texts_of(tokenizer, [ids, [*ids, ids[0]], ids[:1]])
    assert "".join(found) == tokenizer.decode([*ids, *ids, ids[0], ids[0]])
    assert threads == [True, False, True]


def test_a_request_with_tokens_only_needs_no_tokenizer() -> None:
    async def go() -> None:
        news = News(1, [AnswerPiece(0, "", 3)])
        await AnswerDecoder(Texts(None), {}, [[]]).fill(0, news)
        assert news.pieces == [AnswerPiece(0, "", 3)]

    asyncio.run(go())


STREAMS: list[dict[str, Any]] = [
    {"n": 2}, {"skip_special_tokens": False, "ignore_eos": True}, {"stop_token_ids": [97, 98, 99]}, {"echo": True},
    {"ignore_eos": True, "min_tokens": 12, "n": 3}, {"prompt": ["The roof", [5, 6, 7]]}, {"stop": "o"}, {"stop": "o", "n": 2},
]  # fmt: skip


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("more", STREAMS, ids=str)
def test_a_stream_is_the_whole_answer_in_pieces(server, more, seed) -> None:
    asked = {"prompt": "Grüße", "max_tokens": 50, "seed": seed, "temperature": 1.3} | more
    whole = server.complete(**asked)
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, last = server.events(**asked, stream_options=options)
    texts: dict[int, str] = {}
    ends: dict[int, Any] = {}
    for (choice,) in (event["choices"] for event in events):
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        ends[choice["index"]] = choice["finish_reason"], choice["stop_reason"]
    due = whole["choices"]
    assert [texts[choice["index"]] for choice in due] == [choice["text"] for choice in due]
    assert [ends[choice["index"]] for choice in due] == [(choice["finish_reason"], choice["stop_reason"]) for choice in due]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
