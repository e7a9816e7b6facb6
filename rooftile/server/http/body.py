"""Reads a body and parses its JSON, both within limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from rooftile.server import limits
from rooftile.server.refusals import Refusal

T = TypeVar("T")

# so much of a body that is too long is read and thrown away, so that its sender reads the answer
THROWN_AWAY = 4


class ClientGone(Exception):
    """The client has closed its connection; nobody reads an answer."""


async def read_object(request: Request, most: int, read: Callable[[dict[str, Any]], T]) -> T:
    """Returns what `read` makes of the JSON object in a request's body.

    Args:
        request: the request.
        most: the most bytes of a body.
        read: checks the object and takes what it needs; called in a thread for a large body, with which its time grows.

    Raises:
        Refusal: the body is no JSON object, too long, too deep or too late.
        ClientGone: the client has left.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refusal("not_json", f"the content type is {kind[:80]!r}; must be application/json")
    try:
        async with asyncio.timeout(limits.READ_S):
            body = await _read(request, most)
    except TimeoutError:
        why = f"the body has not come within {limits.READ_S:g} s"
        raise Refusal("read_timeout", why, headers={"Connection": "close"}) from None
    except ClientDisconnect:
        raise ClientGone from None
    if len(body) > limits.PARSED_AT_ONCE_BYTES:
        return await asyncio.to_thread(lambda: read(parse_object(body)))
    return read(parse_object(body))


async def _read(request: Request, most: int) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size <= most:
            parts.append(part)
        elif size > THROWN_AWAY * most:
            break
    if size > most:
        why = f"the body has more than {most:,} bytes, the most that are read (--max-body)"
        raise Refusal("body_too_large", why, headers={"Connection": "close"})
    return b"".join(parts)


def parse_object(body: bytes) -> dict[str, Any]:
    """Parses a JSON object.

    Raises:
        Refusal: it is none, or is too deep.
    """
    try:
        found = msgspec.json.decode(body)
    except RecursionError:
        raise _too_deep() from None
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        raise Refusal("invalid_json", f"the body is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise Refusal("invalid_json", f"the body is JSON of type {type(found).__name__}; must be an object")
    # a walk through a long list takes ten times as long as its parsing; so few brackets cannot be nested deeper
    if body.count(b"[") + body.count(b"{") > limits.JSON_DEPTH:
        check_depth(found)
    return found


def check_depth(value: object, most: int = limits.JSON_DEPTH) -> None:
    """Refuses JSON whose objects and lists are nested too deep; walks level by level, so that depth costs no stack."""
    level = [value]
    for _ in range(most):
        parts = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [each for part in parts for each in part if isinstance(each, dict | list)]
        if not level:
            return
    raise _too_deep(most)


def _too_deep(most: int = limits.JSON_DEPTH) -> Refusal:
    return Refusal("invalid_json", f"the body's JSON is nested deeper than {most} levels")
