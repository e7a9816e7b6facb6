"""`Compiling`: grammars that are being compiled, off the engine's thread."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rooftile.engine.loop.pauses import give_way
from rooftile.engine.sampling.grammar import Grammars, Matcher
from rooftile.errors import InvalidInput

# grammars that are compiled at a time
THREADS = 2


@dataclass(slots=True)
class _Waiting:
    order: Any
    made: Future[Matcher]
    until: float


class Compiling:
    """Requests whose grammars are being compiled, at most two at a time.

    Args:
        grammars: compiles them; None if the model has no tokenizer.
        limit_s: seconds that one may take.
    """

    def __init__(self, grammars: Grammars | None, limit_s: float) -> None:
        self._grammars = grammars
        self._limit_s = limit_s
        self._threads = ThreadPoolExecutor(THREADS, "grammar", initializer=give_way)
        self._waiting: dict[int, _Waiting] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def begin(self, order: Any, structured: Mapping[str, Any]) -> None:
        """Begins to compile the grammar of a request.

        Args:
            order: the order with the request, which has an `id`.
            structured: `grammar` of `SamplingParams`.

        Raises:
            InvalidInput: the request cannot have a grammar.
        """
        if self._grammars is None:
            raise InvalidInput("the grammar needs a tokenizer, and the model has none")
        made = self._threads.submit(self._grammars.compile, structured)
        self._waiting[order.id] = _Waiting(order, made, time.monotonic() + self._limit_s)

    def abort(self, id: int) -> None:
        """Forgets a request."""
        waiting = self._waiting.pop(id, None)
        if waiting is not None:
            waiting.made.cancel()

    def close(self) -> None:
        """Forgets all requests; the threads end as soon as they can."""
        self._waiting.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def ended(self) -> Iterator[tuple[Any, Matcher | InvalidInput]]:
        """Yields orders whose grammars are compiled, or will not be; each once."""
        now = time.monotonic()
        for waiting in list(self._waiting.values()):
            if waiting.made.done():
                error = waiting.made.exception()
                if error is not None and not isinstance(error, InvalidInput):
                    error = InvalidInput(f"the grammar cannot be used: {type(error).__name__}")
                found: Matcher | InvalidInput = waiting.made.result() if error is None else error
            elif now > waiting.until:
                found = InvalidInput(f"the grammar was not compiled within {self._limit_s:g} s; give a simpler one")
            else:
                continue
            self.abort(waiting.order.id)
            yield waiting.order, found
