"""`Place`: this process among the ranks of an engine that somebody else has started: torchrun, or a cluster's scheduler."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple


class Place(NamedTuple):
    """A process among ranks that are there already.

    Args:
        rank, ranks: its number, from 0, and how many ranks there are.
        local_rank, local_ranks: the same among those that see the same GPUs.
        meet: returns the store of `torch.distributed` where the ranks meet.
        address: the address of this machine at which the others reach it; None lets gloo choose.
        watched: whether somebody ends rank 0 as soon as another rank ends, and says why.
        lined: whether rank 0 sees that by itself, on lines to the other ranks (see `machines`).
    """

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    meet: Callable[[], Any]
    address: str | None = None
    watched: bool = False
    lined: bool = False

    @classmethod
    def found(cls) -> Place | None:
        """Returns the place of the caller's `placed`, else torchrun's; None if this process is no rank yet."""
        given = _given.get()
        if given is not None or "RANK" not in os.environ:
            return given
        # torchrun sets these variables; other launchers set them, too
        rank, ranks = int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE", "1"))
        local = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
        return cls(rank, ranks, *local, _torchruns, lined=True)


_given: ContextVar[Place | None] = ContextVar("rooftile ranks", default=None)


@contextmanager
def placed(place: Place | None) -> Iterator[None]:
    """Makes an LLM that is made in the block one of the ranks that are there; None changes nothing."""
    token = _given.set(_given.get() if place is None else place)
    try:
        yield
    finally:
        _given.reset(token)


def _torchruns() -> Any:
    """Returns the store of torchrun's ranks."""
    # here and not above: the command looks for torchrun's variables before it imports torch
    from rooftile.engine.ranks.group import dist

    if dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
    else:
        store, _, _ = next(dist.rendezvous("env://"))
    return dist.PrefixStore("rooftile", store)
