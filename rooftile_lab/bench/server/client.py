"""A client of a server that takes little time itself."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Sequence
from typing import Any


class Reading(asyncio.Protocol):
    """One request on a connection of its own: when its events came, and the end of what was said.

    Args:
        port: the server's.
        body: a JSON object, or bytes to send as they are.
        path: the route.
        gone: the number of events after which the client leaves.
        kept: how many of the last bytes are kept.
    """

    def __init__(self, port: int, body: Any, path: str = "/v1/completions", *, gone: int | None = None, kept: int = 4096) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n"
        self._request = head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data
        self._port = port
        self._gone = gone
        self._kept = kept
        self.times: list[float] = []
        """The moment of each event that came."""
        self.sent = 0.0
        self.ended = 0.0
        self.status = 0
        self.tail = b""
        """The last bytes of the answer."""
        self.over = asyncio.get_running_loop().create_future()

    async def run(self) -> Reading:
        """Sends the request, and returns at the end of its answer."""
        transport, _ = await asyncio.get_running_loop().create_connection(lambda: self, "127.0.0.1", self._port)
        try:
            await self.over
        finally:
            transport.close()
        return self

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.sent = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if not self.status:
            self.status = int(data[9:12])
        # the last events are usage, which has no choice, and [DONE]
        count = data.count(b'"index":')
        self.times += [now] * count
        self.tail = (self.tail + data)[-self._kept :]
        if self._gone is not None and len(self.times) >= self._gone:
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.ended = time.perf_counter()
        if not self.over.done():
            self.over.set_result(None)

    @property
    def tokens(self) -> int:
        """Tokens of the answer, as the server has counted them."""
        return self._usage("completion_tokens")

    @property
    def cached(self) -> int:
        """Tokens of the prompt that the prefix cache had."""
        return self._usage("cached_tokens")

    def _usage(self, name: str) -> int:
        found = re.findall(rb'"%s":(\d+)' % name.encode(), self.tail)
        if not found:
            raise RuntimeError(f"no whole answer: status {self.status}, {self.tail[-300:]!r}")
        return int(found[-1])


async def read_all(port: int, bodies: Sequence[Any]) -> list[Reading]:
    """Sends all requests at once; returns them when all are answered."""
    return await asyncio.gather(*(Reading(port, body).run() for body in bodies))


async def get(port: int, path: str) -> bytes:
    """Returns the body of a GET."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return answer.partition(b"\r\n\r\n")[2]


def stream_of(prompt: Any, max_tokens: int, **more: Any) -> dict[str, Any]:
    """Asks for a stream of exactly `max_tokens` tokens."""
    usual = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    return {"prompt": prompt, "max_tokens": max_tokens} | usual | more
