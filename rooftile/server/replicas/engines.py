"""`Engines`: what a server asks of the engines behind it, on this machine or on a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from rooftile.server.engine.calls import RemoteCall
from rooftile.server.engine.messages import Ready


class Engines(Protocol):
    """One or several engines with the same model."""

    ready: asyncio.Event
    """Set when the first engine answers."""
    over: asyncio.Event
    """Set when no engine will answer any more."""

    @property
    def facts(self) -> Ready | None:
        """The facts that an engine has told of itself and its model; None if no engine answers."""

    @property
    def states(self) -> list[str]:
        """The state of each: "ready", "loading", "down" before it is started again, "out"."""

    @property
    def cause(self) -> str:
        """Why no engine answers, for clients."""

    @property
    def percent(self) -> int:
        """How much of the model has been read."""

    def send(
        self, prompt: list[int], params: dict[str, Any], *, salt: str, streams: bool, answers: int = 1,
        started: Callable[[], None] = lambda: None, adapter: str | None = None,
    ) -> RemoteCall:  # fmt: skip
        """Sends a prompt to one of the engines; see `RemoteEngine.send`. The caller must `leave` the call at the end."""

    async def change_adapter(self, name: str, path: str | None) -> None:
        """Loads an adapter into all engines, or with None unloads it; if one refuses it, none has changed."""

    def leave(self, call: RemoteCall) -> bool:
        """Aborts a request unless it has ended; returns whether it had not."""

    async def close(self) -> None:
        """Ends them, or the connection to them."""
