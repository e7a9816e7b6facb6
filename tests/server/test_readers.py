"""Streams end with who reads them: a client that leaves, or one that reads nothing; and an event is one line."""

from __future__ import annotations

import asyncio
import json

import pytest

from rooftile.server import limits
from rooftile.server.http.protocol import ABORT
from rooftile.server.http.sse import EventStream, event
from rooftile.server.observe.log import Account


def test_a_client_that_reads_nothing_is_cut_off(monkeypatch) -> None:
    monkeypatch.setattr(limits, "CHUNK_S", 0.05)
    cut, closed, account = [], [], Account()

    async def events():
        yield b"data: x\n\n"

    async def send(message):
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def receive():
        return await asyncio.Event().wait()

    async def test() -> None:
        stream = EventStream(events(), lambda: closed.append(True), account)
        await stream({"type": "http", "extensions": {ABORT: {"abort": lambda: cut.append(True)}}}, receive, send)

    asyncio.run(asyncio.wait_for(test(), 10))
    assert (cut, closed, account.end) == ([True], [True], "gone")


def test_a_client_that_leaves_ends_its_stream() -> None:
    closed, account = [], Account()

    async def events():
        while True:
            yield b"data: x\n\n"
            await asyncio.sleep(0.01)

    async def send(message):
        pass

    async def receive():
        await asyncio.sleep(0.05)
        return {"type": "http.disconnect"}

    stream = EventStream(events(), lambda: closed.append(True), account)
    asyncio.run(asyncio.wait_for(stream({"type": "http"}, receive, send), 10))
    assert (closed, account.end) == ([True], "gone")


@pytest.mark.parametrize("text", ["a\u2028b", "a\u0085b\u2029", "a\r\nb", "\x1c\x0b"])
def test_an_event_is_one_line_for_every_client(text) -> None:
    data = event({"text": text}).decode()
    line, empty = data.splitlines()
    assert empty == ""
    assert json.loads(line.removeprefix("data: ")) == {"text": text}
