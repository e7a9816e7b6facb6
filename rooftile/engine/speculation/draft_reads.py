"""`DraftReads`: how far a draft model has read the tokens of each block."""

from __future__ import annotations

from itertools import count

from rooftile.engine.requests.request import Answer
from rooftile.kvcache import BlockPool


class DraftReads:
    """The books of what a draft model has read.

    Its keys lie in the blocks of the larger model, and it reads a token when it drafts behind it, which may be never. So a
    block that another answer shares, or finds in the prefix cache, has the draft's keys of its first tokens, or of none.

    Args:
        pool: the blocks.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._read = [0] * pool.total
        # what `BlockPool.takes` was when it was read
        self._taken = [0] * pool.total

    def known(self, answer: Answer, total: int) -> int:
        """Returns how many of an answer's first `total` tokens need not be read again; the last one is always left."""
        assert answer.table is not None
        blocks, size, read = answer.table.blocks, self._pool.size, answer.read_by_draft
        for place in count(read // size):
            tokens = self._tokens(blocks[place]) if place < len(blocks) else 0
            read = max(read, place * size + tokens)
            if tokens < size:
                break
        answer.read_by_draft = read
        return min(read, total - 1)

    def note(self, answer: Answer, length: int) -> None:
        """Takes notice that the first `length` tokens of an answer are read, and what was behind them is not."""
        if answer.table is None:
            return
        blocks, size = answer.table.blocks, self._pool.size
        for place in range(min(answer.read_by_draft, length) // size, min(-(-length // size), len(blocks))):
            block = blocks[place]
            self._read[block], self._taken[block] = min(size, length - place * size), self._pool.takes[block]
        answer.read_by_draft = length

    def _tokens(self, block: int) -> int:
        return self._read[block] if self._taken[block] == self._pool.takes[block] else 0
