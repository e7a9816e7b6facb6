"""The place of a call within a larger problem, of which it computes some heads, queries and keys.

The random bits of dropout, and the distances of ALiBi, belong to places of the larger problem. So a call that is a part of one
carries its place in the option `seed`, int64 (1 + 4 B,): the seed, and for each of its sequences the batch row, head, query and
key of the larger problem at which the sequence begins. `Spec.placed` says that it does. Distances are then |query - key|,
whatever the lengths of the part are.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


class Place(NamedTuple):
    """The first batch row, head, query and key of a sequence."""

    batch: int
    head: int
    query: int
    key: int


def with_places(seed: Tensor | None, places: tuple[Place, ...], device: torch.device) -> Tensor:
    """Returns the option `seed` of a call whose sequences begin at these places; without dropout there is no seed."""
    table = _table(places, device)
    return table if seed is None else torch.cat([seed, table[1:]])


def places_of(seed: Tensor) -> Tensor | None:
    """Returns the places (B, 4) that a seed carries; None for the seed of a whole problem."""
    return seed[1:].view(-1, 4) if seed.shape[0] > 1 else None


@lru_cache(maxsize=1024)
def _table(places: tuple[Place, ...], device: torch.device) -> Tensor:
    return torch.tensor([0, *(n for place in places for n in place)], dtype=torch.int64, device=device)
