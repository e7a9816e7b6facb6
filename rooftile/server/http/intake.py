"""`Intake`: takes requests in, each with its time, its body and its model; and the refusals that any request may end with."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from rooftile.server import limits
from rooftile.server.engine.calls import EngineDown
from rooftile.server.http.body import ClientGone, read_object
from rooftile.server.http.middleware import mistake
from rooftile.server.observe.log import AccessRecord, log
from rooftile.server.refusals import Refusal
from rooftile.server.service import Service

T = TypeVar("T")
_NUMBER = re.compile(r"(\d+\.?\d*|\.\d+)(e[+-]?\d{1,3})?", re.ASCII | re.IGNORECASE)


class Intake:
    """Reads the requests that an engine answers.

    Args:
        service: the served model and its settings.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    async def read(self, request: Request, read: Callable[[dict[str, Any]], T]) -> tuple[T, float]:
        """Returns what `read` makes of a body, and the time of the event loop by which the request must be over.

        Raises:
            Refusal: there is no room for the request, its time is over, or its body is wrong.
        """
        service = self._service
        deadline = asyncio.get_running_loop().time() + _seconds(request, service.settings.deadline_s)
        # before a body is read and parsed for nothing
        service.admission.check_room(request.state.access.key)

        def read_checked(given: dict[str, Any]) -> T:
            self.check_model(given.get("model"))
            return read(given)

        async with in_time(deadline, time.monotonic()):
            return await read_object(request, service.bodies, read_checked), deadline

    def check_model(self, name: object) -> None:
        """Checks the name of the model that a client asks for.

        Raises:
            Refusal: it is another model's.
        """
        own = self._service.settings.served_model_name
        # a name of another type, or one that is too long, is refused with the other fields
        if isinstance(name, str) and len(name) <= limits.NAME_CHARACTERS and name != own and name not in self._service.adapters:
            raise Refusal("model_not_found", f"the model {name[:128]!r} is not served here; ask for {own!r}", param="model")


@contextlib.asynccontextmanager
async def in_time(deadline: float, began: float) -> AsyncIterator[None]:
    """Bounds the time of a request that began at a moment; tells its client why if the time or the engine has ended.

    Raises:
        Refusal: one of both has.
    """
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError:
        raise late(began) from None
    except EngineDown as error:
        raise Refusal("engine_down", str(error)) from None


def late(began: float) -> Refusal:
    """Returns the answer to a request that has begun at a moment, and whose time is over."""
    seconds = time.monotonic() - began
    why = f"the request has taken {seconds:.1f} s, as long as it may (--deadline, or X-Request-Timeout); ask for fewer tokens"
    return Refusal("deadline_exceeded", why)


def own_mistake(error: object, access: AccessRecord) -> Refusal:
    """Logs a mistake of the server; returns the answer to the request that has met it."""
    log.error("request %s: %s", access.id, error)
    return mistake(access.id)


async def wait_for_leaving(receive: Receive) -> None:
    """Returns when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Returns what `work` returns; cancels it if the client leaves meanwhile.

    Raises:
        ClientGone: the client has left.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(wait_for_leaving(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def _seconds(request: Request, most: float) -> float:
    """Returns the seconds that a request may take: --deadline, or less if X-Request-Timeout says so."""
    given = request.headers.getlist("x-request-timeout")
    if not given:
        return most
    # not all that Python reads: its numbers may have underscores
    seconds = float(given[0]) if len(given) == 1 and _NUMBER.fullmatch(given[0]) else 0.0
    if not 0 < seconds < 1e7:
        shown = ", ".join(given)[:40]
        why = f"X-Request-Timeout is {shown!r}; must be one number of seconds above 0, and below 10,000,000"
        raise Refusal("invalid_value", why)
    return min(seconds, most)
