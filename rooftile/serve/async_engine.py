"""`AsyncEngine`: an LLM for many callers at once, each with requests of its own, as in a server.

    callers, in event loops                        the engine's thread
    generate, abort --> orders ------------------> taken in between two steps
                                                   step
    the newest state of each request <------------ told after it, one wake-up for each event loop

What belongs to the engine is touched by its thread only. A caller that reads slowly misses states on the way, never the last: of
a request only the newest one is kept.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, NamedTuple

import torch

from rooftile.errors import InvalidInput
from rooftile.serve.llm import LLM
from rooftile.serve.output import RequestOutput, output_of
from rooftile.serve.request import Request
from rooftile.serve.sampling.params import SamplingParams
from rooftile.serve.text.prompt import ParsedPrompt, Prompt, parse_prompt

# requests that wait for the first step of theirs: what comes after them is told so at once
MAX_WAITING = 1024
# what an interpreter waits at most for a step to end before it ends itself
PATIENCE = 10.0


class Overloaded(RuntimeError):
    """Too many requests wait already; this one was not taken. A server answers 429 to it."""


@dataclass(slots=True, eq=False)
class _Call:
    """A caller's wish, and what it has been told of it."""

    loop: asyncio.AbstractEventLoop
    asked: ParsedPrompt
    params: SamplingParams
    grows: bool
    """Whether it wants to see the answers grow, or only complete."""
    bell: asyncio.Event = field(default_factory=asyncio.Event)
    request: Request | None = None
    news: RequestOutput | Exception | None = None
    """What it has not read yet; under the engine's lock."""


class _Order(NamedTuple):
    """What the engine's thread is to do: about a call, or about a request by its id."""

    kind: Literal["add", "leave", "abort"]
    subject: _Call | int


