"""`Callers`: the link between an engine's thread and its callers, in event loops of the same program.

For each request only the newest state is kept: a caller that reads slowly misses states in between, but never the last one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from rooftile.engine.adapters.names import AdapterChange
from rooftile.engine.engine import Engine
from rooftile.engine.loop.adapter_changes import AdapterChanges
from rooftile.engine.loop.loop import Turn
from rooftile.engine.requests.output import RequestOutput
from rooftile.engine.requests.request import Request
from rooftile.engine.requests.stats import stats_of
from rooftile.engine.sampling.params import SamplingParams
from rooftile.engine.text.prompt import ParsedPrompt
from rooftile.errors import InvalidInput

News = RequestOutput | Exception


class Overloaded(RuntimeError):
    """Too much waits already, so this request was refused. A server answers it with status 429."""


@dataclass(slots=True, eq=False)
class PendingCall:
    """One call of `generate` or `complete`: the order for the engine's thread, and the newest state for its caller."""

    id: int
    text: str | None
    prompt: Sequence[int]
    salt: str
    params: SamplingParams
    streams: bool
    """Whether the caller sees the answers grow, or only complete ones."""
    adapter: str | None = None
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is news."""
    request: Request | None = None
    started: bool = False
    """Whether the model has begun to read the prompt."""
    news: News | None = None
    """The newest state that the caller has not read yet."""

    @property
    def size(self) -> tuple[int, int]:
        """How many answers the call asks for, and how many tokens its prompt has."""
        answers = self.params.n if self.params.beam_width is None else self.params.beam_width
        # the engine says what is wrong with a prompt that is no list
        return answers, len(self.prompt) if isinstance(self.prompt, Sequence) else 0


class Callers:
    """Takes calls from any event loop, and brings each the newest state of its request.

    Args:
        engine: the engine, which is the loop's alone.
        max_waiting, max_waiting_tokens: answers and prompt tokens that may wait; see `AsyncEngine`.
    """

    def __init__(self, engine: Engine, max_waiting: int, max_waiting_tokens: int) -> None:
        self.max_waiting, self.max_waiting_tokens = max_waiting, max_waiting_tokens
        self.stats = stats_of(engine)
        self._engine = engine
        # guards everything below
        self._wake = threading.Condition()
        self._ids = count()
        self._calls: dict[int, PendingCall] = {}
        self._orders: list[PendingCall | AdapterChange | int] = []
        self._adapters = AdapterChanges()
        # answers and prompt tokens of calls that wait
        self._waiting = (0, 0)
        self._closing = False
        self._over = False
        self._cause: BaseException | None = None

    # called by the callers

    def check_room(self, answers: int = 1, tokens: int = 1) -> None:
        """Raises Overloaded if answers and prompt tokens, with those that wait, are too many."""
        waiting, waiting_tokens = self._waiting
        if waiting and waiting + answers > self.max_waiting:
            raise Overloaded(
                f"{waiting:,} answers wait already and the request has {answers:,}; {self.max_waiting:,} may wait (max_waiting): "
                "try again later"
            )
        if waiting_tokens and waiting_tokens + tokens > self.max_waiting_tokens:
            raise Overloaded(
                f"{waiting_tokens:,} prompt tokens wait already and the request has {tokens:,}; {self.max_waiting_tokens:,} may "
                "wait (max_waiting_tokens): try again later"
            )

    def begin(
        self, prompt: ParsedPrompt, params: SamplingParams, *, streams: bool, adapter: str | None = None
    ) -> PendingCall:  # fmt: skip
        """Sends a call to the engine's thread. The caller, an event loop, must `leave` it at the end."""
        with self._wake:
            if self._over or self._closing:
                raise stopped(self._cause)
            call = PendingCall(next(self._ids), prompt.text, prompt.tokens, prompt.cache_salt, params, streams, adapter)
            answers, tokens = call.size
            self.check_room(answers, tokens)
            self._waiting = self._waiting[0] + answers, self._waiting[1] + tokens
            self._calls[call.id] = call
            self._order(call)
        return call

    async def change_adapter(self, name: str, path: str | None) -> None:
        """Loads an adapter, or with None unloads it.

        Raises:
            InvalidInput: the engine refuses that.
        """
        with self._wake:
            if self._over or self._closing:
                raise stopped(self._cause)
            order = AdapterChange(next(self._ids), name, path)
            change = self._adapters.begin(order.id)
            self._order(order)
        reason = await change
        if reason is not None:
            raise InvalidInput(reason)

    async def newest(self, call: PendingCall) -> RequestOutput:
        """Returns the newest state of a call that has not been read yet; waits until there is one, and raises its error."""
        await call.changed.wait()
        call.changed.clear()
        with self._wake:
            news, call.news = call.news, None
        if isinstance(news, Exception):
            raise news
        assert news is not None, "a caller was woken without news"
        return news

    def leave(self, call: PendingCall) -> None:
        """Aborts the request of a caller that reads no more, unless it has ended."""
        with self._wake:
            if self._calls.pop(call.id, None) is not None:
                self._start(call)
                self._order(call.id)

    def abort(self, request_id: int) -> None:
        """Ends a request by the number that its outputs have."""
        with self._wake:
            for call in self._calls.values():
                if call.request is not None and call.request.id == request_id:
                    self._order(call.id)

    def close(self) -> None:
        """Ends the loop."""
        with self._wake:
            self._closing = True
            self._wake.notify()

    def _order(self, order: PendingCall | AdapterChange | int) -> None:
        self._orders.append(order)
        self._wake.notify()

    def _start(self, call: PendingCall) -> None:
        """Notes that a call waits no longer."""
        if not call.started:
            call.started = True
            answers, tokens = call.size
            self._waiting = self._waiting[0] - answers, self._waiting[1] - tokens

    # called by the loop, in the engine's thread

    def orders(self, wait_s: float | None) -> Sequence[PendingCall | AdapterChange | int] | None:
        """Returns the orders that have come; waits for the first at most `wait_s` seconds. None ends the loop."""
        with self._wake:
            self._wake.wait_for(lambda: self._orders or self._closing, wait_s)
            if self._closing:
                return None
            orders, self._orders = self._orders, []
        return orders

    def follow(self, call: PendingCall, request: Request) -> Callable[[], News | None]:
        """Returns a function that reads the newest state of a call."""
        call.request = request

        def news() -> News | None:
            if request.live and not call.streams:
                return None
            output = self._engine.output_of(request, call.text)
            return output if output.error is None else RuntimeError(output.error)

        return news

    def send(self, turn: Turn[News]) -> None:
        """Leaves callers their news, and wakes those who have read all that came before."""
        errors: list[tuple[int, News]] = [(id_, error) for id_, error, _ in turn.refused]
        errors += [(id_, _failure("the request has failed", error)) for id_, error in turn.failed]
        with self._wake:
            self.stats = turn.stats
            for id_ in turn.started:
                if id_ in self._calls:
                    self._start(self._calls[id_])
            self._adapters.tell(turn.adapters)
            self._deliver([*errors, *turn.news])

    def end(self, cause: BaseException | None) -> None:
        """Takes no more orders, and tells every caller that still waits why."""
        with self._wake:
            self._over, self._cause = True, cause
            self._orders.clear()
            self._adapters.end(stopped(cause))
            self._deliver([(id_, stopped(cause)) for id_ in self._calls])

    def _deliver(self, news: Sequence[tuple[int, News]]) -> None:
        woken: dict[asyncio.AbstractEventLoop, list[PendingCall]] = {}
        for id_, newest in news:
            call = self._calls.get(id_)
            if call is None:
                continue
            if isinstance(newest, Exception) or newest.finished:
                self._start(self._calls.pop(id_))
            if call.news is None:
                woken.setdefault(call.loop, []).append(call)
            call.news = newest
        for loop, calls in woken.items():
            try:
                loop.call_soon_threadsafe(_notify, calls)
            except RuntimeError:
                # the loop is closed, so its callers will never read
                for call in calls:
                    self.leave(call)


def _notify(calls: list[PendingCall]) -> None:
    """Wakes callers; runs in their event loop."""
    for call in calls:
        call.changed.set()


def stopped(cause: BaseException | None) -> RuntimeError:
    """Returns the error that says why an engine runs no more; a new one for each caller, since tracebacks grow."""
    if cause is None:
        return RuntimeError("the engine is closed; make another AsyncEngine")
    return _failure("the engine has failed, and takes no more requests", cause)


def _failure(what: str, cause: BaseException) -> RuntimeError:
    error = RuntimeError(f"{what}: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error
