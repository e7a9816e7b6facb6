"""The host's time while nothing ran in a profiled step: waits, lines, and the notes on them."""

from __future__ import annotations

from dataclasses import dataclass

from rooftile.diagnosis.output.units import duration
from rooftile.diagnosis.watching.host_place import HostPlace
from rooftile.diagnosis.watching.timeline import Timeline

# the host's work at one place is named from this share of the step
HOST_SHARE = 0.03


@dataclass(frozen=True, slots=True)
class IdleTime:
    """The gaps of a profiled step, as parts of a step without a profiler.

    shrink: the share of the gaps that such a step has.
    """

    timeline: Timeline
    step_us: float
    shrink: float = 1.0

    @property
    def by_cause(self) -> dict[str, float]:
        return {cause: us * self.shrink for cause, us in self.timeline.idle_us.items()}

    @property
    def _long_us(self) -> float:
        return max(1e3, 0.05 * self.timeline.wall_us)

    @property
    def waiting_us(self) -> float:
        """The part of the host's gaps that waits for something else than launches."""
        # many short gaps of one line are a loop of Python, which is overhead; a long one waits for something
        host = [gap for gap in self.timeline.gaps if gap.cause == "host"]
        single = [gap.us * self.shrink for gap in host if gap.us > self._long_us or gap.is_work]
        return min(max(sum(single) / self.timeline.steps, sum(self.host_work.values())), self.by_cause.get("host", 0.0))

    @property
    def host_work(self) -> dict[HostPlace, float]:
        """The time that the host spends on something else than operators, by place, where it is a part of the step.

        Lines of one file that are short, and together a part of it, are one place.
        """
        least_us = HOST_SHARE * self.step_us
        found: dict[HostPlace, float] = {}
        short: dict[str, list[float]] = {}
        for place, us in ((place, us * self.shrink) for place, us in self.timeline.host_work.items()):
            if us >= least_us:
                found[place] = us
            else:
                short.setdefault(place.where.rpartition(":")[0], []).append(us)
        return found | {
            HostPlace(f"{len(times)} short lines of {file}"): sum(times)
            for file, times in short.items()
            if sum(times) >= least_us
        }

    @property
    def waits(self) -> dict[HostPlace, float]:
        """The host's work, and the lines of long gaps that no sample has named."""
        work = self.host_work
        named = {place.where for place in work}
        return work | {HostPlace(where): us for where, us in self.lines("host").items() if where not in named}

    def lines(self, cause: str) -> dict[str, float]:
        """The time of the step's gaps of one cause by line; of the host's only the long ones, which wait for something."""
        found: dict[str, float] = {}
        for gap in self.timeline.gaps:
            if gap.cause == cause and gap.where and (cause != "host" or gap.us > self._long_us):
                found[gap.where] = found.get(gap.where, 0.0) + gap.us * self.shrink / self.timeline.steps
        return found

    def notes(self) -> list[str]:
        """Returns a note on each place and line that takes a part of the step."""
        work = self.host_work
        named = {place.where for place in work}
        lines = {where: us * self.shrink for where, us in self.timeline.lines.items() if where not in named}
        return [
            f"{100 * us / self.step_us:.0f} % of the step in {place.words}, without an operator" for place, us in work.items()
        ] + [
            f"{where}: {duration(us)} of the step, in which nothing ran"
            for where, us in lines.items()
            if us > 0.05 * self.step_us
        ]
