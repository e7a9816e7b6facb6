"""Blocks of Anthropic's messages as messages of a chat."""

from __future__ import annotations

import json
from typing import Any

from rooftile.server import limits
from rooftile.server.http.openai.fields import read_text
from rooftile.server.refusals import Refusal


def messages_of(given: Any, system: Any) -> list[dict[str, Any]]:
    """Returns the messages of a chat, behind the system message.

    Raises:
        Refusal: a message or a block is of another kind, or lacks a field.
    """
    if not isinstance(given, list) or not given or not all(isinstance(each, dict) for each in given):
        raise _bad("messages", "messages must be a list of at least one object with a role and content")
    if len(given) > limits.MESSAGES:
        raise _bad("messages", f"messages has {len(given):,} messages; may have at most {limits.MESSAGES:,}")
    found = []
    if system is not None:
        found.append({"role": "system", "content": _texts(system, "system")})
    for place, message in enumerate(given):
        where = f"messages[{place}]"
        unknown = message.keys() - {"role", "content"}
        if unknown:
            raise Refusal("unknown_field", f"{where} has {min(unknown)[:80]!r}; has role, content", param=where)
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise _bad(f"{where}.role", f"{where}.role is {str(role)[:40]!r}; must be user or assistant")
        if not isinstance(content, str | list):
            raise _bad(f"{where}.content", f"{where}.content is missing; must be a text, or a list of blocks")
        if isinstance(content, str) or role == "system":
            found.append({"role": role, "content": _texts(content, f"{where}.content")})
        else:
            found += (_of_user if role == "user" else _of_model)(content, f"{where}.content")
    return found


def _of_user(blocks: list[Any], where: str) -> list[dict[str, Any]]:
    """Results of tools first, as a template expects them behind the calls."""
    results: list[dict[str, Any]] = []
    texts: list[Any] = []
    for place, block in enumerate(blocks):
        at = f"{where}[{place}]"
        if _kind(block, at, ("text", "tool_result")) == "text":
            texts.append(_part(block, at))
            continue
        content = block.get("content")
        said = "" if content is None else _texts(content, f"{at}.content")
        if block.get("is_error"):
            # a template has no other place for it
            said = [{"type": "text", "text": "error:"}, *(said if isinstance(said, list) else [{"type": "text", "text": said}])]
        results.append({"role": "tool", "tool_call_id": read_text(block, "tool_use_id", at), "content": said})
    return [*results, *([{"role": "user", "content": texts}] if texts or not results else [])]


def _of_model(blocks: list[Any], where: str) -> list[dict[str, Any]]:
    found: dict[str, Any] = {"role": "assistant", "content": ""}
    for place, block in enumerate(blocks):
        at = f"{where}[{place}]"
        kind = _kind(block, at, ("text", "thinking", "redacted_thinking", "tool_use"))
        if kind == "text":
            found["content"] += read_text(block, "text", at)
        elif kind == "thinking":
            found["reasoning_content"] = found.get("reasoning_content", "") + read_text(block, "thinking", at)
        elif kind == "tool_use":
            call = {"name": read_text(block, "name", at), "arguments": json.dumps(block.get("input", {}), ensure_ascii=False)}
            found.setdefault("tool_calls", []).append({"id": read_text(block, "id", at), "type": "function", "function": call})
    return [found]


def _texts(content: Any, where: str) -> str | list[dict[str, str]]:
    """Returns a text, or blocks of text as a chat's parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _bad(where, f"{where} must be a text, or a list of blocks of type text")
    found = []
    for place, block in enumerate(content):
        at = f"{where}[{place}]"
        _kind(block, at, ("text",))
        found.append(_part(block, at))
    return found


def _part(block: dict[str, Any], where: str) -> dict[str, str]:
    return {"type": "text", "text": read_text(block, "text", where)}


def _kind(block: Any, where: str, has: tuple[str, ...]) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind not in has:
        why = f"{where} is of type {str(kind)[:40]!r}; has {', '.join(has)} here: a model reads text, and nothing is fetched"
        raise Refusal("unsupported", why, param=where)
    return str(kind)


def _bad(param: str, message: str) -> Refusal:
    return Refusal("invalid_value", message, param=param)
