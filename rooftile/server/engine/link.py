"""`SocketLink`: the engine's end of the connection to the server's process."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rooftile.engine.adapters.names import AdapterChange
from rooftile.server.engine.messages import Abort, AdapterChanged, Add, News, Order, Report, RequestRefused, StepNews
from rooftile.server.engine.wire import FrameReader, frame

if TYPE_CHECKING:
    from rooftile.engine.loop.loop import Turn
    from rooftile.engine.requests.request import Request

RECEIVED = 1 << 20


class SocketLink:
    """Reads orders from a socket, and writes each turn of the engine's loop to it.

    Args:
        connection: this process ends when the other end is closed.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._reader: FrameReader[Order] = FrameReader(Order)  # type: ignore[arg-type]
        self._ready = select.poll()
        self._ready.register(connection, select.POLLIN)

    def orders(self, wait_s: float | None) -> Sequence[Add | AdapterChange | int]:
        """Returns the orders that have come; waits at most `wait_s` seconds for an order, None for ever."""
        if not self._ready.poll(None if wait_s is None else wait_s * 1000):
            return ()
        data = self._socket.recv(RECEIVED)
        if not data:
            os._exit(0)
        return [_order_of(message) for message in self._reader.feed(data)]

    def follow(self, order: Add, request: Request) -> Callable[[], News | None]:
        """Returns a function that reads the growth of a request since its last call."""
        # here and not above: it imports torch, and the link already reports while that takes seconds
        from rooftile.server.engine.following import Followed

        return Followed(order.id, request, streams=order.streams).news

    def send(self, turn: Turn[News]) -> None:
        """Sends what happened in a turn."""
        self.write(message_of(turn))

    def write(self, message: Report) -> None:
        """Sends a message; waits while the server reads nothing."""
        try:
            self._socket.sendall(frame(message))
        except (BrokenPipeError, ConnectionResetError):
            os._exit(0)


def _order_of(message: Order) -> Add | AdapterChange | int:
    """Returns a message as the loop takes it."""
    if isinstance(message, Add):
        return message
    return message.id if isinstance(message, Abort) else AdapterChange(message.id, message.name, message.path)


def message_of(turn: Turn[News]) -> StepNews:
    """Returns a turn of the loop as the server's process reads it."""
    # the words of an exception of ours may hold a path or an address; the log has them
    failed = [
        News(id_, [], finished=True, error=f"its news could not be read: {type(error).__name__}") for id_, error in turn.failed
    ]
    refused = [
        RequestRefused(id_, f"the request could not be taken: {type(error).__name__}" if ours else str(error), ours)
        for id_, error, ours in turn.refused
    ]
    adapters = [AdapterChanged(*each) for each in turn.adapters]
    return StepNews(turn.stats, turn.taken, refused, turn.started, [news for _, news in turn.news] + failed, adapters)
