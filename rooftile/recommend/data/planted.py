"""Draws histories with planted interests: events follow from others at known distances, so recall by distance is measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.recommend.data.events import Events
from rooftile.runtime.arguments import check_count


class Planted(NamedTuple):
    """Events, and for each the number of events back to the event that it follows from; 0 for an event that follows from none."""

    events: Events
    distance: Tensor  # (total,)


def planted_events(
    users: int, length: int, *, distances: Sequence[int] = (2, 10, 100), generator: torch.Generator | None = None,
    groups: int = 50, per_group: int = 20, share: float = 0.5,
) -> Planted:  # fmt: skip
    """Draws histories in which an event may follow from an earlier one: it is an item of the same group.

    Items of a group are interchangeable, and groups come at random otherwise, so an event is predictable exactly by a model that
    looks as far back as its distance. The event before it tells how far: items of the last groups, one for each distance, are
    signs that say so.

    Args:
        users: how many.
        length: events of each user.
        distances: how many events back, at least 2: the event right before is the sign.
        groups: of items, beside one per distance for signs.
        generator: of the random numbers.
        per_group: items of a group.
        share: of events that are a sign, or follow from another; less is found where a sign would look past the beginning.

    Raises:
        InvalidInput: an argument is wrong.

    Example:
        >>> found = planted_events(3, 40, distances=(5, 20))
        >>> found.events.items.shape, found.events.item_count
        (torch.Size([120]), 1040)
    """
    users, length = check_count("users", users), check_count("length", length)
    groups, per_group = check_count("groups", groups), check_count("per_group", per_group)
    if not distances or any(check_count("distances", d, 2) >= length for d in distances):
        raise InvalidInput(f"distances is {tuple(distances)}; must have numbers of 2 to {length - 1}, below the length")
    if not 0 < share <= 1:
        raise InvalidInput(f"share is {share}; must be above 0 and at most 1")
    group = torch.randint(groups, (users, length), generator=generator)
    distance = torch.zeros(users, length, dtype=torch.long)
    # a sign and the event behind it are two events, so half of the share are signs
    signs = torch.rand(users, length, generator=generator) < share / 2
    which = torch.randint(len(distances), (users, length), generator=generator)
    for at in range(1, length):
        back = torch.tensor(distances)[which[:, at]]
        # an event that has a source is no sign, and a sign is no source
        able = signs[:, at - 1] & (back <= at) & (distance[:, at - 1] == 0)
        source = group.gather(1, (at - back).clamp(min=0)[:, None])[:, 0]
        able &= source < groups
        group[:, at - 1] = torch.where(able, groups + which[:, at], group[:, at - 1])
        group[:, at] = torch.where(able, source, group[:, at])
        distance[:, at] = torch.where(able, back, 0)
        signs[:, at] &= ~able
    items = group * per_group + torch.randint(per_group, (users, length), generator=generator)
    times = torch.arange(length).expand(users, length) * 60
    cu = torch.arange(users + 1) * length
    return Planted(Events(items.flatten(), cu, times.flatten(), (groups + len(distances)) * per_group), distance.flatten())
