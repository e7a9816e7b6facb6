"""`Users`: what a reader has read of each user, and the calls that it is asked for, a batch of users at a time."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.kvcache.histories import Histories
from rooftile.recommend.serving.hstu import HSTUReader
from rooftile.recommend.serving.requests import Appended, Asked
from rooftile.runtime.arguments import shown

# rows that go through the layers at once: a bound of the memory that a long history takes while it is read
ROWS = 8192


class Stretch(NamedTuple):
    """Events of a user that a pass reads."""

    user: Hashable
    events: Tensor
    times: Tensor
    first: int  # the number of the first among the user's events


class Users:
    """The histories of all users, in a reader's pages."""

    def __init__(self, reader: HSTUReader) -> None:
        self.reader = reader
        self.histories = Histories(reader.pages)

    def last_time(self, user: Hashable) -> int | None:
        """Returns the seconds of a user's last event; None if there is none."""
        found: int | None = self.histories.notes.get(user)
        return found

    def append(self, given: list[Appended], anew: set[Hashable]) -> list[int]:
        """Reads further events of users, those in `anew` from their first on; returns how many events each has now."""
        books = self.histories
        lengths = {x.user: len(x.events) + (0 if x.user in anew else books.length(x.user)) for x in given}
        books.check_room(lengths)
        for user in anew:
            books.forget(user)
        with books.growing({x.user: len(x.events) for x in given}):
            # states are kept when all is read: an error gives slots back, and the block before them has its user's last state
            for states, blocks in [self._read(part) for part in stretches(given, lengths)]:
                self.reader.keep(states, blocks)
        for x in given:
            if len(x.times):
                books.notes[x.user] = int(x.times[-1])
        return [lengths[x.user] for x in given]

    def kept(self, user: Hashable) -> tuple[Tensor, Tensor]:
        """Returns a user's events and times, on the host."""
        length = self.histories.length(user)
        if not length:
            return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
        places = torch.arange(length, device=self.reader.items.device)
        slots = self.histories.slots(self.histories.lines([user], [length]), places)
        return self.reader.items.view(-1)[slots].cpu(), self.reader.times.view(-1)[slots].cpu()

    def _read(self, part: list[Stretch]) -> tuple[Tensor, Tensor]:
        """Reads stretches of events of some users, each user once; returns the states after them, and the blocks of these."""
        lines = self.histories.lines(
            [x.user for x in part], [len(x.events) for x in part], [x.first + len(x.events) for x in part]
        )
        places = [torch.arange(x.first, x.first + len(x.events)) for x in part]
        items, times, places_ = self.on_device([x.events for x in part], [x.times for x in part], places)
        slots = self.histories.slots(lines, places_)
        return self.reader.read(items, times, places_, slots, lines), slots[lines.cu[1:].long() - 1] // self.histories.pool.size

    def candidates(self, asked: list[Asked]) -> Tensor:
        """Returns the states of all candidates, (total, dim)."""
        users, items, times, places = [], [], [], []
        for x in asked:
            length = self.histories.length(x.user)
            if x.items is None:
                raise InvalidInput(f"user {shown(x.user)} has no items; candidates are read one by one: give their numbers")
            if length >= self.reader.model.longest:
                raise InvalidInput(
                    f"user {shown(x.user)} has {length:,} events, the model's longest; a candidate would stand behind them: "
                    "forget the user and append fewer, or give keep="
                )
            at = (self.last_time(x.user) or 0) if x.at is None else x.at
            users.append(x.user)
            items.append(x.items)
            times.append(torch.full_like(x.items, at))
            places.append(torch.full_like(x.items, length))
        lines = self.histories.lines(users, [len(x) for x in items])
        items_, times_, places_ = self.on_device(items, times, places)
        return self.reader.candidates(items_, times_, places_, lines)

    def last_states(self, asked: list[Asked]) -> Tensor:
        """Returns the states (B, dim) after users' last events."""
        for x in asked:
            if not self.histories.length(x.user):
                raise InvalidInput(f"user {shown(x.user)} has no events, so there is no state after the last one; append some")
        blocks = torch.tensor([self.histories.last_block(x.user) for x in asked], dtype=torch.int64)
        return self.reader.states[blocks.to(self.reader.states.device)]

    def on_device(self, *lists: list[Tensor]) -> Tensor:
        """Returns lists of numbers on the host as rows of one tensor, which is copied once."""
        device = self.reader.states.device
        rows = torch.stack([torch.cat(x) if x else torch.empty(0, dtype=torch.int64) for x in lists])
        return rows.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else rows


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
