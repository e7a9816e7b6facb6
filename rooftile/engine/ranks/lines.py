"""The lines between rank 0 and the other ranks: a socket for each.

Either side sees the end of the other as a hang-up, whatever the reason, so no heartbeat is needed. Rank 0 may ask how far a rank
is; a rank may say why it ends. Messages are bytes of JSON, since a line may cross a network.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from rooftile.errors import InvalidInput, Unsupported

_ASK, _BYE = b"where", b"bye"
# no message is longer
_MOST_BYTES = 1 << 16
# the most characters of a sentence
_SENTENCE = 4000


class Told(NamedTuple):
    """A rank's last words: the name of its exception and the sentence."""

    kind: str
    sentence: str

    def error(self, rank: int, ranks: int) -> Exception:
        """Returns the exception that rank 0 raises for it."""
        kind = next((each for each in (InvalidInput, Unsupported) if each.__name__ == self.kind), RuntimeError)
        return kind(f"rank {rank} of {ranks}: {self.sentence}")


class Progress(NamedTuple):
    """How far a rank is: the numbers of rank 0's orders and of sums and gatherings over ranks that its host has begun."""

    orders: int
    collectives: int


def _not_begun() -> Progress:
    return Progress(0, 0)


class Line:
    """The end of a line at another rank than 0. A thread answers rank 0, also while a step hangs.

    Args:
        connection: the socket.
        gone: called in the thread when the line ends, with whether rank 0 has said goodbye.
    """

    def __init__(self, connection: Connection, gone: Callable[[bool], None]) -> None:
        self._progress: Callable[[], Progress] = _not_begun
        self._connection, self._gone = connection, gone
        self._writing = threading.Lock()
        threading.Thread(target=self._answer, name="rooftile line", daemon=True).start()

    @contextmanager
    def reporting(self, progress: Callable[[], Progress]) -> Iterator[None]:
        """Answers rank 0 with what `progress` says as long as the block runs."""
        self._progress = progress
        try:
            yield
        finally:
            self._progress = _not_begun

    def tell(self, error: BaseException) -> None:
        """Tells rank 0 why this rank ends."""
        sentence = str(error) if isinstance(error, InvalidInput | Unsupported) else f"{type(error).__name__}: {error}"
        with suppress(OSError):
            self._write(["told", type(error).__name__, sentence[:_SENTENCE]])

    def _write(self, message: list[str | int]) -> None:
        with self._writing:
            self._connection.send_bytes(json.dumps(message).encode())

    def _answer(self) -> None:
        try:
            while self._connection.recv_bytes(_MOST_BYTES) != _BYE:
                self._write(["where", *self._progress()])
        except (EOFError, OSError):
            self._gone(False)
            return
        self._gone(True)


class Lines:
    """Rank 0's ends of all lines.

    Args:
        connections: the sockets of ranks 1, 2, ...
        ended: called once, in a thread, when a rank has ended before `close`: with its number and its last words, if it said any.
    """

    def __init__(self, connections: Sequence[Connection], ended: Callable[[int, Told | None], None]) -> None:
        self._connections, self._ended = list(connections), ended
        self._closing = threading.Event()
        self._found: dict[int, Progress] = {}
        self._news = threading.Condition()
        threading.Thread(target=self._watch, name="rooftile ranks", daemon=True).start()
        _OPEN.add(self)

    def progress(self, limit_s: float) -> dict[int, Progress]:
        """Asks all ranks how far they are; a rank that does not answer in time is left out."""
        with self._news:
            self._found.clear()
        for connection in self._connections:
            with suppress(OSError):
                connection.send_bytes(_ASK)
        until = time.monotonic() + limit_s
        with self._news:
            while len(self._found) < len(self._connections) and (left := until - time.monotonic()) > 0:
                self._news.wait(left)
            return dict(self._found)

    def say_goodbye(self) -> None:
        """Tells all ranks that rank 0 ends as it should."""
        self._closing.set()
        for connection in self._connections:
            with suppress(OSError):
                connection.send_bytes(_BYE)

    def close(self) -> None:
        """Hangs up."""
        self._closing.set()
        for connection in self._connections:
            connection.close()

    def _watch(self) -> None:
        ranks = {connection: rank for rank, connection in enumerate(self._connections, 1)}
        while not self._closing.is_set():
            try:
                ready = [one for one in wait(self._connections) if isinstance(one, Connection)]
            except (OSError, ValueError):
                return  # closed meanwhile
            for connection in ready:
                if self._closing.is_set():
                    return
                kind, *words = _message(connection)
                if kind != "where":
                    self._ended(ranks[connection], Told(*words) if kind == "told" else None)
                    return
                with self._news:
                    self._found[ranks[connection]] = Progress(*words)
                    self._news.notify_all()


# the lines of this process that have not been closed
_OPEN: weakref.WeakSet[Lines] = weakref.WeakSet()


def say_goodbye() -> None:
    """Tells the ranks of every engine in this process that it ends as it should; for an end without the interpreter's."""
    for lines in list(_OPEN):
        lines.say_goodbye()


def _message(connection: Connection) -> list[Any]:
    """Reads a message; ["end"] when the other end has gone."""
    try:
        message: list[Any] = json.loads(connection.recv_bytes(_MOST_BYTES))
        return message
    except (EOFError, OSError, ValueError):
        return ["end"]
