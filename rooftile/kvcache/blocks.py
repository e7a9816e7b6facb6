"""`BlockPool`: which blocks of a KV cache belong to which sequence, in plain Python without a tensor.

A block holds the keys and values of `size` consecutive tokens. A sequence's `BlockTable` lists its blocks in order and gets one
more when the last is full, so at most size - 1 slots per sequence are allocated and empty. Sequences that begin alike share
blocks:

    fork      makes a table with the same blocks. An owner that writes into a shared block gets a copy of it first
              (copy-on-write); the last owner writes in place.
    prefix    finds full blocks again by their contents (prefix cache): by a keyed hash of their tokens and all tokens before
              them; on a hit the tokens themselves are compared. Blocks without an owner can still be found until their room is
              needed; the least recently used go first.

Every block is in one of three states: `free`, `used` (in some table), or `cached` (in no table, but a prefix would find it).

Kwon et al., PagedAttention, arXiv:2309.06180.
"""

from __future__ import annotations

import secrets
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from rooftile.drawing import notebook as shown
from rooftile.errors import InvalidInput
from rooftile.kvcache.states import Snapshots
from rooftile.runtime.words import answers_words


class OutOfBlocks(RuntimeError):
    """The pool has fewer blocks left than were asked for; nothing has changed."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"{needed} more blocks needed, {available} of the pool are left: free tables, or make the pool larger")
        self.needed = needed
        self.available = available


class Copy(NamedTuple):
    """A copy of one block's contents to another, due before the next write."""

    source: int
    target: int


class BlockTable:
    """The blocks of one sequence, in order. Its `BlockPool` makes, grows and frees it."""

    __slots__ = ("blocks", "digest", "found", "length", "sealed")

    def __init__(self, blocks: list[int], length: int, digest: bytes, sealed: int) -> None:
        self.blocks = blocks
        self.length = length
        """How many tokens have a slot."""
        self.digest = digest
        """The hash of the tokens in the first `sealed` blocks."""
        self.sealed = sealed
        self.found = 0
        """How many of its first tokens were in cached blocks when it began; more than its length was, if it could not begin
        there: no state was kept, or keys of a window were gone."""

    def __repr__(self) -> str:
        return f"BlockTable({self.length} tokens in {self.blocks})"


class _Contents(NamedTuple):
    """The contents of a sealed block: its hash, the hash of all blocks before it, and its tokens."""

    digest: bytes
    before: bytes
    tokens: bytes


