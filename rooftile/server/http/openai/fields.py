"""Reads a form out of a JSON object. A field that is unknown or has no effect here is refused by name, never ignored."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from reprlib import Repr
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from rooftile.server.refusals import Refusal

Form = TypeVar("Form", bound=BaseModel)

# more names are not compared with: the time grows with their number
COMPARED = 60
# shows a value in a sentence: the whole of a large one would take long to write
_short = Repr()
_short.maxlevel, _short.maxdict, _short.maxlist = 2, 3, 3
_short.maxstring = _short.maxlong = _short.maxother = 60
# pydantic's kinds of errors in a client's words; of several for one field, of which each type was tried, the last counts
_DUE = {
    "int_type": "a whole number", "float_type": "a number", "bool_type": "true or false", "string_type": "a text",
    "list_type": "a list", "literal_error": "false", "string_unicode": "a text of whole characters",
}  # fmt: skip
_TEXT = "this server reads and writes text"
_BUDGET = "write reasoning_effort, chat_template_kwargs, or thinking_token_budget for the most tokens of a thought"
_CHAT = "a prompt is read as it is; send messages to /v1/chat/completions"

# fields of OpenAI's API and of other servers that are refused: why
REFUSED = {
    "tools": "a prompt is continued, and only a chat calls functions", "functions": "write tools",
    "tool_choice": "a prompt is continued, and only a chat calls functions", "function_call": "write tool_choice",
    "parallel_tool_calls": "a prompt is continued, and only a chat calls functions",
    "audio": _TEXT, "modalities": _TEXT, "web_search_options": "nothing is looked up", "suffix": "text is continued at its end",
    "prediction": "tokens are computed one by one", "reasoning_effort": _CHAT,
    "verbosity": "max_tokens limits an answer", "prompt_cache_key": "cache_salt says who shares cached prefixes",
    "chat_template": "the checkpoint's own template is used", "chat_template_kwargs": _CHAT, "enable_thinking": _CHAT,
    "add_generation_prompt": _CHAT, "continue_final_message": _CHAT,
    "include_reasoning": _CHAT,
    "thinking_budget": _BUDGET, "max_thinking_tokens": _BUDGET, "reasoning_budget": _BUDGET,
    "reasoning": _BUDGET, "thinking": _BUDGET,
    "logits_processors": "nothing of a request is run",
    "prompt_embeds": "prompts are text or token ids",
    "safety_identifier": "write user", "background": "answers are sent to who asks for them",
}  # fmt: skip
# values of these fields that change nothing
HARMLESS: dict[str, tuple[Any, ...]] = {
    "tools": ([],), "functions": ([],), "tool_choice": ("none", "auto"), "modalities": (["text"],),
    "parallel_tool_calls": (True, False), "suffix": ("",),
}  # fmt: skip


def read_form(kind: type[Form], given: Mapping[str, Any], where: str = "") -> Form:
    """Returns a form with the fields of a JSON object.

    Raises:
        Refusal: a field is unknown, refused, or of the wrong type.
    """
    fields, known = {}, {field.alias or name for name, field in kind.model_fields.items()}
    for name, value in given.items():
        if name in known:
            fields[name] = value
        elif name not in REFUSED or not _is_harmless(name, value):
            raise _unknown(kind, name, where)
    try:
        return kind.model_validate(fields, strict=True)
    except ValidationError as error:
        raise _wrong(error, where) from None


def read_part(kind: type[Form], given: Any, name: str) -> Form | None:
    """Returns the form of an object that is a field of another; None if it is null.

    Raises:
        Refusal: it is no object, or a field in it is wrong.
    """
    if given is None:
        return None
    if not isinstance(given, dict):
        raise Refusal("invalid_value", f"{name} is {_shown(given)}; must be an object", param=name)
    return read_form(kind, given, name)


def read_text(given: Mapping[str, Any], name: str, where: str) -> str:
    """Returns a text that an object must have.

    Raises:
        Refusal: it has none of this name.
    """
    found = given.get(name)
    if not isinstance(found, str):
        why = f"{where}.{name} is {'missing' if found is None else 'no text'}; it is required"
        raise Refusal("invalid_value", why, param=f"{where}.{name}")
    return found


def _is_harmless(name: str, value: Any) -> bool:
    """Tells whether a value changes nothing."""
    return value is None or any(value == one and type(value) is type(one) for one in HARMLESS.get(name, ()))


def _unknown(kind: type[BaseModel], name: str, where: str) -> Refusal:
    shown = repr(name[:80])
    if name in REFUSED and not where:
        return Refusal("unsupported", f"{name} is not supported: {REFUSED[name]}", param=name)
    known = [field.alias or own for own, field in kind.model_fields.items()][:COMPARED]
    near = get_close_matches(name[:80], known, n=1, cutoff=0.5)
    place = f" of {where}" if where else ""
    advice = f"did you mean {near[0]}?" if near else f"has {', '.join(known)}"
    return Refusal("unknown_field", f"{shown} is no field{place}; {advice}", param=f"{where}.{name[:80]}" if where else name[:80])


def _wrong(error: ValidationError, where: str) -> Refusal:
    """Returns the first mistake of a form as a sentence."""
    first, *others = error.errors(include_url=False)
    # the last parts of a place may be the names of types that pydantic has tried
    name, *inside = first["loc"]
    path = f"{where}.{name}" if where else str(name)
    if inside and isinstance(inside[0], int):
        path += f"[{inside[0]}]"
    if first["type"] == "missing":
        return Refusal("invalid_value", f"{path} is missing; it is required", param=path)
    if first["type"] == "string_too_long":
        due = f"have at most {first['ctx']['max_length']} characters"
    else:
        kinds = [each["type"] for each in (first, *others) if each["loc"][0] == name]
        due = f"be {_DUE[kinds[-1]]}"
    return Refusal("invalid_value", f"{path} is {_shown(first['input'])}; must {due}", param=path)


def _shown(value: Any) -> str:
    """Returns a value for a sentence, where JSON has other words than Python in JSON's."""
    return msgspec.json.encode(value).decode() if value is None or isinstance(value, bool) else _short.repr(value)
