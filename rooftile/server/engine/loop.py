"""`Loop`: takes orders and runs steps, in the engine's process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from rooftile.engine.engine import Engine
from rooftile.engine.requests.request import Request
from rooftile.engine.requests.stats import stats_of
from rooftile.engine.sampling.grammar import Matcher
from rooftile.engine.sampling.params import SamplingParams
from rooftile.errors import InvalidInput, Unsupported
from rooftile.server.engine.compiling import Compiling
from rooftile.server.engine.following import Followed
from rooftile.server.engine.messages import Abort, Add, EngineState, News, Order, RequestRefused, StepNews
from rooftile.server.observe.log import log

# how often an idle engine looks after grammars that are being compiled
COMPILING_S = 0.005
# seconds after which an idle engine checks its books
IDLE_S = 1.0


class Link(Protocol):
    """The connection to the server's process."""

    def orders(self, wait_s: float | None) -> Sequence[Order]:
        """Returns the orders that have come; waits at most `wait_s` seconds for an order, None for ever."""

    def send(self, message: StepNews) -> None:
        """Sends a message."""


class Loop:
    """Runs an engine for the server: orders in, one message per step out, and one before it that says which requests are taken.

    Args:
        engine: the engine; only this loop touches it.
        link: the connection to the server's process.
    """

    def __init__(self, engine: Engine, link: Link) -> None:
        self.engine = engine
        self.link = link
        self._by_id: dict[int, Followed] = {}
        self._by_request: dict[Request, Followed] = {}
        self._waiting: dict[int, Followed] = {}
        self._state = EngineState()
        self._checked = True
        self._compiling = Compiling(engine.grammars)

    def run(self) -> None:
        """Runs for ever; an error of the engine ends it."""
        while True:
            self.turn()

    def turn(self) -> None:
        """Takes the orders that have come, and runs a step if there is one to run."""
        idle = self.engine.idle
        wait_s = (None if self._checked else IDLE_S) if idle else 0.0
        orders = self.link.orders(COMPILING_S if idle and self._compiling else wait_s)
        if idle and not orders and not self._compiling:
            # a leak is found by us, and not by the request that finds no room
            self.engine.check_idle()
            self._checked = True
            return
        began = time.perf_counter()
        message = StepNews(self._state)
        for order in orders:
            if isinstance(order, Add):
                self._add(order, message)
            else:
                self._abort(order)
        for add, found in self._compiling.ended():
            self._add(add, message, found)
        self._checked = False
        if message.taken:
            # before the step: meanwhile the server's process begins the answer
            self.link.send(message)
            message = StepNews(self._state)
        before = time.perf_counter()
        changed = [] if self.engine.idle else self.engine.step()
        after = time.perf_counter()
        self._note_started(message)
        message.news = [news for request in changed if (news := self._news(request)) is not None]
        self._count(after - before, before - began + time.perf_counter() - after)
        self.link.send(message)

    def _add(self, order: Add, message: StepNews, grammar: Matcher | InvalidInput | None = None) -> None:
        """Adds a request, or begins with its grammar; whatever is wrong with it concerns its client alone."""
        try:
            if isinstance(grammar, InvalidInput):
                raise grammar
            params = SamplingParams(**order.params)
            if params.structured is not None and grammar is None:
                self._compiling.begin(order)
                return
            request = self.engine.add(order.prompt, params, cache_salt=order.salt, grammar=grammar)
        except (InvalidInput, Unsupported, TypeError) as error:
            message.refused.append(RequestRefused(order.id, str(error)))
            return
        except Exception as error:
            # the engine has not taken it yet, so no other request is hurt
            log.exception("request %d could not be taken", order.id)
            message.refused.append(RequestRefused(order.id, f"the request could not be taken: {type(error).__name__}", ours=True))
            return
        followed = Followed(order.id, request, streams=order.streams)
        self._by_id[order.id] = self._by_request[request] = self._waiting[order.id] = followed
        message.taken.append(order.id)

    def _abort(self, order: Abort) -> None:
        self._compiling.abort(order.id)
        followed = self._by_id.get(order.id)
        if followed is not None:
            self._forget(followed)
            self.engine.abort(followed.request)

    def _forget(self, followed: Followed) -> None:
        del self._by_id[followed.id], self._by_request[followed.request]
        self._waiting.pop(followed.id, None)

    def _note_started(self, message: StepNews) -> None:
        """Notes which requests have left the queue for the first time."""
        started = [each for each in self._waiting.values() if each.request.cached_tokens is not None]
        for followed in started:
            del self._waiting[followed.id]
            self._state.prefix_queries += len(followed.request.prompt)
            self._state.prefix_hits += followed.request.cached_tokens or 0
            message.started.append(followed.id)

    def _news(self, request: Request) -> News | None:
        followed = self._by_request.get(request)
        if followed is None:
            # aborted while this step was in flight
            return None
        try:
            news = followed.news()
        except Exception as error:
            # an error of one request must not end the others
            log.exception("the news of request %d could not be read", followed.id)
            self.engine.abort(request)
            news = News(followed.id, [], finished=True, error=f"its news could not be read: {type(error).__name__}")
        if news is not None and news.finished:
            self._forget(followed)
        return news

    def _count(self, step_s: float, host_s: float) -> None:
        """Brings the state up to date."""
        state, now = self._state, stats_of(self.engine)
        state.running, state.waiting, state.waste = now.running, now.waiting, now.waste
        state.free, state.used, state.cached = now.free_blocks, now.used_blocks, now.cached_blocks
        state.steps, state.tokens, state.preemptions = now.steps, now.tokens, now.preemptions
        state.step_s, state.host_s = step_s, host_s
