"""`Compiling`: grammars that are being compiled, off the engine's thread."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from rooftile.engine.sampling.grammar import Grammars, Matcher
from rooftile.errors import InvalidInput
from rooftile.server import limits
from rooftile.server.engine.messages import Add
from rooftile.server.engine.pauses import give_way


@dataclass(slots=True)
class _Waiting:
    order: Add
    made: Future[Matcher]
    until: float


class Compiling:
    """Requests whose grammars are being compiled, at most two at a time.

    Args:
        grammars: compiles them; None if the model has no tokenizer.
    """

    def __init__(self, grammars: Grammars | None) -> None:
        self._grammars = grammars
        self._threads = ThreadPoolExecutor(limits.COMPILING_THREADS, "grammar", initializer=give_way)
        self._waiting: dict[int, _Waiting] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def begin(self, order: Add) -> None:
        """Begins to compile the grammar of a request.

        Raises:
            InvalidInput: the request cannot have a grammar.
        """
        if self._grammars is None:
            raise InvalidInput("the grammar needs a tokenizer, and the model has none")
        made = self._threads.submit(self._grammars.compile, order.params["structured"])
        self._waiting[order.id] = _Waiting(order, made, time.monotonic() + limits.COMPILING_S)

    def abort(self, id: int) -> None:
        """Forgets a request."""
        waiting = self._waiting.pop(id, None)
        if waiting is not None:
            waiting.made.cancel()

    def ended(self) -> Iterator[tuple[Add, Matcher | InvalidInput]]:
        """Yields requests whose grammars are compiled, or will not be; each once."""
        now = time.monotonic()
        for waiting in list(self._waiting.values()):
            if waiting.made.done():
                error = waiting.made.exception()
                if error is not None and not isinstance(error, InvalidInput):
                    error = InvalidInput(f"the grammar cannot be used: {type(error).__name__}")
                found: Matcher | InvalidInput = waiting.made.result() if error is None else error
            elif now > waiting.until:
                found = InvalidInput(f"the grammar was not compiled within {limits.COMPILING_S:g} s; give a simpler one")
            else:
                continue
            self.abort(waiting.order.id)
            yield waiting.order, found
