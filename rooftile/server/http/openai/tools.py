"""Reads the tools of a chat, and the calls in its messages."""

from __future__ import annotations

import json
from typing import Any

from rooftile.engine.chat.tools.tool import NAME
from rooftile.engine.chat.tools.use import ToolUse, read_use
from rooftile.errors import InvalidInput
from rooftile.server import limits
from rooftile.server.http.openai.forms import ChatForm
from rooftile.server.http.openai.grammars import FIELDS
from rooftile.server.refusals import Refusal


def tools_of(form: ChatForm) -> ToolUse | None:
    """Returns the tools of a chat that the model may call; None if there are none.

    Raises:
        Refusal: they are no tools, or too many or too large.
    """
    try:
        use = read_use(form.tools, form.tool_choice, form.parallel_tool_calls)
    except InvalidInput as error:
        raise _bad(str(error).split()[0].split("[")[0].split(".")[0], str(error)) from None
    if use is not None and use.required and any(getattr(form, name) for name in FIELDS):
        raise _bad("tool_choice", "tool_choice asks for a call, and response_format or structured_outputs for another form")
    return use


def read_calls(given: Any, where: str) -> list[dict[str, Any]]:
    """Returns the calls of an assistant's message as templates take them: with arguments that are objects.

    Raises:
        Refusal: they are no calls.
    """
    if not isinstance(given, list) or len(given) > limits.CALLS:
        what = f"{len(given):,} calls" if isinstance(given, list) else f"type {type(given).__name__}"
        raise _bad(where, f"{where} has {what}; must be a list of at most {limits.CALLS} calls")
    return [_read_call(each, f"{where}[{place}]") for place, each in enumerate(given)]


def _read_call(given: Any, where: str) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or given.get("type", "function") != "function":
        raise _bad(where, f"{where} must be an object with id, type function, and function")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        due = "must be 1 to 64 letters, digits, underscores and hyphens"
        raise _bad(where, f"{where}.function.name is {repr(name)[:70]}; {due}")
    if isinstance(arguments, str):
        try:
            # templates write an object, and would write a text with its quotes
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            raise _bad(where, f"{where}.function.arguments is {arguments[:40]!r}; must be a JSON object as text") from None
    if arguments is not None and not isinstance(arguments, dict):
        raise _bad(where, f"{where}.function.arguments is {repr(arguments)[:40]}; must be a JSON object as text")
    found = {"type": "function", "function": {"name": name, "arguments": arguments or {}}}
    return found if given.get("id") is None else {"id": read_id(given["id"], f"{where}.id")} | found


def read_id(given: Any, where: str) -> str:
    """Returns the id of a call.

    Raises:
        Refusal: it is no text, or a long one.
    """
    if not isinstance(given, str) or not 0 < len(given) <= limits.NAME_CHARACTERS:
        raise _bad(where, f"{where} is {repr(given)[:40]}; must be a text of 1 to {limits.NAME_CHARACTERS} characters")
    return given


def _bad(param: str, message: str) -> Refusal:
    return Refusal("invalid_value", message, param=param)
