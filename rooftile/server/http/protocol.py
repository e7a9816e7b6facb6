"""Limits of an HTTP message, below the application: uvicorn's parser has no limit for headers, and waits for them for ever."""

from __future__ import annotations

import asyncio
import json
from asyncio.events import TimerHandle
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from rooftile.server import limits
from rooftile.server.refusals import Refusal

# the first bytes of every answer, and the seconds before each
_STEPS = (
    (b"H", 0.0), (b"T", 0.05), (b"T", 0.45), (b"P", 1.0), (b"/", 2.0), (b"1", 4.0), (b".", 8.0), (b"1", 16.0), (b" ", 32.0),
)  # fmt: skip


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits for the request line, the headers, their time, and the number of connections.

    A reader that takes nothing is cut off. Closing would not do: a transport closes when its client has read what is left.
    """

    _timer: TimerHandle | None = None
    _reader_timer: TimerHandle | None = None
    _unread_bytes = 0
    _cycles: tuple[RequestResponseCycle, ...] = ()
    _head_bytes = 0
    _in_head = True
    _refusal: Refusal | None = None
    _half_closed: HalfClosed | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Takes a connection, or closes it if there are too many."""
        if len(self.connections) >= limits.CONNECTIONS:
            self.transport = transport
            transport.abort()
            return
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the connection, and tells every request on it."""
        self._disarm()
        self._forget_reader()
        if self._half_closed is not None:
            self._half_closed.stop()
        # uvicorn tells the newest request only; a client may have sent it before the answer to an earlier one
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        # uvicorn leaves its timer where a client has reset the connection, and with it the connection for the rest of its time
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses the bytes that have come; refuses a head that is too long."""
        if self._refusal is not None or self.transport.is_closing():
            return
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._check_head(self._head_bytes)
            if self._timer is None and self._is_quiet():
                # empty lines before a request begin none, but have ended uvicorn's own wait for one
                self._arm()
        elif self._timer is None and self._is_quiet():
            # the rest of a body that was refused unread may not take for ever
            self._arm()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keeps the connection for the answers to what has come whole, though its client sends no more."""
        unanswered = [each for each in self._cycles if not each.response_complete]
        if not unanswered or self.cycle.more_body or self._refusal is not None:
            return False
        # with the last answer the connection ends
        self.cycle.keep_alive = False
        if not unanswered[0].response_started:
            self._half_closed = HalfClosed(self.transport, unanswered[0], self.loop)
        return True

    def on_message_begin(self) -> None:
        """Begins a request: its head must be complete in time."""
        super().on_message_begin()
        self._in_head = True
        self._arm()

    def on_headers_complete(self) -> None:
        """Checks the size of the whole head, and hands the request to the application."""
        self._disarm()
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        self._in_head, self._head_bytes = False, 0
        if self._check_head(size):
            super().on_headers_complete()
            self._cycles = (*(each for each in self._cycles if not each.response_complete), self.cycle)
            if len(self.pipeline) > limits.PIPELINED:
                self.transport.abort()
                # the parser has no other way to leave the rest of what has come unread
                raise ConnectionError(f"more than {limits.PIPELINED} requests wait on a connection")

    def on_message_complete(self) -> None:
        """Ends a request; the next one may begin."""
        super().on_message_complete()
        self._in_head = True

    def on_response_complete(self) -> None:
        """Ends an answer; its client must read what is left of it."""
        super().on_response_complete()
        self._watch_reader()

    def pause_writing(self) -> None:
        """Lets the application wait: its client reads more slowly than it writes."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """Lets the application go on."""
        super().resume_writing()
        self._forget_reader()

    def send_400_response(self, msg: str) -> None:
        """Answers what is no HTTP in the form of all errors."""
        self._answer(Refusal("invalid_request", "this is no HTTP/1.1 request"))

    def _check_head(self, size: int) -> bool:
        """Refuses a head that is too long."""
        url = len(getattr(self, "url", b""))
        if url > limits.REQUEST_LINE_BYTES:
            most = f"{limits.REQUEST_LINE_BYTES:,}"
            self._answer(Refusal("request_line_too_long", f"the request line has more than {most} bytes"))
        elif size > limits.HEADERS_BYTES + url:
            self._answer(Refusal("headers_too_large", f"the headers have more than {limits.HEADERS_BYTES:,} bytes together"))
        return self._refusal is None

    def _answer(self, refusal: Refusal) -> None:
        """Answers without the application, and closes the connection."""
        if self._refusal is not None or self.transport.is_closing():
            return
        self._refusal = refusal
        body = json.dumps(refusal.body).encode()
        head = (b"content-type: application/json\r\n", b"content-length: %d\r\n" % len(body), b"connection: close\r\n\r\n")
        self.transport.write(b"".join([STATUS_LINE[refusal.status], *head, body]))
        # a connection that is closed with something unread is reset, and its client may never see the answer
        self.transport.write_eof()
        self._disarm()
        self._timer = self.loop.call_later(limits.LINGER_S, self._close)

    def _is_quiet(self) -> bool:
        """Tells whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _arm(self) -> None:
        self._disarm()
        self._timer = self.loop.call_later(limits.READ_S, self._late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self._in_head and self._is_quiet():
            self._answer(Refusal("read_timeout", f"no whole request has come in {limits.READ_S:g} s"))
        else:
            self._close()

    def _close(self) -> None:
        """Closes the connection; what its client has not read by now is lost."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def _watch_reader(self) -> None:
        """Begins to look whether the client reads what is left for it."""
        left = self.transport.get_write_buffer_size()
        if self._reader_timer is None and left:
            self._unread_bytes = left
            self._reader_timer = self.loop.call_later(limits.CHUNK_S, self._check_reader)

    def _check_reader(self) -> None:
        self._reader_timer = None
        left = self.transport.get_write_buffer_size()
        if left and left > self._unread_bytes - limits.CHUNK_BYTES:
            self.transport.abort()
        else:
            self._watch_reader()

    def _forget_reader(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None


class HalfClosed:
    """Finds out whether a client that sends no more still reads: sends the beginning of its answer ahead, byte by byte.

    A client that has shut down its sending half waits for its answer. One that has closed the whole connection looks the same,
    until something is sent to it and comes back as an error. So the first bytes of the answer are sent ahead, one by one: every
    answer begins with them. Who is gone is noticed by the second byte, and its request ends; who still reads finds nothing odd.

    Args:
        transport: the connection.
        cycle: the request that is answered next.
        loop: the event loop.
    """

    def __init__(self, transport: asyncio.Transport, cycle: RequestResponseCycle, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._cycle = cycle
        self._loop = loop
        self._sent = 0
        self._timer: TimerHandle | None = None
        # the answer itself is written to this object
        cycle.transport = self  # type: ignore[assignment]
        self._step()

    def write(self, data: bytes) -> None:
        """Sends what has not been sent ahead."""
        self.stop()
        self._transport.write(data[self._sent :])
        self._sent = 0
        self._cycle.transport = self._transport

    def __getattr__(self, name: str) -> Any:
        """Returns a part of the transport."""
        return getattr(self._transport, name)

    def stop(self) -> None:
        """Sends no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _step(self) -> None:
        # to write to a connection that was reset closes it, of which the request is told
        self._transport.write(_STEPS[self._sent][0])
        self._sent += 1
        if self._sent < len(_STEPS):
            self._timer = self._loop.call_later(_STEPS[self._sent][1], self._step)
