"""Reads how the chat template is to write messages."""

from __future__ import annotations

import json
from typing import Any

from rooftile.server import limits
from rooftile.server.http.body import check_depth
from rooftile.server.http.openai.forms import Templated
from rooftile.server.refusals import Refusal

# OpenAI's words and vLLM's
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# the two names under which templates have the switch
SWITCHES = ("enable_thinking", "thinking")


def template_options(form: Templated) -> dict[str, Any]:
    """Returns the keywords of `Tokenizer.chat` for a form.

    Raises:
        Refusal: a variable is too large, or two fields contradict each other.
    """
    continues = form.continue_final_message is True
    if continues and form.add_generation_prompt:
        why = "continue_final_message and add_generation_prompt are both true; a prompt has one end: give one"
        raise _bad("continue_final_message", why)
    opens = not continues if form.add_generation_prompt is None else form.add_generation_prompt
    return {
        "add_generation_prompt": opens, "continue_final_message": continues, "chat_template_kwargs": _variables(form),
    }  # fmt: skip


def _variables(form: Templated) -> dict[str, Any]:
    """Returns the template's variables; those of chat_template_kwargs decide where two fields mean one."""
    effort, thinks = form.reasoning_effort, form.enable_thinking
    if effort is not None and effort not in EFFORTS:
        raise _bad("reasoning_effort", f"reasoning_effort is {effort!r}; must be one of {', '.join(EFFORTS)}")
    found: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if thinks is None and effort is not None:
        thinks = effort != "none"
    given = _checked(form.chat_template_kwargs)
    for name in () if form.enable_thinking is None else SWITCHES:
        if given.get(name, thinks) != thinks:
            raise _bad("enable_thinking", f"enable_thinking and chat_template_kwargs.{name} contradict each other; leave one out")
    if thinks is not None and not any(name in given for name in SWITCHES):
        found |= dict.fromkeys(SWITCHES, thinks)
    return found | given


def _checked(given: Any) -> dict[str, Any]:
    """Returns chat_template_kwargs if they are an object that is small enough."""
    name = "chat_template_kwargs"
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise _bad(name, f"{name} is of type {type(given).__name__}; must be an object of the chat template's variables")
    if len(given) > limits.TEMPLATE_VARIABLES:
        raise _bad(name, f"{name} has {len(given):,} variables; may have at most {limits.TEMPLATE_VARIABLES}")
    try:
        check_depth(given, limits.TEMPLATE_DEPTH)
    except Refusal:
        raise _bad(name, f"{name} is nested deeper than {limits.TEMPLATE_DEPTH} levels") from None
    size = len(json.dumps(given, ensure_ascii=False).encode())
    if size > limits.TEMPLATE_BYTES:
        raise _bad(name, f"{name} has {size:,} bytes; may have at most {limits.TEMPLATE_BYTES:,}")
    return given


def _bad(param: str, message: str) -> Refusal:
    return Refusal("invalid_value", message, param=param)
