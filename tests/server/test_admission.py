"""The queue is bounded in answers, prompt tokens and per key, and what it refuses says when to come again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftile.server.admission import Admission
from rooftile.server.refusals import Refusal


def refusal(admission: Admission, key: str = "a", answers: int = 1, tokens: int = 1) -> Refusal:
    with pytest.raises(Refusal) as error:
        admission.admit(key, [(answers, tokens)])
    return error.value


def test_answers_are_bounded() -> None:
    admission = Admission(4, 100)
    (ticket,) = admission.admit("a", [(3, 10)])
    refused = refusal(admission, answers=2)
    assert refused.status == 429
    assert "the queue holds 3 answers and the request has 2; 4 may wait (--max-waiting); try again in 1 s" in refused.message
    assert refused.headers == {"Retry-After": "1"}
    admission.admit("a", [(1, 1)])
    assert "4 answers wait, as many as may (--max-waiting)" in refusal(admission).message
    ticket.start()
    admission.admit("a", [(3, 1)])


def test_prompt_tokens_are_bounded() -> None:
    admission = Admission(100, 50)
    admission.admit("a", [(1, 20), (1, 30)])
    assert "the queue holds 50 prompt tokens, as many as may wait (--max-waiting-tokens)" in refusal(admission).message


def test_what_never_fits_is_no_matter_of_time() -> None:
    refused = refusal(Admission(4, 50), tokens=51)
    assert (refused.status, refused.code) == (400, "invalid_value")
    assert refusal(Admission(4, 50), answers=5).status == 400


def test_a_key_has_its_own_bound() -> None:
    admission = Admission(100, 100, max_per_key=2)
    one, _ = admission.admit("a", [(1, 1), (1, 1)])
    one.start()
    assert refusal(admission).code == "key_limit"
    admission.admit("b", [(1, 1)])
    # a list of prompts counts as that many
    with pytest.raises(Refusal, match="1 prompts of this key wait or run and the request has 2; 2 may") as late:
        admission.admit("b", [(1, 1), (1, 1)])
    assert late.value.status == 429
    with pytest.raises(Refusal, match="the request has 3 prompts; a key may have 2") as never:
        admission.admit("c", [(1, 1)] * 3)
    assert never.value.status == 400
    one.end()
    admission.admit("a", [(1, 1)])


def test_the_time_to_come_again_follows_the_rate() -> None:
    clock = [0.0]
    admission = Admission(10, 1000, now=lambda: clock[0])
    for _ in range(10):
        clock[0] += 2.0
        admission.admit("a", [(1, 1)])[0].start()
    admission.admit("a", [(10, 1)])
    # ten answers wait, one starts every two seconds, and half of the queue has gone after ten
    assert 8 <= admission.retry_s() <= 10
    clock[0] += 1e6
    assert admission.retry_s() == 60


@given(st.lists(st.tuples(st.sampled_from(["admit", "start", "end"]), st.integers(0, 30), st.integers(1, 9))))
def test_the_books_balance(moves) -> None:
    admission = Admission(40, 200)
    tickets = []
    for move, which, size in moves:
        if move == "admit":
            try:
                tickets += admission.admit("a", [(size, size * 3)])
            except Refusal:
                assert admission.waiting + size > 40 or admission.tokens + 3 * size > 200
        elif which < len(tickets):
            getattr(tickets[which], move)()
    waiting = [ticket for ticket in tickets if ticket.waits]
    assert admission.waiting == sum(ticket.answers for ticket in waiting) <= 40
    assert admission.tokens == sum(ticket.tokens for ticket in waiting) <= 200
    assert admission.running == sum(ticket.lives for ticket in tickets)
    for ticket in tickets:
        ticket.end()
    assert (admission.waiting, admission.tokens, admission.running) == (0, 0, 0)
