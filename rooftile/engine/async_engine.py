"""`AsyncEngine`: an LLM for many concurrent callers inside one program.

    callers, in their event loops                  the engine's thread
    generate, abort --> orders ------------------> read between two steps
                                                   step
    newest state of each request <---------------- delivered after the step, one wake-up per event loop

Only the engine's thread touches the engine. For each request only the newest state is kept: a caller that reads slowly misses
states in between, but never the last one.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import TracebackType

import torch

from rooftile.engine.calls import Call, Order, notify, stopped
from rooftile.engine.growth import growth_of
from rooftile.engine.llm import ASKED, LLM
from rooftile.engine.requests.output import RequestOutput
from rooftile.engine.requests.stats import EngineStats, stats_of, waiting_in
from rooftile.engine.sampling.params import SamplingParams
from rooftile.engine.text.prompt import Prompt, parse_prompt
from rooftile.errors import InvalidInput
from rooftile.runtime.words import answers_with, answers_words

# answers that may wait for their first step, and tokens of their prompts; what comes on top is refused
MAX_WAITING, MAX_WAITING_TOKENS = 1024, 1 << 20
# seconds after which an idle engine checks its books
IDLE_S = 1.0
# seconds that a closing interpreter waits for the current step
PATIENCE = 10.0


class Overloaded(RuntimeError):
    """Too much waits already, so this request was refused. A server answers it with status 429."""


@answers_words
class AsyncEngine:
    """An LLM that many callers use at once, from one event loop or several.

    It runs in a thread of its own, which sleeps when there is nothing to do. The engine owns the LLM until `close`: the LLM's own
    methods refuse meanwhile.

    Args:
        llm: the model.
        max_waiting: how many answers may wait beside those that run; each of n, or of the beams, counts. A request that would
            be too much is refused, unless nothing waits.
        max_waiting_tokens: likewise for the tokens of prompts that wait.

    Raises:
        InvalidInput: the LLM is in use, or a bound is below 1.

    Example:
        >>> async def main():                                                                   # doctest: +SKIP
        ...     async with AsyncEngine(LLM("Llama-3.2-1B")) as engine:
        ...         async for output in engine.generate("The roof", SamplingParams(max_tokens=9)):
        ...             print(output.outputs[0].text)
    """

    def __init__(
        self, llm: LLM, *, max_waiting: int = MAX_WAITING, max_waiting_tokens: int = MAX_WAITING_TOKENS
    ) -> None:  # fmt: skip
        for name, most in (("max_waiting", max_waiting), ("max_waiting_tokens", max_waiting_tokens)):
            if isinstance(most, bool) or not isinstance(most, int) or most < 1:
                raise InvalidInput(f"{name} is {most!r}; must be a whole number of at least 1")
        llm.lend()
        self.llm = llm
        self.max_waiting, self.max_waiting_tokens = max_waiting, max_waiting_tokens
        # replaced as a whole by the engine's thread
        self._stats = stats_of(llm.engine)
        # used by the engine's thread only
        self._calls: dict[int, Call] = {}
        self._taken: deque[Order] = deque()
        self._checked = True
        # used by all threads, under the lock
        self._wake = threading.Condition()
        self._orders: list[Order] = []
        self._closing = False
        self._over = False
        self._cause: BaseException | None = None
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="rooftile engine", daemon=True)
        self._thread.start()
        # a thread in the middle of a step must not outlive the interpreter
        atexit.register(self._stop_at_exit)

    @answers_with(ASKED)
    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, salt: str = "", deltas: bool = False
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answers a prompt and yields its answers while they grow: each output holds everything so far, the last is finished.

        A caller that stops reading (a cancelled task, a closed iterator) aborts its request.

        Args:
            prompt: a text, token ids, or a dictionary like in `LLM.generate`.
            params: the sampling parameters; None takes those of `LLM.get_default_sampling_params`.
            salt: the request shares the prefix cache only with requests of the same salt; a "cache_salt" in the prompt's
                dictionary takes its place.
            deltas: each output holds only the text, tokens and logprobs that are new since the one before, so that a long answer
                costs its reader no more than a short one. Together they are the complete answer. A search shows its answers
                only at the end.

        Raises:
            InvalidInput: the request can never be answered; the sentence says why.
            Overloaded: too many answers or prompt tokens wait already.
            RuntimeError: the engine has failed or was closed.
        """
        outputs = self._read(prompt, params, salt, streams=True)
        searches = params is not None and params.beam_width is not None
        return growth_of(outputs, at_end=searches) if deltas else outputs

    @answers_with(ASKED)
    async def complete(self, prompt: Prompt, params: SamplingParams | None = None, *, salt: str = "") -> RequestOutput:
        """Answers a prompt like `generate`, and returns only the complete answers; no output is built on the way."""
        (output,) = [output async for output in self._read(prompt, params, salt, streams=False)]
        return output

    def abort(self, request_id: int) -> None:
        """Ends a request; its caller gets the answers so far, with the finish reason "abort".

        A request that has ended already stays as it is.
        """
        if isinstance(request_id, bool) or not isinstance(request_id, int):
            raise InvalidInput(f"request_id is {request_id!r}; must be the whole number that an output has")
        self._order(Order("abort", request_id))

    def stats(self) -> EngineStats:
        """Returns how the engine stood after its last step; cheap, and any thread may ask.

        Example:
            >>> engine.stats().waiting                                                          # doctest: +SKIP
            0
        """
        return self._stats

    async def close(self) -> None:
        """Aborts all requests and ends the thread; the LLM is free again."""
        self.llm.check_process()
        await asyncio.to_thread(self._stop)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    # the methods down to _stop run in the callers' threads

    async def _read(
        self, prompt: Prompt, params: SamplingParams | None, salt: str, *, streams: bool
    ) -> AsyncGenerator[RequestOutput, None]:
        """Sends a call to the engine's thread and yields its news."""
        self.llm.check_process()
        # before a text is encoded for nothing
        self._check_room(self._stats.waiting, self._stats.waiting_tokens, 1, 1)
        if isinstance(prompt, str | Mapping):
            # a long text would block the event loop while it is encoded
            parsed = await asyncio.to_thread(parse_prompt, prompt, self.llm.tokenizer, salt)
        else:
            parsed = parse_prompt(prompt, None, salt)
        params = self.llm.get_default_sampling_params() if params is None else params
        call = Call(asyncio.get_running_loop(), parsed, params, streams)
        with self._wake:
            if self._over or self._closing:
                raise stopped(self._cause)
            self._orders.append(Order("add", call))
            self._wake.notify()
        over = False
        try:
            while not over:
                await call.changed.wait()
                call.changed.clear()
                with self._wake:
                    news, call.news = call.news, None
                over = not isinstance(news, RequestOutput) or news.finished
                if isinstance(news, Exception):
                    raise news
                assert news is not None, "a caller was woken without news"
                yield news
        finally:
            if not over:
                self._order(Order("leave", call))

    def _check_room(self, waiting: int, waiting_tokens: int, answers: int, tokens: int) -> None:
        """Refuses a request if its answers and prompt tokens, with those that wait, are too many."""
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

    def _order(self, order: Order) -> None:
        self.llm.check_process()
        with self._wake:
            if not self._over:
                self._orders.append(order)
                self._wake.notify()

    def _stop_at_exit(self) -> None:
        # a forked process has a copy of this engine, and not its thread
        if os.getpid() == self._process:
            self._stop(PATIENCE)

    def _stop(self, patience: float | None = None) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(patience)
        atexit.unregister(self._stop_at_exit)

    # the methods from here on run in the engine's thread

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
            # whatever went wrong, no caller may wait for ever
            logging.getLogger(__name__).exception("the engine has failed, and takes no more requests")
            self._end(error)

    def _take_orders(self) -> bool:
        """Carries out the callers' orders, and sleeps while there is nothing to do. Returns False when all is over."""
        engine = self.llm.engine
        self._wait_for_orders()
        with self._wake:
            self._taken.extend(self._orders)
            self._orders.clear()
            closing = self._closing
        news: list[tuple[Call, RequestOutput | Exception]] = []
        while self._taken:
            kind, subject = self._taken[0]
            if isinstance(subject, int):
                news += self._abort([subject])
            elif kind == "leave":
                self._leave(subject)
            elif closing:
                news.append((subject, stopped(None)))
            else:
                news += self._add(subject)
            self._taken.popleft()
        if closing:
            news += self._abort(list(self._calls))
        self._stats = stats_of(engine)
        self._deliver(news)
        return not closing or not engine.idle

    def _wait_for_orders(self) -> None:
        """Sleeps while there is nothing to do; an engine that has been idle for a while checks its books, once.

        Raises:
            AssertionError: blocks have leaked.
        """
        engine = self.llm.engine
        with self._wake:
            if engine.idle and not self._checked and not self._orders and not self._closing:
                self._wake.wait(IDLE_S)
            due = engine.idle and not self._checked and not self._orders and not self._closing
        if due:
            # without the lock: callers need not wait for it
            engine.check_idle()
            self._checked = True
        with self._wake:
            while engine.idle and self._checked and not self._orders and not self._closing:
                self._wake.wait()
        self._checked = False

    def _add(self, call: Call) -> list[tuple[Call, Exception]]:
        """Adds a request to the engine; an error concerns its caller alone."""
        try:
            params = call.params
            answers = params.n if params.beam_width is None else params.beam_width
            tokens = call.prompt.tokens
            # the engine says what is wrong with a prompt that is no list
            self._check_room(*waiting_in(self.llm.engine), answers, len(tokens) if isinstance(tokens, Sequence) else 0)
            call.request = self.llm.engine.add(call.prompt.tokens, call.params, cache_salt=call.prompt.cache_salt)
        except Exception as error:
            return [(call, error)]
        self._calls[call.request.id] = call
        return []

    def _abort(self, ids: list[int]) -> list[tuple[Call, RequestOutput]]:
        """Aborts those of the requests that still run or wait; returns their last state."""
        news = []
        for id_ in ids:
            call = self._calls.get(id_)
            if call is not None:
                assert call.request is not None
                self.llm.engine.abort(call.request)
                news.append((call, self.llm.engine.output_of(call.request, call.prompt.text)))
        self._forget(news)
        return news

    def _forget(self, news: Sequence[tuple[Call, RequestOutput | Exception]]) -> None:
        """Forgets calls that are over. Not before their last news is made: until then a failure must find them."""
        for call, newest in news:
            if call.request is not None and (isinstance(newest, Exception) or newest.finished):
                self._calls.pop(call.request.id, None)

    def _leave(self, call: Call) -> None:
        """Aborts the request of a caller that reads no more, if it has not ended."""
        if call.request is not None and self._calls.pop(call.request.id, None) is not None:
            self.llm.engine.abort(call.request)

    def _step(self) -> None:
        news: list[tuple[Call, RequestOutput | Exception]] = []
        for request in self.llm.engine.step():
            call = self._calls.get(request.id)
            if call is None:
                # aborted while this step was in flight
                continue
            if request.error is None and request.live and not call.streams:
                continue
            output = self.llm.engine.output_of(request, call.prompt.text)
            news.append((call, output if request.error is None else RuntimeError(request.error)))
        self._forget(news)
        self._stats = stats_of(self.llm.engine)
        self._deliver(news)

    def _deliver(self, news: list[tuple[Call, RequestOutput | Exception]]) -> None:
        """Leaves callers their news, and wakes those who have read all that came before."""
        woken: dict[asyncio.AbstractEventLoop, list[Call]] = {}
        with self._wake:
            for call, newest in news:
                if call.news is None:
                    woken.setdefault(call.loop, []).append(call)
                call.news = newest
        for loop, calls in woken.items():
            try:
                loop.call_soon_threadsafe(notify, calls)
            except RuntimeError:
                # the loop is closed, so its callers will never read
                for call in calls:
                    self._leave(call)

    def _end(self, cause: BaseException | None) -> None:
        """Takes no more orders, and tells every caller that still waits why."""
        with self._wake:
            self._over, self._cause = True, cause
            self._taken.extend(self._orders)
            self._orders.clear()
        added = (order.subject for order in self._taken if order.kind == "add")
        # an order may have been carried out and not yet crossed off
        waiting = dict.fromkeys([*self._calls.values(), *(call for call in added if isinstance(call, Call))])
        self._calls.clear()
        self._taken.clear()
        self._deliver([(call, stopped(cause)) for call in waiting])
        try:
            for call in waiting:
                if call.request is not None:
                    self.llm.engine.abort(call.request)
        finally:
            self.llm.owned = False
