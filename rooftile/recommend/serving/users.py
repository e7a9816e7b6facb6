"""`Users`: what a reader has read of each user, and the calls that it is asked for, a batch of users at a time."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rooftile.kvcache import Pages
from rooftile.kvcache.histories import Histories, Lines
from rooftile.recommend.serving.requests import Appended, Asked

# rows that go through the layers at once: a bound of the memory that a long history takes while it is read
ROWS = 8192


class Rows(NamedTuple):
    """Events that are appended, or candidates, on the device."""

    items: Tensor  # (total,) int64
    times: Tensor  # (total,) int64; zeros if the model reads no times
    places: Tensor  # (total,) int64: numbers among the events of the user's pages; of candidates the number behind the last
    lines: Lines


class Reader(Protocol):
    """How a kind of model reads events into pages, and scores candidates against them: all that differs between the kinds.

    Args:
        pages: where it writes; nothing else does.
        timed: whether it reads times.
        most: how many of a user's last events candidates read; older ones are forgotten. None for all.
    """

    pages: Pages
    timed: bool
    most: int | None

    def fitted(self, users: Users, given: Appended) -> tuple[Appended, bool]:
        """Returns the events that are read, and whether they replace what is known of the user.

        Raises InvalidInput if the history would be too long.
        """

    def read(self, rows: Rows, slots: Tensor) -> Tensor | None:
        """Reads events into their slots (total,); lengths count them already.

        Returns states (B, dim) after each user's last row for `keep`, or None if the model keeps no states.
        """

    def keep(self, states: Tensor, blocks: Tensor) -> None:
        """Keeps the states (B, dim) after users' last events, which are in the blocks (B,)."""

    def scores(self, users: Users, asked: list[Asked]) -> list[Tensor]:
        """Returns the scores (n,) of each user's candidates."""

    def candidate_states(self, users: Users, asked: list[Asked]) -> Tensor:
        """Returns the states (total, dim) of candidates behind their histories."""

    def last_states(self, users: Users, asked: list[Asked]) -> Tensor:
        """Returns the states (B, dim) after users' last events."""


class Stretch(NamedTuple):
    """Events of a user that a pass reads."""

    user: Hashable
    events: Tensor
    times: Tensor
    first: int  # the number of the first among the events of the user's pages


class Users:
    """The histories of all users, in a reader's pages."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.histories = Histories(reader.pages)

    def length(self, user: Hashable) -> int:
        """Returns how many events of a user candidates read."""
        return self._read_of(self.histories.length(user))

    def last_time(self, user: Hashable) -> int | None:
        """Returns the seconds of a user's last event; None if there is none."""
        found: int | None = self.histories.notes.get(user)
        return found

    def append(self, given: list[Appended]) -> list[int]:
        """Reads further events of users; returns how many events each has now."""
        books = self.histories
        fitted = [self.reader.fitted(self, x) for x in given]
        given, anew = [x for x, _ in fitted], [x.user for x, replaces in fitted if replaces]
        lengths = {x.user: len(x.events) + (0 if x.user in anew else books.length(x.user)) for x in given}
        # whole blocks of events that candidates do not read when the call is done
        unread = {user: (length - self._read_of(length)) // books.pool.size for user, length in lengths.items()}
        after = {user: length - unread[user] * books.pool.size for user, length in lengths.items()}
        books.check_room(after)
        for user in anew:
            books.forget(user)
        if early := not books.has_room(lengths):
            # old events make room for new ones before these are read, and are lost even if that fails
            self._forget_first(unread)
            lengths = after
        with books.growing({x.user: len(x.events) for x in given}):
            # states are kept when all is read: an error gives slots back, and the block before them has its user's last state
            read = [self._read(part) for part in stretches(given, lengths)]
            for states, blocks in read:
                if states is not None:
                    self.reader.keep(states, blocks)
        if not early:
            self._forget_first(unread)
        for x in given:
            if len(x.times):
                books.notes[x.user] = int(x.times[-1])
        return [self.length(x.user) for x in given]

    def slots(self, user: Hashable) -> Tensor:
        """Returns the slots of all events in a user's pages."""
        length = self.histories.length(user)
        places = torch.arange(length, device=self.reader.pages.storage.device)
        return self.histories.slots(self.histories.lines([user], [length]), places)

    def moment(self, asked: Asked) -> int:
        """Returns the seconds at which candidates are shown: by default when the user's last event was, or 0 without events."""
        return (self.last_time(asked.user) or 0) if asked.at is None else asked.at

    def candidates(self, asked: list[Asked], items: list[Tensor]) -> Rows:
        """Returns the rows of candidates (n,) of each user in a call; a user may come twice."""
        times = [torch.full_like(x, self.moment(each)) for each, x in zip(asked, items, strict=True)]
        places = [torch.full_like(x, self.histories.length(each.user)) for each, x in zip(asked, items, strict=True)]
        lines = self.histories.lines([each.user for each in asked], [len(x) for x in items])
        items_, times_, places_ = self.on_device(items, times, places)
        return Rows(items_, times_, places_, lines)

    def on_device(self, *lists: list[Tensor]) -> Tensor:
        """Returns lists of numbers on the host as rows of one tensor, which is copied once."""
        device = self.reader.pages.storage.device
        rows = torch.stack([torch.cat(x) if x else torch.empty(0, dtype=torch.int64) for x in lists])
        return rows.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else rows

    def _read(self, part: list[Stretch]) -> tuple[Tensor | None, Tensor]:
        """Reads stretches of events of some users, each user once; returns the states after them, and the blocks of these."""
        lines = self.histories.lines(
            [x.user for x in part], [len(x.events) for x in part], [x.first + len(x.events) for x in part]
        )
        places = [torch.arange(x.first, x.first + len(x.events)) for x in part]
        items, times, places_ = self.on_device([x.events for x in part], [x.times for x in part], places)
        slots = self.histories.slots(lines, places_)
        states = self.reader.read(Rows(items, times, places_, lines), slots)
        return states, slots[lines.cu[1:].long() - 1] // self.histories.pool.size

    def _read_of(self, length: int) -> int:
        return length if self.reader.most is None else min(length, self.reader.most)

    def _forget_first(self, blocks: Mapping[Hashable, int]) -> None:
        for user, count in blocks.items():
            if count:
                self.histories.forget_first(user, count)


def stretches(given: list[Appended], lengths: Mapping[Hashable, int]) -> Iterator[list[Stretch]]:
    """Cuts users' further events, after which they have `lengths`, into passes of at most ROWS rows, a user once in each."""
    part: list[Stretch] = []
    free = ROWS
    for user, events, times in given:
        before = lengths[user] - len(events)
        start = 0
        while start < len(events):
            stop = min(start + free, len(events))
            part.append(Stretch(user, events[start:stop], times[start:stop], before + start))
            free -= stop - start
            start = stop
            if not free:
                yield part
                part, free = [], ROWS
    if part:
        yield part
