"""Users' events: which items, when, one user after the other; and the split that holds out each user's last event."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rooftile.errors import InvalidInput


class Events(NamedTuple):
    """Events of users, packed.

    Args:
        items: (total,) int64, numbers from 0.
        cu: (B + 1,) int64, offsets of users.
        times: (total,) int64, seconds, which never fall within a user.
        item_count: how many items there are.
    """

    items: Tensor
    cu: Tensor
    times: Tensor
    item_count: int

    def of(self, user: int) -> Events:
        """Returns the events of one user.

        Example:
            >>> Events(torch.tensor([4, 2, 2]), torch.tensor([0, 1, 3]), torch.tensor([5, 0, 9]), 5).of(1).items
            tensor([2, 2])
        """
        start, stop = int(self.cu[user]), int(self.cu[user + 1])
        return Events(self.items[start:stop], torch.tensor([0, stop - start]), self.times[start:stop], self.item_count)

    def of_users(self, users: Tensor) -> Events:
        """Returns the events of users (n,), in their order: a batch.

        Example:
            >>> events = Events(torch.tensor([4, 2, 3]), torch.tensor([0, 1, 3]), torch.tensor([5, 0, 9]), 5)
            >>> events.of_users(torch.tensor([1, 0])).items
            tensor([2, 3, 4])
        """
        lengths = self.cu.diff()[users]
        cu = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        rows = torch.arange(int(cu[-1])) + torch.repeat_interleave(self.cu[users] - cu[:-1], lengths)
        return Events(self.items[rows], cu, self.times[rows], self.item_count)

    def last(self, longest: int) -> Events:
        """Returns the last events of each user, at most `longest`.

        Example:
            >>> Events(torch.arange(5), torch.tensor([0, 1, 5]), torch.arange(5), 5).last(2).items
            tensor([0, 3, 4])
        """
        lengths = self.cu.diff()
        behind = torch.repeat_interleave(self.cu[1:], lengths) - torch.arange(len(self.items))
        return self.kept(behind <= longest)

    def kept(self, keep: Tensor) -> Events:
        """Returns the events that a mask (total,) keeps; users stay, also without events."""
        user = torch.repeat_interleave(torch.arange(len(self.cu) - 1), self.cu.diff())
        lengths = torch.bincount(user[keep], minlength=len(self.cu) - 1)
        cu = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return Events(self.items[keep], cu, self.times[keep], self.item_count)


def packed(users: Tensor, items: Tensor, times: Tensor) -> Events:
    """Sorts events (n,) by user and time, and numbers users and items from 0 in the order of their names' values.

    Events of one time stay in their order.

    Raises:
        InvalidInput: the tensors have other lengths.

    Example:
        >>> packed(torch.tensor([7, 3, 7]), torch.tensor([50, 40, 50]), torch.tensor([9, 1, 2]))
        Events(items=tensor([0, 1, 1]), cu=tensor([0, 1, 3]), times=tensor([1, 2, 9]), item_count=2)
    """
    if not users.shape == items.shape == times.shape or users.ndim != 1:
        raise InvalidInput(f"users, items and times have {len(users)}, {len(items)} and {len(times)} events; must be alike")
    order = times.argsort(stable=True)
    order = order[users[order].argsort(stable=True)]
    _, user = users[order].unique(return_inverse=True)
    names, item = items[order].unique(return_inverse=True)
    lengths = torch.bincount(user) if len(user) else torch.zeros(0, dtype=torch.long)
    return Events(item, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]), times[order], len(names))


def without_last(events: Events) -> tuple[Events, Tensor, Tensor]:
    """Splits off the last event of each user with at least two events.

    Returns:
        The events before them, the users (n,) and their last items (n,).

    Example:
        >>> events = Events(torch.tensor([4, 2, 3]), torch.tensor([0, 1, 3]), torch.tensor([5, 0, 9]), 5)
        >>> before, users, due = without_last(events)
        >>> before.items, users, due
        (tensor([4, 2]), tensor([1]), tensor([3]))
    """
    users = (events.cu.diff() > 1).nonzero()[:, 0]
    rows = events.cu[users + 1] - 1
    keep = torch.ones(len(events.items), dtype=torch.bool)
    keep[rows] = False
    return events.kept(keep), users, events.items[rows]
