"""`WindowPool`: a pool whose blocks have a second part, in rows of memory that are given back once a window has passed them.

Keys of a layer with a window are only read by the queries near behind them. Their memory is not a part of each block:
it consists of fewer *rows*, and a block has one of these while a table may still read it:

    held     the window of some table's next query covers the block, or a step writes it
    spare    no window covers it: the row goes on holding the block's keys, and is the next block's as soon as it is needed

A row belongs to a block and not to a table, so forks share rows as they share blocks, copy-on-write copies both, and a prefix
that is found again has its rows, or is cut to where they are complete. Every row is `free`, held or spare.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence

from rooftile.errors import InvalidInput
from rooftile.kvcache.blocks import BlockPool, BlockTable, Copy
from rooftile.runtime.words import answers_words


@answers_words
class WindowPool(BlockPool):
    """A pool of `total` blocks of `block_size` tokens each, with `rows` rows for what only the last `window` tokens read.

    Args:
        total, block_size, watermark, prefixes: as in `BlockPool`.
        rows: the number of rows; `rows_for` says how many never run out.
        window: the keys that a query sees, its own among them.

    Raises:
        InvalidInput: a number makes no sense.

    Example:
        >>> pool = WindowPool(total=8, block_size=4, rows=4, window=4)
        >>> table = pool.begin(range(20))
        >>> pool.append(table, 20), pool.cover(table, 0, 12), pool.new_rows()
        ([], None, {0: 0, 1: 1, 2: 2})
        >>> pool.next_step(), pool.held_rows      # the next query, at 12, sees 9 and after
        (None, 1)
        >>> pool.cover(table, 12, 8)              # blocks 3 and 4 are written
        >>> pool.new_rows()                       # the last free row, and the first given back
        {3: 3, 4: 0}
    """

    def __init__(
        self, total: int, block_size: int = 16, *, rows: int, window: int, watermark: float = 0.01, prefixes: bool = True
    ) -> None:
        if not 1 <= rows <= total:
            raise InvalidInput(f"{rows} rows for a pool of {total} blocks; there must be 1 to {total}")
        if window < 1:
            raise InvalidInput(f"a window of {window} keys; it must have at least one")
        self.rows, self.window = rows, window
        super().__init__(total, block_size, watermark=watermark, prefixes=prefixes)

    @staticmethod
    def rows_for(window: int, block_size: int, *, answers: int, tokens: int) -> int:
        """Returns how many rows are enough for `answers` answers that read at most `tokens` tokens in a step together."""
        return answers * ((window - 1) // block_size + 2) + -(-tokens // block_size)

    def reset(self) -> None:
        super().reset()
        self._free_rows = list(range(self.rows - 1, -1, -1))
        self._row_of: dict[int, int] = {}  # by block
        self._spare: OrderedDict[int, None] = OrderedDict()  # blocks whose row can be taken, the longest spare first
        self._holds: Counter[int] = Counter()  # how many tables hold a block's row
        self._held: dict[BlockTable, range] = {}  # the columns of a table that it holds
        self._next: dict[BlockTable, int] = {}  # the position of a table's next query, after a step that is planned
        self._row_copies: list[Copy] = []
        self._made: dict[int, int] = {}  # rows that `new_rows` has not returned yet, by block

    @property
    def held_rows(self) -> int:
        """How many blocks have, or will have, a row that must not be taken."""
        return len(self._holds)

    def next_step(self) -> None:
        """Gives back what the step before has read for the last time; call it before a step is planned."""
        super().next_step()
        for table, position in self._next.items():
            held = self._held[table]
            self._hold(table, range(self._first(position), held.stop))
        self._next.clear()

    def cover(self, table: BlockTable, start: int, tokens: int) -> None:
        """Makes rows for `tokens` tokens from `start` on, which a step reads.

        The table has these slots already. Rows behind the window stay until the next step: this one's first query sees them.
        """
        columns = range(start // self.size, self.blocks_of(start + tokens))
        # in a step that reads on from where it has read to already, its first query sees more
        first = self._held[table].start if table in self._next else self._first(start)
        self._hold(table, range(first, columns.stop))
        self._next[table] = start + tokens
        for block in table.blocks[columns.start : columns.stop]:
            self._give_row(block)

    def new_rows(self) -> dict[int, int]:
        """Returns, once, the rows that blocks have got since the last call, by block; call it for a step that runs."""
        made, self._made = self._made, {}
        return made

    def row_copies(self) -> list[Copy]:
        """Returns, once, the copies of rows that go with the copies of blocks since the last call."""
        copies, self._row_copies = self._row_copies, []
        return copies

    def begin(self, tokens: Sequence[int], salt: str = "") -> BlockTable:
        table = super().begin(tokens, salt)
        self._hold_window(table)
        return table

    def append(self, table: BlockTable, tokens: int) -> list[Copy]:
        last = table.length // self.size
        copies = super().append(table, tokens)
        for source, target in copies:
            if last not in self._held[table]:
                continue
            self._keep(target)
            if source in self._row_of:
                self._give_row(target)
                self._row_copies.append(Copy(self._row_of[source], self._row_of[target]))
            self._let_go(source)
        return copies

    def fork(self, table: BlockTable) -> BlockTable:
        other = super().fork(table)
        self._hold(other, self._held[table])
        if table in self._next:
            self._next[other] = self._next[table]
        return other

    def truncate(self, table: BlockTable, length: int) -> None:
        held = self._held[table]
        self._hold(table, range(held.start, held.start))
        super().truncate(table, length)
        self._next.pop(table, None)
        self._hold_window(table)

    def free(self, table: BlockTable) -> None:
        if table in self._held:
            self._hold(table, range(0))
            del self._held[table]
            self._next.pop(table, None)
        super().free(table)

    def check(self) -> None:
        super().check()
        rows = [*self._row_of.values(), *self._free_rows]
        assert sorted(rows) == list(range(self.rows)), "a row is lost, or has two owners"
        holds = Counter(block for table, held in self._held.items() for block in table.blocks[held.start : held.stop])
        assert holds == self._holds, "a block counts other holds than tables have"
        assert set(self._held) == self._tables, "a table holds no columns, or none of this pool's does"
        spare = {block for block in self._row_of if block not in self._holds}
        assert spare == set(self._spare), "a row without a holder is not spare, or a held row is"

    def _first(self, position: int) -> int:
        """The first column that the query at a position sees."""
        return max(position - (self.window - 1), 0) // self.size

    def _complete(self, blocks: list[int]) -> int:
        """Returns how many of the first blocks a text can begin with: blocks in the window of the next query have rows."""
        keep, due = len(blocks), -1
        # the cut for a state may be one at which a row is missing
        while keep != due:
            due = super()._complete(blocks[:keep])
            keep = self._with_rows(blocks[:due])
        return keep

    @property
    def _lacks(self) -> str:
        return "keys of a window are gone" if self.snapshots is None else "no state is kept, or keys of a window are gone,"

    def _with_rows(self, blocks: list[int]) -> int:
        keep = run = 0
        for n, block in enumerate(blocks, 1):
            run = run + 1 if block in self._row_of else 0
            if run >= n - self._first(n * self.size):
                keep = n
        return keep

    def _hold_window(self, table: BlockTable) -> None:
        self._hold(table, range(self._first(table.length), self.blocks_of(table.length)))

    def _hold(self, table: BlockTable, columns: range) -> None:
        """Lets a table hold these columns and no others."""
        before = self._held.get(table, range(0))
        for n in _without(columns, before):
            self._keep(table.blocks[n])
        for n in _without(before, columns):
            self._let_go(table.blocks[n])
        self._held[table] = columns

    def _keep(self, block: int) -> None:
        self._holds[block] += 1
        self._spare.pop(block, None)

    def _let_go(self, block: int) -> None:
        self._holds[block] -= 1
        if not self._holds[block]:
            del self._holds[block]
            if block in self._row_of:
                self._spare[block] = None

    def _give_row(self, block: int) -> None:
        """Gives a block a row, unless it has one: of a block that was somebody else's, it is as good as another."""
        if block not in self._row_of:
            self._made[block] = self._row_of[block] = self._take_row()

    def _take_row(self) -> int:
        """Takes a row: a free one, or else the row of the block which has been spare for the longest time."""
        if self._free_rows:
            return self._free_rows.pop()
        assert self._spare, f"all {self.rows} rows are held; rows_for says how many are enough"
        block, _ = self._spare.popitem(last=False)
        return self._row_of.pop(block)


def _without(some: range, others: range) -> Iterator[int]:
    """Yields the numbers of one range that are not in another, without looking at the common ones."""
    yield from range(some.start, min(some.stop, others.start))
    yield from range(max(some.start, others.stop, min(some.stop, others.start)), some.stop)
