"""`Histories`: the events of many users in pages, which stay from call to call and make room for others when blocks run out.

A sequence of an engine ends; a user's history does not. So the books are kept by user, and a user who was not asked for longest
loses the whole history when another needs its blocks. Users share no blocks: no two have the same events at the same times.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.kvcache.blocks import BlockPool, BlockTable
from rooftile.kvcache.pages import Pages
from rooftile.kvcache.specs import bytes_in_words
from rooftile.runtime.arguments import shown
from rooftile.runtime.words import answers_words


class Lines(NamedTuple):
    """The tensors of a call over rows of B users, on the device of the pages."""

    table: Tensor  # (B, N) int32
    lengths: Tensor  # (B,) int32: the events of each user that the call knows
    cu: Tensor  # (B + 1,) int32: offsets of the rows
    user: Tensor  # (total,): the number of each row's user in the call


@answers_words
class Histories:
    """Users' histories in the blocks of `pages`.

    Args:
        pages: the memory, which nothing else writes to.

    Example:
        >>> histories = Histories(Pages(3, layers=1, heads=1, dim=8, block_size=4))
        >>> with histories.growing({"ann": 5, "bob": 2}):
        ...     pass                                    # write the events into their slots
        >>> with histories.growing({"eve": 1}):         # all blocks are taken: the user who waits longest makes room
        ...     pass
        >>> "ann" in histories, len(histories), histories.evicted
        (False, 2, 1)
    """

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        blocks, _, _, size, _, _ = pages.storage.shape
        self.pool = BlockPool(blocks, size, watermark=0, prefixes=False)
        self._tables: OrderedDict[Hashable, BlockTable] = OrderedDict()  # least recently used first
        # each table's blocks once more, as bytes that are copied whole: thousands of Python's ints would take a millisecond
        self._packed: dict[Hashable, array[int]] = {}
        self.notes: dict[Hashable, Any] = {}
        """Whatever else is known about a user; it is forgotten with the history."""
        self.evicted = 0
        """How many histories made room for others so far."""

    def __len__(self) -> int:
        return len(self._tables)

    def __contains__(self, user: Hashable) -> bool:
        return user in self._tables

    def __iter__(self) -> Iterator[Hashable]:
        """Yields users, the least recently used first."""
        return iter(list(self._tables))

    def __repr__(self) -> str:
        return f"Histories({self})"

    def __str__(self) -> str:
        pool = self.pool
        taken, each = pool.used_blocks, self.block_bytes
        return (
            f"{len(self):,} users, {self.events:,} events in {taken:,} of {pool.total:,} blocks of {pool.size}: {taken:,} x "
            f"{bytes_in_words(each)} = {bytes_in_words(taken * each)}, {pool.waste():.0%} of it empty; {self.evicted:,} evicted"
        )

    @property
    def events(self) -> int:
        """The events of all users."""
        return sum(table.length for table in self._tables.values())

    @property
    def block_bytes(self) -> int:
        """The bytes of a block, in all layers."""
        return self.pages.nbytes // self.pool.total

    def length(self, user: Hashable) -> int:
        """Returns how many events a user has; 0 if the user is unknown."""
        return self._tables[user].length if user in self._tables else 0

    def nbytes(self, user: Hashable) -> int:
        """Returns the bytes that a user's blocks take; 0 if the user is unknown."""
        return len(self._packed.get(user, ())) * self.block_bytes

    def in_words(self, user: Hashable) -> str:
        """Says how many bytes a user's blocks take, and which share of them is empty."""
        events, taken = self.length(user), self.nbytes(user)
        slots = taken // self.block_bytes * self.pool.size
        empty = f", {1 - events / slots:.0%} of it empty" if slots else ""
        return f"{events:,} events in {slots:,} slots = {bytes_in_words(taken)}{empty}"

    def use(self, user: Hashable) -> None:
        """Makes a user the last who makes room for others.

        Raises:
            InvalidInput: the user is unknown.
        """
        if user not in self._tables:
            raise InvalidInput(f"user {shown(user)} is unknown: never appended, forgotten, or evicted; append the history first")
        self._tables.move_to_end(user)

    def forget(self, user: Hashable) -> bool:
        """Gives up a user's blocks; returns whether the user was known."""
        if user not in self._tables:
            return False
        self.pool.free(self._tables.pop(user))
        del self._packed[user]
        self.notes.pop(user, None)
        return True

    def forget_first(self, user: Hashable, blocks: int) -> None:
        """Gives up the first blocks of a known user's history, which are full: events are numbered from the next one then."""
        self.pool.drop_first(self._tables[user], blocks)
        del self._packed[user][:blocks]

    @contextmanager
    def growing(self, counts: Mapping[Hashable, int]) -> Iterator[None]:
        """Gives slots to further events of users, new or known, and takes them back if the block of code raises an error.

        Users who are not in `counts` make room where blocks are too few, the least recently used first.

        Raises:
            InvalidInput: the users of the call alone need more blocks than there are; nothing has changed.
        """
        before = {user: self.length(user) if user in self else None for user in counts}
        self.check_room({user: self.length(user) + count for user, count in counts.items()})
        self._make_room(counts)
        try:
            for user, count in counts.items():
                table = self._tables.get(user)
                if table is None:
                    table = self._tables[user] = self.pool.begin(())
                    self._packed[user] = array("i")
                self.pool.append(table, count)
                self._packed[user].extend(table.blocks[len(self._packed[user]) :])
            yield
        except BaseException:
            for user, length in before.items():
                if length is None:
                    self.forget(user)
                else:
                    self.pool.truncate(self._tables[user], length)
                    del self._packed[user][len(self._tables[user].blocks) :]
            raise

    def lines(self, users: Sequence[Hashable], rows: Sequence[int], lengths: Sequence[int] | None = None) -> Lines:
        """Returns the tensors of a call, without waiting for the device.

        Args:
            users: any of the known users; one may come twice.
            rows: how many rows each has.
            lengths: how many of its first events the call knows; None for all of them.
        """
        device, B = self.pages.storage.device, len(users)
        lengths = [self.length(user) for user in users] if lengths is None else lengths
        width = max(self.pool.blocks_of(max(lengths, default=0)), 1)
        packed = array("i")
        for user, length in zip(users, lengths, strict=True):
            blocks = self._packed[user][: self.pool.blocks_of(length)]
            packed += blocks
            packed.frombytes(bytes(4 * (width - len(blocks))))
        packed.extend(lengths)
        packed.extend(accumulate(rows, initial=0))
        numbers = torch.frombuffer(packed, dtype=torch.int32)
        numbers = numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.clone()
        table, known, cu = numbers.split((B * width, B, B + 1))
        user = torch.repeat_interleave(torch.arange(B, device=device), cu.diff(), output_size=sum(rows))
        return Lines(table.view(B, width), known, cu, user)

    def slots(self, lines: Lines, places: Tensor) -> Tensor:
        """Returns the slots (total,) of events by their numbers `places` (total,) in their users' histories."""
        return lines.table[lines.user, places // self.pool.size].long() * self.pool.size + places % self.pool.size

    def last_block(self, user: Hashable) -> int:
        """Returns the block of a user's last event; the user has at least one."""
        return self._packed[user][-1]

    def check(self) -> None:
        """Raises AssertionError, with the reason, if the books are inconsistent."""
        self.pool.check()
        assert {user: table.blocks for user, table in self._tables.items()} == {u: list(x) for u, x in self._packed.items()}
        assert self.pool.used_blocks == sum(map(len, self._packed.values())), "a block is lost"

    def has_room(self, lengths: Mapping[Hashable, int]) -> bool:
        """Tells whether users of these lengths fit at once, if all others make room."""
        return sum(map(self.pool.blocks_of, lengths.values())) <= self.pool.total

    def check_room(self, lengths: Mapping[Hashable, int]) -> None:
        """Raises InvalidInput if users of these lengths do not fit at once, even alone."""
        pool = self.pool
        if self.has_room(lengths):
            return
        blocks, room = sum(map(pool.blocks_of, lengths.values())), f"the pool has {pool.total:,} of {pool.size} events"
        for user, length in lengths.items():
            if length > pool.total * pool.size:
                needs = f"would have {length:,} events in {pool.blocks_of(length):,} blocks"
                raise InvalidInput(f"user {shown(user)} {needs}; {room}: give the last events, or make the pool larger")
        raise InvalidInput(f"{len(lengths):,} users of one call need {blocks:,} blocks; {room}: give fewer users at once")

    def _make_room(self, counts: Mapping[Hashable, int]) -> None:
        for user in counts:
            if user in self._tables:
                self._tables.move_to_end(user)
        needed = sum(
            self.pool.blocks_of(self.length(user) + count) - len(self._packed.get(user, ())) for user, count in counts.items()
        )
        while self.pool.available < needed:
            # the users of the call are the last, and have room together
            self.forget(next(iter(self._tables)))
            self.evicted += 1
