"""`WaitingQueue`: the requests that wait, in the order in which they begin."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from rooftile.engine.requests.request import Request

# the most requests in a row that may begin before the oldest waiting request
OVERTAKING = 16


class WaitingQueue:
    """The requests that wait: the smallest `priority` first, then the oldest.

    No request starves: when `OVERTAKING` requests have begun before the oldest one, that one is next, whatever its priority, and
    its turn is kept: it waits and runs before all others from then on. So a request with k older ones before it begins, at the
    latest, as number (k + 1) * (OVERTAKING + 1).

    A preempted request comes back with its old number, so it is before all that came after it with the same priority.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._overtaking = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        """Puts a request in its place."""
        insort(self._requests, request, key=lambda each: each.order)

    def head(self) -> Request:
        """Returns the request that is next; it stays in the queue until it has begun."""
        if self._overtaking >= OVERTAKING:
            oldest = self._oldest()
            place = self._requests.index(oldest)
            oldest.urgent = True
            # in this order an interruption cannot lose the request
            self._requests.insert(0, oldest)
            del self._requests[place + 1]
            self._overtaking = 0
        return self._requests[0]

    def note_begun(self, request: Request) -> None:
        """Takes the head out of the queue."""
        self._overtaking = 0 if request is self._oldest() else self._overtaking + 1
        self.remove(request)

    def remove(self, request: Request) -> None:
        """Takes a request out of the queue."""
        self._requests.remove(request)

    def clear(self) -> None:
        """Takes all requests out."""
        self._requests.clear()
        self._overtaking = 0

    def _oldest(self) -> Request:
        first, last = self._requests[0], self._requests[-1]
        if first.order[:2] == last.order[:2]:
            # the usual case: all have one priority
            return first
        return min(self._requests, key=lambda each: each.id)
