"""The books of the states that are kept for prefixes, compared with a list of who was used when."""

from __future__ import annotations

import random

import pytest

from rooftile.kvcache import BlockPool, WindowPool
from rooftile.kvcache.states import Snapshots


@pytest.mark.parametrize("total", [1, 2, 5])
@pytest.mark.parametrize("seed", range(4))
def test_those_used_last_are_kept(total: int, seed: int) -> None:
    """A state that a step writes is found from the next step on, and is not given up within the step."""
    rng, kept = random.Random(seed), Snapshots(total)
    order: list[int] = []  # the states that can be found, least recently used first
    coming: list[int] = []
    content: dict[int, int] = {}  # by place
    for _ in range(600):
        n, key = rng.randrange(8), rng.random()
        if key < 0.4:
            place = kept.keep(bytes([n]))
            full = len(order) + len(coming) == total
            if n in order or n in coming or (full and not order):
                assert place is None
                continue
            if full:
                order.pop(0)
            coming.append(n)
            assert place is not None
            content[place] = n
        elif key < 0.8:
            place = kept.find(bytes([n]))
            assert (place is not None) == (n in order)
            if place is not None:
                assert content[place] == n
                order.remove(n)
                order.append(n)
        else:
            kept.next_step()
            order += coming
            coming.clear()
        assert [kept.has(bytes([m])) for m in range(8)] == [m in order for m in range(8)]
        kept.check()


def test_bets_have_a_quarter_of_the_places() -> None:
    """... when all are taken; one that is found is a state like others."""
    kept = Snapshots(8)

    def keep(names: str, *, bet: bool) -> str:
        for name in names:
            assert kept.keep(name.encode(), bet=bet) is not None
            kept.next_step()
            kept.check()
        return "".join(name for name in "abcdefghijklmnopqr" if kept.has(name.encode()))

    keep("abcd", bet=True)
    assert keep("efgh", bet=False) == "abcdefgh"
    assert keep("ij", bet=False) == "cdefghij"
    # a third bet takes the place of a state, a fourth the place of a bet
    assert keep("k", bet=True) == "cdfghijk"
    assert keep("l", bet=True) == "dfghijkl"
    assert kept.find(b"d") is not None
    assert kept.find(b"f") is not None
    assert keep("m", bet=True) == "dfhijklm"
    assert keep("nopq", bet=False) == "dflmnopq"
    assert kept.kept == 8


@pytest.mark.parametrize("kind", ["blocks", "windows"])
def test_a_prefix_begins_at_a_state(kind: str) -> None:
    """... and, in a pool with rows, where the rows are complete that the next token sees."""
    snapshots = Snapshots(3)
    made = {"blocks": (BlockPool, {}), "windows": (WindowPool, {"rows": 4, "window": 6})}
    of, more = made[kind]
    pool = of(16, 4, **more)
    pool.snapshots = snapshots
    tokens = list(range(21))
    table = pool.begin(tokens)
    pool.next_step()
    for start, stop in ((0, 8), (8, 12), (12, 20)):
        pool.append(table, stop - start)
        pool.cover(table, start, stop - start)
        pool.seal(table, tokens[:stop])
        assert snapshots.keep(table.digest) is not None
        pool.next_step()
    other = pool.begin(tokens)
    assert (other.length, snapshots.has(other.digest)) == (20, True)
    assert pool.begin([*tokens[:18], 99, 98]).length == 12
    # the row of the first block is another's by now
    assert pool.begin([*tokens[:11], 99, 98]).length == (8 if kind == "blocks" else 0)
    # another salt knows nothing
    assert pool.begin(tokens, "salt").length == 0
    pool.check()
    pool.forget_prefixes()
    assert pool.begin(tokens).length == 0
