"""`Service`: the served model and what has been promised about it: one object that all routes share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rooftile.engine.adapters.names import adapters_of
from rooftile.engine.chat.thought_formats import AUTO
from rooftile.engine.embedding.folder import recipe_of
from rooftile.server.admission import Admission
from rooftile.server.engine.messages import Ready
from rooftile.server.http.body import Bodies
from rooftile.server.http.texts import Texts
from rooftile.server.observe.metrics import Metrics
from rooftile.server.refusals import Refusal, retry_later
from rooftile.server.replicas.engines import Engines
from rooftile.server.replicas.replicas import Replicas
from rooftile.server.settings import ServerSettings

if TYPE_CHECKING:
    from rooftile.engine.embedding.reading import TextReader

# how often the event loop's lag is measured
LAG_S = 0.05


class Live(Protocol):
    """A request that is being answered."""

    def stop(self, refusal: Refusal) -> None:
        """Ends it, and tells its client why."""


class Service:
    """A model, its engines, and their queue.

    Args:
        settings: the server's settings.
        start_engines: starts the engines; None for replicas on this machine.
    """

    def __init__(self, settings: ServerSettings, start_engines: Callable[[], Engines] | None = None) -> None:
        self.settings = settings
        self._start_engines = start_engines or self._replicas
        self.metrics = Metrics(settings.metrics_prefix, settings.served_model_name, settings.engine.get("speculative"))
        self.bodies = Bodies(settings.max_body)
        self.admission = Admission(settings.max_waiting, settings.max_waiting_tokens, settings.max_per_key)
        self.engines: Engines | None = None
        self.texts: Texts | None = None
        self._reader: TextReader | None = None
        self.draining = False
        self.live: set[Live] = set()
        """Requests that are being answered."""
        self.created = int(time.time())
        self.adapters = {name: str(path) for name, path in adapters_of(settings.engine.get("adapters")).items()}
        """The folders of the adapters that requests may name as their model."""
        self.adapter_change = asyncio.Lock()
        """Held while an adapter is loaded or unloaded."""
        self._lag: asyncio.Task[None] | None = None

    async def start(self) -> bool:
        """Starts the engines; returns whether one became ready."""
        # measured from the beginning: also while the model is read
        self._lag = asyncio.create_task(self._measure_lag())
        self.engines = self._start_engines()
        await asyncio.to_thread(_import_serving)
        ends = [asyncio.create_task(each.wait()) for each in (self.engines.ready, self.engines.over)]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        facts = self.engines.facts
        if facts is None or self.engines.over.is_set():
            return False
        engine = self.settings.engine
        self.texts = await Texts.load(
            facts.folder, engine.get("chat_template"), engine.get("reasoning_parser", AUTO), engine.get("tool_call_parser", AUTO)
        )
        if facts.embedding is not None:
            recipe = await asyncio.to_thread(recipe_of, Path(facts.embedding.folder), causal=facts.embedding.causal)
            self._reader = self.texts.text_reader(recipe, facts.max_len, facts.vocabulary)
        return True

    async def close(self) -> None:
        """Ends the engines and the threads."""
        if self._lag is not None:
            self._lag.cancel()
        if self.texts is not None:
            self.texts.close()
        if self.engines is not None:
            await self.engines.close()

    def check(self) -> tuple[Engines, Texts, Ready]:
        """Returns the engines, the tokenizer and the facts about them.

        Raises:
            Refusal: with status 503, if no request can be answered now.
        """
        engines = self.engines
        if self.draining:
            raise retry_later("shutting_down", "the server is shutting down; ask another, or later", 10)
        facts = None if engines is None else engines.facts
        if engines is not None and facts is not None and self.texts is not None:
            return engines, self.texts, facts
        if engines is None or any(each in ("loading", "ready") for each in engines.states):
            percent = 0 if engines is None else engines.percent
            raise retry_later("model_loading", f"the model is being read, {percent} %", 2)
        why = engines.cause
        raise Refusal("engine_down", why) if engines.over.is_set() else retry_later("engine_down", why, 2)

    @property
    def reader(self) -> TextReader:
        """The reader of texts for a model that embeds them."""
        assert self._reader is not None, "routes ask for it where the model embeds"
        return self._reader

    def facts(self) -> dict[str, Any]:
        """Returns the served model in OpenAI's words."""
        _, texts, ready = self.check()
        return {
            "id": self.settings.served_model_name, "object": "model", "created": self.created, "owned_by": "rooftile",
            "max_model_len": ready.max_len, "has_chat_template": texts.has_template,
        }  # fmt: skip

    def adapter_facts(self) -> list[dict[str, Any]]:
        """Returns the adapters, as models whose parent is the served one."""
        base = self.facts()
        return [base | {"id": name, "root": path, "parent": base["id"]} for name, path in self.adapters.items()]

    def health(self) -> dict[str, Any]:
        """Returns how each engine stands.

        Raises:
            Refusal: with status 503, if no request can be answered now.
        """
        engines = self.check()[0]
        return {"status": "ok", "replicas": engines.states}

    def scrape(self) -> bytes:
        """Returns the metrics of this moment."""
        metrics = self.metrics
        metrics.waiting.set(self.admission.waiting)
        metrics.queued.set(self.admission.tokens)
        engines = self.engines
        metrics.up.set(engines is not None and engines.facts is not None)
        if isinstance(engines, Replicas):
            for number, each in enumerate(engines.all, 1):
                there = len(each.adapters.there) if each.engine.answers else 0
                metrics.note_replica(
                    number, up=each.engine.answers, requests=each.engine.requests, starts=each.starts, adapters=there
                )
        return metrics.text()

    def count_engines(self, answering: int) -> None:
        """Notes how many engines take requests; the limits of the queue are multiplied by their number."""
        self.admission.engines = max(1, answering)

    def _replicas(self) -> Engines:
        settings = {"model": self.settings.model, "json_log": self.settings.json_log} | self.settings.engine
        return Replicas(
            self.settings.replicas, settings, stall_s=self.settings.stall_s, noted=self.metrics.note_stats,
            changed=self.count_engines,
        )  # fmt: skip

    async def _measure_lag(self) -> None:
        while True:
            due = time.monotonic() + LAG_S
            await asyncio.sleep(LAG_S)
            self.metrics.lag.observe(max(0.0, time.monotonic() - due))


def _import_serving() -> None:
    """Imports what requests need, while the engine's process reads the model."""
    import rooftile.engine.sampling.params
    import rooftile.engine.text.detokenizer  # noqa: F401
