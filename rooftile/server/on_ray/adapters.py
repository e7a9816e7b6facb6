"""The adapters of a cluster's replicas: the ingress says which there are to be, and each replica follows."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rooftile.engine.adapters.names import folders_of
from rooftile.server.engine.calls import EngineDown, EngineRefused

# name: folder, and a mark: an adapter that comes later under the same name and folder has another
Marked = Mapping[str, tuple[str, str]]
# the ingress's name, a number that rises with each change, and the adapters; all that Ray carries
Wanted = tuple[str, int, Marked]


def started_with(given: Any) -> dict[str, tuple[str, str]]:
    """Returns the adapters that every replica is started with."""
    return {name: (str(folder), "") for name, folder in folders_of(given).items()}


class WantedAdapters:
    """The adapters that the replicas are to have, as their ingress counts them.

    Args:
        given: those that they are started with.
    """

    def __init__(self, given: Any) -> None:
        self._own, self._number = secrets.token_hex(8), 0
        self._adapters = started_with(given)

    @property
    def now(self) -> Wanted:
        """The word to the replicas."""
        return self._own, self._number, self._adapters

    def change(self, name: str, path: str | None) -> Callable[[], None]:
        """Adds an adapter, or with None takes one away; returns what undoes it.

        Raises:
            EngineRefused: there is an adapter of this name, or none.
        """
        before = self._adapters
        if path is None and name not in before:
            raise EngineRefused(f"there is no adapter {name!r}")
        if path is not None and name in before:
            raise EngineRefused(f"an adapter {name!r} is loaded already; unload it first, or give another name")
        added = {} if path is None else {name: (path, secrets.token_hex(8))}
        self._set({known: each for known, each in before.items() if known != name} | added)
        return lambda: self._set(before)

    def _set(self, adapters: dict[str, tuple[str, str]]) -> None:
        self._number, self._adapters = self._number + 1, adapters


class FollowedAdapters:
    """The adapters of one replica.

    Args:
        given: those that its engine is started with.
        change: loads an adapter into the engine, or with None unloads it.
    """

    def __init__(self, given: Any, change: Callable[[str, str | None], Awaitable[None]]) -> None:
        self._there, self._change = started_with(given), change
        self._seen: tuple[str, int] | None = None
        self._lock = asyncio.Lock()

    async def follow(self, wanted: Wanted) -> str:
        """Loads and unloads what differs; returns why an adapter could not be loaded, or "". An older word changes nothing."""
        own, number = wanted[:2]
        adapters = {name: (path, mark) for name, (path, mark) in wanted[2].items()}
        async with self._lock:
            if self._seen is not None and self._seen[0] == own and number <= self._seen[1]:
                return ""
            try:
                for name, each in list(self._there.items()):
                    if adapters.get(name) != each:
                        del self._there[name]
                        await self._change(name, None)
                for name in adapters.keys() - self._there.keys():
                    await self._change(name, adapters[name][0])
                    self._there[name] = adapters[name]
            except EngineRefused as error:
                return str(error)
            except EngineDown:
                # the replica ends, and the one that takes its place follows
                return ""
            self._seen = own, number
            return ""
