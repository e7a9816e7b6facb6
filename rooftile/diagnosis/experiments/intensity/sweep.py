"""E4 of a pass over memory: more multiply-adds per element, and the time that they add.

r counts added arithmetic in units of T0, the operator's own time: r = 1/2 adds what alone, in the cache, takes half of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

from rooftile.diagnosis.experiments.call import RepeatableCall
from rooftile.diagnosis.experiments.deadline import Deadline
from rooftile.diagnosis.experiments.intensity.ladder import Ladder
from rooftile.diagnosis.experiments.smaller.axes import CallAxis, piece
from rooftile.diagnosis.experiments.timing import Timer, error, interleaved, low
from rooftile.errors import Unsupported

# in the order in which they are compiled: where the budget ends, the slope is there before the knee
STEPS = (1 / 2, 1 / 4, 1.0, 2.0, 1 / 8, 4.0)
MOST = 512  # multiply-adds
# the slope of the first part, where memory can still hide the added arithmetic
SLOPE_UP_TO = 0.75
LEAST_RISE = 1.05
PLANNED_ROUNDS = 5
# seconds for the time of one multiply-add, and for the times of the rungs
STEP_S, TIMED_S = 1.0, 2.0
# the operator and its first rung may differ by so much
SAME = 2.0


@dataclass(frozen=True, slots=True)
class Sweep:
    """Times by added arithmetic, both in µs of the whole call; the first is without."""

    added_us: tuple[float, ...]
    time_us: tuple[float, ...]
    spread_us: float
    added_flops: tuple[float, ...]

    @property
    def slope(self) -> float | None:
        """The least-squares slope of time over added arithmetic, up to three quarters of the time without; None for one time.

        Where the first step is larger than that, as twice as many rows of a product are, it is the slope of this step.
        """
        points = list(zip(self.added_us, self.time_us, strict=True))
        points = points[:2] + [(a, t) for a, t in points[2:] if a <= SLOPE_UP_TO * self.time_us[0]]
        if len(points) < 2:
            return None
        mean_a, mean_t = (sum(values) / len(points) for values in zip(*points, strict=True))
        square = sum((a - mean_a) ** 2 for a, _ in points)
        return sum((a - mean_a) * (t - mean_t) for a, t in points) / square if square else None

    def knee_flops(self) -> float | None:
        """The added FLOPs at which the flat part meets the rising one; None if the last time is not clearly above the first.

        Far beyond the knee time rises with the added arithmetic: the line through the last two points meets the first time there.
        """
        base, last = self.time_us[0], self.time_us[-1]
        if len(self.time_us) < 3 or last < 1.5 * base:
            return None
        rise = (last - self.time_us[-2]) / (self.added_us[-1] - self.added_us[-2])
        knee_us = self.added_us[-1] - (last - base) / rise if rise > 0 else 0.0
        return self.added_flops[-1] * max(knee_us, 0.0) / self.added_us[-1]


def sweep(
    ladder: Ladder, call: RepeatableCall, axes: list[CallAxis], timer: Timer, time_us: float,
    deadline: Deadline, *,
    steps: Sequence[float] = STEPS, counts: Sequence[int] = (),
) -> Sweep:  # fmt: skip
    """Returns times with more and more multiply-adds.

    Args:
        ladder: of the call.
        call: the operator.
        axes: along which it can be cut to what fits the cache.
        timer: of its device.
        time_us: T0, the unit of what is added.
        deadline: for compiling and timing; the rungs that it has no time for are left out.
        steps: what the rungs add, in units of T0, the most important first.
        counts: the multiply-adds of the rungs, instead of `steps`.

    Raises Unsupported where there is no ladder, or no time for one.
    """
    small = piece(call, axes, min(1.0, timer.cache_bytes / max(call.bytes(), 1)))
    in_cache = Ladder(small.call, deadline)
    step_us = _step_us(in_cache, timer, deadline) / small.share
    own = ladder.rung(0)
    _check_same(median(timer.once(own, cold=True) for _ in range(3)), time_us)
    threads = timer.threads(ladder.rung(timer.tried[1]))
    wanted = [step * time_us * threads / step_us for step in steps]
    counts = counts or tuple(dict.fromkeys(2 ** round(math.log2(n)) for n in wanted if 0.7 <= n <= MOST * 1.4))
    if not counts:
        raise Unsupported("no number of multiply-adds from 1 to 512 per element takes a share of its time")
    rungs: dict[int, RepeatableCall] = {0: own}
    for count in counts:
        timing_s = PLANNED_ROUNDS * sum(time_us + n * step_us / threads for n in (*rungs, count)) / 1e6
        # one rung is needed, and the ladder itself says that there is no time to compile it
        if len(rungs) > 1 and (not deadline.allows(timing_s) or not ladder.has_time_for(count)):
            break
        rungs[count] = ladder.rung(count)
    taken = interleaved({n: partial(timer.used, rung) for n, rung in rungs.items()}, TIMED_S, deadline)
    order = sorted(rungs)
    return Sweep(
        tuple(count * step_us / threads for count in order),
        tuple(low(taken[count]) / threads for count in order),
        max(error(samples) for samples in taken.values()) / threads,
        tuple(2.0 * count * ladder.elements for count in order),
    )


def _check_same(first_us: float, time_us: float) -> None:
    """Inductor's kernel must be about as fast as the operator's own, else its slope is the slope of another program."""
    if not time_us / SAME <= first_us <= time_us * SAME:
        raise Unsupported(f"the kernel that Inductor makes of it takes {first_us / time_us:.2g} times as long as its own")


def _step_us(ladder: Ladder, timer: Timer, deadline: Deadline) -> float:
    """Returns the time of one more multiply-add for each element of a piece in the cache, of one thread."""
    few, many = timer.tried
    works = {count: partial(timer.burst, ladder.rung(count)) for count in (few, many)}
    taken = {count: low(samples) for count, samples in interleaved(works, STEP_S, deadline).items()}
    if taken[many] < LEAST_RISE * taken[few]:
        # in the cache nothing can hide them
        raise Unsupported("added arithmetic takes no time in the cache, so a compiler may have removed it")
    return (taken[many] - taken[few]) / (many - few)
