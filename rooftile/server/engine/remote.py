"""`RemoteEngine`: the engine's process as the server sees it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rooftile.engine.requests.stats import EngineStats
from rooftile.server.engine.calls import EngineDown, EngineRefused, RemoteCall
from rooftile.server.engine.messages import Abort, Add, ChangeAdapter, Failed, News, Reading, Ready, Report, StepNews
from rooftile.server.engine.wire import FrameReader, WireError, frame
from rooftile.server.observe.log import log

RECEIVED = 1 << 20
# how often it is checked that steps end
PULSE_S = 0.25
# seconds that a killed process may take to be gone
GONE_S = 5.0


class RemoteEngine:
    """An engine in a process of its own.

    Args:
        settings: the keywords of `LLM`, and `model`.
        stall_s: a step that takes longer is taken for dead, and the process is killed.
        noted: called with the engine's counts after each step.
        environment: variables that its process has beside this one's.
        listener: a port at which its other ranks meet it, if somebody else starts them; the caller closes it.
    """

    def __init__(
        self, settings: dict[str, Any], *, stall_s: float, noted: Callable[[EngineStats], None] = lambda stats: None,
        environment: Mapping[str, str] | None = None, listener: socket.socket | None = None,
    ) -> None:  # fmt: skip
        self.ready: Ready | None = None
        self.percent = 0
        self.stats = EngineStats()
        self.cause: str | None = None
        """Why the engine answers no more, for clients; None while it does, or may soon."""
        self.detail = ""
        """The same for the log: with words of an exception, which may hold a path or an address."""
        self.wrong = False
        """Whether a setting or the model was wrong, so that a new start would not help."""
        self.over = asyncio.Event()
        self.changed = asyncio.Event()
        """Set when the engine is ready, or over."""
        self.load = 0
        """The weights of the requests that have not ended."""
        self._stall_s = stall_s
        self._noted = noted
        self._calls: dict[int, RemoteCall] = {}
        self._count = 0
        self._heard = time.monotonic()
        self._on_start: dict[int, Callable[[], None]] = {}
        self._changes: dict[int, asyncio.Future[None]] = {}
        ours, theirs = socket.socketpair()
        inherited = [each.fileno() for each in (theirs, listener) if each is not None]
        if listener is not None:
            settings = settings | {"listener": listener.fileno()}
        # a session of its own: Ctrl-C on a terminal reaches the server only. -P: no module is taken from the working folder
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rooftile.server.engine.process", str(theirs.fileno())],
            stdin=subprocess.PIPE, pass_fds=inherited, start_new_session=True,
            env=_environment() | dict(environment or {}),
        )  # fmt: skip
        theirs.close()
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(settings).encode())
        self.process.stdin.close()
        self._socket = ours
        self._writer: asyncio.StreamWriter | None = None
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]

    @property
    def answers(self) -> bool:
        """Whether it takes requests."""
        return self.ready is not None and self.cause is None

    @property
    def requests(self) -> int:
        """How many prompts it has that have not ended."""
        return len(self._calls)

    def send(
        self, prompt: list[int], params: dict[str, Any], *, salt: str, streams: bool, started: Callable[[], None] = lambda: None,
        weight: int = 0, adapter: str | None = None,
    ) -> RemoteCall:  # fmt: skip
        """Sends a request; its `taken` is done when the engine has it. The caller must `leave` the call at the end.

        Args:
            prompt: token ids.
            params: keywords of `SamplingParams`.
            salt: requests share cached prefixes only if their salts are equal.
            streams: whether the answers are wanted while they grow.
            started: called once, when the request waits no longer.
            weight: what the request adds to `load` until it ends.
            adapter: the name of the adapter that answers; None for the model as it is.

        Raises:
            EngineDown: the engine has failed.
        """
        self._check()
        if not self._calls:
            # an idle engine is silent
            self._heard = time.monotonic()
        self._count += 1
        self._write(frame(Add(self._count, prompt, params, salt, streams, adapter)))
        call = RemoteCall(self._count, weight)
        self._calls[call.id], self._on_start[call.id] = call, started
        self.load += weight
        return call

    async def change_adapter(self, name: str, path: str | None) -> None:
        """Loads an adapter from a folder, or with None unloads it.

        Raises:
            EngineRefused: the engine refuses it; the sentence says why.
            EngineDown: the engine has failed.
        """
        self._check()
        self._count += 1
        done = self._changes[self._count] = asyncio.get_running_loop().create_future()
        self._write(frame(ChangeAdapter(self._count, name, path)))
        await done

    def leave(self, call: RemoteCall) -> bool:
        """Aborts a request unless it has ended; returns whether it had not."""
        if self._ended(call.id) is None:
            return False
        if not call.taken.done():
            call.taken.cancel()
        if self.cause is None:
            self._write(frame(Abort(call.id)))
        return True

    async def close(self) -> None:
        """Ends the process, which sees its socket closed; one that still reads the model is killed, and loses nothing."""
        self._end("the server stops")
        if self.ready is None:
            self.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._reap)

    def kill(self) -> None:
        """Ends the process at once."""
        self.process.kill()

    def lose(self, cause: str) -> None:
        """Ends the process at once, for a reason that its clients get."""
        self._end(cause)
        self.process.kill()

    def _reap(self) -> None:
        try:
            self.process.wait(GONE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _check(self) -> None:
        if self.cause is not None:
            raise EngineDown(self.cause)
        if self.ready is None:
            raise EngineDown(f"the model is being read, {self.percent} %")

    def _write(self, data: bytes) -> None:
        """Sends without waiting: what the engine does not read during a step waits in this process."""
        assert self._writer is not None
        self._writer.write(data)

    async def _read(self) -> None:
        """Reads what the engine reports until it is over."""
        reader, self._writer = await asyncio.open_connection(sock=self._socket, limit=RECEIVED)
        frames: FrameReader[Report] = FrameReader(Report)  # type: ignore[arg-type]
        try:
            while data := await reader.read(RECEIVED):
                self._heard = time.monotonic()
                for message in frames.feed(data):
                    self._take(message)
            code = await asyncio.to_thread(self.process.wait)
            self._end(f"the engine's process has ended {'by signal' if code < 0 else 'with code'} {abs(code)}")
        except (OSError, WireError) as error:
            self._end("the connection to the engine has failed", f": {error}")
            self.process.kill()
        except Exception as error:
            # whatever went wrong, no client may wait until the engine seems to stall
            log.exception("a message of the engine could not be taken")
            self._end("a message of the engine could not be taken", f": {type(error).__name__}")
            self.process.kill()

    async def _watch(self) -> None:
        """Kills an engine whose step does not end."""
        while not self.over.is_set():
            await asyncio.sleep(PULSE_S)
            silent = time.monotonic() - self._heard
            if self._calls and silent > self._stall_s:
                self._end(f"a step of the engine has taken {silent:.0f} s and has not ended (--stall)")
                self.process.kill()

    def _take(self, message: Report) -> None:
        if isinstance(message, StepNews):
            self.stats = message.stats
            self._hand_out(message)
            # after the callers whom the news has woken: a token does not wait for the metrics
            asyncio.get_running_loop().call_soon(self._noted, message.stats)
        elif isinstance(message, Reading):
            self.percent = message.percent
        elif isinstance(message, Ready):
            self.ready = message
            self.changed.set()
        else:
            self._fail(message)

    def _fail(self, message: Failed) -> None:
        self.wrong, self.detail = message.wrong, message.reason
        self._end(f"the {'model could not be read' if message.wrong else 'engine has failed'}; the server's log says why")

    def _hand_out(self, step: StepNews) -> None:
        for id_ in step.taken:
            call = self._calls.get(id_)
            if call is not None and not call.taken.done():
                call.taken.set_result(None)
        for refused in step.refused:
            call = self._ended(refused.id)
            if call is not None:
                call.fail(EngineRefused(refused.reason, ours=refused.ours))
        for id_ in step.started:
            self._started(id_)
        for news in step.news:
            self._tell(news)
        for change in step.adapters:
            self._end_change(change.id, None if change.reason is None else EngineRefused(change.reason))

    def _end_change(self, id_: int, error: Exception | None) -> None:
        done = self._changes.pop(id_)
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def _tell(self, news: News) -> None:
        call = self._calls.get(news.id)
        if call is None:
            return
        if news.finished:
            self._ended(news.id)
        call.take(news)

    def _ended(self, id_: int) -> RemoteCall | None:
        """Takes a request that is over from the account, and returns it; None if it has ended before."""
        self._started(id_)
        call = self._calls.pop(id_, None)
        if call is not None:
            self.load -= call.weight
        return call

    def _started(self, id_: int) -> None:
        on_start = self._on_start.pop(id_, None)
        if on_start is not None:
            on_start()

    def _end(self, cause: str, exception: str = "") -> None:
        """Tells every caller that the engine answers no more; the log alone has the words of an exception."""
        if self.cause is not None:
            return
        self.cause, self.detail = cause, self.detail or cause + exception
        if self._writer is not None:
            self._writer.close()
        for call in list(self._calls.values()):
            self._ended(call.id)
            call.fail(EngineDown(cause))
        for id_ in list(self._changes):
            self._end_change(id_, EngineDown(cause))
        self.over.set()
        self.changed.set()


def _environment() -> dict[str, str]:
    """Returns the engine's environment: it finds this package where the server has it, and knows no key."""
    found = {name: value for name, value in os.environ.items() if name != "ROOFTILE_API_KEY"}
    paths = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return found | {"PYTHONPATH": os.pathsep.join(paths)}
