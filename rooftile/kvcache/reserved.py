"""`ReservedPool`: the allocator that paging replaced. Each sequence reserves room for the longest one, and shares nothing.

It is here for comparison, with the same kernels and the same scheduler. A sequence's blocks need not be contiguous: reserving
costs memory, not speed.
"""

from __future__ import annotations

from rooftile.errors import InvalidInput
from rooftile.kvcache.blocks import BlockPool, BlockTable, Copy
from rooftile.runtime.words import answers_words


@answers_words
class ReservedPool(BlockPool):
    """A pool of `total` blocks of `block_size` tokens each, in which a sequence takes the blocks of `reserve` tokens at once.

    A fork reads its parent's blocks until it writes; then all of them are copied.

    Example:
        >>> pool = ReservedPool(total=8, block_size=4, reserve=16)
        >>> table = pool.begin([1, 2, 3])
        >>> pool.append(table, 3), pool.used_blocks, round(pool.waste(), 2)
        ([], 4, 0.81)
    """

    shares = False

    def __init__(self, total: int, block_size: int = 16, *, reserve: int, watermark: float = 0.01) -> None:
        super().__init__(total, block_size, watermark=watermark, prefixes=False)
        self.each = self.blocks_of(reserve)
        if self.each > total:
            raise InvalidInput(
                f"a sequence of {reserve:,} tokens takes {self.each:,} blocks of {block_size}; the pool has {total:,}: "
                "make it larger"
            )

    def needed_by(self, prompt: int, more: int, answers: int) -> int:
        return answers * self.each

    def needs(self, table: BlockTable, tokens: int) -> int:
        if tokens <= 0:
            return 0
        return 0 if table.blocks and all(self._owners[block] == 1 for block in table.blocks) else self.each

    def append(self, table: BlockTable, tokens: int) -> list[Copy]:
        copies: list[Copy] = []
        if self.needs(table, tokens):
            self._ask_for(self.each)
            blocks = [self._take() for _ in range(self.each)]
            written = self.blocks_of(table.length)
            copies = [Copy(*pair) for pair in zip(table.blocks[:written], blocks, strict=False)]
            self._give_up(table.blocks)
            table.blocks = blocks
        table.length += tokens
        return copies

    def _due(self, length: int) -> int:
        return self.each if length else 0
