"""The one rule of the budget: nothing begins that is not expected to end in time.

What a run takes is known from the step or from a first run, so a run that is under way when the time ends is at most one.
"""

from __future__ import annotations

import math
import time

from rooftile.errors import Unsupported

# an experiment that has begun may end late if its runs take no more than this together, as runs of most operators do
SHORT_S = 0.2
# in seconds; tests have a clock of their own here
clock = time.perf_counter


class Deadline:
    """The end of the time that experiments may take.

    Args:
        seconds: from now.

    Example:
        >>> Deadline(60.0).allows(5.0), Deadline(60.0).but(50.0).allows(20.0)
        (True, False)
    """

    def __init__(self, seconds: float = math.inf) -> None:
        self._end = clock() + seconds

    @property
    def left_s(self) -> float:
        """The seconds that are left; negative after the end."""
        return self._end - clock()

    def allows(self, expected_s: float) -> bool:
        """Returns whether something that is expected to take so long ends in time; nothing does after the end."""
        return 0.0 < self.left_s >= expected_s

    def check(self, expected_s: float = 0.0) -> None:
        """Raises Unsupported if something that is expected to take so long would end too late."""
        if not self.allows(expected_s):
            raise Unsupported("the budget ended before it")

    def allows_rest(self, expected_s: float) -> bool:
        """Returns whether the rest of something that has begun ends in time, or is short."""
        return expected_s <= SHORT_S or self.allows(expected_s)

    def check_rest(self, expected_s: float) -> None:
        """Raises Unsupported if the rest of something that has begun would end too late, and is not short."""
        if not self.allows_rest(expected_s):
            self.check(expected_s)

    def within(self, seconds: float) -> Deadline:
        """Returns the deadline that comes after these seconds, or this one if it is earlier."""
        return Deadline(min(seconds, self.left_s))

    def but(self, seconds: float) -> Deadline:
        """Returns a deadline that is earlier by some seconds, which it keeps for something else."""
        return Deadline(self.left_s - seconds)
