"""`StatePlan`: which states a step begins with, and which of them it leaves behind.

Layers with states know a sequence only by the state after its last token, so a prefix can begin only where a state was kept. A
state may be large: few are kept, and each at a *mark* of a prompt, where a block ends:

    its end             the last full block; if the prompt ends with it, the block before, too, since a hit leaves a token to read
    where it branches   the last block that an earlier prompt had, if no state was kept there: a third prompt finds one
    on the way          after each `every` tokens

A step of a prompt ends at its next mark, and what follows is the next step's. States of answers are not kept, since they would
soon be all that is; an answer that was preempted is read again from the last state of its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

from rooftile.engine.requests.request import Answer
from rooftile.kvcache import BlockPool
from rooftile.kvcache.states import StateRows


class StatePlan:
    """The copies of states for the steps of a scheduler; each copy is a source by its target.

    Args:
        pool: the blocks, and which states are kept.
        rows: the rows of states.
        every: the tokens between two marks on the way, rounded up to whole blocks.
    """

    def __init__(self, pool: BlockPool, rows: StateRows, every: int) -> None:
        self.pool, self.rows = pool, rows
        self.every = pool.blocks_of(every) * pool.size

    def to_a_mark(self, answer: Answer, tokens: int) -> int:
        """Returns how many of an answer's next `tokens` tokens to read, so that the step ends at the prompt's next mark."""
        mark = None if self.pool.snapshots is None else self._next_mark(answer, answer.planned)
        return tokens if mark is None else min(tokens, mark - answer.planned)

    def before(self, answer: Answer) -> int:
        """Returns the row of the state that an answer begins with, after the prefix that was found for it."""
        if not answer.planned:
            return self.rows.zeros
        assert answer.table is not None
        assert self.pool.snapshots is not None
        place = self.pool.snapshots.find(answer.table.digest)
        assert place is not None, "a prefix without its state"
        return self.rows.first_snapshot + place

    def after(self, answer: Answer, outputs: Sequence[Answer]) -> dict[int, int]:
        """Returns the copies after a step that reads tokens of a prompt: to forks, and to keep the state for a prefix.

        Args:
            answer: the answer that reads them.
            outputs: the answers that go on from its last token.
        """
        copies = {output.slot: answer.slot for output in outputs if output is not answer}
        snapshots, table = self.pool.snapshots, answer.table
        if snapshots is not None and table is not None and self._next_mark(answer, answer.planned - 1) == answer.planned:
            assert answer.planned == table.sealed * self.pool.size, "a mark that is no block's end"
            place = snapshots.keep(table.digest)
            if place is not None:
                copies[self.rows.first_snapshot + place] = answer.slot
        return copies

    def _next_mark(self, answer: Answer, start: int) -> int | None:
        """Returns the first mark of an answer's prompt after `start` tokens; None if there is no other."""
        size, request = self.pool.size, answer.request
        prompt = len(request.prompt)
        marks = ((prompt - 1) // size * size, prompt // size * size, request.paged_tokens, (start // self.every + 1) * self.every)
        return min((mark for mark in marks if start < mark <= prompt), default=None)
