"""Renders chat templates.

A template is a Jinja program from the checkpoint folder. It runs in Jinja's sandbox, where it can change and reach nothing, and
for a limited number of steps. It finds there what Transformers gives to templates.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rooftile.errors import InvalidInput, Unsupported

# lines of compiled templates; a thousand messages take some 30,000
MOST_STEPS = 1_000_000
# the types of parts that are text, in OpenAI's two APIs
TEXT_PARTS = ("text", "input_text", "output_text")


def render(
    template: str, messages: Sequence[dict[str, Any]], add_generation_prompt: bool, named: Mapping[str, str], place: str
) -> str:
    """Returns a conversation as the template writes it.

    Args:
        template: the Jinja program.
        messages: dictionaries with a role and content each.
        add_generation_prompt: whether to end where the model's answer begins.
        named: the special tokens by name, which the template may use.
        place: the folder of the template, for error messages.

    Raises:
        InvalidInput: the messages are none, or the template refuses them, fails or runs for too long.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidInput(f"messages is {messages!r}; must be a list of at least one")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidInput(f"a message is {str(message)[:80]!r}; must be a dictionary with a role and content")
    written_as = [_with_text(message) for message in messages]
    try:
        program = _compiled(template)
        with _limited(MOST_STEPS):
            written: str = program.render(
                messages=written_as, tools=None, documents=None, add_generation_prompt=add_generation_prompt, **named
            )
    except ImportError:
        raise InvalidInput("a chat template needs the package jinja2; pip install jinja2") from None
    except Exception as error:
        # a template is somebody else's program: whatever it raises is its refusal of these messages
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InvalidInput(f"the chat template of {place} cannot write these messages: {reason}") from error
    return written


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


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message whose content is a text."""
    content = message.get("content")
    # where there are tool calls a template looks for null
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
def _compiled(template: str) -> Any:
    """Returns a template as a program in a sandbox, with the filter, the functions and the block that Transformers adds."""
    from jinja2 import nodes
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
    return environment.from_string(template)


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
