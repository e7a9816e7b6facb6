"""`RayEngines`: the replicas of the deployment `Engine` as the ingress sees them, which routes and limits like any server."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

import msgspec

from rooftile.engine.requests.stats import EngineStats
from rooftile.server.engine.calls import EngineDown, EngineRefused, RemoteCall
from rooftile.server.engine.messages import Add, Failed, Ready, StepNews
from rooftile.server.observe.log import log
from rooftile.server.on_ray.adapters import WantedAdapters
from rooftile.server.on_ray.engine import read, read_facts
from rooftile.server.replicas.prefixes import blocks_of
from rooftile.server.routing import weight

# seconds between two words to the engines that calls still have readers, unless --stall is short
PULSE_S = 5.0
# seconds in which all engines read an adapter
CHANGE_S = 100.0
GONE = "the replica that had the request has ended"


class RayEngines:
    """Engines on a cluster.

    Args:
        handle: a handle of Ray Serve's for the deployment.
        stall_s: an engine aborts calls of which it has heard nothing for so long.
        shares_prefixes: whether prompts share what is cached.
        noted: called with the number of an engine, from 1 on, and its counts.
        changed: called with the number of engines that answer.
        adapters: the adapters that engines are started with.
    """

    def __init__(
        self, handle: Any, *, stall_s: float, shares_prefixes: bool, noted: Callable[[int, EngineStats], None],
        changed: Callable[[int], None], adapters: Any = None,
    ) -> None:  # fmt: skip
        self.ready = asyncio.Event()
        self.over = asyncio.Event()
        self.facts: Ready | None = None
        self._handle = handle
        self._answer = handle.options(method_name="answer", stream=True)
        self._adapters = WantedAdapters(adapters)
        self._shares_prefixes = shares_prefixes
        self._changed = changed
        self._noted = noted
        self._answering = 1
        self._numbers: dict[str, int] = {}
        self._count = 0
        # calls have a name of their own among all ingresses'
        self._own = secrets.token_hex(8)
        self._calls: dict[RemoteCall, tuple[asyncio.Task[None], Callable[[], None]]] = {}
        self._life = asyncio.create_task(self._live(min(PULSE_S, stall_s / 4)))

    @property
    def states(self) -> list[str]:
        """The state of each engine that answers."""
        return ["ready"] * self._answering if self.ready.is_set() else ["loading"]

    @property
    def cause(self) -> str:
        """Why no engine answers, for clients."""
        return "no replica of the engine answers"

    @property
    def percent(self) -> int:
        """How much of the model has been read: the ingress is not told."""
        return 0

    def send(
        self, prompt: list[int], params: dict[str, Any], *, salt: str, streams: bool, answers: int = 1,
        started: Callable[[], None] = lambda: None, adapter: str | None = None,
    ) -> RemoteCall:  # fmt: skip
        """Sends a prompt to one of the engines."""
        assert self.facts is not None
        self._count += 1
        call, size = RemoteCall(self._count), self.facts.block_size
        blocks = blocks_of(prompt, salt if adapter is None else f"{adapter}\0{salt}", size) if self._shares_prefixes else []
        order = msgspec.msgpack.encode(Add(0, prompt, params, salt, streams, adapter))
        response = self._answer.remote(
            order, self._name(call), kept=hasattr(self._handle, "broadcast"), blocks=blocks, size=size,
            load=weight(len(prompt), answers), adapters=None if adapter is None else self._adapters.now,
        )  # fmt: skip
        self._calls[call] = asyncio.create_task(self._follow(call, response)), started
        return call

    async def change_adapter(self, name: str, path: str | None) -> None:
        """Loads an adapter into all engines, or with None unloads it; if one refuses it, none has changed.

        Engines that are started later follow, before they answer a prompt for an adapter.

        Raises:
            EngineRefused: an engine refuses it, or this Ray cannot tell all of them.
            EngineDown: none answers.
        """
        if not hasattr(self._handle, "broadcast"):
            raise EngineRefused("with this Ray adapters are those of --adapter; install a newer one, or start the server again")
        undo = self._adapters.change(name, path)
        try:
            said = [each for each in await self._tell_adapters() if isinstance(each, str)]
        except Exception:
            undo()
            log.exception("the engines could not be told of the adapter %r", name)
            raise EngineDown("the engines have not changed their adapters in time") from None
        reason = next(filter(None, said), None)
        if reason is None and said:
            return
        undo()
        if reason is None:
            raise EngineDown(self.cause)
        # those that have it already
        await self._tell_adapters()
        raise EngineRefused(reason)

    async def _tell_adapters(self) -> list[Any]:
        """Tells all engines which adapters there are to be; returns what each says, or how it has failed."""
        told = self._handle.broadcast("change_adapters", self._adapters.now)
        found: list[Any] = await told.results_async(timeout_s=CHANGE_S, return_exceptions=True)
        return found

    def leave(self, call: RemoteCall) -> bool:
        """Aborts a request unless it has ended; returns whether it had not."""
        task = self._end(call)
        if task is None:
            return False
        if not call.taken.done():
            call.taken.cancel()
        task.cancel()
        return True

    async def close(self) -> None:
        """Aborts all requests."""
        tasks = [self._life, *(task for task, _ in self._calls.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _name(self, call: RemoteCall) -> str:
        return f"{self._own}-{call.id}"

    def _end(self, call: RemoteCall) -> asyncio.Task[None] | None:
        """Takes a call from the account; returns the task that follows it, unless it has ended before."""
        self._start(call)
        found = self._calls.pop(call, None)
        return None if found is None else found[0]

    def _start(self, call: RemoteCall) -> None:
        if call in self._calls and not call.started:
            call.started = True
            self._calls[call][1]()

    async def _follow(self, call: RemoteCall, response: Any) -> None:
        """Hands what Ray brings of a call to its reader."""
        from ray.serve.exceptions import BackPressureError

        try:
            async for data in response:
                self._take(call, read(data))
            error: Exception | None = None if call.over else EngineDown(GONE)
        except asyncio.CancelledError:
            response.cancel()
            raise
        except BackPressureError:
            error = EngineDown("Ray has refused the request, because too many wait in its queue (max_queued_requests)")
        except Exception as lost:
            log.error("a call of a replica has failed: %s: %s", type(lost).__name__, str(lost).partition("\n")[0])
            error = EngineDown(GONE)
        if error is not None and self._end(call) is not None:
            call.fail(error)

    def _take(self, call: RemoteCall, message: object) -> None:
        if isinstance(message, Failed):
            self._fail(call, EngineDown(message.reason))
        if not isinstance(message, StepNews):
            return
        if message.taken and not call.taken.done():
            call.taken.set_result(None)
        for refused in message.refused:
            self._fail(call, EngineRefused(refused.reason, ours=refused.ours))
        if message.started:
            self._start(call)
        for news in message.news:
            if news.finished:
                self._end(call)
            call.take(news)

    def _fail(self, call: RemoteCall, error: Exception) -> None:
        self._end(call)
        call.fail(error)

    async def _live(self, pulse_s: float) -> None:
        """Asks an engine for its facts, and tells all of them now and then which calls still have readers."""
        while self.facts is None:
            try:
                self.facts = read_facts(await self._handle.facts.remote())
            except Exception:
                # no replica is there yet, or the one that was has ended
                log.exception("the engines do not answer yet")
                await asyncio.sleep(1)
        self._changed(1)
        self.ready.set()
        while hasattr(self._handle, "broadcast"):
            try:
                names = [self._name(call) for call in self._calls]
                told = self._handle.broadcast("keep", names, self._adapters.now)
                heard = await told.results_async(timeout_s=pulse_s, return_exceptions=True)
                self._note({name: EngineStats(*counts) for name, counts in (each for each in heard if isinstance(each, tuple))})
            except Exception:
                log.exception("the engines could not be told which calls have readers")
            await asyncio.sleep(pulse_s)

    def _note(self, stats: dict[str, EngineStats]) -> None:
        """Takes the engines' counts, by their names; an engine that has gone counts nothing, and its number stays its own."""
        self._answering = len(stats)
        self._changed(len(stats))
        for name in stats:
            self._numbers.setdefault(name, len(self._numbers) + 1)
        for name, number in self._numbers.items():
            self._noted(number, stats.get(name, EngineStats()))