@answers_words
class BlockPool:
    """A pool of `total` blocks of `block_size` tokens each.

    Args:
        total: the number of blocks.
        block_size: tokens per block, a power of two.
        watermark: the share of the blocks that `admits` keeps free for running sequences.
        prefixes: whether full blocks can be found again by their contents.

    Raises:
        InvalidInput: a number makes no sense.

    Example:
        >>> pool = BlockPool(total=8, block_size=4)
        >>> table = pool.begin([1, 2, 3, 4, 5])
        >>> pool.append(table, 5)
        []
        >>> table
        BlockTable(5 tokens in [0, 1])
        >>> other = pool.fork(table)
        >>> pool.append(other, 1)                     # the second block is shared: it is copied before it is written
        [Copy(source=1, target=2)]
        >>> pool.free(table), pool.free(other)
        (None, None)
        >>> pool.check()
    """

    shares = True
    """Whether forked tables go on sharing the blocks that they have in common."""

    snapshots: Snapshots | None = None
    """The states that are kept, where layers have states: a prefix then begins where one of them is."""

    def __init__(self, total: int, block_size: int = 16, *, watermark: float = 0.01, prefixes: bool = True) -> None:
        if total < 1:
            raise InvalidInput(f"a pool of {total} blocks; it needs at least one")
        if block_size < 1 or block_size & (block_size - 1):
            raise InvalidInput(f"blocks of {block_size} tokens; their size must be a power of two")
        if not 0 <= watermark < 1:
            raise InvalidInput(f"watermark {watermark}; it must be at least 0 and less than 1")
        self.total = total
        self.size = block_size
        self.watermark = int(total * watermark)
        """How many blocks `admits` keeps free."""
        self._prefixes = prefixes
        self.takes = [0] * total
        """How often each block was taken: it holds something else since then."""
        # the key is secret, so no user can make two prefixes collide
        self._hash = blake2b(digest_size=16, key=secrets.token_bytes(16))
        self.reset()

    def reset(self) -> None:
        """Forgets all tables and the prefix cache, so every block is free; tables from before must not be used any more.

        It is for bookkeeping that was interrupted half-way, which `free` cannot repair.
        """
        # blocks are taken from the end, so the lowest number is used first
        self._free = list(range(self.total - 1, -1, -1))
        self._owners = [0] * self.total
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._contents: dict[int, _Contents] = {}
        self._found: dict[bytes, int] = {}
        self._tables: set[BlockTable] = set()
        if self.snapshots is not None:
            self.snapshots.reset()

    def __repr__(self) -> str:
        held = f"{self.used_blocks:,} used, {self.cached_blocks:,} cached, {self.free_blocks:,} free"
        return f"{type(self).__name__}({self.total:,} blocks of {self.size} tokens: {held})"

    def _repr_html_(self) -> str:
        """Draws used blocks as a bar, and lists the counts."""
        bar = shown.spans([[(0.0, self.used_blocks / self.total)]], side=192, height=18)
        counts = (("used", self.used_blocks), ("cached", self.cached_blocks), ("free", self.free_blocks))
        rows = ((f"{name} blocks", f"{n:,}", f"{n / self.total:.0%}") for name, n in counts)
        return shown.card(shown.sentence(f"{self!r}"), bar, shown.table((), rows))

    @property
    def free_blocks(self) -> int:
        """How many blocks hold nothing."""
        return len(self._free)

    @property
    def cached_blocks(self) -> int:
        """How many blocks are in no table but would be found by a prefix."""
        return len(self._cached)

    @property
    def used_blocks(self) -> int:
        """How many blocks are in some table."""
        return self.total - len(self._free) - len(self._cached)

    @property
    def available(self) -> int:
        """How many blocks can be taken: free and cached ones."""
        return len(self._free) + len(self._cached)

    def blocks_of(self, tokens: int) -> int:
        """Returns how many blocks hold this many tokens."""
        return -(-tokens // self.size)

    def needed_by(self, prompt: int, more: int, answers: int) -> int:
        """Returns how many blocks a request takes; the answers share the prompt's full blocks.

        Args:
            prompt: tokens of the prompt.
            more: tokens of each answer.
            answers: the number of answers.
        """
        whole, shared = self.blocks_of(prompt + more), prompt // self.size
        return whole + (answers - 1) * (whole - shared)

    def admits(self, tokens: int) -> bool:
        """Tells whether a new sequence of this many tokens fits, with `watermark` blocks to spare for running ones."""
        return self.available - self.blocks_of(tokens) >= self.watermark

    def begin(self, tokens: Sequence[int], salt: str = "") -> BlockTable:
        """Makes the table of a new sequence, with the longest prefix of its tokens that is cached.

        The table's `length` is the number of tokens in that prefix. It never covers the last token, since a model computes at
        least one. A prefix is found only under the `salt` that it was stored with.
        """
        table = BlockTable([], 0, self._salted(salt), 0)
        for start in range(0, (len(tokens) - 1) // self.size * self.size if self._prefixes else 0, self.size):
            part = array("q", tokens[start : start + self.size]).tobytes()
            digest = self._digest(table.digest, part)
            block = self._found.get(digest)
            if block is None or self._contents[block] != (digest, table.digest, part):
                break
            if self._owners[block] == 0:
                del self._cached[block]
            self._owners[block] += 1
            table.blocks.append(block)
            table.digest = digest
        table.found = len(table.blocks) * self.size
        keep = self._complete(table.blocks)
        if keep < len(table.blocks):
            self._give_up(table.blocks[keep:])
            del table.blocks[keep:]
            table.digest = self._contents[table.blocks[-1]].digest if keep else self._salted(salt)
        table.sealed = keep
        table.length = keep * self.size
        self._tables.add(table)
        return table

    def hit_in_words(self, table: BlockTable, prompt: int) -> str:
        """Says how many of a prompt's tokens a new table begins with, and why with no more."""
        begun, found = table.length, table.found
        if found > begun:
            why = f"pages of {found:,} are there, {self._lacks} between {begun:,} and {found:,}"
        elif prompt - found > self.size:
            why = f"no page is there after {found:,}"
        else:
            why = f"a page has {self.size:,}, and the last token is always read"
        return f"{begun:,} of {prompt:,} tokens hit: {why}"

    @property
    def _lacks(self) -> str:
        """Says why a table may not begin after a block that is there."""
        return "no state is kept"

    def needs(self, table: BlockTable, tokens: int) -> int:
        """Returns how many blocks `append` would take."""
        blocks = self.blocks_of(table.length + tokens) - len(table.blocks)
        return blocks + (tokens > 0 and table.length % self.size != 0 and self._owners[table.blocks[-1]] > 1)

    def append(self, table: BlockTable, tokens: int) -> list[Copy]:
        """Gives slots to this many more tokens; returns the copies to make, in order, before anything is written.

        Raises:
            OutOfBlocks: there are not enough blocks; nothing has changed.
        """
        blocks = table.blocks
        copies: list[Copy] = []
        length = table.length + tokens
        more = -(-length // self.size) - len(blocks)
        if tokens and table.length % self.size:
            last = blocks[-1]
            if self._owners[last] > 1:
                self._ask_for(more + 1)
                target = self._take()
                copies.append(Copy(last, target))
                self._owners[last] -= 1
                blocks[-1] = target
            elif last in self._contents:
                # the block was full once, and will now hold something else
                self._forget(last)
        if more > 0:
            self._ask_for(more)
            blocks.extend(self._take() for _ in range(more))
        table.length = length
        return copies

    def seal(self, table: BlockTable, tokens: Sequence[int], length: int | None = None) -> None:
        """Enters the table's full blocks, which the model has written, into the prefix cache.

        Args:
            table: the sequence's table.
            tokens: the tokens of the whole sequence.
            length: how many of them the model has written; None for all of them. Each step calls this, and a copy of the first
                tokens of a long sequence would take longer than a step on a GPU.
        """
        if not self._prefixes:
            return
        full = min(table.length, len(tokens), len(tokens) if length is None else length) // self.size
        if table.sealed == full:
            return
        words = array("q", tokens[table.sealed * self.size : full * self.size]).tobytes()
        width = 8 * self.size
        for n, block in enumerate(table.blocks[table.sealed : full]):
            part = words[n * width : (n + 1) * width]
            digest = self._digest(table.digest, part)
            # if another sequence has stored the same tokens meanwhile, its block stays the one that is found
            if digest not in self._found and block not in self._contents:
                self._found[digest] = block
                self._contents[block] = _Contents(digest, table.digest, part)
            table.digest = digest
            table.sealed += 1

    def fork(self, table: BlockTable) -> BlockTable:
        """Makes another table with the same blocks."""
        for block in table.blocks:
            self._owners[block] += 1
        other = BlockTable(table.blocks.copy(), table.length, table.digest, table.sealed)
        self._tables.add(other)
        return other

    def truncate(self, table: BlockTable, length: int) -> None:
        """Gives up the slots past `length` tokens, which must not cut into a sealed block.

        Raises:
            InvalidInput: `length` is inside a sealed block, or larger than the table's.
        """
        if not table.sealed * self.size <= length <= table.length:
            raise InvalidInput(
                f"length {length}; a table of {table.length} tokens, {table.sealed * self.size} sealed, is cut between them"
            )
        keep = self._due(length)
        self._give_up(table.blocks[keep:])
        del table.blocks[keep:]
        table.length = length

    def drop_first(self, table: BlockTable, blocks: int) -> None:
        """Gives up a table's first blocks, which are full and not sealed: its tokens are numbered from the next one then."""
        assert not table.sealed, f"{table} has sealed blocks"
        assert blocks * self.size <= table.length, f"{table} has not {blocks} full blocks to give up"
        self._give_up(table.blocks[:blocks])
        del table.blocks[:blocks]
        table.length -= blocks * self.size

    def free(self, table: BlockTable) -> None:
        """Gives up all blocks of a table; sealed ones stay in the prefix cache until their room is needed.

        Raises:
            InvalidInput: the table was freed already, or belongs to another pool.
        """
        if table not in self._tables:
            raise InvalidInput(f"{table} is none of this pool's: it was freed already, or another pool has made it")
        self._tables.remove(table)
        self._give_up(table.blocks)
        table.blocks = []
        table.length = table.sealed = 0

    def next_step(self) -> None:
        """Tells the pool that a step is about to be planned; see `WindowPool` and `Snapshots`."""
        if self.snapshots is not None:
            self.snapshots.next_step()

    def cover(self, table: BlockTable, start: int, tokens: int) -> None:
        """Makes rows for tokens that a step reads; only a `WindowPool` has rows."""

    def new_rows(self) -> dict[int, int]:
        """Returns the new rows of blocks."""
        return {}

    def row_copies(self) -> list[Copy]:
        """Returns the copies of rows that go with the copies of blocks."""
        return []

    def forget_prefixes(self) -> None:
        """Empties the prefix cache, for instance because the model has changed."""
        self._found.clear()
        self._contents.clear()
        self._free.extend(self._cached)
        self._cached.clear()
        if self.snapshots is not None:
            self.snapshots.reset()

    def live_tokens(self) -> int:
        """Counts the tokens in tables; tokens in a shared block count once."""
        filled: dict[int, int] = {}
        for table in self._tables:
            left = table.length
            for block in table.blocks:
                filled[block] = max(filled.get(block, 0), min(left, self.size))
                left -= self.size
        return sum(filled.values())

    def waste(self) -> float:
        """Returns the share of used blocks' slots that hold no token."""
        slots = self.used_blocks * self.size
        return 1 - self.live_tokens() / slots if slots else 0.0

    def saved(self) -> float:
        """Returns the share of blocks that sharing saves, relative to tables that share nothing."""
        listed = sum(len(table.blocks) for table in self._tables)
        return 1 - self.used_blocks / listed if listed else 0.0

    def check(self) -> None:
        """Raises AssertionError, with the reason, if the bookkeeping is inconsistent."""
        owners = Counter(block for table in self._tables for block in table.blocks)
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        for table in self._tables:
            assert len(set(table.blocks)) == len(table.blocks), f"{table} has a block twice"
            assert len(table.blocks) == self._due(table.length), f"{table} has not the blocks that its length asks for"
            assert table.sealed * self.size <= table.length, f"{table} has {table.sealed} blocks sealed"
        for block, count in enumerate(self._owners):
            assert owners[block] == count, f"block {block} counts {count} owners and has {owners[block]}"
            states = (block in free) + (count > 0) + (block in self._cached)
            assert states == 1, f"block {block} is in {states} of the states free, used and cached"
            assert block not in self._cached or block in self._contents, f"block {block} is cached and holds nothing known"
            assert block not in free or block not in self._contents, f"block {block} is free and can be found"
        assert self.free_blocks + self.used_blocks + self.cached_blocks == self.total
        assert {block: known.digest for block, known in self._contents.items()} == {b: d for d, b in self._found.items()}
        if self.snapshots is not None:
            self.snapshots.check()

    def _due(self, length: int) -> int:
        """Returns how many blocks a table of `length` tokens should have."""
        return self.blocks_of(length)

    def _ask_for(self, blocks: int) -> None:
        if blocks > self.available:
            raise OutOfBlocks(blocks, self.available)

    def _take(self) -> int:
        """Takes a block for one owner: a free one, or else the least recently used of the cached ones."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        self._owners[block] = 1
        self.takes[block] += 1
        return block

    def _give_up(self, blocks: list[int]) -> None:
        # last block first, so that it is evicted first: a block is useless to the prefix cache without those before it
        for block in reversed(blocks):
            self._owners[block] -= 1
            if self._owners[block] == 0:
                if block in self._contents:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def _forget(self, block: int) -> None:
        del self._found[self._contents.pop(block).digest]

    def _complete(self, blocks: list[int]) -> int:
        """Returns how many of the first blocks a text can begin with: those up to the last one after which a state was kept."""
        if self.snapshots is None:
            return len(blocks)
        return next((n for n in range(len(blocks), 0, -1) if self.snapshots.has(self._contents[blocks[n - 1]].digest)), 0)

    def _salted(self, salt: str) -> bytes:
        """Returns the hash before the first token."""
        # a salt may be any string, even one with half of a surrogate pair in it
        return self._digest(salt.encode(errors="surrogatepass"), b"")

    def _digest(self, before: bytes, tokens: bytes) -> bytes:
        """Hashes tokens together with the hash of all tokens before them, so sequences that differ anywhere differ in it."""
        keyed = self._hash.copy()
        keyed.update(before + tokens)
        return keyed.digest()
