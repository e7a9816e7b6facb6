"""`Pace`: how long the next draft of an answer may be, by what became of the last ones.

all accepted      twice as long, up to the most
some accepted     one longer than what was accepted, and at least FIRST: where a quotation ends another may begin
none accepted     FIRST tokens; the third time in a row, and later, after a pause of 1, 2, 4, ... tokens without a draft

`SteadyPace` is for drafts whose tokens are accepted or not by chance, as a draft model's are: the length follows the share
that was accepted of late, and no single draft.
"""

from __future__ import annotations

# the longest pause, in tokens
LONGEST_PAUSE = 64
# the least length of a draft, and how many drafts in a row may be refused whole: where a quotation or an edit ends, the next one
# begins a few tokens later, and a pause or a length of 1 would miss its beginning
FIRST, PATIENCE = 4, 2
# for a draft model: the share accepted at first, a token's weight in it, and the drafts in a row that may be refused whole. A
# larger weight follows a draft's luck
HOPED, WEIGHT, STEADY_PATIENCE = 0.7, 0.03, 3


class Pace:
    """The length of one answer's drafts.

    Args:
        most: the most tokens of a draft.

    Example:
        >>> pace = Pace(15)
        >>> pace.note(4, 4, 10), pace.length
        (None, 8)
        >>> for _ in range(3):
        ...     pace.note(8, 0, 11)
        >>> pace.length, pace.pauses(11), pace.pauses(12)
        (4, True, False)
    """

    __slots__ = ("_misses", "_until", "length", "most", "waits")
    patience = PATIENCE

    def __init__(self, most: int) -> None:
        self.most, self.length = most, min(FIRST, most)
        self.waits = False
        """Whether the answer sits a step out, to be drafted for when its last token has come."""
        self._misses = self._until = 0

    def pauses(self, generated: int) -> bool:
        """Whether an answer of this many tokens gets no draft."""
        return generated < self._until

    def note(self, drafted: int, accepted: int, generated: int) -> None:
        """Takes notice of a draft, and of how many of its tokens were accepted; the answer then has `generated` tokens."""
        self.length = min(2 * self.length if accepted == drafted else max(accepted + 1, FIRST), self.most)
        self._pause_after(accepted, generated)

    def _pause_after(self, accepted: int, generated: int) -> None:
        self._misses = 0 if accepted else self._misses + 1
        if self._misses > self.patience:
            self._until = generated + min(1 << (self._misses - self.patience - 1), LONGEST_PAUSE)


class SteadyPace(Pace):
    """The length of one answer's drafts by a draft model: the tokens that a draft may be hoped to get, and one more.

    Example:
        >>> pace = SteadyPace(8)
        >>> pace.length, pace.note(4, 4, 10), pace.length
        (3, None, 4)
    """

    __slots__ = ("_share",)
    patience = STEADY_PATIENCE

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self._share = HOPED
        self._set_length()

    def note(self, drafted: int, accepted: int, generated: int) -> None:
        # tokens behind the first that was refused say nothing
        tried = min(accepted + 1, drafted)
        self._share += min(WEIGHT * tried, 1.0) * (accepted / tried - self._share)
        self._set_length()
        self._pause_after(accepted, generated)

    def _set_length(self) -> None:
        self.length = min(round(1 / max(1 - self._share, 1 / 64)), self.most)
