"""`Loop`: takes orders and runs steps, for a server's process or for an `AsyncEngine`'s thread."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from rooftile.engine.adapters.names import AdapterChange
from rooftile.engine.engine import Engine
from rooftile.engine.loop.compiling import Compiling
from rooftile.engine.requests.request import Request
from rooftile.engine.requests.stats import EngineStats, stats_of
from rooftile.engine.sampling.grammar import Matcher
from rooftile.engine.sampling.params import SamplingParams
from rooftile.errors import InvalidInput, Unsupported

# how often an idle engine looks after grammars that are being compiled
COMPILING_S = 0.005
# seconds after which an idle engine checks its books, and again its ranks
IDLE_S = 1.0

News = TypeVar("News")


class AddOrder(Protocol):
    """The order to answer a prompt. The order to end a request is its id alone."""

    @property
    def id(self) -> int: ...
    @property
    def prompt(self) -> Sequence[int]: ...
    @property
    def params(self) -> SamplingParams | Mapping[str, Any]: ...
    @property
    def salt(self) -> str: ...
    @property
    def adapter(self) -> str | None: ...


@dataclass(slots=True)
class Turn(Generic[News]):
    """Holds the results of one turn of the loop, by the clients' ids of requests."""

    stats: EngineStats
    """The engine after the step before."""
    taken: list[int] = field(default_factory=list)
    refused: list[tuple[int, Exception, bool]] = field(default_factory=list)
    """Requests that the engine cannot take, with the reason, and whether the engine is to blame and not the request."""
    started: list[int] = field(default_factory=list)
    """Requests that wait no longer: the model reads their prompts."""
    news: list[tuple[int, News]] = field(default_factory=list)
    failed: list[tuple[int, Exception]] = field(default_factory=list)
    """Requests that an error of their own has ended."""
    adapters: list[tuple[int, str | None]] = field(default_factory=list)
    """Changes of adapters, by their ids, with the reason why one was refused."""


class Link(Protocol[News]):
    """The connection to the clients."""

    def orders(self, wait_s: float | None) -> Sequence[Any] | None:
        """Returns the orders that have come: `AddOrder`, `AdapterChange`, or the id of a request to end. None ends the loop.

        Args:
            wait_s: seconds to wait for an order at most; None for ever.
        """

    def follow(self, order: Any, request: Request) -> Callable[[], News | None]:
        """Returns a function that reads the news of a request after a step; it returns None if none is due."""

    def send(self, turn: Turn[News]) -> None:
        """Sends a turn to the clients."""


@dataclass(slots=True)
class _Followed(Generic[News]):
    id: int
    request: Request
    news: Callable[[], News | None]


