"""Texts whose look-ups the engine's benchmark repeats."""

import pytest

from rooftile.engine.speculation.ngrams import NgramIndex
from rooftile_lab.bench.lookup_texts import TEXTS, TextGuesser


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_is_longer_than_an_answer_and_repeats_its_prompt(name) -> None:
    text = TEXTS[name]()
    assert len(text.answer) >= 256
    assert len(set(text.answer) - set(text.prompt)) <= 2
    assert text.answer != text.prompt[: len(text.answer)]


@pytest.mark.parametrize("name", TEXTS)
def test_guesses_are_right_where_a_look_up_is(name) -> None:
    text = TEXTS[name]()
    words = {"text": text, "given": 10, "right": 7, "wrong": 8}
    found, plain = type("Guesser", (TextGuesser,), words)(2, 4), NgramIndex(2, 4)
    told = []
    for done in range(0, 600, 7):
        guesses = found.guess([0] * (10 + done), 6)
        due = plain.guess([*text.prompt, *text.answer[:done]], 6)
        assert guesses == [7 if a == b else 8 for a, b in zip(due, text.answer[done:], strict=False)]
        told += guesses
    assert {7, 8} == set(told)
