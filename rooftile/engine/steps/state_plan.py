"""`StatePlan`: which states a step begins with, and which of them it leaves behind.

Layers with states know a sequence only by the state after its last token, so a prefix can begin only where a state was kept. A
state may be large: few are kept, and each at a *mark* of a prompt, where a block ends:

    its end             the last full block; if the prompt ends with it, the block before, too, since a hit leaves a token to read
    where it branches   the last block that an earlier prompt had, if no state was kept there: a third prompt finds one
    on the way          after 256, 512, 1,024, ... tokens, and after each `every`: a second prompt finds one behind more than half
                        of the tokens that both begin with

Marks cut no step: a recurrence reads a chunk in parts, from mark to mark (see `Rounds`). States of answers are not kept, since
they would soon be all that is; an answer that was preempted is read again from the last state of its prompt.
"""

from __future__ import annotations

from rooftile.engine.requests.request import Answer
from rooftile.kvcache import BlockPool
from rooftile.kvcache.states import StateRows

# the first mark on the way: to read fewer tokens takes a GPU about as long as to read the weights, which it reads in any case
FIRST = 256


class StatePlan:
    """The copies of states for the steps of a scheduler; each copy is a source by its target.

    Args:
        pool: the blocks, and which states are kept.
        rows: the rows of states.
        every: the most tokens between two marks on the way, rounded up to whole blocks.
    """

    def __init__(self, pool: BlockPool, rows: StateRows, every: int) -> None:
        self.pool, self.rows = pool, rows
        self.every = pool.blocks_of(every) * pool.size

    def before(self, answer: Answer) -> int:
        """Returns the row of the state that an answer begins with, after the prefix that was found for it."""
        if not answer.planned:
            return self.rows.zeros
        assert answer.table is not None
        assert self.pool.snapshots is not None
        place = self.pool.snapshots.find(answer.table.digest)
        assert place is not None, "a prefix without its state"
        return self.rows.first_snapshot + place

    def keep(self, answer: Answer, start: int) -> dict[int, int]:
        """Finds room for the states at the marks that an answer's next step reads, from `start` to `answer.planned` tokens.

        Returns the rows to keep them in, by the number of tokens before the mark, rising. Blocks up to the last mark are sealed.
        """
        snapshots, table, size, prompt = self.pool.snapshots, answer.table, self.pool.size, len(answer.request.prompt)
        if snapshots is None or answer.request.params.prompt_logprobs is not None:
            # a request that asks for logprobs of its prompt shares no prefix
            return {}
        assert table is not None
        # likely to be asked for, and others, which are bets
        likely = {(prompt - 1) // size * size, prompt // size * size, answer.request.paged_tokens}
        found: dict[int, int] = {}
        stop = min(prompt, answer.planned)
        for mark in sorted({*likely, *self._on_the_way(start, stop)}):
            if not start < mark <= stop:
                continue
            self.pool.seal(table, answer.ids[:mark])
            assert mark == table.sealed * size, "a mark that is no block's end"
            place = snapshots.keep(table.digest, bet=mark not in likely)
            if place is not None:
                found[mark] = self.rows.first_snapshot + place
        return found

    def _on_the_way(self, start: int, stop: int) -> set[int]:
        """Returns the marks on the way of a prompt after `start` tokens, up to `stop`."""
        marks = set(range((start // self.every + 1) * self.every, stop + 1, self.every))
        mark = self.pool.blocks_of(FIRST) * self.pool.size
        while mark <= min(stop, self.every):
            marks.add(mark)
            mark *= 2
        return marks
