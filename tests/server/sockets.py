"""Raw bytes to a server and what comes back."""

from __future__ import annotations

import contextlib
import json
import socket

from tests.server.live import Server


def connect(server: Server, timeout_s: float = 20.0) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout_s)


def send(server: Server, data: bytes, *, then_close: bool = True) -> bytes:
    """Returns all that the server says to some bytes until it closes, or until it has been silent for a while."""
    found = b""
    with connect(server) as made:
        with contextlib.suppress(ConnectionError):
            made.sendall(data)
            if then_close:
                made.shutdown(socket.SHUT_WR)
        made.settimeout(3)
        with contextlib.suppress(TimeoutError, ConnectionError):
            while part := made.recv(65536):
                found += part
                # the rest of an answer comes at once
                made.settimeout(0.2)
    return found


def request(body: object, *headers: str, path: str = "/v1/completions") -> bytes:
    """Returns a whole request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {len(data)}", *headers,
    ]  # fmt: skip
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def status(answer: bytes) -> int | None:
    """Returns the status of an answer; None if there is none."""
    return int(answer.split()[1]) if answer.startswith(b"HTTP/1.1 ") else None
