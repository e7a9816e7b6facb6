"""Rows that blocks give back behind a window, tested with a memory that is written and read through the tables."""

from __future__ import annotations

import random

import pytest

from rooftile.errors import InvalidInput
from rooftile.kvcache import BlockTable, OutOfBlocks, WindowPool


class Memory:
    """Rows whose contents are the tokens themselves, as an engine uses them: steps of all tables, and windows that are read."""

    def __init__(self, pool: WindowPool) -> None:
        self.pool = pool
        self.cells: dict[tuple[int, int], int] = {}
        # what a device knows of the rows of blocks
        self.rows: dict[int, int] = {}
        self.due: dict[BlockTable, list[int]] = {}

    def begin(self, prompt: list[int]) -> tuple[BlockTable, int]:
        table = self.pool.begin(prompt)
        self.due[table] = prompt[: table.length]
        self.read(table, table.length)
        return table, table.length

    def write(self, table: BlockTable, tokens: list[int]) -> None:
        """A step that reads these tokens: they are written, and the first of them sees its window."""
        size, start = self.pool.size, len(self.due[table])
        self.pool.append(table, start + len(tokens) - table.length)
        self.pool.cover(table, start, len(tokens))
        self.rows |= self.pool.new_rows()
        for source, target in self.pool.row_copies():
            for n in range(size):
                self.cells[target, n] = self.cells.get((source, n), -1)
        self.due[table] = self.due[table] + tokens
        for n, token in enumerate(tokens, start):
            self.cells[self.place(table, n)] = token
        for n in range(start, start + len(tokens)):
            self.read(table, n)

    def place(self, table: BlockTable, n: int) -> tuple[int, int]:
        block = table.blocks[n // self.pool.size]
        # the pool's books and the device's agree
        assert self.rows[block] == self.pool._row_of[block]
        return self.rows[block], n % self.pool.size

    def read(self, table: BlockTable, position: int) -> None:
        """Reads all that the query at a position sees."""
        seen = range(max(position - self.pool.window + 1, 0), min(position + 1, len(self.due[table])))
        assert [self.cells[self.place(table, n)] for n in seen] == self.due[table][seen.start : seen.stop]

    def free(self, table: BlockTable) -> None:
        self.pool.free(table)
        del self.due[table]


@pytest.mark.parametrize(("size", "window", "answers"), [(4, 10, 6), (4, 1, 5), (8, 5, 4), (2, 9, 7)])
def test_a_window_reads_what_was_written_whatever_happens_around_it(size: int, window: int, answers: int) -> None:
    chance = random.Random(size * window)
    most = 6 * size
    rows = WindowPool.rows_for(window, size, answers=answers, tokens=most)
    pool = WindowPool(200, size, rows=rows, window=window)
    memory, hits, copied, evicted = Memory(pool), 0, 0, 0
    beginnings = [[chance.randrange(2) for _ in range(12 * size)] for _ in range(3)]
    for n in range(4_000):
        pool.next_step()
        budget = most
        for _ in range(chance.randrange(1, 5)):
            tables = list(memory.due)
            what = chance.choice(("begin", "begin", "write", "write", "write", "fork", "free", "free", "cut"))
            try:
                if what == "begin" and len(tables) < answers:
                    prompt = [*chance.choice(beginnings)[: chance.randrange(12 * size)], chance.randrange(2)]
                    table, found = memory.begin(prompt)
                    hits += found
                elif not tables:
                    continue
                elif what == "write" and budget:
                    table = chance.choice(tables)
                    tokens = [chance.randrange(2) for _ in range(min(chance.choice((1, 1, size, 3 * size)), budget))]
                    own = memory.due[table]
                    known = next((text for text in beginnings if text[: len(own)] == own), own)
                    tokens = known[len(own) : len(own) + len(tokens)] or tokens
                    before, shared = set(pool._row_of), pool.needs(table, 1) and table.length % size
                    memory.write(table, tokens)
                    evicted += bool(before - set(pool._row_of))
                    copied += bool(shared)
                    budget -= len(tokens)
                    pool.seal(table, memory.due[table])
                elif what == "fork" and len(tables) < answers:
                    table = chance.choice(tables)
                    memory.due[pool.fork(table)] = memory.due[table]
                elif what == "free":
                    memory.free(chance.choice(tables))
                elif what == "cut":
                    # an answer that is computed again shares what another is about to read
                    table = chance.choice(tables)
                    if len(tables) < answers and table.length == len(memory.due[table]):
                        other = pool.fork(table)
                        length = table.length // size * size
                        if table.sealed * size <= length and all(
                            block in pool._row_of for block in other.blocks[pool._first(length) : length // size]
                        ):
                            pool.truncate(other, length)
                            memory.due[other] = memory.due[table][:length]
                        else:
                            pool.free(other)
            except OutOfBlocks:
                for victim in list(memory.due)[-3:]:
                    memory.free(victim)
        if n % 20 == 0:
            pool.check()
            for table in memory.due:
                memory.read(table, len(memory.due[table]))
    assert hits > 50
    assert evicted > 20
    assert copied > 20
    for table in list(memory.due):
        memory.free(table)
    pool.check()
    assert pool.held_rows == pool.used_blocks == 0


def test_a_long_text_holds_no_more_rows_than_its_window() -> None:
    pool = WindowPool(100, 4, rows=WindowPool.rows_for(9, 4, answers=1, tokens=8), window=9)
    table = pool.begin(range(400))
    pool.append(table, 400)
    most = []
    for start in range(0, 400, 8):
        pool.next_step()
        pool.cover(table, start, 8)
        most.append(pool.held_rows)
    assert pool.rows == 6
    assert max(most) <= 5
    assert len(table.blocks) == 100


def test_a_prefix_is_cut_to_where_its_window_is_complete() -> None:
    """Rows behind a window are taken by another text; the prefix is found up to a place whose window still has its rows."""
    pool = WindowPool(40, 4, rows=6, window=5)
    first = pool.begin(range(40))
    pool.append(first, 40)
    for start in range(0, 40, 8):
        pool.next_step()
        pool.cover(first, start, 8)
    pool.seal(first, range(40))
    pool.free(first)
    # the rows of the last six blocks are there: blocks 4 to 9
    assert pool.begin([*range(36), 7, 7, 7, 7, 7]).length == 36
    assert pool.begin([*range(20), 7]).length == 20
    # a window of 5 at 16 sees block 3, whose row is gone; that at 0 sees nothing
    assert pool.begin([*range(16), 7]).length == 0


def test_two_forks_of_a_block_have_rows_of_their_own() -> None:
    pool = WindowPool(20, 4, rows=8, window=6)
    table = pool.begin(range(6))
    pool.append(table, 6)
    pool.cover(table, 0, 6)
    assert pool.new_rows() == {0: 0, 1: 1}
    other = pool.fork(table)
    pool.next_step()
    (copy,) = pool.append(other, 1)
    assert (copy.source, copy.target) == (1, 2)
    assert pool.row_copies() == [(1, 2)]
    assert pool.row_copies() == []
    pool.cover(other, 6, 1)
    assert pool.new_rows() == {2: 2}
    pool.check()


def test_rows_of_a_step_that_never_ran_are_told_with_the_next() -> None:
    """A request may be preempted in the step that gave it rows; its blocks keep them, and another text gets the blocks."""
    pool = WindowPool(8, 4, rows=4, window=4)
    first = pool.begin(range(4))
    pool.append(first, 4)
    pool.cover(first, 0, 4)
    block = first.blocks[0]
    pool.free(first)
    second = pool.begin(range(9))
    pool.append(second, 4)
    assert second.blocks == [block]
    pool.next_step()
    pool.cover(second, 0, 4)
    assert pool.new_rows() == {block: 0}
    assert pool.new_rows() == {}


def test_wrong_numbers_are_said() -> None:
    for more, due in (
        ({"rows": 0, "window": 4}, "0 rows for a pool of 8 blocks; there must be 1 to 8"),
        ({"rows": 9, "window": 4}, "9 rows for a pool of 8 blocks; there must be 1 to 8"),
        ({"rows": 4, "window": 0}, "a window of 0 keys; it must have at least one"),
    ):
        with pytest.raises(InvalidInput, match=due):
            WindowPool(8, 4, **more)
