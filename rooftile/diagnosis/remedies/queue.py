"""The queue between host and device: how long a step takes when its kernels, or the host's work, become shorter or longer.

The host asks for kernels one after the other, and the device runs them in that order. A kernel starts when the host has asked for
it and the one before has ended, so a step is never shorter than the host's work, whatever its kernels gain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from rooftile.diagnosis.records import OperatorRow
from rooftile.diagnosis.watching.timeline import Launch, OpKey

# launches that may wait for the device; the host waits before it asks for one more
DEPTH = 1024
# the host's time before one launch beyond this is a wait or the program's own work, and stays when launches become cheaper
LONG_US = 1000.0
# the pace of the host without a profiler beside its pace under it
PACES = (0.01, 4.0)


class LaunchChange(NamedTuple):
    """A change of one operator's launches; times are of all of its calls in the step."""

    device: float = 1.0  # the share of its kernels' time that is left
    device_us: float = 0.0  # new kernels' time
    host: float | None = None  # the host's time for it, in place of what it was
    kept: float = 0.0  # ... for all of its launches but this share
    host_us: float = 0.0  # the host's time for new kernels


@dataclass(frozen=True, slots=True)
class Queue:
    """The launches of one step, in order, and the host's time after the last."""

    launches: tuple[Launch, ...]
    tail_us: float = 0.0

    def run(self) -> tuple[float, float]:
        """Returns the times at which the host has asked for everything, and at which the step ends."""
        host = device = 0.0
        ends: list[float] = []
        for n, launch in enumerate(self.launches):
            host += launch.host_us
            if n >= DEPTH:
                host = max(host, ends[n - DEPTH])
            device = max(device, host) + launch.device_us
            ends.append(device)
            if launch.waits:
                host = max(host, device)
        host += self.tail_us
        return host, max(host, device)

    @property
    def step_us(self) -> float:
        """The time of a step after others: the host asks for its first kernels while the device is at the step before."""
        if not self.launches:
            return self.tail_us
        first, *rest = self.launches
        second = [first._replace(host_us=first.host_us + self.tail_us), *rest]
        return Queue((*self.launches, *second), self.tail_us).run()[1] - self.run()[1]

    @property
    def host_us(self) -> float:
        """The host's own time."""
        return sum(launch.host_us for launch in self.launches) + self.tail_us

    def short_waits_us(self, waiting_us: float, keys: Collection[OpKey]) -> float:
        """Returns the part of the host's waits that a change of these operators' launches would take for the cost of launches.

        It keeps what is long; the rest is spread over all short times before launches.
        """
        short = {n: min(launch.host_us, LONG_US) for n, launch in enumerate(self.launches)}
        total_us, long_us = sum(short.values()), sum(launch.host_us for launch in self.launches) - sum(short.values())
        share = sum(us for n, us in short.items() if self.launches[n].key in keys) / total_us if total_us else 0.0
        return share * min(max(0.0, waiting_us - long_us), total_us)

    def paced(self, launched_us: float) -> Queue:
        """Returns the queue with the host's times scaled so that it has asked for everything after `launched_us`.

        A profiler lengthens the host's times, all of them about alike.
        """
        low, high = PACES
        for _ in range(40):
            pace = (low * high) ** 0.5
            if self._scaled(pace).run()[0] < launched_us:
                low = pace
            else:
                high = pace
        return self._scaled(low)

    def changed(self, changes: Mapping[OpKey, LaunchChange]) -> Queue:
        """Returns the queue with other times for the launches of some operators, each spread over all launches of its own."""
        counts = Counter(launch.key for launch in self.launches)
        found = []
        for launch in self.launches:
            change = changes.get(launch.key) if launch.key is not None else None
            if change is not None:
                count, host_us = counts[launch.key], launch.host_us
                if change.host is not None:
                    host_us = change.host / count + max(change.kept * host_us, host_us - LONG_US)
                launch = launch._replace(
                    host_us=host_us + change.host_us / count,
                    device_us=launch.device_us * change.device + change.device_us / count,
                )
            found.append(launch)
        return replace(self, launches=tuple(found))

    def saved_us(self, changes: Mapping[OpKey, LaunchChange], step_us: float) -> float:
        """Returns the time that a step of `step_us` loses by the changes; negative if it gets longer."""
        before, after = self.step_us, self.changed(changes).step_us
        return step_us * (1 - after / before) if before else 0.0

    def _scaled(self, pace: float) -> Queue:
        scaled = tuple(launch._replace(host_us=launch.host_us * pace) for launch in self.launches)
        return Queue(scaled, self.tail_us * pace)


def joined(changes: Mapping[int, LaunchChange], operations: Sequence[OperatorRow]) -> dict[OpKey, LaunchChange]:
    """Returns the changes of rows of the table by the keys of a profiler, which has one for the same operator in all modules.

    operations: the rows. Rows without a change stay as they are, which a key that they share takes into account.
    """
    rows: dict[OpKey, list[int]] = {}
    for row, operation in enumerate(operations):
        rows.setdefault((operation.op, operation.shapes), []).append(row)
    found = {}
    for key, its in rows.items():
        if not any(row in changes for row in its):
            continue
        calls = sum(operations[row].calls for row in its)
        own = [(changes.get(row, LaunchChange()), operations[row].calls / calls) for row in its]
        found[key] = LaunchChange(
            device=sum(change.device * share for change, share in own),
            device_us=sum(change.device_us for change, _ in own),
            host=None if all(change.host is None for change, _ in own) else sum(change.host or 0.0 for change, _ in own),
            kept=sum(share for change, share in own if change.host is None) if len(own) > 1 else 0.0,
            host_us=sum(change.host_us for change, _ in own),
        )
    return found
