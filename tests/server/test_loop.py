"""The engine's side: one message per step with what is new, orders between steps, and books that are checked when idle."""

from __future__ import annotations

import time

import pytest

from rooftile.engine import SamplingParams
from rooftile.engine.loop.loop import Loop, Turn
from rooftile.engine.requests.stats import stats_of
from rooftile.server.engine.following import Followed
from rooftile.server.engine.link import SocketLink, message_of
from rooftile.server.engine.messages import Abort, Add, StepNews

GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


class FakeLink(SocketLink):
    """Hands out prepared orders, one list per turn, and keeps what is sent."""

    def __init__(self, *orders: list) -> None:
        self._orders = list(orders)
        self.sent: list[StepNews] = []
        self.waits: list[float | None] = []

    def orders(self, wait_s: float | None) -> list:
        self.waits.append(wait_s)
        orders = self._orders.pop(0) if self._orders else []
        return [order if isinstance(order, Add) else order.id for order in orders]

    def send(self, turn: Turn) -> None:
        self.sent.append(message_of(turn))


def play(llm, *orders: list, turns: int = 40) -> FakeLink:
    link = FakeLink(*orders)
    loop = Loop(llm.engine, link)
    for _ in range(turns):
        loop.turn()
        if llm.engine.idle and not link._orders:
            break
    assert llm.engine.idle
    llm.engine.pool.check()
    assert llm.engine.pool.used_blocks == 0
    return link


