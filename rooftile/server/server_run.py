"""Starts a server, and ends it: at a signal, or when no engine is left."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from rooftile.engine.loop.pauses import freeze_garbage
from rooftile.errors import InvalidInput
from rooftile.server import limits
from rooftile.server.engine.messages import FAILED
from rooftile.server.http.app import make_app
from rooftile.server.http.protocol import BoundedProtocol
from rooftile.server.observe.log import log, start_log
from rooftile.server.refusals import Refusal
from rooftile.server.replicas.replicas import Replicas
from rooftile.server.service import Service
from rooftile.server.settings import ServerSettings

# seconds in which clients read the last word of a server
FAREWELL_S = 1.0
WRONG = 2
SWITCH_S = 0.001
BACKLOG = 1024
# files beside the counted connections: connections that have just come, the engine, the log
SPARE_FILES = BACKLOG + 256
TOLD_S = 60.0


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: running requests are drained first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to `ServerRun`."""
        yield


class ServerRun:
    """One life of a server.

    Args:
        settings: its settings.
        listener: the socket that it listens on.
    """

    def __init__(self, settings: ServerSettings, listener: socket.socket) -> None:
        self._settings = settings
        self._listener = listener
        self._service = Service(settings)
        self._stop = asyncio.Event()
        self._told = -TOLD_S
        config = uvicorn.Config(
            make_app(self._service), http=BoundedProtocol, ws="none", lifespan="off", log_config=None, access_log=False,
            server_header=False, interface="asgi3", proxy_headers=False, timeout_keep_alive=int(limits.IDLE_S),
            timeout_graceful_shutdown=2, backlog=BACKLOG,
        )  # fmt: skip
        self._server = _Uvicorn(config)

    async def live(self) -> int:
        """Serves until the end; returns the exit code."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._note_error)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        starting = asyncio.create_task(self._service.start())
        stopping = asyncio.create_task(self._stop.wait())
        log.info("listening on %s; reading %s", self._address, self._settings.model)
        try:
            await asyncio.wait({starting, stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done() and not starting.result():
                return await self._fail()
            if not starting.done():
                starting.cancel()
                return self._listening_failed(serving)
            self._say_ready()
            return await self._serve(stopping, serving)
        finally:
            stopping.cancel()
            self._server.should_exit = True
            await asyncio.gather(serving, starting, return_exceptions=True)
            await self._service.close()

    async def _serve(self, stopping: asyncio.Task[bool], serving: asyncio.Task[None]) -> int:
        """Serves until a signal comes, no engine is left, or the server stops listening."""
        engines = self._service.engines
        assert engines is not None
        over = asyncio.create_task(engines.over.wait())
        await asyncio.wait({over, stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
        if not over.done():
            await self._drain(over)
        over.cancel()
        return await self._fail() if engines.over.is_set() else self._listening_failed(serving)

    def _listening_failed(self, serving: asyncio.Task[None]) -> int:
        """Returns the exit code of a server whose engine has not failed: 0, unless it listens no more without being asked."""
        if not serving.done() or self._stop.is_set():
            return 0
        log.error("the server listens no more", exc_info=serving.exception())
        return FAILED

    async def _drain(self, over: asyncio.Task[bool]) -> None:
        """Lets running requests finish, and tells clients whose requests do not in time."""
        service, settings = self._service, self._settings
        service.draining = True
        log.info("draining: %d requests run, and have %g s", len(service.live), settings.drain_s)
        until = time.monotonic() + settings.drain_s
        while service.live and time.monotonic() < until and not over.done():
            await asyncio.sleep(0.05)
        left = Refusal("shutting_down", f"the server is shutting down, and the request has not ended in {settings.drain_s:g} s")
        for responder in list(service.live):
            responder.stop(left)
        until = time.monotonic() + FAREWELL_S
        while service.live and time.monotonic() < until:
            await asyncio.sleep(0.02)
        log.info("stopped")

    async def _fail(self) -> int:
        """Says why there is no engine; every waiting client knows it already."""
        engines = self._service.engines
        assert isinstance(engines, Replicas)
        log.error("%s", engines.failed.detail)
        await asyncio.sleep(FAREWELL_S)
        return WRONG if engines.failed.wrong else FAILED

    def _on_signal(self) -> None:
        if self._stop.is_set():
            # whoever asks twice does not want to wait; engines end with their sockets
            if isinstance(self._service.engines, Replicas):
                self._service.engines.kill()
            os._exit(1)
        self._stop.set()

    def _note_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Logs an error of the event loop; a lack of files, which it tells for every connection that waits, once per minute."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif loop.time() - self._told >= TOLD_S:
            self._told = loop.time()
            log.error("connections wait, because this process may open no more files (ulimit -n)")

    @property
    def _address(self) -> str:
        host = f"[{self._settings.host}]" if ":" in self._settings.host else self._settings.host
        return f"http://{host}:{self._listener.getsockname()[1]}"

    def _say_ready(self) -> None:
        engines, settings = self._service.engines, self._settings
        assert engines is not None
        ready = engines.facts
        if ready is None:
            # it has died since
            return
        if ready.embedding is not None:
            what = (
                f"scores of {ready.embedding.width} labels"
                if ready.embedding.is_cross
                else f"vectors of {ready.embedding.width:,}"
            )
            log.info(
                "ready: %s; model %s; %s; %s tokens per text, %s requests and %s tokens waiting, %g s per request; %s",
                self._address, settings.served_model_name, what, f"{ready.max_len:,}", f"{settings.max_waiting:,}",
                f"{settings.max_waiting_tokens:,}", settings.deadline_s, self._asked,
            )  # fmt: skip
            return
        log.info(
            "ready: %s; model %s; %scache of %s; at most %s answers at once, %s tokens per sequence, %s answers and %s prompt "
            "tokens waiting, %g s per request; %s",
            self._address, settings.served_model_name, f"{settings.replicas} replicas, each with a " * (settings.replicas > 1),
            ready.cache, f"{ready.max_answers:,}",
            f"{ready.max_len:,}", f"{settings.max_waiting:,}", f"{settings.max_waiting_tokens:,}", settings.deadline_s,
            self._asked,
        )  # fmt: skip

    @property
    def _asked(self) -> str:
        return "keys are asked for" if self._settings.keys else "no key is asked for"


def bind(host: str, port: int) -> socket.socket:
    """Returns a listening socket.

    Raises:
        InvalidInput: the port is taken, or the host is none of this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    # a server that is started again at once must not wait for the connections of the last one
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host.strip("[]"), port))
        listener.listen(BACKLOG)
    except (OSError, TypeError) as error:
        listener.close()
        if getattr(error, "errno", None) != errno.EADDRINUSE:
            # a name that is too long for any host is no error of the system's
            why = getattr(error, "strerror", None) or "it is no name of a host"
            raise InvalidInput(f"host {host[:80]}, port {port} cannot be listened on: {why}") from None
        raise InvalidInput(f"port {port} is taken; give another one with --port, or end the program that has it") from None
    return listener


def run(settings: ServerSettings) -> int:
    """Serves until the end; returns the exit code: 0 after a signal, 2 if a setting is wrong, 70 if the engine has died."""
    listener = bind(settings.host, settings.port)
    # a thread that reads a large body in Python gives way to the event loop after so long
    sys.setswitchinterval(SWITCH_S)
    allow_files()
    start_log(as_json=settings.json_log, queued=True)
    freeze_garbage()

    async def live() -> int:
        return await ServerRun(settings, listener).live()

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(live())


def allow_files() -> None:
    """Raises this process's limit of open files to what all connections take, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    due = limits.CONNECTIONS + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < due:
        resource.setrlimit(resource.RLIMIT_NOFILE, (due if hard == resource.RLIM_INFINITY else min(due, hard), hard))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Returns uvloop's event loop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
