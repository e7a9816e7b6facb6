"""Clients that send requests before they have read earlier answers, and what they announce before they send it."""

from __future__ import annotations

import asyncio
import contextlib

from rooftile.server import limits
from tests.server.listening import listening

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
