"""`AdapterChanges`: callers of an engine's thread that wait until an adapter is loaded or unloaded."""

from __future__ import annotations

import asyncio
from contextlib import suppress

Waiting = asyncio.Future[str | None]


class AdapterChanges:
    """Waiting callers, by the ids of their orders; who uses it holds a lock."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[asyncio.AbstractEventLoop, Waiting]] = {}

    def begin(self, id_: int) -> Waiting:
        """Returns what the caller, an event loop, waits for: the reason why its order was refused, or None."""
        loop = asyncio.get_running_loop()
        future: Waiting = loop.create_future()
        self._waiting[id_] = loop, future
        return future

    def tell(self, ends: list[tuple[int, str | None]]) -> None:
        """Tells callers how their orders have ended; any thread calls it."""
        for id_, reason in ends:
            loop, future = self._waiting.pop(id_)
            # a loop that is closed has no caller who waits
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_end, future, reason)

    def end(self, cause: Exception) -> None:
        """Tells all callers that no order will be carried out any more."""
        for loop, future in self._waiting.values():
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_fail, future, cause)
        self._waiting.clear()


def _end(future: Waiting, reason: str | None) -> None:
    if not future.done():
        future.set_result(reason)


def _fail(future: Waiting, cause: Exception) -> None:
    if not future.done():
        future.set_exception(cause)
