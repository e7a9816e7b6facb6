"""`AsyncEngine`: an LLM for many callers inside one program. Its thread runs a `Loop` whose clients are the callers."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import torch

from rooftile.engine.llm import ASKED, LLM
from rooftile.engine.loop.callers import Callers, Overloaded
from rooftile.engine.loop.growth import growth_of
from rooftile.engine.loop.loop import Loop
from rooftile.engine.requests.output import RequestOutput
from rooftile.engine.requests.stats import EngineStats
from rooftile.engine.sampling.params import SamplingParams
from rooftile.engine.text.prompt import Prompt, parse_prompt
from rooftile.errors import InvalidInput
from rooftile.runtime.words import answers_with, answers_words

__all__ = ["AsyncEngine", "Overloaded"]

# answers that may wait for their first step, and tokens of their prompts; what comes on top is refused
MAX_WAITING, MAX_WAITING_TOKENS = 1024, 1 << 20
# seconds that a closing interpreter waits for the current step
PATIENCE = 10.0


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
        self._callers = Callers(llm.engine, max_waiting, max_waiting_tokens)
        self._loop = Loop(llm.engine, self._callers)
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="rooftile engine", daemon=True)
        self._thread.start()
        # a thread in the middle of a step must not outlive the interpreter
        atexit.register(self._stop_at_exit)

    @answers_with(ASKED)
    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, salt: str = "", deltas: bool = False,
        adapter: str | None = None, priority: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:  # fmt: skip
        """Answers a prompt and yields its answers while they grow: each output holds everything so far, the last is finished.

        A caller that stops reading (a cancelled task, a closed iterator) aborts its request.

        Args:
            prompt: a text, token ids, or a dictionary like in `LLM.generate`.
            params: the sampling parameters; None takes `LLM.get_default_sampling_params`.
            salt: the request shares the prefix cache only with requests of the same salt; a "cache_salt" in the prompt's
                dictionary takes its place.
            deltas: each output holds only the text, tokens and logprobs that are new since the one before, so that a long answer
                costs its reader no more than a short one. Together they are the complete answer. A search shows its answers
                only at the end.
            adapter: the name of the adapter that answers; None for the model as it is.
            priority: takes the place of the `priority` in params; requests with a smaller number begin first.

        Raises:
            InvalidInput: the request can never be answered; the sentence says why.
            Overloaded: too many answers or prompt tokens wait already.
            RuntimeError: the engine has failed or was closed.
        """
        outputs = self._read(prompt, params, salt, streams=True, adapter=adapter, priority=priority)
        searches = isinstance(params, SamplingParams) and params.beam_width is not None
        return growth_of(outputs, at_end=searches) if deltas else outputs

    @answers_with(ASKED)
    async def complete(
        self, prompt: Prompt, params: SamplingParams | None = None, *, salt: str = "", adapter: str | None = None,
        priority: int | None = None,
    ) -> RequestOutput:  # fmt: skip
        """Answers a prompt like `generate`, and returns only the complete answers; no output is built on the way."""
        outputs = self._read(prompt, params, salt, streams=False, adapter=adapter, priority=priority)
        (output,) = [output async for output in outputs]
        return output

    @answers_with(ASKED)
    async def load_adapter(self, name: str, path: str | Path) -> None:
        """Reads an adapter between two steps, like `LLM.load_adapter`; prompts may name it then.

        Raises:
            InvalidInput: it is refused, and nothing has changed; the sentence says why.
            RuntimeError: the engine has failed or was closed.

        Example:
            >>> await engine.load_adapter("pirate", "adapters/pirate")                          # doctest: +SKIP
        """
        self.llm.check_process()
        await self._callers.change_adapter(name, str(path))

    @answers_with(ASKED)
    async def unload_adapter(self, name: str) -> None:
        """Takes no more prompts for an adapter, like `LLM.unload_adapter`; those that have begun end with it.

        Raises:
            InvalidInput: there is no adapter of this name.
            RuntimeError: the engine has failed or was closed.
        """
        self.llm.check_process()
        await self._callers.change_adapter(name, None)

    def abort(self, request_id: int) -> None:
        """Ends a request; its caller gets the answers so far, with the finish reason "abort".

        A request that has ended already stays as it is.
        """
        if isinstance(request_id, bool) or not isinstance(request_id, int):
            raise InvalidInput(f"request_id is {request_id!r}; must be the whole number that an output has")
        self.llm.check_process()
        self._callers.abort(request_id)

    def stats(self) -> EngineStats:
        """Returns how the engine stood after its last step; cheap, and any thread may ask.

        Example:
            >>> engine.stats().waiting                                                          # doctest: +SKIP
            0
        """
        return self._callers.stats

    async def close(self) -> None:
        """Aborts all requests and ends the thread; the LLM is free again."""
        self.llm.check_process()
        await asyncio.to_thread(self._stop)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def _read(
        self, prompt: Prompt, params: SamplingParams | None, salt: str, *, streams: bool, adapter: str | None,
        priority: int | None,
    ) -> AsyncGenerator[RequestOutput, None]:  # fmt: skip
        """Sends a call to the engine's thread and yields its news."""
        self.llm.check_process()
        # before a text is encoded for nothing
        self._callers.check_room()
        if isinstance(prompt, str | Mapping):
            # a long text would block the event loop while it is encoded
            parsed = await asyncio.to_thread(parse_prompt, prompt, self.llm.tokenizer, salt)
        else:
            parsed = parse_prompt(prompt, None, salt)
        params = self.llm.get_default_sampling_params() if params is None else params
        if not isinstance(params, SamplingParams):
            raise InvalidInput(f"params is {params!r}; must be SamplingParams")
        params = params if priority is None else replace(params, priority=priority)
        call = self._callers.begin(parsed, params, streams=streams, adapter=adapter)
        try:
            output = None
            while output is None or not output.finished:
                output = await self._callers.newest(call)
                yield output
        finally:
            self._callers.leave(call)

    def _stop_at_exit(self) -> None:
        # a forked process has a copy of this engine, and not its thread
        if os.getpid() == self._process:
            self._stop(PATIENCE)

    def _stop(self, patience: float | None = None) -> None:
        self._callers.close()
        self._thread.join(patience)
        atexit.unregister(self._stop_at_exit)

    def _run(self) -> None:
        """Runs the loop, in the engine's thread."""
        try:
            device = self.llm.pages.storage.device
            if device.type == "cuda":
                # each thread has its own current device
                torch.cuda.set_device(device)
            self._loop.run()
            self._callers.end(None)
        except BaseException as error:
            # whatever went wrong, no caller may wait for ever
            logging.getLogger(__name__).exception("the engine has failed, and takes no more requests")
            self._callers.end(error)
            self._loop.abandon()
        finally:
            self.llm.owned = False
