"""`StatePlan`: which states a step begins with, and which of them it leaves behind.

Layers with states know a sequence only by the state after its last token, so a prefix can begin only where a state was kept. A
state may be large: few are kept, each at the end of a block. So a chunk of a prompt ends where a block does, if it can, and what
follows is the next step's: a prompt takes one step more. States of answers are not kept, since they would soon be all that is.
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
    """

    def __init__(self, pool: BlockPool, rows: StateRows) -> None:
        self.pool, self.rows = pool, rows

    def to_a_border(self, answer: Answer, tokens: int) -> int:
        """Returns how many of an answer's next tokens to read, so that the step ends where a block does, if it can.

        No prefix has the last token of all, so a step that would read it ends before.
        """
        start, size = answer.planned, self.pool.size
        border = (start + tokens - (tokens == answer.unread)) // size * size
        return border - start if self.pool.snapshots is not None and border > start else tokens

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
        if snapshots is not None and table is not None and answer.planned == table.sealed * self.pool.size:
            place = snapshots.keep(table.digest)
            if place is not None:
                copies[self.rows.first_snapshot + place] = answer.slot
        return copies
