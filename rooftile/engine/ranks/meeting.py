"""A meeting of ranks on several machines, at a TCP port of rank 0's machine: `hosted` on rank 0, and `joined` on the others.

Whoever starts the ranks opens the port, so that no other program can take it before rank 0 listens there.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

from rooftile.engine.ranks.place import Place

# seconds in which rank 0 must listen: it imports torch before
_LIMIT_S = 300.0


def open_port(address: str) -> socket.socket:
    """Returns a socket that listens at a free port of this address, and at no other address of this machine."""
    return socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)


def hosted(listener: socket.socket, ranks: int) -> Place:
    """Returns rank 0's place, which listens at the port; somebody watches the other ranks."""
    address, port = listener.getsockname()[:2]

    def meet() -> Any:
        return _store(address, port, ranks, True, listener.detach())

    return Place(0, ranks, 0, 1, meet, address, watched=True)


def joined(address: str, port: int, rank: int, ranks: int, own: str) -> Place:
    """Returns the place of another rank.

    Args:
        address, port: where rank 0 listens.
        rank, ranks: this process's number, and how many ranks there are.
        own: the address of this machine at which the others reach it.
    """
    return Place(rank, ranks, 0, 1, lambda: _store(address, port, ranks, False, None), own)


def _store(address: str, port: int, ranks: int, is_master: bool, listener: int | None) -> Any:
    # here and not above: the process that opens the port needs no torch
    from rooftile.engine.ranks.group import dist

    limit = timedelta(seconds=_LIMIT_S)
    return dist.TCPStore(address, port, ranks, is_master, limit, wait_for_workers=False, master_listen_fd=listener)
