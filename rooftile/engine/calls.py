"""Messages between the callers of an `AsyncEngine`, in their event loops, and the engine's thread."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from rooftile.engine.requests.output import RequestOutput
from rooftile.engine.requests.request import Request
from rooftile.engine.sampling.params import SamplingParams
from rooftile.engine.text.prompt import ParsedPrompt


@dataclass(slots=True, eq=False)
class Call:
    """One call of `generate` or `complete`: what is asked for, and the newest state for its caller."""

    loop: asyncio.AbstractEventLoop
    prompt: ParsedPrompt
    params: SamplingParams
    streams: bool
    """Whether the caller sees the answers grow, or only complete ones."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is news."""
    request: Request | None = None
    news: RequestOutput | Exception | None = None
    """The newest state that the caller has not read yet; guarded by the engine's lock."""


class Order(NamedTuple):
    """Something for the engine's thread to do: about a call, or about a request by its id."""

    kind: Literal["add", "leave", "abort"]
    subject: Call | int


def notify(calls: list[Call]) -> None:
    """Wakes callers; runs in their event loop."""
    for call in calls:
        call.changed.set()


def stopped(cause: BaseException | None) -> RuntimeError:
    """Returns the error that says why an engine runs no more; a new one for each caller, since tracebacks grow."""
    if cause is None:
        return RuntimeError("the engine is closed; make another AsyncEngine")
    error = RuntimeError(f"the engine has failed, and takes no more requests: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error
