"""`Service`: the served model and what has been promised about it: one object that all routes share."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol

from rooftile.engine.requests.stats import EngineStats
from rooftile.server.admission import Admission
from rooftile.server.engine.messages import Ready
from rooftile.server.engine.remote import RemoteEngine
from rooftile.server.http.body import Bodies
from rooftile.server.http.texts import Texts
from rooftile.server.observe.metrics import Metrics
from rooftile.server.refusals import Refusal, retry_later
from rooftile.server.settings import ServerSettings

# how often the event loop's lag is measured
LAG_S = 0.05


class Live(Protocol):
    """A request that is being answered."""

    def stop(self, refusal: Refusal) -> None:
        """Ends it, and tells its client why."""


class Service:
    """A model, its engine, and its queue.

    Args:
        settings: the server's settings.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.metrics = Metrics(settings.metrics_prefix, settings.served_model_name)
        self.bodies = Bodies(settings.max_body)
        self.admission = Admission(settings.max_waiting, settings.max_waiting_tokens, settings.max_per_key)
        self.engine: RemoteEngine | None = None
        self.texts: Texts | None = None
        self.draining = False
        self.live: set[Live] = set()
        """Requests that are being answered."""
        self.created = int(time.time())
        self._lag: asyncio.Task[None] | None = None

    async def start(self) -> bool:
        """Starts the engine; returns whether it became ready."""
        # measured from the beginning: also while the model is read
        self._lag = asyncio.create_task(self._measure_lag())
        settings = {"model": self.settings.model, "json_log": self.settings.json_log} | self.settings.engine
        self.engine = RemoteEngine(settings, stall_s=self.settings.stall_s, noted=self._note)
        await asyncio.to_thread(_import_serving)
        await self.engine.changed.wait()
        if self.engine.ready is None or self.engine.cause is not None:
            return False
        self.texts = await Texts.load(self.engine.ready.folder, self.settings.engine.get("chat_template"))
        ready = self.engine.ready
        self._note(EngineStats(free_blocks=ready.blocks))
        return True

    async def close(self) -> None:
        """Ends the engine and the threads."""
        if self._lag is not None:
            self._lag.cancel()
        if self.texts is not None:
            self.texts.close()
        if self.engine is not None:
            await self.engine.close()

    def check(self) -> tuple[RemoteEngine, Texts, Ready]:
        """Returns the engine, the tokenizer and the facts about them.

        Raises:
            Refusal: with status 503, if no request can be answered now.
        """
        engine = self.engine
        if self.draining:
            raise retry_later("shutting_down", "the server is shutting down; ask another, or later", 10)
        if engine is not None and engine.cause is not None:
            raise Refusal("engine_down", engine.cause)
        if engine is None or engine.ready is None or self.texts is None:
            percent = 0 if engine is None else engine.percent
            raise retry_later("model_loading", f"the model is being read, {percent} %", 2)
        return engine, self.texts, engine.ready

    def facts(self) -> dict[str, Any]:
        """Returns the served model in OpenAI's words."""
        return {
            "id": self.settings.served_model_name, "object": "model", "created": self.created, "owned_by": "rooftile",
            "max_model_len": self.check()[2].max_len,
        }  # fmt: skip

    def scrape(self) -> bytes:
        """Returns the metrics of this moment."""
        metrics, engine = self.metrics, self.engine
        metrics.waiting.set(self.admission.waiting)
        metrics.queued.set(self.admission.tokens)
        metrics.up.set(engine is not None and engine.ready is not None and engine.cause is None)
        return metrics.text()

    def _note(self, stats: EngineStats) -> None:
        self.metrics.note_stats(stats)

    async def _measure_lag(self) -> None:
        while True:
            due = time.monotonic() + LAG_S
            await asyncio.sleep(LAG_S)
            self.metrics.lag.observe(max(0.0, time.monotonic() - due))


def _import_serving() -> None:
    """Imports what requests need, while the engine's process reads the model."""
    import rooftile.engine.sampling.params
    import rooftile.engine.text.detokenizer  # noqa: F401
