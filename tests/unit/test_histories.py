"""Users' histories in pages: who has which slots, who makes room, and what an error leaves behind."""

from __future__ import annotations

import random

import pytest
import torch

from rooftile.errors import InvalidInput
from rooftile.kvcache import Histories, Pages


def histories(blocks: int = 6, size: int = 4) -> Histories:
    return Histories(Pages(blocks, layers=1, heads=1, dim=4, block_size=size, dtype=torch.float32))


def grow(books: Histories, **counts: int) -> None:
    with books.growing(counts):
        pass


def test_the_user_who_waits_longest_makes_room() -> None:
    books = histories()
    grow(books, a=8, b=8)
    grow(books, c=5)
    books.use("a")
    grow(books, d=1)
    assert list(books) == ["c", "a", "d"]
    # a user of the call is never evicted, however long ago it was used
    grow(books, c=12)
    assert list(books) == ["d", "c"]
    assert (books.length("c"), books.length("a"), books.evicted) == (17, 0, 2)
    books.check()


def test_a_call_that_cannot_fit_changes_nothing() -> None:
    books = histories()
    grow(books, a=9, b=3)
    with pytest.raises(InvalidInput, match=r"user 'a' would have 25 events in 7 blocks; the pool has 6 of 4 events"):
        grow(books, a=16)
    with pytest.raises(InvalidInput, match=r"3 users of one call need 7 blocks; the pool has 6 of 4 events: give fewer"):
        grow(books, c=9, d=8, e=5)
    assert list(books) == ["a", "b"]
    assert books.evicted == 0
    books.check()


def test_an_error_takes_slots_back() -> None:
    books = histories()
    grow(books, a=3)

    def fails() -> None:
        with books.growing({"a": 6, "b": 2}):
            assert (books.length("a"), books.length("b")) == (9, 2)
            raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        fails()
    assert list(books) == ["a"]
    assert (books.length("a"), books.pool.used_blocks) == (3, 1)
    books.check()


def test_the_first_blocks_are_given_up() -> None:
    books = histories()
    grow(books, a=11, b=4)
    slots = books.slots(books.lines(["a"], [3]), torch.arange(8, 11))
    books.forget_first("a", 2)
    assert (books.length("a"), books.pool.used_blocks, books.in_words("a")[:8]) == (3, 2, "3 events")
    assert torch.equal(books.slots(books.lines(["a"], [3]), torch.arange(3)), slots)
    grow(books, a=5, c=12)
    assert list(books) == ["b", "a", "c"]
    books.check()
    with pytest.raises(AssertionError, match="has not 3 full blocks"):
        books.forget_first("a", 3)
    books.forget_first("a", 2)
    assert (books.length("a"), "a" in books) == (0, True)
    assert books.forget("a")
    books.check()


def test_lines_name_each_event_its_slot() -> None:
    """Whatever users come and go: no two events share a slot, and a table leads to what was written."""
    draw = random.Random(3)
    books = histories(blocks=24)
    written: dict[int, tuple[int, int]] = {}
    for _ in range(60):
        users = draw.sample(range(8), draw.randint(1, 4))
        counts = {user: draw.randint(0, 9) for user in users}
        if any(books.length(user) + n > 30 for user, n in counts.items()):
            books.forget(users[0])
            continue
        before = {user: books.length(user) for user in users}
        with books.growing(counts):
            lines = books.lines(users, list(counts.values()))
        places = torch.cat([torch.arange(before[user], books.length(user)) for user in users])
        for n, place, slot in zip(lines.user.tolist(), places.tolist(), books.slots(lines, places).tolist(), strict=True):
            written[slot] = (users[n], place)
        assert lines.lengths.tolist() == [books.length(user) for user in users]
        assert lines.cu.diff().tolist() == list(counts.values())
        order = list(books)
        every = books.lines(order, [books.length(user) for user in order])
        places = torch.cat([torch.arange(books.length(user)) for user in order])
        found = [written[slot] for slot in books.slots(every, places).tolist()]
        assert found == [(order[n], place) for n, place in zip(every.user.tolist(), places.tolist(), strict=True)]
        for user in order:
            if last := books.length(user):
                assert written[books.last_block(user) * 4 + (last - 1) % 4] == (user, last - 1)
        books.check()
    assert books.evicted > 5


def test_books_in_words() -> None:
    books = histories()
    assert not books.forget("a")
    with pytest.raises(InvalidInput, match="user 'a' is unknown: never appended, forgotten, or evicted"):
        books.use("a")
    grow(books, a=5)
    # two blocks of 4 events, each a key and a value of 4 numbers
    assert books.nbytes("a") == 2 * 4 * 2 * 4 * 4
    assert str(books) == "1 users, 5 events in 2 of 6 blocks of 4: 2 x 128 bytes = 256 bytes, 38% of it empty; 0 evicted"
    assert books.forget("a")
    assert len(books) == books.nbytes("a") == 0
