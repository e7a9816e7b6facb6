"""Draws histories of users who return to their interests after gaps, so that recall by distance can be measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.recommend.data.events import Events
from rooftile.runtime.arguments import check_count, check_number, shown


class Planted(NamedTuple):
    """Events, and for each the number of events back to the event that it follows from; 0 for an event that follows from none."""

    events: Events
    distance: Tensor  # (total,)


def planted_events(
    users: int, length: int, *, distances: Sequence[int] = (2, 10, 60), generator: torch.Generator | None = None,
    categories: int = 20, groups: int = 8, per_group: int = 5, share: float = 0.8, visit: int = 2,
) -> Planted:  # fmt: skip
    """Draws histories of users who return to their interests after gaps.

    A category has several groups of items, and each user likes one group of it. A visit to a category begins with its sign, such
    as a search for it, and goes on with items of the group that the user likes there. The sign tells the category; the group is
    known to a model that looks back to the user's last visit. How far that is, is planted: a visit returns to the category whose
    item lies one of `distances` events back, if the user has not been there since. Where none lies there, it goes to a random
    category, at the distance that this happens to have. Events outside of visits are popular items, which tell nothing.

    Args:
        users: how many.
        length: events of each user, at least 2. The last two are a sign and the first item of a visit.
        distances: how many events back visits return, each at least 2 and below the length.
        generator: of the random numbers.
        categories: how many.
        groups: of a category.
        per_group: items of a group. Items are numbered by category and group; then come the signs, and as many popular items.
        share: of events that belong to visits, above 0 and at most 1.
        visit: items of a visit, after its sign.

    Returns:
        The events, and for each the distance to the user's last item of its category; 0 for signs, popular items, and the first
        item of a category.

    Raises:
        InvalidInput: an argument is wrong.

    Example:
        >>> found = planted_events(3, 40, distances=(5, 20))
        >>> found.events.items.shape, found.events.item_count
        (torch.Size([120]), 840)
    """
    users, length, visit = check_count("users", users), check_count("length", length, 2), check_count("visit", visit)
    categories, groups = check_count("categories", categories), check_count("groups", groups)
    per_group = check_count("per_group", per_group)
    if not isinstance(distances, Iterable):
        raise InvalidInput(f"distances is {shown(distances)}; must be several numbers, such as (2, 10, 60)")
    back = tuple(check_count("distances", d, 2) for d in distances)
    if not back or max(back) >= length:
        raise InvalidInput(f"distances is {back}; must have numbers of 2 to {length - 1}, below the length")
    if not 0 < check_number("share", share) <= 1:
        raise InvalidInput(f"share is {share}; must be above 0 and at most 1")

    def drawn(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    liked = drawn(groups, users, categories)
    category, distance = _visits(users, length, back, categories, share, visit, generator)
    # an item, a sign or neither stands at a place
    is_sign, there = category >= categories, category.remainder(categories)
    of_group = (there * groups + liked.gather(1, there)) * per_group + drawn(per_group, users, length)
    count = categories * groups * per_group
    # few of the popular items have most of the events
    popular = count + categories + torch.rand(users, length, generator=generator).pow(3).mul(categories).long()
    items = torch.where(category < 0, popular, torch.where(is_sign, count + there, of_group))
    times = torch.arange(length).expand(users, length) * 60
    events = Events(items.flatten(), torch.arange(users + 1) * length, times.flatten(), count + 2 * categories)
    return Planted(events, distance.flatten())


def _visits(
    users: int, length: int, distances: tuple[int, ...], categories: int, share: float, visit: int,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Draws the category of each item, plus `categories` for a sign and -1 for neither, and the distances, (users, length)."""
    # a place that continues no visit begins one with this probability
    begin = share / (share + (1 - share) * (1 + visit))
    rows, back = torch.arange(users), torch.tensor(distances)
    category, distance = torch.full((users, length), -1), torch.zeros(users, length, dtype=torch.long)
    last = torch.full((users, categories), -1)  # the place of a user's last item of a category
    current, left = torch.zeros(2, users, dtype=torch.long)  # the category of a visit, and items that are due in it
    for at in range(length):
        goes_on = (left > 0) & (at != length - 2)
        before = last[rows, current]
        distance[:, at] = torch.where(goes_on & (before >= 0), at - before, 0)
        last[rows[goes_on], current[goes_on]] = at
        begins = ~goes_on & ((torch.rand(users, generator=generator) < begin) | (at == length - 2))
        source = at + 1 - back[torch.randint(len(back), (users,), generator=generator)]
        there = category[rows, source.clamp(min=0)]
        is_last = (source >= 0) & (there >= 0) & (there < categories)
        is_last &= last[rows, there.remainder(categories)] == source
        chosen = torch.where(is_last, there, torch.randint(categories, (users,), generator=generator))
        category[:, at] = torch.where(goes_on, current, torch.where(begins, chosen + categories, -1))
        current = torch.where(begins, chosen, current)
        left = torch.where(begins, visit, (left - 1).clamp(min=0) * goes_on)
    return category, distance
