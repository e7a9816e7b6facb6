"""An output costs what its new tokens cost, and stays as it was while the answer grows."""

from __future__ import annotations

import copy
import pickle
import tracemalloc
from typing import Any

import pytest

from rooftile.engine.requests.output import CompletionOutput, output_of
from rooftile.engine.requests.request import Answer, Request, Top
from rooftile.engine.sampling.params import SamplingParams
from rooftile.engine.text.growing import PIECES, GrowingText

PROMPT = [7, 8, 9]


class Text:
    """Stands in for a Detokenizer: token n is the text "n ", of which a stop string may take tokens away."""

    def __init__(self) -> None:
        self.grown = GrowingText()

    def snapshot(self) -> Any:
        return self.grown.snapshot()

    @property
    def tokens_released(self) -> int:
        return 0


class Counted(list):
    """A list that counts how many of its elements are read."""

    read = 0

    def __getitem__(self, place):
        found = super().__getitem__(place)
        self.read += len(found) if isinstance(place, slice) else 1
        return found

    def __iter__(self):
        self.read += len(self)
        return super().__iter__()


def request_of(length: int, logprobs: int | None = 0) -> tuple[Request, Answer]:
    """A request with one answer of so many tokens, with a text and, unless None, logprobs."""
    request = Request(0, PROMPT, SamplingParams(logprobs=logprobs, max_tokens=None), 10**6, frozenset())
    answer = Answer(request, 0, 0, Counted(PROMPT), detokenizer=Text())  # type: ignore[arg-type]
    answer.tops, answer.shown = Counted(), Counted()
    request.answers.append(answer)
    for token in range(length):
        grow(answer, token)
    return request, answer


def grow(answer: Answer, token: int) -> None:
    answer.ids.append(token)
    answer.tops.append(Top(-0.5, 1, [], []))
    answer.detokenizer.grown.append(f"{token} ")


def elements_read(answer: Answer) -> int:
    return answer.ids.read + answer.tops.read + answer.shown.read


@pytest.mark.parametrize("new", [1, 5])
def test_an_output_reads_only_new_tokens(new: int) -> None:
    counts = []
    for length in (10, 10_000):
        request, answer = request_of(length)
        output_of(request)
        before = elements_read(answer)
        for token in range(new):
            grow(answer, length + token)
        output_of(request)
        counts.append(elements_read(answer) - before)
    # a token and its logprobs
    assert counts == [2 * new, 2 * new]


def test_an_output_takes_as_much_memory_however_long_the_answer_is() -> None:
    taken = []
    for length in (10, 10_000):
        # the list of logprobs itself grows now and then, and is counted above
        request, answer = request_of(length, logprobs=None)
        output_of(request)
        grow(answer, 1)
        tracemalloc.start()
        output = output_of(request)
        taken.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        assert len(output.outputs[0].token_ids) == length + 1
    # a copy of the tokens would take 80,000 bytes
    assert abs(taken[1] - taken[0]) < 1000


def test_outputs_stay_as_they_were() -> None:
    request, answer = request_of(0)
    count = 3 * PIECES
    seen = [output_of(request).outputs[0]]
    for token in range(count):
        grow(answer, token)
        seen.append(output_of(request).outputs[0])
    for n, output in enumerate(seen):
        assert output.token_ids == list(range(n))
        assert output.text == "".join(f"{token} " for token in range(n))
        assert [list(shown) for shown in output.logprobs] == [[token] for token in range(n)]


def test_what_a_stop_string_takes_away_stays_in_earlier_outputs() -> None:
    request, answer = request_of(6)
    (earlier,) = output_of(request).outputs
    answer.ids = answer.ids[: len(PROMPT) + 4]
    del answer.tops[4:]
    (last,) = output_of(request).outputs
    assert (last.token_ids, len(last.logprobs)) == ([0, 1, 2, 3], 4)
    assert (earlier.token_ids, len(earlier.logprobs)) == ([0, 1, 2, 3, 4, 5], 6)


def test_what_a_caller_does_to_an_output_stays_in_it() -> None:
    request, _ = request_of(4)
    (first,), (second,) = output_of(request).outputs, output_of(request).outputs
    first.token_ids.clear()
    first.logprobs.clear()
    first.text = ""
    assert (second.token_ids, second.text, len(second.logprobs)) == ([0, 1, 2, 3], "0 1 2 3 ", 4)


def test_an_output_is_a_plain_value() -> None:
    """Equal to one that is made of its fields; copies and pickles share nothing with the engine."""
    request, answer = request_of(2)
    (output,) = output_of(request).outputs
    for made in (pickle.loads(pickle.dumps(output)), copy.copy(output), copy.deepcopy(output)):
        grow(answer, 5)
        assert made == output
        assert type(made.token_ids) is list
        assert repr(made) == repr(output)
        assert not hasattr(made, "_snapshot")
    assert output == CompletionOutput(0, "0 1 ", [0, 1], 0.0, output.logprobs)
    with pytest.raises(AttributeError, match="'CompletionOutput' object has no attribute 'tokens'"):
        output.tokens  # noqa: B018


@pytest.mark.parametrize("first", [0, 1, 5, PIECES - 1, PIECES, PIECES + 3])
@pytest.mark.parametrize("more", [0, 1, PIECES - 3, PIECES, 3 * PIECES + 1])
def test_what_has_come_since_a_snapshot(first: int, more: int) -> None:
    text = GrowingText()
    for n in range(first):
        text.append(f"{n} ")
    earlier = text.snapshot()
    for n in range(first, first + more):
        text.append(f"{n} ")
    assert text.snapshot().after(earlier) == "".join(f"{n} " for n in range(first, first + more))
    assert text.snapshot().after(None) == text.snapshot().read()
