"""Clients that send slowly: a byte now and then keeps neither a connection nor a request open."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace

import pytest
from starlette.requests import Request

from rooftile.server import limits
from rooftile.server.http.body import Bodies, ClientGone, read_object
from rooftile.server.refusals import Refusal
from rooftile.server.service import Service
from rooftile.server.settings import ServerSettings
from tests.server.listening import listening
from tests.server.sockets import status


async def trickle(port: int, first: bytes, more: bytes) -> bytes:
    """Sends a byte now and then; returns what the server says at its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(first)
    reading = asyncio.create_task(reader.read())
    with contextlib.suppress(ConnectionError):
        for _ in range(200):
            if reading.done():
                break
            writer.write(more)
            await writer.drain()
            await asyncio.sleep(0.05)
    found = await asyncio.wait_for(reading, 300)
    writer.close()
    return found


@pytest.mark.parametrize(("first", "more"), [(b"", b""), (b"GET /health HTTP/1.1\r\nX", b"x"), (b"", b"\r\n"), (b"GET /", b"a")])
def test_a_slow_head_ends_in_time(monkeypatch, first, more) -> None:
    monkeypatch.setattr(limits, "READ_S", 0.4)

    async def test() -> None:
        async with listening() as (port, _):
            assert status(await trickle(port, first, more)) == 408

    asyncio.run(asyncio.wait_for(test(), 300))


def test_the_rest_of_a_refused_body_ends_in_time(monkeypatch) -> None:
    monkeypatch.setattr(limits, "READ_S", 0.4)
    head = b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n"

    async def test() -> None:
        async with listening() as (port, _):
            said = await trickle(port, head, b"x")
            assert status(said) == 404
            assert said.count(b"HTTP/1.1") == 1

    asyncio.run(test())


def test_between_two_requests_a_connection_may_rest(monkeypatch) -> None:
    monkeypatch.setattr(limits, "READ_S", 0.3)
    line = b"GET /page.js HTTP/1.1\r\nHost: localhost\r\n\r\n"

    async def test() -> None:
        async with listening() as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(2):
                writer.write(line)
                head = await reader.readuntil(b"\r\n\r\n")
                assert status(head) == 200
                size = int(next(each for each in head.split(b"\r\n") if each.lower().startswith(b"content-length")).split()[1])
                await reader.readexactly(size)
                await asyncio.sleep(0.6)
            writer.close()

    asyncio.run(asyncio.wait_for(test(), 300))


def test_too_many_connections_are_closed(monkeypatch) -> None:
    monkeypatch.setattr(limits, "CONNECTIONS", 2)

    async def test() -> None:
        async with listening() as (port, _):
            made = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(made[2][0].read(), 300) == b""
            made[0][1].write(b"GET /page.js HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert status(await made[0][0].readline()) == 200
            for _, writer in made:
                writer.close()

    asyncio.run(asyncio.wait_for(test(), 300))


def body_of(*messages: dict) -> Request:
    """Returns a request whose body comes in these messages, and then no more."""
    left = list(messages)

    async def receive() -> dict:
        return left.pop(0) if left else await asyncio.Event().wait()

    headers = [(b"content-type", b"application/json")]
    return Request({"type": "http", "method": "POST", "headers": headers}, receive)


def test_a_slow_body_ends_in_time(monkeypatch) -> None:
    monkeypatch.setattr(limits, "READ_S", 0.1)
    request = body_of({"type": "http.request", "body": b"{", "more_body": True})
    with pytest.raises(Refusal) as late:
        asyncio.run(asyncio.wait_for(read_object(request, Bodies(100), dict), 300))
    assert late.value.status == 408


def ready_service() -> Service:
    """A server that would read a request's body, and has no engine to send it to."""
    service = Service(ServerSettings(model="m"))
    service.engines = SimpleNamespace(facts=SimpleNamespace(embedding=None))
    service.texts = SimpleNamespace()
    return service


def test_a_body_that_comes_later_than_its_request_may_take_is_late() -> None:
    """The header counts from the request's head on, and not from the end of its body."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 90000\r\n"

    async def test() -> None:
        async with listening(ready_service()) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head + b"X-Request-Timeout: 0.3\r\n\r\n{")
            assert status(await reader.readuntil(b"\r\n\r\n")) == 504
            assert b"deadline_exceeded" in await reader.readuntil(b"}}")
            writer.close()

    asyncio.run(asyncio.wait_for(test(), 300))


def test_bodies_have_room_together() -> None:
    """Two thousand connections of four MiB each would take eight GiB."""
    bodies = Bodies(100_000)
    whole = {"type": "http.request", "body": b"x" * 100_000, "more_body": True}

    async def test() -> None:
        reading = [asyncio.create_task(read_object(body_of(whole), bodies, dict)) for _ in range(200)]
        # no task waits for anything but room, so each has come as far as it can
        for _ in range(100):
            await asyncio.sleep(0)
        done, waiting = ([each for each in reading if each.done() is ended] for ended in (True, False))
        assert bodies.held <= limits.BODIES * bodies.most
        assert len(waiting) == limits.BODIES * bodies.most // (100_000 - limits.PARSED_AT_ONCE_BYTES)
        refused = [each.exception() for each in done]
        assert {each.code for each in refused} == {"queue_full"}
        assert {each.headers["Retry-After"] for each in refused} == {"1"}
        # a small one is read at any time
        small = body_of({"type": "http.request", "body": b'{"a": 1}', "more_body": False})
        assert await read_object(small, bodies, dict) == {"a": 1}
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(test())
    assert bodies.held == 0


def test_a_client_that_leaves_in_its_body_is_gone() -> None:
    request = body_of({"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"})
    with pytest.raises(ClientGone):
        asyncio.run(asyncio.wait_for(read_object(request, Bodies(100), dict), 300))


def test_a_body_of_any_size_is_read_within_its_limit() -> None:
    parts = [{"type": "http.request", "body": each, "more_body": True} for each in (b'{"a": "', b"x" * 50_000, b'"')]
    request = body_of(*parts, {"type": "http.request", "body": b"}", "more_body": False})
    assert asyncio.run(read_object(request, Bodies(60_000), dict)) == {"a": "x" * 50_000}
    request = body_of(*parts, {"type": "http.request", "body": b"}", "more_body": False})
    with pytest.raises(Refusal) as long:
        asyncio.run(read_object(request, Bodies(50_000), dict))
    assert long.value.status == 413


def test_a_body_without_end_is_not_read_to_its_end() -> None:
    """Reads some of what is too much, so that its sender may read the answer, and not all."""
    received = []

    async def receive() -> dict:
        received.append(1)
        assert len(received) < 20, "the whole of it is read"
        return {"type": "http.request", "body": b" " * 100, "more_body": True}

    request = Request({"type": "http", "method": "POST", "headers": [(b"content-type", b"application/json")]}, receive)
    with pytest.raises(Refusal) as long:
        asyncio.run(asyncio.wait_for(read_object(request, Bodies(100), dict), 300))
    assert long.value.status == 413
    assert len(received) == 5
