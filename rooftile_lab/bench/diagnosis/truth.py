"""The main cause of a program's time by experiments that no diagnosis makes: whole runs of the program, changed by hand.

without     a part of it is left out: the loader, the environment, the exchange between processes
tiny        every size is as small as it can be, and the number of operators stays
arithmetic  the processor's matrix products are made slower or faster by a known factor, by the libraries' environment
counters    on a GPU with Nsight Compute, in place of the last two: what each kernel of a step kept busy; no kernel is overhead
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

CAUSES = ("memory", "compute", "overhead", "host", "input", "communication")
UNCLEAR = "unclear"
# the least share of a main cause, and its least ratio to the next cause's share
LEAST, AHEAD = 0.4, 1.3
# a program cannot take longer without a part of it: the machine was too busy
BUSIER = 1.15
# the host holds a device up if it alone takes so much of the time
HOST_BOUND = 0.85
# products that are slower by less than this say nothing
SLOWER = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """The times of a step of one program, in µs. An experiment that was not made is None.

    `arithmetic_us` is the time with products that take `factor` times as long; `part` is what leaving out a part would prove.
    `overlaps`: the host asks a device for work ahead of time, so that its own time shows only where it is nearly all of it.
    `counted_us` is the kernels' time by what counters saw busy.
    """

    whole_us: float
    tiny_us: float | None = None
    part: str = ""
    without_us: float | None = None
    arithmetic_us: float | None = None
    factor: float = 1.0
    overlaps: bool = False
    counted_us: Mapping[str, float] | None = None

    @property
    def shares(self) -> dict[str, float]:
        """The shares of the step by cause, which add up to 1; what no experiment explains is memory.

        Without the experiment on arithmetic the rest cannot be divided into compute and memory: it counts as unclear.
        """
        rest_us = self.whole_us if self.without_us is None else min(self.without_us, self.whole_us)
        if self.counted_us is not None:
            return self._counted_shares(self.counted_us, rest_us)
        assert self.tiny_us is not None
        overhead_us = 0.0 if self.overlaps and self.tiny_us < HOST_BOUND * rest_us else min(self.tiny_us, rest_us)
        found = {"overhead": overhead_us}
        if self.part:
            found[self.part] = self.whole_us - rest_us
        left_us = rest_us - overhead_us
        if self.arithmetic_us is None or 1 / SLOWER < self.factor < SLOWER:
            found[UNCLEAR] = left_us
        else:
            grown_us = (self.arithmetic_us - rest_us) / (self.factor - 1)
            found["compute"] = min(max(grown_us, 0.0), left_us)
            found["memory"] = left_us - found["compute"]
        return {cause: us / self.whole_us for cause, us in found.items()}

    def _counted_shares(self, counted_us: Mapping[str, float], rest_us: float) -> dict[str, float]:
        device_us = sum(counted_us.values())
        # under the counters, kernels may be a little slower
        each = min(1.0, rest_us / device_us)
        found = {cause: us * each for cause, us in counted_us.items()} | {"overhead": rest_us - device_us * each}
        if self.part:
            found[self.part] = self.whole_us - rest_us
        return {cause: us / self.whole_us for cause, us in found.items()}

    @property
    def cause(self) -> str:
        """The main cause, with 40 % of the step or more and 1.3 times the next one's share; "unclear" without one.

        It is unclear, too, where the step took 1.15 times as long without a part of it.
        """
        if self.without_us is not None and self.without_us > BUSIER * self.whole_us:
            return UNCLEAR
        ranked = sorted(((share, cause) for cause, share in self.shares.items()), reverse=True)
        (first, cause), second = ranked[0], ranked[1][0]
        return cause if first >= LEAST and first >= AHEAD * second else UNCLEAR


def agrees(verdict: str | None, truth: str) -> bool | None:
    """Returns whether a step's verdict is the truth; None where that is unclear.

    A diagnosis says "host" of everything that the main process does or waits for between operators, input among it.
    """
    if truth == UNCLEAR:
        return None
    return verdict == truth or (verdict == "host" and truth == "input")
