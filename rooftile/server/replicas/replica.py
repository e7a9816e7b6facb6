"""`Replica`: an engine that is started again when it has died, and what is known of it for routing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rooftile.engine.requests.stats import EngineStats
from rooftile.server.engine.remote import RemoteEngine
from rooftile.server.observe.log import log
from rooftile.server.replicas.known_adapters import KnownAdapters
from rooftile.server.replicas.prefixes import Prefixes
from rooftile.server.routing import Known

# seconds before each start again
PAUSES_S = (1.0, 4.0, 16.0)
# an engine that has answered for so long may be started again as often as at first
STEADY_S = 300.0


class Replica:
    """One of several engines.

    Args:
        name: its name in the log, such as "replica 2 of 3"; "" for the only one.
        settings: the keywords of `LLM`, and `model`.
        environment: variables of its process.
        stall_s: a step that takes longer is taken for dead.
        noted: called with the engine's counts after each step, and with empty ones when it starts.
        changed: called when it answers, or answers no more.
        restarts: whether it is started again when it has died.
    """

    def __init__(
        self, name: str, settings: dict[str, Any], environment: Mapping[str, str], *, stall_s: float,
        noted: Callable[[EngineStats], None], changed: Callable[[], None], restarts: bool,
    ) -> None:  # fmt: skip
        self.starts = 0
        """How often it has been started again."""
        self.out = False
        """Whether it is over for good."""
        self._name, self._settings, self._environment = name, settings, environment
        self._stall_s, self._noted, self._changed = stall_s, noted, changed
        self.adapters = KnownAdapters(settings)
        self._restarts = restarts
        self._begin()
        self._life = asyncio.create_task(self._live())

    def _begin(self) -> None:
        self._noted(EngineStats())
        settings = self.adapters.for_another_start(self._settings) if self.starts else self._settings
        for name in self.adapters.lacks:
            log.error("%s has the adapter %r no more: its folder is gone", self._name, name)
        self.engine = RemoteEngine(settings, stall_s=self._stall_s, noted=self._noted, environment=self._environment)
        self._prefixes = Prefixes(0)

    @property
    def state(self) -> str:
        """One of "ready", "loading" while the model is read, "down" before it is started again, and "out"."""
        if self.engine.answers:
            return "ready"
        if self.engine.cause is None:
            return "loading"
        return "out" if self.out else "down"

    def known(self, blocks: Sequence[int], size: int) -> Known:
        """Returns what is known of the engine for a prompt with these blocks of `size` tokens."""
        return Known(self.engine.load, self._prefixes.count(blocks) * size)

    def note_prompt(self, blocks: Sequence[int]) -> None:
        """Notes that the engine is sent a prompt with these blocks."""
        self._prefixes.add(blocks)

    async def close(self) -> None:
        """Ends it."""
        self._life.cancel()
        await asyncio.gather(self._life, return_exceptions=True)
        await self.engine.close()

    async def _live(self) -> None:
        left = list(PAUSES_S if self._restarts else ())
        while True:
            await self.engine.changed.wait()
            since = time.monotonic()
            if self.engine.answers:
                self._begin_answering()
                await self.engine.over.wait()
            if time.monotonic() - since > STEADY_S:
                left = list(PAUSES_S)
            if self.engine.wrong or not left:
                break
            pause = left.pop(0)
            log.error("%s: %s; it is started again in %g s", self._name, self.engine.detail, pause)
            self._changed()
            # its process must be gone, and its GPU's memory free, before another one starts
            await self.engine.close()
            await asyncio.sleep(pause)
            self.starts += 1
            self._begin()
        self.out = True
        if self._restarts:
            log.error("%s: %s; it is not started again", self._name, self.engine.detail)
        self._changed()

    def _begin_answering(self) -> None:
        ready = self.engine.ready
        assert ready is not None
        self._prefixes = Prefixes(ready.blocks)
        self._noted(EngineStats(free_blocks=ready.blocks))
        if self._name:
            log.info("%s answers", self._name)
        self._changed()
