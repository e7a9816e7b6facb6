"""Streams answers as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing
from types import MappingProxyType
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rooftile.server.engine.messages import News
from rooftile.server.http.body import ClientGone
from rooftile.server.http.intake import unless_gone
from rooftile.server.http.middleware import mistake
from rooftile.server.http.openai.chat_answers import delta_of
from rooftile.server.http.openai.objects import Objects
from rooftile.server.http.openai.token_ids import answer_ids, prompt_ids
from rooftile.server.http.responder import Responder
from rooftile.server.observe.log import AccessRecord, log
from rooftile.server.refusals import Refusal

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


# many clients cut a stream at every line end of Unicode, and JSON escapes only the line ends of ASCII
_LINE_ENDS = tuple((end.encode(), f"\\u{ord(end):04x}".encode()) for end in ("\u0085", "\u2028", "\u2029"))


def event(value: dict[str, Any], name: str | None = None) -> bytes:
    """Returns an object as one event, on one line, under its name if it has one."""
    data = _encode(value)
    for end, escaped in _LINE_ENDS:
        if end in data:
            data = data.replace(end, escaped)
    return (b"" if name is None else b"event: " + name.encode() + b"\n") + b"data: " + data + b"\n\n"


class EventStream(Response):
    """A response that ends with its events, or with its client.

    Args:
        events: the events.
        close: called at the end, whatever it is.
        access: the request's.
        headers: headers of the answer.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], close: Callable[[], None], access: AccessRecord,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers({"X-Accel-Buffering": "no"} | dict(headers))
        self._events = events
        self._close = close
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends all events."""
        try:
            await unless_gone(receive, self._send_all(send))
        except ClientGone:
            self._access.end = "gone"
        finally:
            self._close()

    async def _send_all(self, send: Send) -> None:
        # not the length of an empty body
        headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        async with aclosing(self._events):
            await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


# chunks that have come together
Chunks = AsyncGenerator[list[dict[str, Any]], None]


async def chunks_of(responder: Responder, objects: Objects) -> Chunks:
    """Yields the chunks of a stream.

    Raises:
        Refusal: the answers end before they are complete.
    """
    chunks = _Chunks(responder, objects)
    if found := [*chunks.opening()]:
        yield found
    async with aclosing(responder.news()) as several:
        async for place, news in several:
            if found := [*chunks.growth(place, news)]:
                yield found
    if found := [*chunks.closing()]:
        yield found


async def events_of(chunks: Chunks, access: AccessRecord) -> AsyncGenerator[bytes, None]:
    """Yields the chunks of a stream as events; an error in the middle is an event, and [DONE] is always the last."""
    try:
        async with aclosing(chunks):
            async for together in chunks:
                # they are sent together: each sending is a system call
                yield b"".join(map(event, together))
    except Exception as error:
        yield event(end_of(error, access).body)
    yield DONE


def end_of(error: Exception, access: AccessRecord) -> Refusal:
    """Returns what the client is told of an error in the middle of a stream, and notes it."""
    refusal = error if isinstance(error, Refusal) else mistake(access.id)
    if refusal is not error:
        log.error("request %s: a mistake of the server", access.id, exc_info=error)
    access.end = refusal.code
    return refusal


class _Chunks:
    """The chunks of one stream.

    Args:
        responder: the request.
        objects: writes its objects.
    """

    def __init__(self, responder: Responder, objects: Objects) -> None:
        self._responder = responder
        self._objects = objects
        self._with_usage = responder.generation.include_usage or responder.generation.continuous_usage
        self._echoed: set[int] = set()
        self._begun: set[int] = set()

    def opening(self) -> Iterator[dict[str, Any]]:
        """Yields what comes before the answers."""
        generation = self._responder.generation
        for index in range(len(self._responder.tokens) * generation.n if generation.chat else 0):
            yield self._objects.chunk([self._objects.opening(index)], None, with_usage=self._with_usage) | (
                prompt_ids(self._responder, 0) if index == 0 else {}
            )

    def growth(self, place: int, news: News) -> Iterator[dict[str, Any]]:
        """Yields what is new in the answers to a prompt."""
        generation, objects = self._responder.generation, self._objects
        for piece in news.pieces:
            index, text, before = place * generation.n + piece.index, piece.text, None
            said: str | dict[str, Any] = text
            if generation.chat:
                said = delta_of(self._responder.read(place, piece), thoughts=generation.thoughts)
            if generation.echo and index not in self._echoed:
                self._echoed.add(index)
                said, before = generation.echoes[place] + text, self._responder.echoed(place)
            logprobs = None
            if generation.logprobs is not None and (piece.logprobs or before):
                start = len(generation.echoes[place]) if generation.echo else 0
                logprobs = objects.logprobs(piece.logprobs or [], piece.offsets, start=start, before=before)
            # a token may have no text yet: half of a character, or the beginning of a stop string or of a mark
            ids = answer_ids(self._responder, piece.logprobs)
            if said or logprobs or ids.get("token_ids") or piece.finish is not None or generation.continuous_usage:
                said = {"content": ""} if said == {} else said
                delta = objects.delta(index, said, piece.finish, piece.stop, logprobs) | ids
                if not generation.chat and index not in self._begun:
                    self._begun.add(index)
                    delta |= prompt_ids(self._responder, place)
                now = self._responder.usage.object() if generation.continuous_usage else None
                yield objects.chunk([delta], now, with_usage=self._with_usage)

    def closing(self) -> Iterator[dict[str, Any]]:
        """Yields what comes after the answers."""
        if self._with_usage:
            yield self._objects.chunk([], self._responder.usage.object(), with_usage=True)
