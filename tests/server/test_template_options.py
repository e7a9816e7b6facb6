"""A request may say how the chat template writes it: bounded, checked, and never in place of what the server says."""

from __future__ import annotations

from typing import Any

import pytest

from rooftile.server.http.openai.fields import read_form
from rooftile.server.http.openai.forms import ChatForm
from rooftile.server.http.openai.template_options import template_options
from rooftile.server.refusals import Refusal
from tests.server.asking import CHATS, TALK, refused

CONTINUED = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because"}]


def variables(**fields: Any) -> dict[str, Any]:
    return template_options(read_form(ChatForm, TALK | fields))["chat_template_kwargs"]


def test_fields_become_variables() -> None:
    on, off = ({"enable_thinking": value, "thinking": value} for value in (True, False))
    assert variables() == {}
    assert variables(enable_thinking=False) == off
    assert variables(reasoning_effort="high") == {"reasoning_effort": "high"} | on
    assert variables(reasoning_effort="none") == {"reasoning_effort": "none"} | off
    assert variables(reasoning_effort="none", enable_thinking=True) == {"reasoning_effort": "none"} | on
    assert variables(chat_template_kwargs={"thinking": False}, reasoning_effort="low") == {
        "thinking": False, "reasoning_effort": "low",
    }  # fmt: skip
    assert variables(chat_template_kwargs={"reasoning_effort": "x"}, reasoning_effort="low")["reasoning_effort"] == "x"


@pytest.mark.parametrize(
    ("fields", "ends"),
    [
        ({}, (True, False)),
        ({"add_generation_prompt": False}, (False, False)),
        ({"continue_final_message": True}, (False, True)),
        ({"continue_final_message": False, "add_generation_prompt": True}, (True, False)),
    ],
)  # fmt: skip
def test_ends_of_a_prompt(fields: dict[str, Any], ends: tuple[bool, bool]) -> None:
    options = template_options(read_form(ChatForm, TALK | fields))
    assert (options["add_generation_prompt"], options["continue_final_message"]) == ends


DEEP: dict[str, Any] = {}
for _ in range(9):
    DEEP = {"a": DEEP}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"chat_template_kwargs": [1]}, "of type list"),
        ({"chat_template_kwargs": {f"v{n}": n for n in range(33)}}, "33 variables; may have at most 32"),
        ({"chat_template_kwargs": {"a": "x" * 2**20}}, "bytes; may have at most 16,384"),
        ({"chat_template_kwargs": {"a": DEEP}}, "deeper than 8"),
        ({"chat_template_kwargs": {"thinking": True}, "enable_thinking": False}, "contradict"),
        ({"reasoning_effort": "hard"}, "must be one of none, minimal, low"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "both true"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(Refusal, match=sentence):
        variables(**fields)


def test_over_the_wire(server, llm) -> None:
    own = llm.get_tokenizer()
    due = own.chat(CONTINUED, False, continue_final_message=True)
    assert own.decode(due, False).endswith("assistant: Because")
    assert server.post("/tokenize", messages=CONTINUED, continue_final_message=True).json()["tokens"] == due
    fields = {"messages": CONTINUED, "continue_final_message": True, "max_tokens": 4, "temperature": 0, "logprobs": True}
    answer = server.post(CHATS, fields).json()
    assert answer["usage"]["prompt_tokens"] == len(due)
    found = llm.chat(CONTINUED, continue_final_message=True)[0]
    assert found.prompt_token_ids == due
    assert server.post(CHATS, TALK | {"enable_thinking": False, "reasoning_effort": "low"}).status_code == 200
    named = TALK | {"chat_template_kwargs": {"a\nb": 1}}
    assert "does not read" in refused(server, CHATS, named, "invalid_value", "chat_template_kwargs")
    for name in ("messages", "bos_token"):
        named = TALK | {"chat_template_kwargs": {name: []}}
        assert "gets from the engine" in refused(server, CHATS, named, "invalid_value", "chat_template_kwargs")
    refused(server, CHATS, TALK | {"continue_final_message": True}, "invalid_value", "continue_final_message")
