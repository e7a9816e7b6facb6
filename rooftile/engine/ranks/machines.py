"""The lines between ranks that torchrun has started, which may be on several machines.

torchrun's store says where rank 0 listens, with a secret without which a connection is closed again. A rank that refuses its
settings before it has a line says so in the store.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from hmac import compare_digest
from multiprocessing.connection import Connection
from typing import Any

from rooftile.engine.ranks.failures import RankEnded
from rooftile.engine.ranks.lines import Line, Lines, Told
from rooftile.engine.ranks.place import Place
from rooftile.errors import InvalidInput, Unsupported

# seconds that ranks wait for each other: one may download a model first
MEETING_S = 600.0
# how often rank 0 looks whether a rank has refused
_PULSE_S = 0.2
# seconds in which a new connection must say whose it is, and in which rank 0 must answer a new one
_INTRODUCTION_S = 5.0
_SECRET_BYTES = 16
# the secret in hexadecimal digits and the rank
_INTRODUCTION = 2 * _SECRET_BYTES + 8
# seconds of silence after which the other machine is asked whether it is there, between questions, and questions
_KEEP_ALIVE = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}
_LISTENS = "rank 0 listens"


@contextmanager
def telling_ranks(ranks: int) -> Iterator[None]:
    """Tells the other ranks of torchrun's if this one refuses its settings in the block: they would wait for it.

    Args:
        ranks: how many share the model.
    """
    given = Place.found()
    # without torchrun's agent rank 0 is the store, which ends with it
    if ranks == 1 or given is None or not given.lined or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        yield
        return
    try:
        yield
    except (InvalidInput, Unsupported) as error:
        words = json.dumps({"refused": [type(error).__name__, str(error)]})
        given.meet().set(_refusal_of(given.rank) if given.rank else _LISTENS, words)
        raise


def lines_to_all(store: Any, given: Place, ended: Callable[[int, Told | None], None]) -> Lines:
    """Waits for the lines of all other ranks, at rank 0.

    Args:
        store: the ranks' store.
        given: this process's place.
        ended: what `Lines` takes.

    Raises:
        InvalidInput, Unsupported: a rank has refused its settings.
        RankEnded: a rank has not come in time.
    """
    # nothing outside connects where all ranks are on this machine
    host = "127.0.0.1" if given.local_ranks == given.ranks else os.environ.get("MASTER_ADDR") or socket.gethostname()
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    secret, found = secrets.token_hex(_SECRET_BYTES), dict[int, Connection]()
    until = time.monotonic() + MEETING_S
    with socket.create_server((host if host == "127.0.0.1" else "", 0), family=family) as listener:
        listener.settimeout(_PULSE_S)
        store.set(_LISTENS, json.dumps({"host": host, "port": listener.getsockname()[1], "secret": secret}))
        while missing := [rank for rank in range(1, given.ranks) if rank not in found]:
            for rank in missing:
                if store.check([_refusal_of(rank)]):
                    raise Told(*json.loads(store.get(_refusal_of(rank)))["refused"]).error(rank, given.ranks)
            if time.monotonic() > until:
                raise RankEnded(f"rank {missing[0]} of {given.ranks} has not come within {MEETING_S:.0f} s")
            try:
                connection = listener.accept()[0]
            except TimeoutError:
                continue
            guest = _introduced(connection, secret)
            if guest in missing:
                found[guest] = _kept(connection)
            else:
                connection.close()
    return Lines([found[rank] for rank in range(1, given.ranks)], ended)


def line_to_first(store: Any, given: Place, gone: Callable[[bool], None]) -> Line:
    """Waits for rank 0, and connects to it, at another rank.

    Args:
        store: the ranks' store.
        given: this process's place.
        gone: what `Line` takes.

    Raises:
        InvalidInput, Unsupported: rank 0 has refused its settings, or cannot be reached.
        RankEnded: rank 0 has not come in time.
    """
    try:
        store.wait([_LISTENS], timedelta(seconds=MEETING_S))
    except RuntimeError as error:
        raise RankEnded(
            f"rank 0 of {given.ranks} has not come within {MEETING_S:.0f} s, or its store has ended: {error}"
        ) from None
    said = json.loads(store.get(_LISTENS))
    if "refused" in said:
        raise Told(*said["refused"]).error(0, given.ranks)
    try:
        connection = socket.create_connection((said["host"], said["port"]), _INTRODUCTION_S)
        connection.sendall(f"{said['secret']}{given.rank:08d}".encode())
    except OSError as error:
        raise InvalidInput(
            f"rank {given.rank} of {given.ranks} cannot reach rank 0 at {said['host']}, port {said['port']} ({error}); open the "
            "machines' ports to each other"
        ) from None
    return Line(_kept(connection), gone)


def _refusal_of(rank: int) -> str:
    return f"refusal of rank {rank}"


def _introduced(connection: socket.socket, secret: str) -> int | None:
    """Returns the rank at the other end of a new connection; None if it does not know the secret."""
    connection.settimeout(_INTRODUCTION_S)
    words = b""
    try:
        while len(words) < _INTRODUCTION:
            got = connection.recv(_INTRODUCTION - len(words))
            if not got:
                return None
            words += got
    except OSError:
        return None
    known, rank = words[: len(secret)], words[len(secret) :]
    return int(rank) if compare_digest(known, secret.encode()) and rank.isdigit() else None


def _kept(connection: socket.socket) -> Connection:
    """Returns a connection that ends, too, when the other machine does."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Connection(connection.detach())
