"""`Drafter`: another model that guesses, for all answers of a step together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from rooftile.engine.requests.request import Answer


class Drafter(Protocol):
    """Guesses how answers go on. It reads what it needs of their tokens into the blocks that they have."""

    def can(self, answer: Answer, count: int) -> bool:
        """Tells whether `count` tokens may be guessed behind the last one, which may have yet to come."""

    def guess(
        self, asked: Sequence[tuple[Answer, int]], entries: Mapping[tuple[int, int], int]
    ) -> dict[Answer, list[int]]:  # fmt: skip
        """Returns the tokens that may follow. An answer is left out whose tokens are too many to be read in this step.

        Args:
            asked: answers whose last token is known, with room for the tokens in their tables; how many tokens to guess of each.
            entries: new entries of the block tables on the device: a block by (slot, column).
        """

    def note(self, answer: Answer, drafted: int, accepted: int) -> None:
        """Takes notice of how many guesses were accepted; the answer has not got them yet."""
