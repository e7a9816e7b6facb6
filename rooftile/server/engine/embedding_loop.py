"""`EmbeddingLoop`: takes orders to embed texts and runs batches of them, in the process of a model that generates nothing.

An `Add` has the tokens of all texts of a request, one after the other. Its `params` have the texts' lengths, and for pairs the
types of tokens. A batch takes texts of several requests, and of a long request the first ones.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from rooftile.engine.adapters.names import AdapterChange
from rooftile.engine.embedding.embedder import Embedder, as_bytes
from rooftile.engine.embedding.reading import ReadText
from rooftile.engine.requests.stats import EngineStats
from rooftile.engine.start.blueprint import current_device
from rooftile.server.engine.link import SocketLink
from rooftile.server.engine.messages import AdapterChanged, Add, News, StepNews


@dataclass(slots=True)
class _Request:
    """A request: texts that no batch has had yet, and the vectors of the others."""

    id: int
    left: deque[ReadText]
    vectors: list[Any] = field(default_factory=list)
    """Tensors (n, width), in the order of its texts."""
    started: bool = False


class EmbeddingLoop:
    """Reads orders between two batches; every request gets one answer, when all of its texts have their vectors.

    Args:
        embedder: the model.
        link: the connection to the server.
        most_texts: the most texts of a batch.
    """

    def __init__(self, embedder: Embedder, link: SocketLink, most_texts: int) -> None:
        self._embedder, self._link, self._most_texts = embedder, link, most_texts
        # in the order in which they came
        self._requests: dict[int, _Request] = {}
        self._steps = self._tokens = 0
        self._step_s = 0.0

    def run(self) -> None:
        """Runs until the server goes away, which ends this process."""
        while True:
            self.turn()

    def turn(self) -> None:
        """Takes the orders that have come, and runs a batch if there is one to run."""
        taken = []
        for order in self._link.orders(0.0 if self._requests else None):
            if isinstance(order, Add):
                self._requests[order.id] = _Request(order.id, deque(texts_of(order)))
                taken.append(order.id)
            elif isinstance(order, AdapterChange):
                # an answer to it, too: its client waits
                refused = AdapterChanged(order.id, "a model that embeds texts takes no adapters")
                self._link.write(StepNews(self._stats(0), adapters=[refused]))
            else:
                self._requests.pop(order, None)
        chosen = self._choose()
        started = [request.id for request, _ in chosen if not request.started]
        for request, _ in chosen:
            request.started = True
        if taken or started:
            # before the batch: meanwhile others may come into the queue
            self._link.write(StepNews(self._stats(len(chosen)), taken, started=started))
        if chosen:
            self._run(chosen)

    def _choose(self) -> list[tuple[_Request, list[ReadText]]]:
        """Takes the texts of the next batch from their requests: the oldest that fit, and at least one."""
        chosen: list[tuple[_Request, list[ReadText]]] = []
        room, texts = self._embedder.max_batched_tokens, self._most_texts
        for request in self._requests.values():
            own: list[ReadText] = []
            while request.left and texts and (len(request.left[0].tokens) <= room or not (chosen or own)):
                own.append(request.left.popleft())
                room, texts = room - len(own[-1].tokens), texts - 1
            if own:
                chosen.append((request, own))
            if request.left:
                # a later request does not overtake the rest of this one
                break
        return chosen

    def _run(self, chosen: list[tuple[_Request, list[ReadText]]]) -> None:
        texts = [text for _, own in chosen for text in own]
        began = time.perf_counter()
        with current_device(self._embedder.device):
            vectors = self._embedder.on_host(texts)
        if self._embedder.is_cross and vectors.shape[1] == 1:
            vectors = self._embedder.scores(vectors)[:, None]
        self._step_s = time.perf_counter() - began
        self._steps, self._tokens = self._steps + 1, self._tokens + sum(len(text.tokens) for text in texts)
        news = []
        for (request, _), found in zip(chosen, vectors.split([len(own) for _, own in chosen]), strict=True):
            request.vectors.append(found)
            if not request.left:
                del self._requests[request.id]
                news.append(News(request.id, [], finished=True, vectors=as_bytes(request.vectors)))
        self._link.write(StepNews(self._stats(0), news=news))

    def _stats(self, running: int) -> EngineStats:
        waiting = [request for request in self._requests.values() if not request.started]
        return EngineStats(
            running=running, waiting=len(waiting), waiting_tokens=sum(len(text.tokens) for each in waiting for text in each.left),
            steps=self._steps, tokens=self._tokens, step_s=self._step_s,
        )  # fmt: skip


def texts_of(order: Add) -> Sequence[ReadText]:
    """Returns the texts of an order."""
    ends = pairwise(accumulate(order.params["lengths"], initial=0))
    types = order.params.get("types")
    return [ReadText(order.prompt[a:b], None if types is None else types[a:b]) for a, b in ends]
