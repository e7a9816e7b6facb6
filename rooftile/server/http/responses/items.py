"""Items of a response's input as messages of a chat."""

from __future__ import annotations

from typing import Any

from rooftile.server import limits
from rooftile.server.http.openai.fields import read_text
from rooftile.server.http.responses.functions import model_name
from rooftile.server.refusals import Refusal

# both are the operator's words; templates know one of them
_OPERATORS = ("system", "developer")


def messages_of(given: Any) -> list[dict[str, Any]]:
    """Returns the messages of an input: a text, or a list of items.

    What a model has thought, said and called between two of its user's messages is one message of a chat.

    Raises:
        Refusal: an item is of another kind, or lacks a field.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given or not all(isinstance(each, dict) for each in given):
        raise _bad("input", "input must be a text, or a list of at least one item")
    if len(given) > limits.MESSAGES:
        raise _bad("input", f"input has {len(given):,} items; may have at most {limits.MESSAGES:,}")
    found: list[dict[str, Any]] = []
    for place, item in enumerate(given):
        _add(found, item, f"input[{place}]")
    return found


def with_instructions(instructions: str | None, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages behind one system message, of the instructions and the operator's messages that come first."""
    first = next((n for n, each in enumerate(messages) if each["role"] != "system"), len(messages))
    texts = [instructions] if instructions else []
    parts = [part for each in messages[:first] for part in _parts(each["content"])]
    if not parts:
        return [*([{"role": "system", "content": instructions}] if instructions else []), *messages[first:]]
    return [{"role": "system", "content": [*texts, *parts]}, *messages[first:]]


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [content]


def _add(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        _add_message(messages, item, where)
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        if not isinstance(parts, list):
            raise _bad(where, f"{where} has content or a summary of type {type(parts).__name__}; must be a list of parts")
        thought = "".join(_text(part, where) for part in parts)
        # what another server has encrypted is unknown here, and was never said
        if thought:
            own = _answer(messages)
            own["reasoning_content"] = own.get("reasoning_content", "") + thought
    elif kind == "function_call":
        for name in ("name", "arguments") + (("namespace",) if item.get("namespace") is not None else ()):
            read_text(item, name, where)
        call = {"name": model_name(item), "arguments": item["arguments"]}
        calls = _answer(messages).setdefault("tool_calls", [])
        calls.append({"id": read_text(item, "call_id", where), "type": "function", "function": call})
    elif kind == "function_call_output":
        if not isinstance(item.get("output"), str | list):
            raise _bad(f"{where}.output", f"{where}.output is missing; must be a text, or a list of parts of type input_text")
        messages.append({"role": "tool", "tool_call_id": read_text(item, "call_id", where), "content": item["output"]})
    else:
        why = f"{where} is of type {str(kind)[:40]!r}; has message, reasoning, function_call and function_call_output here"
        raise Refusal("unsupported", why, param=where)


def _add_message(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    role, content = read_text(item, "role", where), item.get("content")
    if not isinstance(content, str | list):
        raise _bad(f"{where}.content", f"{where}.content is missing; must be a text, or a list of parts of type input_text")
    if role != "assistant":
        messages.append({"role": "system" if role in _OPERATORS else role, "content": content})
        return
    parts = _parts(content)
    refused = next((part for part in parts if isinstance(part, dict) and part.get("type") == "refusal"), None)
    if refused is not None:
        raise Refusal("unsupported", f"{where}.content has a part of type 'refusal'; leave it out", param=f"{where}.content")
    own = _answer(messages, new=bool(messages) and bool(messages[-1].get("content")))
    own["content"] = "".join(part if isinstance(part, str) else _text(part, where) for part in parts)


def _answer(messages: list[dict[str, Any]], *, new: bool = False) -> dict[str, Any]:
    """Returns the model's message that is being put together, or a new one."""
    if new or not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text(part: Any, where: str) -> str:
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise _bad(where, f"{where} has a part without a text; must be {{type, text}}")
    return text


def _bad(param: str, message: str) -> Refusal:
    return Refusal("invalid_value", message, param=param)