class Loop(Generic[News]):
    """Runs an engine: orders in, one turn per step out, and one before the step that says which requests are taken.

    Args:
        engine: the engine; only this loop touches it.
        link: the connection to the clients.
        compiling_s: seconds that the grammar of a request may take to be compiled.
    """

    def __init__(self, engine: Engine, link: Link[News], *, compiling_s: float = math.inf) -> None:
        self.engine = engine
        self.link = link
        self._by_id: dict[int, _Followed[News]] = {}
        self._by_request: dict[Request, _Followed[News]] = {}
        self._waiting: dict[int, _Followed[News]] = {}
        self._stats = stats_of(engine)
        self._checked = True
        self._compiling = Compiling(engine.grammars, compiling_s)

    def run(self) -> None:
        """Runs until the link has no more orders; an error of the engine ends it at once."""
        while self.turn():
            pass

    def turn(self) -> bool:
        """Takes the orders that have come, and runs a step if there is one to run. Returns False at the end of all orders."""
        idle = self.engine.idle
        watches = not self._checked or self.engine.runner.has_ranks
        wait_s = (IDLE_S if watches else None) if idle else 0.0
        orders = self.link.orders(COMPILING_S if idle and self._compiling else wait_s)
        if orders is None:
            self._end()
            return False
        if idle and not orders and not self._compiling:
            self.engine.runner.check()
            # a leak is found by us, and not by the request that finds no room
            if not self._checked:
                self.engine.check_idle()
            self._checked = True
            return True
        began = time.perf_counter()
        turn: Turn[News] = Turn(self._stats)
        for order in orders:
            if isinstance(order, int):
                self._abort(order, turn)
            elif isinstance(order, AdapterChange):
                self._change_adapter(order, turn)
            else:
                self._add(order, turn)
        for add, found in self._compiling.ended():
            self._add(add, turn, found)
        self._checked = False
        if turn.taken:
            # before the step: meanwhile the clients begin their answers
            self.link.send(turn)
            turn = Turn(self._stats)
        before = time.perf_counter()
        changed = [] if self.engine.idle else self.engine.step()
        after = time.perf_counter()
        self._note_started(turn)
        for request in changed:
            # a request without a follower was aborted while this step was in flight
            if (followed := self._by_request.get(request)) is not None:
                self._read(followed, turn)
        host_s = before - began + time.perf_counter() - after
        turn.stats = self._stats = self._counted(step_s=after - before, host_s=host_s)
        self.link.send(turn)
        return True

    def abandon(self) -> None:
        """Aborts what an engine that has failed still holds."""
        for followed in self._by_id.values():
            self.engine.abort(followed.request)

    def _end(self) -> None:
        """Aborts all requests, sends their last news, and lets a step in flight end."""
        turn: Turn[News] = Turn(self._stats)
        for id_ in list(self._by_id):
            self._abort(id_, turn)
        self._compiling.close()
        while not self.engine.idle:
            self.engine.step()
        turn.stats = self._counted()
        self.link.send(turn)

    def _counted(self, step_s: float = 0.0, host_s: float = 0.0) -> EngineStats:
        summed = {name: getattr(self._stats, name) for name in ("prefix_queries", "prefix_hits", "prefix_pages")}
        return stats_of(self.engine)._replace(**summed, step_s=step_s, host_s=host_s)

    def _add(self, order: AddOrder, turn: Turn[News], grammar: Matcher | InvalidInput | None = None) -> None:
        """Adds a request, or begins with its grammar; whatever is wrong with it concerns its client alone."""
        try:
            if isinstance(grammar, InvalidInput):
                raise grammar
            params = order.params if isinstance(order.params, SamplingParams) else SamplingParams(**order.params)
            if params.grammar is not None and grammar is None:
                self._compiling.begin(order, params.grammar)
                return
            request = self.engine.add(order.prompt, params, cache_salt=order.salt, grammar=grammar, adapter=order.adapter)
        except Exception as error:
            # the engine has not taken it yet, so no other request is hurt
            ours = not isinstance(error, InvalidInput | Unsupported | TypeError)
            if ours:
                logging.getLogger(__name__).exception("request %d could not be taken", order.id)
            turn.refused.append((order.id, error, ours))
            return
        followed = _Followed(order.id, request, self.link.follow(order, request))
        self._by_id[order.id] = self._by_request[request] = self._waiting[order.id] = followed
        turn.taken.append(order.id)

    def _change_adapter(self, order: AdapterChange, turn: Turn[News]) -> None:
        reason = None
        try:
            if order.path is None:
                self.engine.unload_adapter(order.name)
            else:
                self.engine.load_adapter(order.name, order.path)
        except (InvalidInput, Unsupported) as error:
            reason = str(error)
        except Exception as error:
            logging.getLogger(__name__).exception("the adapter %r could not be loaded", order.name)
            reason = f"the adapter could not be loaded: {type(error).__name__}"
        turn.adapters.append((order.id, reason))

    def _abort(self, id_: int, turn: Turn[News]) -> None:
        """Ends a request that has not ended, and tells its last news to a client that still listens."""
        self._compiling.abort(id_)
        followed = self._by_id.get(id_)
        if followed is not None:
            self.engine.abort(followed.request)
            self._read(followed, turn)

    def _forget(self, followed: _Followed[News]) -> None:
        del self._by_id[followed.id], self._by_request[followed.request]
        self._waiting.pop(followed.id, None)

    def _note_started(self, turn: Turn[News]) -> None:
        """Notes which requests have left the queue for the first time."""
        started = [each for each in self._waiting.values() if each.request.cached_tokens is not None]
        for followed in started:
            del self._waiting[followed.id]
            turn.started.append(followed.id)
        found = [each.request for each in started]
        self._stats = self._stats._replace(
            prefix_queries=self._stats.prefix_queries + sum(len(request.prompt) for request in found),
            prefix_hits=self._stats.prefix_hits + sum(request.cached_tokens or 0 for request in found),
            prefix_pages=self._stats.prefix_pages + sum(request.paged_tokens for request in found),
        )

    def _read(self, followed: _Followed[News], turn: Turn[News]) -> None:
        """Puts the news of a request into the turn, and forgets a request that has ended."""
        try:
            news = followed.news()
        except Exception as error:
            # an error of one request must not end the others
            logging.getLogger(__name__).exception("the news of request %d could not be read", followed.id)
            self.engine.abort(followed.request)
            turn.failed.append((followed.id, error))
            self._forget(followed)
            return
        if news is not None:
            turn.news.append((followed.id, news))
        if not followed.request.live:
            self._forget(followed)
