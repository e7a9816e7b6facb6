"""`Engine`: a deployment of Ray Serve whose replicas each hold an engine, in a process of its own like a server's."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec

from rooftile.engine.ranks.meeting import open_port
from rooftile.engine.settings.table import ranks_of
from rooftile.server.engine.calls import EngineDown, EngineRefused, RemoteCall
from rooftile.server.engine.messages import FAILED, Add, Failed, Ready, Report, RequestRefused, StepNews
from rooftile.server.engine.remote import RemoteEngine
from rooftile.server.observe.log import log
from rooftile.server.on_ray.adapters import FollowedAdapters, Wanted
from rooftile.server.on_ray.nodes import check_rooftile, node_address, torch_version
from rooftile.server.on_ray.ranks import RankActors, RankOrder

# seconds in which Ray carries what is said to the clients of an engine that has ended
LAST_WORDS_S = 1.0

_encode = msgspec.msgpack.Encoder().encode
_read_add = msgspec.msgpack.Decoder(Add).decode


class Engine:
    """An engine, whose process ends with the replica's, because its socket is closed.

    What it says crosses as the bytes of messages, of which the types are checked when they are read.

    Args:
        settings: the keywords of `LLM`, and `model`.
        stall_s: a step that takes longer is taken for dead; so is a client whose ingress has not spoken of it for so long.
        rooftile: the version with which the application was made.

    Raises:
        InvalidInput: this node has another version.
    """

    # Ray Serve awaits it; elsewhere it would be a mistake
    async def __init__(self, settings: dict[str, Any], stall_s: float, rooftile: str) -> None:  # type: ignore[misc]
        check_rooftile(rooftile)
        self._name = secrets.token_hex(8)
        self._stall_s = stall_s
        self._start(settings, rooftile)
        self._adapters = FollowedAdapters(settings.get("adapters"), self._engine.change_adapter)
        self._following: asyncio.Task[None] | None = None
        # when an ingress has last said that a call has a reader
        self._wanted: dict[str, tuple[RemoteCall, float]] = {}
        try:
            await self._engine.changed.wait()
            if not self._engine.answers:
                raise RuntimeError(self._engine.detail)
        except BaseException:
            self._end_ranks()
            raise
        self._tasks = [asyncio.create_task(self._abort_unread()), asyncio.create_task(self._end_with_engine())]

    async def facts(self) -> bytes:
        """Returns the engine's `Ready`."""
        assert self._engine.ready is not None
        return _encode(self._engine.ready)

    async def change_adapters(self, wanted: Wanted) -> str:
        """Loads and unloads adapters until they are those that are wanted; returns why not, or ""."""
        return await self._adapters.follow(wanted)

    async def keep(self, names: Sequence[str], adapters: Wanted | None = None) -> tuple[str, list[float]]:
        """Notes that these calls still have readers; returns a name of the engine's, and its counts as `EngineStats` has them.

        An engine that was started later than the others has their adapters then, too.
        """
        for name in names:
            if name in self._wanted:
                self._wanted[name] = self._wanted[name][0], time.monotonic()
        if self._following is None or self._following.done():
            # not waited for: the ingress takes who does not answer for one that has gone
            self._following = asyncio.create_task(self._follow(adapters))
        return self._name, [*self._engine.stats]

    async def answer(
        self, order: bytes, name: str, *, kept: bool, blocks: Sequence[int], size: int, load: int,
        adapters: Wanted | None = None,
    ) -> AsyncGenerator[bytes, None]:  # fmt: skip
        """Yields what happens to a prompt, each time as a `Report` about call 0.

        Args:
            order: an `Add`.
            name: the call's name for `keep`.
            kept: whether its ingress will say that the call is read.
            blocks, size, load: the prompt's blocks, the tokens of each, and its weight, which the router has read.
            adapters: the adapters that there are to be, if the prompt names one.
        """
        add, started = _read_add(order), asyncio.Event()
        call: RemoteCall | None = None
        try:
            await self._follow(adapters)
            call = self._engine.send(
                add.prompt, add.params, salt=add.salt, streams=add.streams, started=started.set, adapter=add.adapter
            )
            if kept:
                self._wanted[name] = call, time.monotonic()
            await call.taken
            yield _encode(StepNews(self._engine.stats, taken=[0]))
            await started.wait()
            yield _encode(StepNews(self._engine.stats, started=[0]))
            async for news in call:
                news.id = 0
                yield _encode(StepNews(self._engine.stats, news=[news]))
        except EngineRefused as error:
            yield _encode(StepNews(self._engine.stats, refused=[RequestRefused(0, str(error), error.ours)]))
        except EngineDown as error:
            yield _encode(Failed(str(error)))
        finally:
            self._wanted.pop(name, None)
            if call is not None:
                self._engine.leave(call)

    async def check_health(self) -> None:
        """Raises RuntimeError if the engine answers no more, so that Ray starts another replica."""
        if self._engine.cause is not None:
            raise RuntimeError(self._engine.detail)

    def _start(self, settings: dict[str, Any], rooftile: str) -> None:
        """Starts the engine's process, and actors of its other ranks."""
        self._ranks: RankActors | None = None
        if ranks_of(settings) == 1:
            self._engine = RemoteEngine(settings, stall_s=self._stall_s)
            return
        with open_port(node_address()) as listener:
            self._engine = RemoteEngine(settings, stall_s=self._stall_s, listener=listener)
            address, port = listener.getsockname()[:2]
        order = RankOrder(settings, address, port, rooftile, torch_version())
        self._ranks = RankActors(order, self._lose)

    async def _follow(self, adapters: Wanted | None) -> None:
        """Follows the ingress; what cannot be loaded here is refused where it is asked for."""
        if adapters is not None and (reason := await self._adapters.follow(adapters)):
            log.error("the replica lacks an adapter: %s", reason)

    def _lose(self, cause: str, detail: str) -> None:
        """Ends the engine, of which a rank has ended."""
        if self._engine.cause is None:
            log.error("%s%s", cause, detail)
        self._engine.lose(cause)

    def _end_ranks(self) -> None:
        if self._ranks is not None:
            self._ranks.close()

    async def _end_with_engine(self) -> None:
        """Ends the other ranks when the engine is over, and then this process: its load is 0, so it would draw requests."""
        await self._engine.over.wait()
        log.error("the replica ends: %s", self._engine.detail)
        self._end_ranks()
        await asyncio.sleep(LAST_WORDS_S)
        os._exit(FAILED)

    async def _abort_unread(self) -> None:
        """Ends calls of which no ingress has spoken for long: their readers are gone, and nothing has said so."""
        while True:
            await asyncio.sleep(self._stall_s / 4)
            for call, heard in list(self._wanted.values()):
                if time.monotonic() - heard > self._stall_s:
                    self._engine.leave(call)
                    call.fail(EngineDown("the answer has had no reader for as long as a step may take (--stall)"))


def read(data: bytes) -> Report:
    """Returns what `answer` has sent."""
    return _read_report(data)


def read_facts(data: bytes) -> Ready:
    """Returns what `facts` has sent."""
    return _read_ready(data)


_read_report = msgspec.msgpack.Decoder(Report).decode  # type: ignore[arg-type,var-annotated]
_read_ready = msgspec.msgpack.Decoder(Ready).decode
