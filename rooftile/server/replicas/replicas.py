"""`Replicas`: engines behind one API. They are started together, and each prompt is sent to one of them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from rooftile.engine.requests.stats import EngineStats
from rooftile.engine.start.replica import VISIBLE
from rooftile.server.engine.calls import EngineDown, RemoteCall
from rooftile.server.engine.messages import Ready
from rooftile.server.engine.remote import RemoteEngine
from rooftile.server.replicas.devices import environments
from rooftile.server.replicas.prefixes import blocks_of
from rooftile.server.replicas.replica import Replica
from rooftile.server.routing import choose, weight


class Replicas:
    """The engines of a server. A single one that dies ends its server; of several, one that dies is started again.

    Args:
        count: how many engines there are.
        settings: the keywords of `LLM`, and `model`.
        stall_s: a step that takes longer is taken for dead.
        noted: called with the number of an engine, from 1 on, and its counts after each of its steps.
        changed: called with the number of engines that answer, when one begins or ceases to.
    """

    def __init__(
        self, count: int, settings: dict[str, Any], *, stall_s: float, noted: Callable[[int, EngineStats], None],
        changed: Callable[[int], None] = lambda answering: None,
    ) -> None:  # fmt: skip
        self.ready = asyncio.Event()
        """Set when the first engine answers."""
        self.over = asyncio.Event()
        """Set when no engine will answer any more, or when one was refused its settings before it answered at all."""
        self._changed = changed
        self._turn = 0
        self._engines: dict[RemoteCall, RemoteEngine] = {}
        self._shares_prefixes = count > 1 and settings.get("enable_prefix_caching", True)
        visible = os.environ.get(VISIBLE)
        several = {"machine": {"replicas": count, "visible": visible}} if count > 1 else {}
        self.all = [
            Replica(
                f"replica {number} of {count}" if count > 1 else "", settings | several, own, stall_s=stall_s,
                noted=partial(noted, number), changed=self._note_change, restarts=count > 1,
            )
            for number, own in enumerate(environments(count, settings, visible), 1)
        ]  # fmt: skip

    @property
    def answering(self) -> list[Replica]:
        """The replicas that take requests now."""
        return [each for each in self.all if each.engine.answers]

    @property
    def facts(self) -> Ready | None:
        """The facts that an engine has told of itself and its model; None if no engine answers."""
        return next((each.engine.ready for each in self.answering), None)

    @property
    def failed(self) -> RemoteEngine:
        """The engine that says why no engine answers."""
        ended = [each.engine for each in self.all if each.engine.cause is not None]
        return next((each for each in ended if each.wrong), ended[-1] if ended else self.all[0].engine)

    @property
    def states(self) -> list[str]:
        """The state of each replica."""
        return [each.state for each in self.all]

    @property
    def cause(self) -> str:
        """Why no engine answers, for clients."""
        return self.failed.cause or f"the model is being read, {self.percent} %"

    def send(
        self, prompt: list[int], params: dict[str, Any], *, salt: str, streams: bool, answers: int = 1,
        started: Callable[[], None] = lambda: None, adapter: str | None = None,
    ) -> RemoteCall:  # fmt: skip
        """Sends a prompt to one of the engines; see `RemoteEngine.send`. The caller must `leave` the call at the end.

        Args:
            answers: how many answers are computed.
            adapter: the name of the adapter that answers, which has prefixes of its own.

        Raises:
            EngineDown: no engine answers.
        """
        there = self.answering
        if not there:
            raise EngineDown(self.cause)
        if adapter is not None:
            there = [each for each in there if adapter not in each.adapters.lacks] or there
        chosen = self._choose(there, prompt, salt if adapter is None else f"{adapter}\0{salt}")
        call = chosen.engine.send(
            prompt, params, salt=salt, streams=streams, started=started, weight=weight(len(prompt), answers), adapter=adapter
        )  # fmt: skip
        self._engines[call] = chosen.engine
        return call

    async def change_adapter(self, name: str, path: str | None) -> None:
        """Loads an adapter into all engines, or with None unloads it; if one refuses it, none has changed.

        Raises:
            EngineRefused: an engine refuses it.
            EngineDown: an engine does not answer now.
        """
        there = [each for each in self.all if not each.out]
        if not there or not all(each.engine.answers for each in there):
            raise EngineDown("adapters change while all engines answer, and one does not")
        concerned = [each for each in there if path is not None or name not in each.adapters.lacks]
        ends = await asyncio.gather(*(each.engine.change_adapter(name, path) for each in concerned), return_exceptions=True)
        errors = [end for end in ends if isinstance(end, BaseException)]
        # an engine that dies while it unloads is started again without it
        if errors and (path is not None or len(errors) == len(ends)):
            changed = [each for each, end in zip(concerned, ends, strict=True) if end is None]
            undone = (each.engine.change_adapter(name, None) for each in changed)
            await asyncio.gather(*undone, return_exceptions=True)
            raise errors[0]
        for each in self.all:
            each.adapters.note(name, path)

    def leave(self, call: RemoteCall) -> bool:
        """Aborts a request unless it has ended; returns whether it had not."""
        engine = self._engines.pop(call, None)
        return engine is not None and engine.leave(call)

    @property
    def percent(self) -> int:
        """How much of the model the first engine that will answer has read."""
        return max(each.engine.percent for each in self.all)

    async def close(self) -> None:
        """Ends all of them."""
        await asyncio.gather(*(each.close() for each in self.all))

    def kill(self) -> None:
        """Ends all processes at once."""
        for each in self.all:
            each.engine.kill()

    def _choose(self, there: list[Replica], prompt: list[int], salt: str) -> Replica:
        if len(self.all) == 1:
            return there[0]
        facts = there[0].engine.ready
        assert facts is not None
        blocks = blocks_of(prompt, salt, facts.block_size) if self._shares_prefixes else []
        chosen = there[choose([each.known(blocks, facts.block_size) for each in there], self._turn)]
        self._turn += 1
        chosen.note_prompt(blocks)
        return chosen

    def _note_change(self) -> None:
        if self.answering:
            self.ready.set()
        elif all(each.out for each in self.all):
            self.over.set()
        # a setting that is wrong is wrong for all replicas, and is told before somebody relies on the others
        if any(each.out and each.engine.wrong and not each.starts for each in self.all):
            self.over.set()
        self._changed(len(self.answering))
