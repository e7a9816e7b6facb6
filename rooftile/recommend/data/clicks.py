"""Draws candidates that a user clicks because of an interest that lies a known number of events back."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.recommend.data.events import Events
from rooftile.runtime.arguments import check_count, check_number


class Clicks(NamedTuple):
    """Candidates of each user, and whether the user clicks them.

    Args:
        events: the histories.
        categories: (items,) int64, the category of each item.
        candidates: (B, M) int64, items.
        labels: (B, M) bool.
        distance: (B, M) int64, how many events back the last event of the candidate's group lies, 1 for the last one; 0 if there
            is no such event.
    """

    events: Events
    categories: Tensor
    candidates: Tensor
    labels: Tensor
    distance: Tensor


def planted_clicks(
    users: int, length: int, *, candidates: int = 32, categories: int = 32, generator: torch.Generator | None = None,
    groups: int = 8, interests: int = 2, nearest: int = 16, noise: float = 0.0, per_group: int = 5, times: int = 4,
) -> Clicks:  # fmt: skip
    """Draws users whose interests came and went: a candidate is clicked if the user has events of its group, however far back.

    A history has periods, counted from its end: the last `nearest` events, the events before up to 4 * `nearest`, up to
    16 * `nearest`, and so on; the oldest events are in no period if they are fewer than `interests * times`. Each period has
    interests of its own, groups of which a user has a few events there and none elsewhere. Half of the candidates belong to an
    interest, of each period equally often; the others to groups that the user never saw. So a model that reads the last n events
    cannot know the clicks whose `distance` is above n. All other events are items that are no candidates, of all categories, so
    the category of a candidate tells nothing.

    Args:
        users: how many.
        length: events of each user, at least `nearest`.
        candidates: of each user.
        categories: of items.
        generator: of the random numbers.
        groups: of a category.
        interests: of a period.
        nearest: events of the last period, at least `interests * times`.
        noise: the probability that a label is turned round, at least 0 and below 0.5.
        per_group: items of a group; each category has twice as many others.
        times: events of an interest.

    Raises:
        InvalidInput: an argument is wrong, or there are too few groups for the interests and for other candidates.

    Example:
        >>> clicks = planted_clicks(3, 256, candidates=10)
        >>> clicks.candidates.shape, clicks.events.item_count
        (torch.Size([3, 10]), 1600)
    """
    users, candidates = check_count("users", users), check_count("candidates", candidates)
    categories, groups = check_count("categories", categories), check_count("groups", groups)
    interests, times, per_group = (
        check_count(name, x) for name, x in (("interests", interests), ("times", times), ("per_group", per_group))
    )
    nearest = check_count("nearest", nearest, interests * times)
    length = check_count("length", length, nearest)
    if not 0 <= check_number("noise", noise) < 0.5:
        raise InvalidInput(f"noise is {noise}; must be at least 0 and below 0.5")
    ends = [nearest]
    while ends[-1] < length:
        ends.append(min(4 * ends[-1], length))
    if len(ends) > 1 and ends[-1] - ends[-2] < interests * times:
        ends.pop()
    planted = len(ends) * interests
    if categories * groups <= planted:
        raise InvalidInput(
            f"there are {categories * groups} groups; {len(ends)} periods have {planted} interests, and candidates need others"
        )

    def drawn(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    # a user's groups in random order: interests, period by period, and then those that it never saw
    order = torch.rand(users, categories * groups, generator=generator).argsort(1)
    group, last = _history(order[:, :planted].unflatten(1, (len(ends), interests)), length, ends, times, generator)
    size = (groups + 2) * per_group  # items in a category
    first = group.div(groups, rounding_mode="floor") * size + group.remainder(groups) * per_group
    of_group = first + drawn(per_group, users, length)
    other = drawn(categories, users, length) * size + groups * per_group + drawn(2 * per_group, users, length)
    items = torch.where(group < 0, other, of_group)

    truth = torch.rand(users, candidates, generator=generator) < 0.5
    which = torch.where(
        truth, drawn(planted, users, candidates), planted + drawn(categories * groups - planted, users, candidates)
    )
    asked = order.gather(1, which)
    chosen = asked.div(groups, rounding_mode="floor") * size + asked.remainder(groups) * per_group
    distance = torch.where(truth, last.flatten(1).gather(1, which.clamp(max=planted - 1)), 0)
    labels = truth ^ (torch.rand(users, candidates, generator=generator) < noise)
    # minutes to days between events
    gaps = torch.randn(users, length, generator=generator).mul(2).add(7).exp().long()
    events = Events(items.flatten(), torch.arange(users + 1) * length, gaps.cumsum(1).flatten(), categories * size)
    category = torch.arange(categories).repeat_interleave(size)
    return Clicks(events, category, chosen + drawn(per_group, users, candidates), labels, distance)


def _history(
    interests: Tensor, length: int, ends: list[int], times: int, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Puts interests (users, periods, n) into histories: the group of each event (users, length), -1 for none, and how many
    events back the last event of each interest lies (users, periods, n).
    """  # fmt: skip
    users, _, count = interests.shape
    group, last = torch.full((users, length), -1), torch.zeros_like(interests)
    for period, end in enumerate(ends):
        start = ends[period - 1] if period else 0
        # distinct places, counted back from the end of the history
        drawn = torch.rand(users, end - start, generator=generator).argsort(1)[:, : count * times]
        back = start + 1 + drawn.unflatten(1, (count, -1))  # (users, n, times)
        last[:, period] = back.amin(2)
        group.scatter_(1, length - back.flatten(1), interests[:, period].repeat_interleave(back.shape[2], 1))
    return group, last
