"""The bookkeeping of a paged KV cache, tested with a memory that is written and read through the tables."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from rooftile.errors import InvalidInput
from rooftile.kvcache import BlockPool, BlockTable, OutOfBlocks, ReservedPool


class Memory:
    """A cache whose keys and values are the tokens themselves, and the expected contents of each sequence."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.slots: dict[tuple[int, int], int] = {}
        self.due: dict[BlockTable, list[int]] = {}

    def read(self, table: BlockTable) -> list[int]:
        size = self.pool.size
        return [self.slots[table.blocks[n // size], n % size] for n in range(table.length)]

    def begin(self, prompt: list[int], salt: str = "") -> BlockTable:
        table = self.pool.begin(prompt, salt)
        self.due[table] = prompt[: table.length]
        return table

    def write(self, table: BlockTable, tokens: list[int]) -> None:
        size = self.pool.size
        start = table.length
        for source, target in self.pool.append(table, len(tokens)):
            for n in range(size):
                if (source, n) in self.slots:
                    self.slots[target, n] = self.slots[source, n]
        for n, token in enumerate(tokens, start):
            self.slots[table.blocks[n // size], n % size] = token
        self.due[table] = self.due[table] + tokens

    def fork(self, table: BlockTable) -> BlockTable:
        other = self.pool.fork(table)
        self.due[other] = self.due[table]
        return other

    def free(self, table: BlockTable) -> None:
        self.pool.free(table)
        del self.due[table]

    def cut(self, table: BlockTable, length: int) -> None:
        self.pool.truncate(table, length)
        self.due[table] = self.due[table][:length]

    def check(self) -> None:
        self.pool.check()
        for table, due in self.due.items():
            assert self.read(table) == due


@pytest.mark.parametrize(("size", "prefixes"), [(4, True), (16, True), (4, False)])
def test_what_a_sequence_wrote_it_reads_whatever_happens_around_it(size: int, prefixes: bool) -> None:
    chance = random.Random(size)
    pool = BlockPool(60, size, prefixes=prefixes)
    memory = Memory(pool)
    refused = hits = copied = 0
    beginnings = [[chance.randrange(2) for _ in range(5 * size)] for _ in range(3)]
    for n in range(34_000):
        tables = list(memory.due)
        what = chance.choice(("begin", "write", "write", "write", "fork", "free", "cut", "seal", "seal"))
        try:
            if what == "begin" or not tables:
                prompt = [*chance.choice(beginnings)[: chance.randrange(5 * size)], chance.randrange(2)]
                table = memory.begin(prompt, salt=chance.choice(("", "other")))
                hits += table.length
                assert table.length < len(prompt)
                assert memory.read(table) == prompt[: table.length]
                memory.write(table, prompt[table.length :])
                continue
            table = chance.choice(tables)
            if what == "write":
                tokens = [chance.randrange(2) for _ in range(chance.choice((1, 1, 1, size, 3 * size)))]
                before, needs, available = pool.used_blocks, pool.needs(table, len(tokens)), pool.available
                shared = pool._owners[table.blocks[-1]] > 1 if table.length % size else False
                copied += shared
                memory.write(table, tokens)
                assert pool.used_blocks - before == needs <= available
            elif what == "fork":
                memory.fork(table)
            elif what == "free":
                memory.free(table)
            elif what == "cut":
                memory.cut(table, chance.randint(table.sealed * size, table.length))
            elif what == "seal":
                pool.seal(table, memory.due[table])
        except OutOfBlocks as error:
            refused += 1
            assert error.needed > error.available == pool.available  # noqa: PT017
            if what == "begin":
                memory.free(table)
            for victim in list(memory.due)[-5:]:
                memory.free(victim)
        if n % 100 == 0:
            memory.check()
    memory.check()
    # every kind of event occurred
    assert refused > 100
    assert copied > 100
    assert (hits > 1000) == prefixes
    for table in list(memory.due):
        memory.free(table)
    memory.check()
    assert pool.used_blocks == 0


def test_only_what_is_written_is_sealed_and_a_long_sequence_is_not_copied() -> None:
    class Watched(list[int]):
        def __getitem__(self, key):
            read.append(len(range(*key.indices(len(self)))) if isinstance(key, slice) else 1)
            return super().__getitem__(key)

    read: list[int] = []
    pool, tokens = BlockPool(300, 4), Watched(range(1000))
    table = pool.begin(list(tokens))
    pool.append(table, 1000)
    for written in range(1, 1001):
        pool.seal(table, tokens, written)
        assert table.sealed == written // 4
    # each token once, and a block at a time
    assert (sum(read), max(read)) == (1000, 4)
    pool.check()


def test_a_prefix_is_found_while_its_room_is_not_needed() -> None:
    pool = BlockPool(6, 4)
    table = pool.begin(range(10))
    assert (table.length, pool.append(table, 10)) == (0, [])
    pool.seal(table, range(10))
    pool.free(table)
    assert (pool.cached_blocks, pool.free_blocks) == (2, 4)
    again = pool.begin(range(10))
    assert again.length == 8
    # the last token is always computed
    whole = pool.begin(range(8))
    assert whole.length == 4
    pool.free(whole)
    pool.free(again)
    # three new blocks come from the free ones; two more evict cached blocks, from the end of the prefix
    pool.append(pool.begin([7]), 16)
    assert pool.begin(range(10)).length == 8
    pool.check()


def test_the_longest_unused_prefix_goes_first_and_its_end_before_its_beginning() -> None:
    pool = BlockPool(4, 4)
    for start in (0, 100):
        table = pool.begin(range(start, start + 9))
        pool.append(table, 8)
        pool.seal(table, range(start, start + 9))
        pool.free(table)
    pool.append(pool.begin([1]), 4)
    lengths = {}
    for start in (0, 100):
        table = pool.begin(range(start, start + 9))
        lengths[start] = table.length
        pool.free(table)
    assert lengths == {0: 4, 100: 8}


def test_salts_and_other_beginnings_share_nothing() -> None:
    pool = BlockPool(20, 4)
    table = pool.begin([1, 2, 3, 4, 5, 6, 7, 8, 9], "a")
    pool.append(table, 9)
    pool.seal(table, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert pool.begin([1, 2, 3, 4, 5, 6, 7, 8, 9], "a").length == 8
    assert pool.begin([1, 2, 3, 4, 5, 6, 7, 8, 9], "b").length == 0
    assert pool.begin([1, 2, 3, 4, 5, 6, 7, 8, 9]).length == 0
    # the same tokens after another prefix are another block
    assert pool.begin([9, 9, 9, 9, 5, 6, 7, 8, 9], "a").length == 0
    pool.forget_prefixes()
    assert pool.begin([1, 2, 3, 4, 5, 6, 7, 8, 9], "a").length == 0
    pool.check()


def test_equal_hashes_are_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = BlockPool(20, 4)
    monkeypatch.setattr(pool, "_digest", lambda before, tokens: b"all alike")
    table = pool.begin([1, 2, 3, 4, 5])
    pool.append(table, 5)
    pool.seal(table, [1, 2, 3, 4, 5])
    assert pool.begin([1, 2, 3, 9, 5]).length == 0
    assert pool.begin([1, 2, 3, 4, 5]).length == 4


def test_the_last_owner_writes_in_place() -> None:
    pool = BlockPool(8, 4)
    table = pool.begin([1])
    pool.append(table, 6)
    others = [pool.fork(table) for _ in range(2)]
    assert pool.used_blocks == 2
    assert [len(pool.append(x, 1)) for x in (*others, table)] == [1, 1, 0]
    assert pool.used_blocks == 4
    assert len({x.blocks[0] for x in (*others, table)}) == 1
    # a full block is never written: nothing to copy
    twin = pool.fork(table)
    pool.append(table, 1)
    pool.free(twin)
    full = pool.fork(table)
    assert pool.append(full, 1) == []
    pool.check()


def test_a_refusal_changes_nothing() -> None:
    pool = BlockPool(3, 4)
    table = pool.begin([1])
    pool.append(table, 6)
    other = pool.fork(table)
    with pytest.raises(OutOfBlocks, match="2 more blocks needed, 1 of the pool are left"):
        pool.append(other, 4)
    assert (other.length, other.blocks) == (6, table.blocks)
    assert pool.needs(other, 4) == 2
    pool.check()


def test_admission_leaves_blocks_for_those_that_run() -> None:
    pool = BlockPool(100, 16, watermark=0.05)
    assert pool.admits(95 * 16)
    assert not pool.admits(95 * 16 + 1)
    pool.append(pool.begin([1]), 16 * 90)
    assert pool.admits(16 * 5)
    assert not pool.admits(16 * 5 + 1)


def lognormal(chance: random.Random, mean: float, spread: float) -> int:
    return min(max(int(chance.lognormvariate(math.log(mean) - spread**2 / 2, spread)), 1), 1024)


@pytest.mark.parametrize(
    ("inputs", "outputs", "most"), [((161, 1.2), (338, 0.9), 0.02), ((19, 0.6), (58, 0.9), 0.07)], ids=["ShareGPT", "Alpaca"]
)
def test_waste_is_what_half_a_block_a_sequence_is(inputs, outputs, most: float) -> None:
    """Serves a thousand requests with lengths like those of the datasets, first come first served; 15,700 slots."""
    chance = random.Random(0)
    pool = BlockPool(15_700 // 16)
    lengths = [(lognormal(chance, *inputs), lognormal(chance, *outputs)) for _ in range(1000)]
    waiting = [(length, length + more) for length, more in reversed(lengths)]  # tokens now, and in the end
    running: list[tuple[BlockTable, int]] = []
    seen = []
    while waiting or running:
        while waiting and pool.admits(waiting[-1][0]):
            length, end = waiting.pop()
            table = pool.begin([0])
            pool.append(table, length)
            running.append((table, end))
        n = 0
        while n < len(running):
            while pool.needs(running[n][0], 1) > pool.available:
                newest, its_end = running.pop()
                waiting.append((newest.length, its_end))
                pool.free(newest)
                if n == len(running):
                    break
            else:
                table, end = running[n]
                pool.append(table, 1)
                if table.length < end:
                    n += 1
                else:
                    pool.free(table)
                    del running[n]
        seen.append(pool.waste() if running else 0.0)
    pool.check()
    assert 0 < statistics.mean(seen) < most


def test_bad_input() -> None:
    for size in (0, 3, 24):
        with pytest.raises(InvalidInput, match="power of two"):
            BlockPool(4, size)
    with pytest.raises(InvalidInput, match="at least one"):
        BlockPool(0)
    with pytest.raises(InvalidInput, match=r"watermark 1\.5"):
        BlockPool(4, watermark=1.5)
    pool = BlockPool(4, 4)
    table = pool.begin([1])
    pool.append(table, 6)
    pool.seal(table, range(6))
    with pytest.raises(InvalidInput, match="6 tokens, 4 sealed"):
        pool.truncate(table, 3)
    pool.free(table)
    with pytest.raises(InvalidInput, match="freed already"):
        pool.free(table)


def test_a_reserved_table_is_cut() -> None:
    pool = ReservedPool(8, 4, reserve=16)
    table = pool.begin([1])
    pool.append(table, 7)
    with pytest.raises(InvalidInput, match="length 8; a table of 7 tokens"):
        pool.truncate(table, 8)
    pool.truncate(table, 3)
    assert (table.length, pool.used_blocks) == (3, 4)
    pool.check()
    pool.truncate(table, 0)
    assert (table.length, pool.used_blocks) == (0, 0)
    pool.check()
    pool.append(table, 2)
    assert pool.used_blocks == 4
    pool.check()


def test_a_reset_frees_everything() -> None:
    pool = BlockPool(8, 4)
    table = pool.begin(range(9))
    pool.append(table, 9)
    pool.seal(table, range(9))
    pool.fork(table)
    # half-way through giving up
    pool._owners[table.blocks[0]] -= 1
    pool.reset()
    pool.check()
    assert (pool.free_blocks, pool.used_blocks, pool.cached_blocks) == (8, 0, 0)
    assert pool.begin(range(9)).length == 0


@pytest.mark.parametrize(
    "harm",
    [
        lambda pool: pool._free.append(pool._free[-1]),
        lambda pool: pool._owners.__setitem__(0, 7),
        lambda pool: next(iter(pool._tables)).blocks.append(3),
        lambda pool: pool._cached.__setitem__(0, None),
        lambda pool: pool._found.clear(),
    ],
)
def test_the_check_sees_what_is_wrong(harm) -> None:
    pool = BlockPool(8, 4)
    table = pool.begin([1])
    pool.append(table, 6)
    pool.seal(table, range(6))
    pool.check()
    harm(pool)
    with pytest.raises(AssertionError):
        pool.check()
