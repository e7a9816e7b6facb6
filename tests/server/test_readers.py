"""Streams end with who reads them: a client that leaves, or one that reads nothing; and an event is one line."""

from __future__ import annotations

import asyncio
import json
import socket
from types import SimpleNamespace

import pytest

from rooftile.server import limits
from rooftile.server.http.protocol import BoundedProtocol
from rooftile.server.http.sse import EventStream, event
from rooftile.server.observe.log import AccessRecord
from tests.server.listening import listening


def test_a_client_that_reads_nothing_is_cut_off(monkeypatch) -> None:
    """Whatever it does not read: here many small answers, which no application waits for."""
    monkeypatch.setattr(limits, "CHUNK_S", 0.2)

    async def test() -> None:
        async with listening() as (port, state):
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.setblocking(False)
                await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
                client.send(b"GET /page.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * limits.PIPELINED)
                async with asyncio.timeout(300):
                    while not state.connections:
                        await asyncio.sleep(0.01)
                    while state.connections:
                        await asyncio.sleep(0.01)

    asyncio.run(test())


@pytest.mark.parametrize(
    ("left", "is_cut"), [([9000, 9000], True), ([9000, 8000], True), ([9000, 4000, 0], False), ([3000, 3000], True), ([0], False)]
)
def test_a_slow_reader_is_not_one_that_reads_nothing(monkeypatch, left, is_cut) -> None:
    """The bytes that are left for it fall by 4 KiB in the time, or to nothing."""
    monkeypatch.setattr(limits, "CHUNK_S", 0.0)
    sizes, cut = list(left), []

    async def test() -> None:
        protocol = BoundedProtocol.__new__(BoundedProtocol)
        protocol.loop = asyncio.get_running_loop()
        protocol.transport = SimpleNamespace(
            get_write_buffer_size=lambda: sizes.pop(0) if len(sizes) > 1 else sizes[0], abort=lambda: cut.append(True)
        )
        protocol._watch_reader()
        while protocol._reader_timer is not None:
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(test(), 300))
    assert bool(cut) is is_cut


def test_a_client_that_leaves_ends_its_stream() -> None:
    closed, access = [], AccessRecord()

    async def events():
        while True:
            yield b"data: x\n\n"
            await asyncio.sleep(0.01)

    async def send(message):
        pass

    async def receive():
        await asyncio.sleep(0.05)
        return {"type": "http.disconnect"}

    stream = EventStream(events(), lambda: closed.append(True), access)
    asyncio.run(asyncio.wait_for(stream({"type": "http"}, receive, send), 300))
    assert (closed, access.end) == ([True], "gone")


@pytest.mark.parametrize("text", ["a\u2028b", "a\u0085b\u2029", "a\r\nb", "\x1c\x0b"])
def test_an_event_is_one_line_for_every_client(text) -> None:
    data = event({"text": text}).decode()
    line, empty = data.splitlines()
    assert empty == ""
    assert json.loads(line.removeprefix("data: ")) == {"text": text}
