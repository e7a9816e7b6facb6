"""Renders chat templates.

A template is a Jinja program from the checkpoint folder. It runs in Transformers' sandbox, where it can change and reach nothing,
and for a limited number of steps.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from types import FrameType
from typing import Any

from rooftile.errors import InvalidInput

# lines of compiled templates; a thousand messages take some 30,000
MOST_STEPS = 1_000_000


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
    render_jinja_template = _renderer()
    try:
        with _limited(MOST_STEPS):
            written, _ = render_jinja_template(
                conversations=[list(messages)], chat_template=template, add_generation_prompt=add_generation_prompt, **named
            )
    except Exception as error:
        # a template is somebody else's program: whatever it raises is its refusal of these messages
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InvalidInput(f"the chat template of {place} cannot write these messages: {reason}") from error
    text: str = written[0]
    return text


def _renderer() -> Any:
    refusal = InvalidInput("a chat template needs the packages transformers and jinja2; pip install transformers jinja2")
    # checked here, since Transformers imports jinja2 late and would raise an error of its own
    if find_spec("jinja2") is None:
        raise refusal
    try:
        from transformers.utils.chat_template_utils import render_jinja_template
    except ImportError:
        raise refusal from None
    return render_jinja_template


@contextmanager
def _limited(steps: int) -> Iterator[None]:
    """Ends this thread's template with an error after so many of its lines.

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
