"""The HTTP side of a server in this process, without an engine."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import uvicorn

from rooftile.server.http.app import make_app
from rooftile.server.http.protocol import BoundedProtocol
from rooftile.server.server_run import bind
from rooftile.server.service import Service
from rooftile.server.settings import ServerSettings


@contextlib.asynccontextmanager
async def listening(service: Service | None = None):
    """Yields the port of a server without an engine, and uvicorn's state with its connections."""
    listener = bind("127.0.0.1", 0)
    # connections inherit it: a client that reads nothing is noticed after few bytes
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    port = listener.getsockname()[1]
    app = make_app(service or Service(ServerSettings(model="m")))
    config = uvicorn.Config(app, http=BoundedProtocol, ws="none", lifespan="off", log_config=None, timeout_keep_alive=60)
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield port, server.server_state
    finally:
        server.should_exit = True
        await task
