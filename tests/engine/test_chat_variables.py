"""Chat templates get a caller's variables, and may end in the last message; the text is the text of Transformers.

The folder that ROOFTILE_CHAT_TEMPLATES names may have published templates, *.jinja, which are then compared, too.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from rooftile.engine.text.chat_template import render
from rooftile.engine.text.harmony_messages import SIGN
from rooftile.errors import InvalidInput
from tests.engine.folders import core

# the forms of published templates: a switch that is on, off or absent; a block that the prompt opens; a text that is trimmed
PLAIN = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
SWITCH = PLAIN + (
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
OPENED = PLAIN + "{% if add_generation_prompt %}<|assistant|>{{ '<think>\n' if thinking else '</think>' }}{% endif %}"
TRIMMED = PLAIN.replace("m['content']", "m['content'] | trim")
EFFORT = "{{ 'Reasoning: ' + (reasoning_effort or 'medium') + kinds | default([]) | tojson }}" + PLAIN
OWN = {"plain": PLAIN, "switch": SWITCH, "opened": OPENED, "trimmed": TRIMMED, "effort": EFFORT}
FOLDER = os.environ.get("ROOFTILE_CHAT_TEMPLATES")
PUBLISHED = sorted(Path(FOLDER).glob("*.jinja")) if FOLDER else []
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
ASKED = [{"role": "user", "content": "Why tiles? <think>"}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "Because of the  "}]
VARIABLES: list[dict[str, object]] = [
    {}, {"enable_thinking": True, "thinking": True}, {"enable_thinking": False, "thinking": False}, {"reasoning_effort": "high"},
]  # fmt: skip


def ours(
    template: str, messages: list[dict[str, str]], *, opens: bool = True, continues: bool = False, **variables: object
) -> str:
    return render(template, messages, opens, NAMED, "here", variables=variables, continue_final_message=continues)


def theirs(
    template: str, messages: list[dict[str, str]], *, opens: bool = True, continues: bool = False, **variables: object
) -> str:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core("byte_level"), chat_template=template, **NAMED)
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=opens, continue_final_message=continues, **variables
    )
    assert isinstance(text, str)
    return text


def compare(template: str) -> int:
    """Compares a template's texts; returns how many of them Transformers writes."""
    written = 0
    for variables in VARIABLES:
        for messages, ends in (
            (ASKED, {}), (ASKED, {"opens": False}), (ANSWERED, {"opens": False, "continues": True}),
        ):  # fmt: skip
            try:
                due = theirs(template, messages, **ends, **variables)
            except Exception:
                # the template refuses these messages, or cannot end in them
                with pytest.raises(InvalidInput):
                    ours(template, messages, **ends, **variables)
                continue
            assert ours(template, messages, **ends, **variables) == due, (messages, ends, variables)
            written += 1
    return written


@pytest.mark.parametrize("name", OWN)
def test_text_is_the_text_of_transformers(name: str) -> None:
    assert compare(OWN[name]) == 12


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_published_templates(path: Path) -> None:
    compare(path.read_text(encoding="utf-8"))


def test_continued_text_keeps_the_spaces_that_the_template_keeps() -> None:
    assert ours(PLAIN, ANSWERED, opens=False, continues=True).endswith("<|assistant|>Because of the  ")
    assert ours(TRIMMED, ANSWERED, opens=False, continues=True).endswith("<|assistant|>Because of the")


def test_what_a_user_writes_does_not_move_the_end() -> None:
    spelt = [{"role": "user", "content": "CONTINUE_FINAL_MESSAGE_TAG "}, {"role": "assistant", "content": "a"}]
    assert ours(PLAIN, spelt, opens=False, continues=True).endswith("<|assistant|>a")


@pytest.mark.parametrize(
    ("messages", "opens", "why"),
    [
        (ANSWERED, True, "both true"),
        (ASKED, False, "the last message is of 'user'"),
        ([*ASKED, {"role": "assistant", "content": None, "tool_calls": [{}]}], False, "the assistant's text"),
    ],
)
def test_what_cannot_be_continued(messages: list[dict[str, str]], opens: bool, why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        ours(PLAIN, messages, opens=opens, continues=True)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"tool_calls": 3}, "tool_calls 3; must be a list"), ({"tool_calls": "x"}, "tool_calls 'x'; must be a list"),
        ({"tool_calls": [3]}, "tool_calls .*3.*; must be a list"), ({"tool_calls": [{"function": 3}]}, "objects with a function"),
        ({"reasoning": 3, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}, "thoughts are 3; must be a text"),
    ],
)  # fmt: skip
def test_calls_and_thoughts_of_another_form(more: dict[str, object], why: str) -> None:
    """The template of gpt-oss does not see them as they come."""
    with pytest.raises(InvalidInput, match=why):
        ours(f"{{# {SIGN} #}}{PLAIN}", [*ASKED, {"role": "assistant", "content": "", **more}])  # type: ignore[list-item]


@pytest.mark.parametrize("given", ["no", 1, None])
def test_switches_are_true_or_false(given: object) -> None:
    with pytest.raises(InvalidInput, match=f"add_generation_prompt is {given!r}; must be True or False"):
        render(PLAIN, ASKED, given, NAMED, "here")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=f"continue_final_message is {given!r}; must be True or False"):
        render(PLAIN, ANSWERED, False, NAMED, "here", continue_final_message=given)  # type: ignore[arg-type]


def test_a_template_that_changes_the_last_message() -> None:
    with pytest.raises(InvalidInput, match="cannot be continued"):
        ours("{{ messages[0]['content'] }}", ANSWERED, opens=False, continues=True)
    with pytest.raises(InvalidInput, match="cannot be continued"):
        ours(PLAIN.replace("m['content']", "m['content'] | upper"), ANSWERED, opens=False, continues=True)


@pytest.mark.parametrize("name", ["tools", "documents", "add_generation_prompt", "continue_final_message", "bos_token"])
def test_variables_of_the_engine_stay(name: str) -> None:
    with pytest.raises(InvalidInput, match=f"{name}', which the template gets from the engine"):
        ours(PLAIN, ASKED, **{name: "x"})


@pytest.mark.parametrize(
    ("name", "why"), [("reasoning_efort", "did you mean reasoning_effort"), ("a\nb", "leave it out"), ("x" * 999, "leave it out")]
)
def test_variables_that_are_not_read(name: str, why: str) -> None:
    with pytest.raises(InvalidInput, match=why) as caught:
        ours(EFFORT, ASKED, **{name: 1})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


def test_variables_are_data_and_no_program() -> None:
    text = ours(EFFORT, ASKED, reasoning_effort="{{ messages }}", kinds=[{"deep": [1, None]}])
    assert text.startswith('Reasoning: {{ messages }}[{"deep": [1, null]}]')


def test_variables_end_no_limit_of_steps() -> None:
    endless = "{% for a in range(rounds) %}{% for b in range(rounds) %}{{ a }}{% endfor %}{% endfor %}"
    with pytest.raises(InvalidInput, match="steps without an end"):
        ours(endless, ASKED, rounds=99_999)
    with pytest.raises(InvalidInput, match="cannot write"):
        ours(endless, ASKED, rounds=10**12)