class AsyncEngine:
    """An LLM that many callers use at once, from one event loop or several.

    It runs in a thread of its own, which sleeps when there is nothing to do. The LLM is the engine's until `close`: do not call
    it yourself meanwhile.

    Args:
        llm: the model.
        max_waiting: requests that wait beside those that run; one more is refused.

    Raises:
        InvalidInput: somebody uses the LLM, or max_waiting is below 1.

    Example:
        >>> async def main():                                                                   # doctest: +SKIP
        ...     async with AsyncEngine(LLM("Llama-3.2-1B")) as engine:
        ...         async for output in engine.generate("The roof", SamplingParams(max_tokens=9)):
        ...             print(output.outputs[0].text)
    """

    def __init__(self, llm: LLM, *, max_waiting: int = MAX_WAITING) -> None:
        if max_waiting < 1:
            raise InvalidInput(f"max_waiting is {max_waiting}; must be at least 1")
        llm.lend()
        self.llm = llm
        self.max_waiting = max_waiting
        # of the engine's thread
        self._calls: dict[int, _Call] = {}
        # of all, under the lock
        self._wake = threading.Condition()
        self._orders: list[_Order] = []
        self._closing = False
        self._over = False
        self._cause: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="rooftile engine", daemon=True)
        self._thread.start()
        # a thread in the middle of a step must not outlive the interpreter
        atexit.register(self._stop, PATIENCE)

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, salt: str = ""
    ) -> AsyncGenerator[RequestOutput, None]:
        """The answers to a prompt while they grow: each output has everything so far, the last one is finished.

        Whoever stops reading (a cancelled task, a closed iterator) aborts the request.

        Args:
            prompt: a text, or token ids; or a dictionary as `LLM.generate` takes it.
            params: of the answers.
            salt: prefixes are shared with requests of the same salt only.

        Raises:
            InvalidInput: it can never be answered; the sentence says why.
            Overloaded: max_waiting requests wait already.
            RuntimeError: the engine has failed, or was closed.
        """
        return self._told(prompt, params, salt, grows=True)

    async def complete(self, prompt: Prompt, params: SamplingParams | None = None, *, salt: str = "") -> RequestOutput:
        """As `generate`, for one who waits for the end: nothing is told, or built, on the way."""
        (output,) = [output async for output in self._told(prompt, params, salt, grows=False)]
        return output

    def abort(self, request_id: int) -> None:
        """Ends a request; its caller gets what there is, with "abort" for a reason. One that is over is left as it is."""
        self._order(_Order("abort", request_id))

    async def close(self) -> None:
        """Aborts what runs, and ends the thread. The LLM is free again."""
        await asyncio.to_thread(self._stop)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # in the callers' event loops

    async def _told(
        self, prompt: Prompt, params: SamplingParams | None, salt: str, *, grows: bool
    ) -> AsyncGenerator[RequestOutput, None]:
        self._check_room()
        if isinstance(prompt, str | Mapping):
            # a text may be long: it is read off the loop
            read = await asyncio.to_thread(parse_prompt, prompt, self.llm.tokenizer, salt)
        else:
            read = parse_prompt(prompt, None, salt)
        call = _Call(asyncio.get_running_loop(), read, SamplingParams() if params is None else params, grows)
        with self._wake:
            if self._over or self._closing:
                raise _ended(self._cause)
            self._orders.append(_Order("add", call))
            self._wake.notify()
        over = False
        try:
            while not over:
                await call.bell.wait()
                call.bell.clear()
                with self._wake:
                    news, call.news = call.news, None
                over = not isinstance(news, RequestOutput) or news.finished
                if isinstance(news, Exception):
                    raise news
                assert news is not None, "a bell rings for news only"
                yield news
        finally:
            if not over:
                self._order(_Order("leave", call))

    def _check_room(self) -> None:
        """Before a text is read for nothing; whoever passes is counted again when its turn comes."""
        waiting = len(self.llm.engine.scheduler.waiting)
        if waiting >= self.max_waiting:
            raise Overloaded(f"{waiting:,} requests wait already, as many as may (max_waiting); try again later")

    def _order(self, order: _Order) -> None:
        with self._wake:
            if not self._over:
                self._orders.append(order)
                self._wake.notify()

    def _stop(self, patience: float | None = None) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(patience)
        atexit.unregister(self._stop)

    # in the engine's thread

    def _run(self) -> None:
        try:
            device = self.llm.pages.storage.device
            if device.type == "cuda":
                # each thread has its own current device
                torch.cuda.set_device(device)
            while self._take_orders():
                self._step()
            self._end(None)
        except BaseException as error:
            # whatever it is, nobody may wait for ever
            logging.getLogger(__name__).exception("the engine has failed, and takes no more requests")
            self._end(error)

    def _take_orders(self) -> bool:
        """Does what callers want, and sleeps while nobody wants anything. False when all is over."""
        engine = self.llm.engine
        with self._wake:
            while engine.idle and not self._orders and not self._closing:
                self._wake.wait()
            orders, self._orders = self._orders, []
            closing = self._closing
        told: list[tuple[_Call, RequestOutput | Exception]] = []
        for kind, subject in orders:
            if isinstance(subject, int):
                told += self._aborted([subject])
            elif kind == "leave":
                self._left(subject)
            elif closing:
                told.append((subject, _ended(None)))
            else:
                told += self._added(subject)
        if closing:
            told += self._aborted(list(self._calls))
        self._tell(told)
        return not closing or not engine.idle

    def _added(self, call: _Call) -> list[tuple[_Call, Exception]]:
        """Takes a request in; or what is wrong with it, which is its caller's business alone."""
        try:
            self._check_room()
            call.request = self.llm.engine.add(call.asked.tokens, call.params, cache_salt=call.asked.cache_salt)
        except Exception as error:
            return [(call, error)]
        self._calls[call.request.id] = call
        return []

    def _aborted(self, ids: list[int]) -> list[tuple[_Call, RequestOutput]]:
        """Aborts requests that are not over: their last state."""
        calls = [call for id_ in ids if (call := self._calls.pop(id_, None)) is not None]
        told = []
        for call in calls:
            assert call.request is not None
            self.llm.engine.abort(call.request)
            told.append((call, output_of(call.request, call.asked.text)))
        return told

    def _left(self, call: _Call) -> None:
        """Nobody reads a call any more: its request ends, if it has not."""
        if call.request is not None and self._calls.pop(call.request.id, None) is not None:
            self.llm.engine.abort(call.request)

    def _step(self) -> None:
        told: list[tuple[_Call, RequestOutput | Exception]] = []
        for request in self.llm.engine.step():
            call = self._calls.get(request.id)
            if call is None:
                # aborted while this step was computed
                continue
            over = not request.live
            if over:
                del self._calls[request.id]
            if over or call.grows:
                told.append((call, output_of(request, call.asked.text)))
        self._tell(told)

    def _tell(self, told: list[tuple[_Call, RequestOutput | Exception]]) -> None:
        """Leaves callers their news, and rings at those who have read what they were left before."""
        rings: dict[asyncio.AbstractEventLoop, list[_Call]] = {}
        with self._wake:
            for call, news in told:
                if call.news is None:
                    rings.setdefault(call.loop, []).append(call)
                call.news = news
        for loop, calls in rings.items():
            try:
                loop.call_soon_threadsafe(_ring, calls)
            except RuntimeError:
                # the loop is closed, and nobody there will read
                for call in calls:
                    self._left(call)

    def _end(self, cause: BaseException | None) -> None:
        """Nothing is taken any more; whoever still waits hears why."""
        with self._wake:
            self._over, self._cause = True, cause
            orders, self._orders = self._orders, []
        waiting = [*self._calls.values(), *(order.subject for order in orders if order.kind == "add")]
        self._calls.clear()
        self._tell([(call, _ended(cause)) for call in waiting if isinstance(call, _Call)])
        try:
            for call in waiting:
                if isinstance(call, _Call) and call.request is not None:
                    self.llm.engine.abort(call.request)
        finally:
            self.llm.owned = False


def _ring(calls: list[_Call]) -> None:
    for call in calls:
        call.bell.set()


def _ended(cause: BaseException | None) -> RuntimeError:
    """Why nothing goes on: an error of its own for each caller, as tracebacks grow."""
    if cause is None:
        return RuntimeError("the engine is closed; make another AsyncEngine")
    error = RuntimeError(f"the engine has failed, and takes no more requests: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error
