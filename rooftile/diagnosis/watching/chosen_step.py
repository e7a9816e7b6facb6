"""The step that a diagnosis shows, of several that were timed and profiled: its time, its timeline, and how the others differ."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from statistics import mean, median, quantiles

from rooftile.diagnosis.output.units import duration
from rooftile.diagnosis.watching.idle import IdleTime
from rooftile.diagnosis.watching.mean_step import mean_step
from rooftile.diagnosis.watching.timeline import Profiled, Timeline

# quartiles of the steps' times that are further apart than this share of a step: the times of a quiet stretch are taken then
NOISY = 0.1


class ChosenStep:
    """One step of those that were timed without a profiler and with it.

    On a quiet machine its time is the median of all, and its profile the one in the middle; where a program's steps wait for
    unequal times, it is the mean of all. Else it is the quickest stretch: a profile and the two timed steps around it; the median
    again where all profiles came later.

    Args:
        taken: the times of the steps without a profiler, in µs.
        profiles: each with the number of timed steps before it.
    """

    def __init__(self, taken: Sequence[float], profiles: Sequence[tuple[int, Profiled]]) -> None:
        self._taken = taken
        # a step that has failed left none
        self._profiles = [(at, one) for at, one in profiles if hasattr(one, "timeline")]

    @property
    def us(self) -> float:
        """The time of the step without a profiler."""
        return self._chosen[0]

    @property
    def profiled(self) -> Profiled:
        """A profile of one step."""
        return self._chosen[1]

    @cached_property
    def timeline(self) -> Timeline:
        """The operators and gaps of the step under the profiler."""
        return mean_step(self._timelines) if self._is_noisy and self._differ_by_waits else self.profiled.timeline

    @property
    def shrink(self) -> float:
        """The share of an operator's time under the profiler that it takes without: all of it, if it is no more than the step."""
        return min(1.0, self.us / self.timeline.busy_us) if self.timeline.busy_us else 1.0

    @property
    def idle(self) -> IdleTime:
        """The gaps of the step without the profiler: what the operators leave of it.

        The profiler takes its time between operators, and so does the thread that samples lines.
        """
        idle_us = sum(self.timeline.idle_us.values())
        left = min(1.0, max(0.0, self.us - self.timeline.busy_us) / idle_us) if idle_us else 1.0
        return IdleTime(self.timeline, self.us, left)

    def noise(self) -> list[str]:
        """Returns a note if the steps differ, else none."""
        if not self._is_noisy:
            return []
        differ = f"steps took {duration(min(self._taken))} to {duration(max(self._taken))}"
        if self._differ_by_waits:
            return [f"{differ}, because they wait for unequal times: all times are means, of a step of {duration(self.us)}"]
        differ += ", because other programs kept the machine busy or the steps differ"
        times = "of a stretch in which a step took" if self._are_between else "medians, of a step of"
        return [f"{differ}; all times are {times} {duration(self.us)}"]

    @property
    def _timelines(self) -> list[Timeline]:
        return [one.timeline for _, one in self._profiles]

    @cached_property
    def _is_noisy(self) -> bool:
        first, _, third = quantiles(self._taken, n=4)
        return third - first > NOISY * median(self._taken)

    @property
    def _are_between(self) -> bool:
        """Whether the profiles were made between the timed steps, and not after all of them."""
        return len({at for at, _ in self._profiles}) > 1

    @cached_property
    def _differ_by_waits(self) -> bool:
        """Whether the program's own waits make its steps differ, and not other programs."""
        waits = [IdleTime(one, one.wall_us).waiting_us for one in self._timelines]
        rests = [one.wall_us - wait for one, wait in zip(self._timelines, waits, strict=True)]
        differ = max(waits) - min(waits)
        return differ > NOISY * median(self._taken) and differ > max(rests) - min(rests)

    @cached_property
    def _chosen(self) -> tuple[float, Profiled]:
        by_time = sorted((one for _, one in self._profiles), key=lambda one: one.timeline.wall_us)
        middle = by_time[len(by_time) // 2]
        if not self._is_noisy:
            return median(self._taken), middle
        if self._differ_by_waits:
            return mean(self._taken), middle
        if not self._are_between:
            return median(self._taken), middle
        around = {at: mean(near) for at, _ in self._profiles if (near := self._taken[max(0, at - 1) : at + 1])}
        at, quickest = min(self._profiles, key=lambda item: around.get(item[0], 0.0) + item[1].timeline.wall_us)
        # with a profiler it takes no less than without
        return min(around.get(at, quickest.timeline.wall_us), quickest.timeline.wall_us), quickest
