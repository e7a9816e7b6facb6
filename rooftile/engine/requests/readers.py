"""`Readers`: calls of several threads that one engine answers together; whichever has nothing to read runs the next step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from rooftile.engine.engine import Engine
from rooftile.engine.process_lock import ProcessLock
from rooftile.engine.requests.output import RequestOutput
from rooftile.engine.requests.request import Request
from rooftile.engine.sampling.params import SamplingParams
from rooftile.engine.start.blueprint import current_device
from rooftile.engine.text.prompt import Prompt, parse_prompt
from rooftile.errors import InvalidInput

# a prompt, how it is answered, and the adapter that answers it
Asked = tuple[Prompt, SamplingParams, str | None]


@dataclass(slots=True, eq=False)
class _Reader:
    """One call: its requests, and which of them have changed since it last looked."""

    places: dict[Request, tuple[int, str | None]] = field(default_factory=dict)
    """For each request the place of its prompt in the call, and the prompt's text."""
    news: dict[Request, None] = field(default_factory=dict)
    unfinished: int = 0


class Readers:
    """The calls that an engine answers.

    Args:
        engine: the engine.
        lock: held while the engine and the books of the calls are used.
    """

    def __init__(self, engine: Engine, lock: ProcessLock) -> None:
        self._engine, self._lock = engine, lock
        self._readers: dict[Request, _Reader] = {}

    def __len__(self) -> int:
        return len(self._readers)

    def run(
        self, asked: Iterable[Asked], check: Callable[[], None]
    ) -> Iterator[tuple[int, Request | RequestOutput, str | None]]:  # fmt: skip
        """Answers the prompts of one call.

        Args:
            asked: the prompts.
            check: raises InvalidInput if the engine may not be asked now; called with the lock.

        Yields:
            A prompt's place, its request (or the output of a refused prompt) and its text, each time it has changed.
        """
        reader = _Reader()
        try:
            for place, (prompt, params, name) in enumerate(asked):
                refused = self._add(reader, place, (prompt, params, name), check)
                if refused is not None:
                    yield place, refused, refused.prompt
            while (changed := self._next_changes(reader)) is not None:
                for request in changed:
                    place, text = reader.places[request]
                    yield place, request, text
        finally:
            # the caller may have left early
            with self._lock:
                for request in reader.places:
                    self._readers.pop(request, None)
                    self._engine.abort(request)

    def _add(self, reader: _Reader, place: int, asked: Asked, check: Callable[[], None]) -> RequestOutput | None:
        """Adds a prompt to the engine; returns the output with the reason if the prompt is refused."""
        prompt, params, adapter = asked
        with self._lock:
            check()
            try:
                text, tokens, cache_salt = parse_prompt(prompt, self._engine.tokenizer)
                request = self._engine.add(tokens, params, cache_salt=cache_salt, adapter=adapter)
            except InvalidInput as error:
                # a subclass may raise again
                ids: list[int] = [*prompt] if type(prompt) is list or type(prompt) is tuple else []
                text = prompt if isinstance(prompt, str) else None
                return RequestOutput(-1, text, ids, finished=True, error=str(error))
            reader.places[request] = place, text
            reader.unfinished += 1
            self._readers[request] = reader
        return None

    def _next_changes(self, reader: _Reader) -> list[Request] | None:
        """Runs a step if there is one to run; returns the reader's requests that have changed, or None after the last."""
        engine = self._engine
        with self._lock:
            # also finish the step in flight whose requests were all aborted
            if not reader.unfinished and not (engine.scheduler.idle and not engine.idle):
                return None
            if not engine.idle:
                self._step()
            elif not reader.news:
                # another caller has aborted these requests
                reader.news |= {request: None for request in reader.places if request in self._readers}
            changed = list(reader.news)
            reader.news.clear()
            for request in changed:
                if not request.live:
                    del self._readers[request]
                    reader.unfinished -= 1
            return changed

    def _step(self) -> None:
        """Runs a step and tells each reader which of its requests have changed; the readers may be several."""
        try:
            with current_device(self._engine.runner.device):
                changed = self._engine.step()
        except BaseException:
            # a failed step has aborted every request; the other threads learn it from their news
            for request, reader in self._readers.items():
                reader.news[request] = None
            raise
        for request in changed:
            if request in self._readers:
                self._readers[request].news[request] = None
