"""Renders chat templates.

A template is a Jinja program from the checkpoint folder. It runs in Jinja's sandbox, where it can change and reach nothing, and
for a limited number of steps. It finds there what Transformers gives to templates.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, NoReturn

from rooftile.engine.text.harmony_messages import SIGN, harmony_messages
from rooftile.errors import InvalidInput, Unsupported

# lines of compiled templates; a thousand messages take some 30,000
MOST_STEPS = 1_000_000
# what the engine gives to each template
OWN = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
# clients give these to any model, whether it thinks or not
HINTS = ("enable_thinking", "thinking", "reasoning_effort")
# the types of parts that are text, in OpenAI's two APIs
TEXT_PARTS = ("text", "input_text", "output_text")


class _WrongVariable(ValueError):
    """A caller's variable that is refused before the template runs."""


def render(
    template: str, messages: Sequence[dict[str, Any]], add_generation_prompt: bool, named: Mapping[str, str], place: str,
    *, variables: Mapping[str, Any] = MappingProxyType({}), continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:  # fmt: skip
    """Returns a conversation as the template writes it.

    Args:
        template: the Jinja program.
        messages: dictionaries with a role and content each.
        add_generation_prompt: whether to end where the model's answer begins.
        named: the special tokens by name, which the template may use.
        place: the folder of the template, for error messages.
        variables: the caller's variables of the template, such as enable_thinking.
        continue_final_message: whether to end in the text of the last message, which the model continues.
        tools: the functions that the model may call, in OpenAI's form.

    Raises:
        InvalidInput: the messages are none, or the template refuses them, fails or runs for too long; it does not read one of
            the variables; or the last message cannot be continued.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidInput(f"messages is {messages!r}; must be a list of at least one")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidInput(f"a message is {str(message)[:80]!r}; must be a dictionary with a role and content")
    for name, value in (("add_generation_prompt", add_generation_prompt), ("continue_final_message", continue_final_message)):
        if not isinstance(value, bool):
            raise InvalidInput(f"{name} is {repr(value)[:80]}; must be True or False")
    written_as = [_with_text(message) for message in messages]
    mark = _mark_end(written_as, add_generation_prompt) if continue_final_message else ""
    # variables of another kind are refused below
    harmony = harmony_messages(written_as, variables) if SIGN in template and isinstance(variables, Mapping) else None
    if harmony is not None:
        written_as = harmony.messages
    try:
        program, read = _compiled(template)
        _check_variables(variables, read, named)
        if "tools" in read:
            # templates with tools look into the text beside a call, and fail where it is null; older ones ask whether it is null
            written_as = [message | {"content": message.get("content") or ""} for message in written_as]
        if tools and "xml_tools" in read - {*variables} and "tools" not in read:
            # SmolLM3's name for them; it takes the functions alone
            variables = {**variables, "xml_tools": [tool.get("function", tool) for tool in tools]}
        elif tools and "tools" not in read:
            raise _WrongVariable(f"tools are given, and the chat template of {place} has no place for them; leave tools out")
        with _limited(MOST_STEPS):
            written: str = program.render(
                messages=written_as, tools=tools, documents=None, add_generation_prompt=add_generation_prompt,
                **named, **variables,
            )  # fmt: skip
    except ImportError:
        raise InvalidInput("a chat template needs the package jinja2; pip install jinja2") from None
    except _WrongVariable as error:
        raise InvalidInput(str(error)) from None
    except Exception as error:
        # a template is somebody else's program: whatever it raises is its refusal of these messages
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InvalidInput(f"the chat template of {place} cannot write these messages: {reason}") from error
    if harmony is not None:
        written = harmony.put_back(written)
    return _cut_at(mark, written, messages[-1], place) if mark else written


def text_of(content: object, where: str = "content") -> str:
    """Returns the content of a message as the text that a template writes.

    Parts of text are joined by newlines, as vLLM joins them, and null is no text; a template would write its Python words.

    Raises:
        InvalidInput: it is neither a text, nor null, nor a list of parts.
        Unsupported: a part is no text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | tuple) or not all(isinstance(part, str | dict) for part in content):
        raise InvalidInput(f"{where} must be a text, or a list of parts of type text")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        if part.get("type", "text") not in TEXT_PARTS:
            kind = repr(str(part["type"])[:40])
            raise Unsupported(f"{where} has a part of type {kind}; a model reads text, and nothing is fetched")
        if not isinstance(part.get("text"), str):
            raise InvalidInput(f"{where} has a part without a text; must be {{type, text}}")
        texts.append(part["text"])
    return "\n".join(texts)