def test_what_crosses_is_what_is_new(llm) -> None:
    (due,) = llm.generate([[5, 6, 7]], SamplingParams(**GREEDY, logprobs=1))
    link = play(llm, [Add(1, [5, 6, 7], GREEDY | {"logprobs": 1})])
    assert link.sent[0].taken == [1]
    assert link.sent[1].started == [1]
    pieces = [piece for step in link.sent for news in step.news for piece in news.pieces]
    assert "".join(piece.text for piece in pieces) == due.outputs[0].text
    scored = [token[0] for piece in pieces for token in piece.logprobs]
    assert [token.id for token in scored] == due.outputs[0].token_ids
    assert [piece.finish for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert [news.finished for step in link.sent for news in step.news].count(True) == 1
    assert link.sent[-1].stats.steps >= 12
    assert link.sent[-1].stats.running == 0


def test_a_whole_answer_crosses_once(llm) -> None:
    (due,) = llm.generate([[5, 6, 7]], SamplingParams(**GREEDY))
    link = play(llm, [Add(1, [5, 6, 7], GREEDY, streams=False)])
    (news,) = [news for step in link.sent for news in step.news]
    assert news.pieces[0].ids == due.outputs[0].token_ids
    assert news.pieces[0].tokens == 12


def test_the_state_of_every_step_is_that_of_its_answers(llm) -> None:
    engine, found = llm.engine, []
    longer = {"temperature": 0, "ignore_eos": True}
    # the answers of one request end in different steps
    varied = {"n": 3, "temperature": 2.0, "seed": 2, "allowed_token_ids": [*range(80, 96)], "stop_token_ids": [80, 81]}
    orders = [
        Add(1, [5] * 40, longer | varied | {"max_tokens": 25}), Add(2, [6], longer | {"max_tokens": 30}),
        Add(3, [7] * 20, {"beam_width": 2, "max_tokens": 5}),
    ]  # fmt: skip
    loop = Loop(engine, FakeLink(orders))
    for _ in range(40):
        loop.turn()
        live = [answer for request in engine.scheduler.running for answer in request.live]
        empty = sum(len(answer.table.blocks) * engine.pool.size - answer.planned for answer in live if answer.table)
        slots, stats = engine.pool.used_blocks * engine.pool.size, stats_of(engine)
        assert (stats.running, stats.waste) == (len(live), min(1.0, empty / slots) if slots else 0.0)
        found.append(stats.running)
        if engine.idle:
            break
    assert engine.idle
    assert {0, 1, 2, 3} < set(found)


def test_an_aborted_request_says_so_and_nothing_more(llm) -> None:
    link = play(llm, [Add(1, [5, 6], GREEDY | {"max_tokens": 500})], [], [Abort(1), Abort(7)])
    assert [len(step.news) for step in link.sent] == [0, 1, 1, 1]
    (last,) = link.sent[-1].news
    assert (last.finished, [piece.finish for piece in last.pieces]) == (True, ["abort"])


def test_a_wrong_request_concerns_nobody_else(llm) -> None:
    orders = [Add(1, [5], {"n": 99}), Add(2, [10**9], {}), Add(3, [5], {"bogus": 1}), Add(4, [5], {"max_tokens": 1})]
    link = play(llm, orders)
    assert [refused.id for refused in link.sent[0].refused] == [1, 2, 3]
    assert "n is 99" in link.sent[0].refused[0].reason
    assert link.sent[0].taken == [4]
    assert link.sent[1].news[0].finished


def test_a_client_hears_before_the_step_that_its_request_is_taken(llm, monkeypatch) -> None:
    link, step, told = FakeLink([Add(1, [5, 6, 7], GREEDY)]), llm.engine.step, []

    def watched():
        told.append([each for message in link.sent for each in message.taken])
        return step()

    monkeypatch.setattr(llm.engine, "step", watched)
    loop = Loop(llm.engine, link)
    while not told or not llm.engine.idle:
        loop.turn()
    # once, and without a message for steps that take nothing new
    assert told[0] == told[-1] == [1]
    assert len(link.sent) == len(told) + 1


def test_an_idle_engine_checks_its_books_once(llm, monkeypatch) -> None:
    checked = []
    monkeypatch.setattr(llm.engine, "check_idle", lambda: checked.append(True))
    link = FakeLink([Add(1, [5], {"max_tokens": 1})])
    loop = Loop(llm.engine, link)
    loop.turn()
    assert checked == []
    loop.turn()
    assert checked == [True]
    # it waited a second for orders before, and waits for ever after
    assert link.waits == [None, 1.0]
    loop.turn()
    assert link.waits[-1] is None


def test_a_leak_ends_the_engine(llm) -> None:
    loop = Loop(llm.engine, FakeLink([Add(1, [5], {"max_tokens": 1})]))
    loop.turn()
    lost = llm.engine.pool._free.pop()
    try:
        with pytest.raises(AssertionError):
            loop.turn()
    finally:
        llm.engine.pool._free.append(lost)
    llm.engine.pool.check()


def test_blocks_that_nobody_gives_back_end_the_engine_with_a_sentence(llm) -> None:
    """The pool's own counts agree: a table without a request is seen only where no request runs."""
    loop = Loop(llm.engine, FakeLink([Add(1, [5], {"max_tokens": 1})]))
    loop.turn()
    lost = llm.engine.pool.begin([5, 6])
    llm.engine.pool.append(lost, 2)
    try:
        with pytest.raises(AssertionError, match="1 of 600 blocks of the KV cache are held, and no request runs"):
            loop.turn()
    finally:
        llm.engine.pool.free(lost)
    slot = llm.engine.scheduler._slots.pop()
    try:
        with pytest.raises(AssertionError, match="1 slots are held"):
            llm.engine.check_idle()
    finally:
        llm.engine.scheduler._slots.append(slot)
    llm.engine.check_idle()


def test_a_request_that_cannot_be_taken_ends_nobody_elses(llm, monkeypatch, caplog) -> None:
    add = llm.engine.add

    def broken(prompt, *rest, **more):
        if prompt == [6]:
            raise RuntimeError("a mistake of ours")
        return add(prompt, *rest, **more)

    monkeypatch.setattr(llm.engine, "add", broken)
    link = play(llm, [Add(1, [6], GREEDY), Add(2, [5], GREEDY)])
    (refused,) = link.sent[0].refused
    assert (refused.id, refused.ours) == (1, True)
    assert "a mistake of ours" in caplog.text
    assert link.sent[-1].news[0].finished


def test_news_that_cannot_be_read_ends_one_request(llm, monkeypatch, caplog) -> None:
    news = Followed.news

    def broken(followed):
        if followed.id == 1:
            raise ValueError("a mistake of ours")
        return news(followed)

    monkeypatch.setattr(Followed, "news", broken)
    link = play(llm, [Add(1, [6], GREEDY), Add(2, [5], GREEDY)])
    told = {each.id: each for step in link.sent for each in step.news}
    assert told[1].error == "its news could not be read: ValueError"
    assert told[1].finished
    assert told[2].error is None
    assert told[2].finished
    assert "a mistake of ours" in caplog.text


def test_a_bad_grammar_is_refused_and_a_good_one_runs(llm) -> None:
    link = FakeLink([Add(1, [5], {"structured": {"regex": "(("}}), Add(2, [5], {"structured": {"choice": ["ab"]}, "seed": 1})])
    loop = Loop(llm.engine, link)
    until = time.monotonic() + 300
    while time.monotonic() < until:
        loop.turn()
        time.sleep(0.001)
        refused = [each for step in link.sent for each in step.refused]
        if refused and any(news.finished for step in link.sent for news in step.news):
            break
    assert [each.id for each in refused] == [1]
    assert refused[0].reason.startswith("the grammar cannot be used")
    ids = [token for step in link.sent for news in step.news for piece in news.pieces for token in piece.ids or ()]
    assert llm.tokenizer.decode(ids) == "ab"
