"""Clients that send requests before they have read earlier answers, and what they announce before they send it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import struct

import pytest

from rooftile.server import limits
from rooftile.server.http.protocol import BoundedProtocol
from tests.server.listening import listening
from tests.server.sockets import connect, send, status

LINE = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def answers_to(requests: int) -> int:
    """Returns how many answers come to so many requests in one piece."""
    found = b""
    async with listening() as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(LINE * requests)
        with contextlib.suppress(ConnectionError, TimeoutError):
            while part := await asyncio.wait_for(reader.read(65536), 2):
                found += part
        writer.close()
    return found.count(b"HTTP/1.1 503")


def test_a_connection_holds_few_requests_ahead() -> None:
    """A connection that may hold any number takes memory without end, and the event loop for seconds."""
    most = limits.PIPELINED + 1
    assert asyncio.run(answers_to(most)) == most
    assert asyncio.run(answers_to(most + 500)) <= most


@pytest.mark.parametrize(
    ("kind", "size", "due"),
    [
        ("text/plain", 30, (415, True)), ("application/json", limits.BODY_BYTES + 1, (413, True)),
        ("application/json", limits.BODY_BYTES, (100, False)),
    ],
)  # fmt: skip
def test_a_client_that_asks_before_it_sends_is_told_at_once(server, kind, size, due) -> None:
    """Otherwise it would send a body that nobody reads, or its next request would be read as the body of this one."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {size}\r\n"
    with connect(server) as made:
        made.sendall(f"{head}Expect: 100-continue\r\n\r\n".encode())
        found = made.recv(4096)
    assert (status(found), b"connection: close" in found) == due


def test_two_host_headers_are_refused(server) -> None:
    """Programs on the way may believe the other one."""
    found = send(server, b"GET /health HTTP/1.1\r\nHost: evil.example\r\nHost: localhost\r\n\r\n", then_close=False)
    assert status(found) == 400
    assert b"2 Host headers" in found


async def connections_left() -> int:
    """Returns how many connections a server still has in memory when its client has read an answer and reset its own."""
    async with listening() as (port, _):
        made = await asyncio.to_thread(socket.create_connection, ("127.0.0.1", port))
        made.sendall(LINE)
        assert await asyncio.to_thread(made.recv, 4096)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        made.close()
        await asyncio.sleep(0.2)
        gc.collect()
        return sum(type(each) is BoundedProtocol for each in gc.get_objects())


def test_a_connection_that_was_reset_is_let_go() -> None:
    """A timer of uvicorn would keep it for a minute."""
    assert asyncio.run(connections_left()) == 0
