"""Reads a body and parses its JSON, both within limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from rooftile.server import limits
from rooftile.server.refusals import Refusal, retry_later

T = TypeVar("T")

# so much of a body that is too long is read and thrown away, so that its sender reads the answer
THROWN_AWAY = 4
_NESTS = {dict, list}
# the content types of programs that name none: no header, or the header that `curl -d` writes by itself
_OF_CURL = ("", "application/x-www-form-urlencoded")


class ClientGone(Exception):
    """The client has closed its connection; an answer would not be read."""


class Bodies:
    """How large bodies may be: each of them, and all together while they are read and parsed.

    Args:
        most: the most bytes of one.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0
        """Bytes of the bodies that are being read or parsed, as far as they are counted: small ones need no room."""

    def take(self, size: int, more: int) -> int:
        """Takes room for `more` bytes of a body that has had `size`; returns how much was taken.

        Raises:
            Refusal: all bodies together would be too large.
        """
        taken = max(0, size + more - limits.PARSED_AT_ONCE_BYTES) - max(0, size - limits.PARSED_AT_ONCE_BYTES)
        if self.held + taken > limits.BODIES * self.most:
            why = f"bodies of {self.held:,} bytes are being read, and there is room for {limits.BODIES * self.most:,}"
            raise retry_later("queue_full", f"{why}; try again in 1 s", 1)
        self.held += taken
        return taken


async def read_object(request: Request, bodies: Bodies, read: Callable[[dict[str, Any]], T]) -> T:
    """Returns what `read` makes of the JSON object in a request's body.

    Args:
        request: the request.
        bodies: the bounds, and what other requests hold.
        read: checks the object and takes what it needs; called in a thread for a large body, with which its time grows.

    Raises:
        Refusal: the body is no JSON object, too long, too deep or too late.
        ClientGone: the client has left.
    """
    _check_kind(request, bodies.most)
    body, taken = bytearray(), 0
    try:
        async with asyncio.timeout(limits.READ_S):
            async for part in _parts(request, bodies.most):
                taken += bodies.take(len(body), len(part))
                body += part
        if len(body) > limits.PARSED_AT_ONCE_BYTES:
            return await asyncio.to_thread(lambda: read(parse_object(body)))
        return read(parse_object(body))
    except TimeoutError:
        why = f"the body has not come within {limits.READ_S:g} s"
        raise Refusal("read_timeout", why, headers={"Connection": "close"}) from None
    except ClientDisconnect:
        raise ClientGone from None
    finally:
        bodies.held -= taken


def _check_kind(request: Request, most: int) -> None:
    """Refuses by its headers what will not be read."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # a page of elsewhere may send the others without asking, and a browser then names its origin
    if kind != "application/json" and (kind not in _OF_CURL or "origin" in request.headers):
        raise Refusal("not_json", f"the content type is {kind[:80]!r}; must be application/json")
    coding = request.headers.get("content-encoding", "").strip().lower()
    if coding not in ("", "identity"):
        raise Refusal("not_json", f"the content encoding is {coding[:80]!r}; must be none: send the JSON as it is")
    # whoever asks before it sends a body hears at once that it is too long
    if "expect" in request.headers and int(request.headers.get("content-length", 0)) > most:
        raise _too_large(most)


async def _parts(request: Request, most: int) -> AsyncIterator[bytes]:
    """Yields the parts of a body that is not too long."""
    size = 0
    async for part in request.stream():
        size += len(part)
        if size <= most:
            yield part
        elif size > THROWN_AWAY * most:
            break
    if size > most:
        raise _too_large(most)


def _too_large(most: int) -> Refusal:
    why = f"the body has more than {most:,} bytes, the most that are read (--max-body)"
    return Refusal("body_too_large", why, headers={"Connection": "close"})


def parse_object(body: bytes | bytearray) -> dict[str, Any]:
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
    # a walk takes longer than the parsing; so few brackets cannot be nested deeper
    if body.count(b"[") + body.count(b"{") > limits.JSON_DEPTH:
        check_depth(found)
    written = _written_names(body)
    if written != len(found) and written != _kept_names(found):
        raise Refusal("invalid_json", "an object in the body has the same name twice; give it once")
    return found


def check_depth(value: object, most: int = limits.JSON_DEPTH) -> None:
    """Refuses JSON whose objects and lists are nested too deep; walks level by level, so that depth costs no stack."""
    level = [value]
    for _ in range(most):
        level = _inside(level)
        if not level:
            return
    raise _too_deep(most)


def _inside(level: list[Any]) -> list[Any]:
    """Returns the objects and lists that lie directly in these."""
    parts = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
    # most long lists have numbers or texts alone, and their types are told sooner than each of their elements is looked at
    return [each for part in parts if _NESTS & set(map(type, part)) for each in part if isinstance(each, dict | list)]


def _written_names(body: bytes | bytearray) -> int:
    """Counts the names in the objects of a JSON text, repeated names included."""
    # what lies between two quotes that no backslash escapes is a string, and outside of strings a colon follows each name
    outside = body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2]
    return sum(part.count(b":") for part in outside)


def _kept_names(found: dict[str, Any]) -> int:
    """Returns how many names parsed objects have: of a name that stood there twice the parser has kept the last."""
    level: list[Any] = [found]
    names = 0
    while level:
        names += sum(len(each) for each in level if isinstance(each, dict))
        level = _inside(level)
    return names


def _too_deep(most: int = limits.JSON_DEPTH) -> Refusal:
    return Refusal("invalid_json", f"the body's JSON is nested deeper than {most} levels")
