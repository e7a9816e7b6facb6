"""Streams answers as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rooftile.server import limits
from rooftile.server.http.answering import Answering, wait_for_leaving
from rooftile.server.http.body import ClientGone
from rooftile.server.http.openai.objects import Objects
from rooftile.server.http.protocol import ABORT
from rooftile.server.observe.log import Account, log
from rooftile.server.refusals import Refusal

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


# many clients cut a stream at every line end of Unicode, of which JSON escapes only those of ASCII
_LINE_ENDS = tuple((end.encode(), f"\\u{ord(end):04x}".encode()) for end in ("\u0085", "\u2028", "\u2029"))


def event(value: dict[str, Any]) -> bytes:
    """Returns an object as one event, on one line."""
    data = _encode(value)
    for end, escaped in _LINE_ENDS:
        if end in data:
            data = data.replace(end, escaped)
    return b"data: " + data + b"\n\n"


class EventStream(Response):
    """A response that ends with its events, with its client, or with a client that reads too slowly.

    Args:
        events: the events.
        close: called at the end, whatever it is.
        account: the request's.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None], account: Account) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers({"X-Accel-Buffering": "no"})
        self._events = events
        self._close = close
        self._account = account

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends all events."""
        abort = scope.get("extensions", {}).get(ABORT, {}).get("abort", lambda: None)
        # not the length of an empty body
        headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        work = asyncio.ensure_future(self._send_all(send, headers, abort))
        gone = asyncio.ensure_future(wait_for_leaving(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientGone
            work.result()
        except ClientGone:
            self._account.end = "gone"
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
            self._close()

    async def _send_all(self, send: Send, headers: list[Any], abort: Callable[[], None]) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
            async for data in self._events:
                async with asyncio.timeout(limits.CHUNK_S):
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            async with asyncio.timeout(limits.CHUNK_S):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            # closing would wait until the client has read what is left
            abort()
            raise ClientGone from None


async def events_of(answering: Answering, objects: Objects, account: Account) -> AsyncIterator[bytes]:
    """Yields the chunks of a stream; an error in the middle is an event, and [DONE] is always the last."""
    try:
        async for chunk in _chunks(answering, objects):
            yield event(chunk)
    except Refusal as refusal:
        account.end = refusal.code
        yield event(refusal.body)
    except Exception:
        log.exception("request %s: a mistake of the server", account.id)
        account.end = "server_error"
        from rooftile.server.http.envelope import mistake

        yield event(mistake(account.id).body)
    yield DONE


async def _chunks(answering: Answering, objects: Objects) -> AsyncIterator[dict[str, Any]]:
    ask, usage = answering.ask, answering.usage
    with_usage = ask.include_usage or ask.continuous_usage
    for index in range(len(answering.tokens) * ask.n if ask.chat else 0):
        yield objects.chunk([objects.opening(index)], None, with_usage=with_usage)
    echoed: set[int] = set()
    async for place, news in answering.news():
        for piece in news.pieces:
            index, text = place * ask.n + piece.index, piece.text
            if ask.echo and index not in echoed:
                echoed.add(index)
                text = ask.echoes[place] + text
            logprobs = piece.logprobs if ask.logprobs is not None else None
            # a token may have no text yet: half of a character, or the beginning of a stop string
            if text or logprobs or piece.finish is not None or ask.continuous_usage:
                delta = objects.delta(index, text, piece.finish, piece.stop, logprobs)
                now = usage.object() if ask.continuous_usage else None
                yield objects.chunk([delta], now, with_usage=with_usage)
    if with_usage:
        yield objects.chunk([], usage.object(), with_usage=True)
