"""The scripted model says what the script has, and what a request asks for acts on it."""

from __future__ import annotations

import pytest

from tests.server.scripted import ScriptedServer


@pytest.fixture(scope="module")
def scripted(folder, tmp_path_factory):
    with ScriptedServer(folder, tmp_path_factory.mktemp("script")) as made:
        yield made


def test_the_model_says_what_the_script_has(scripted) -> None:
    scripted.say(("roof", "A roof has tiles.\n<|user|> Grüße"), ("", "Good day."))
    found = scripted.complete("The roof", max_tokens=60)["choices"][0]
    assert (found["text"], found["finish_reason"]) == ("A roof has tiles.\n Grüße", "stop")
    assert scripted.complete("x", max_tokens=60)["choices"][0]["text"] == "Good day."
    assert scripted.complete("x", max_tokens=60, stop="day")["choices"][0]["text"] == "Good "
    scripted.say()
    assert scripted.complete("x", max_tokens=20)["choices"][0]["text"] != "Good day."
    several = scripted.complete(["x"] * 5, max_tokens=6, n=2)
    assert len(several["choices"]) == 10


def test_a_grammar_is_above_the_script(scripted) -> None:
    scripted.say(("", "maybe"))
    found = scripted.complete("x", structured_outputs={"choice": ["yes", "no"]})["choices"][0]
    assert found["text"] in ("yes", "no")