def _check_variables(variables: Mapping[str, Any], read: frozenset[str], named: Mapping[str, str]) -> None:
    """Checks that a template reads the variables that a caller gives it, and that they replace none of the engine's."""
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise _WrongVariable(f"chat_template_kwargs is {repr(variables)[:80]}; must be a dictionary of variables by name")
    own = {*OWN, *named}
    for name in variables:
        if name in own:
            raise _WrongVariable(f"chat_template_kwargs has {name!r}, which the template gets from the engine; leave it out")
        if name not in read and name not in HINTS:
            near = get_close_matches(name[:80], sorted(read - own)[:200], n=1)
            advice = f"did you mean {near[0]}?" if near else "leave it out"
            raise _WrongVariable(f"chat_template_kwargs has {name[:80]!r}, which the chat template does not read; {advice}")


def _mark_end(messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
    """Marks the end of the last message, which is to be continued; returns the mark, which no caller can guess."""
    if add_generation_prompt:
        raise InvalidInput("continue_final_message and add_generation_prompt are both true; a prompt has one end: give one")
    last = messages[-1]
    if last["role"] != "assistant" or not isinstance(last.get("content"), str):
        shown = repr(last["role"][:40])
        raise InvalidInput(f"continue_final_message is true, and the last message is of {shown}; must be the assistant's text")
    mark = secrets.token_hex(16)
    # the space behind it tells whether the template keeps a text's last spaces
    messages[-1] = last | {"content": last["content"] + mark + " "}
    return mark


def _cut_at(mark: str, written: str, last: dict[str, Any], place: str) -> str:
    """Returns a conversation up to the mark, by the rule of Transformers: without spaces before it that the template removes."""
    end = written.rfind(mark)
    if end < 0 or text_of(last["content"]).strip() not in written:
        raise InvalidInput(f"the chat template of {place} leaves the last message out, or changes it; it cannot be continued")
    return written[:end] if written[end + len(mark) :].startswith(" ") else written[:end].rstrip()


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message whose content is a text; null stays where there are calls."""
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return message
    return message | {"content": text_of(content, "a message's content")}


def template_of(value: str | Path, name: str = "chat_template") -> str:
    """Returns a chat template: the text of a file, or a text that is a template itself, as vLLM takes both.

    Raises:
        InvalidInput: it is neither.
    """
    if not isinstance(value, str | Path):
        raise InvalidInput(f"{name} is {value!r}; must be a file with a chat template, or its text")
    is_text = isinstance(value, str) and ("{" in value or "\n" in value)
    if is_text:
        return str(value)
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "it is no text in UTF-8"
        raise InvalidInput(f"{name} is {str(value)!r}, which cannot be read: {why}; give a file, or a template's text") from None


@lru_cache(maxsize=8)
def _compiled(template: str) -> tuple[Any, frozenset[str]]:
    """Returns a template as a program in a sandbox, with what Transformers adds, and the names of the variables that it reads."""
    from jinja2 import meta, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Reads {% generation %}, which marks a model's words for training: it writes what is in it."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> nodes.Node:
            """Returns the block without its marks."""
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment.from_string(template), frozenset(meta.find_undeclared_variables(environment.parse(template)))


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:  # fmt: skip
    # Jinja's own filter writes < and > as escapes, for pages
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


@contextmanager
def _limited(steps: int) -> Iterator[None]:
    """Ends this thread's template with an error after a number of its lines.

    The sandbox limits one `range`, but not loops within loops, which would run for years. Steps are counted and not seconds, so
    that a slow machine refuses no more than a fast one.
    """
    left = steps

    def count(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal left
        left -= event == "line"
        if left < 0:
            raise InvalidInput(f"it has run {steps:,} steps without an end")
        return count

    def enter(frame: FrameType, event: str, arg: object) -> Any:
        # the name of the file that Jinja compiles a string into
        return count if frame.f_code.co_filename == "<template>" else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)
