"""The load that other programs put on the CPU: how many of the cores that this process may use they keep busy.

Linux counts each core's busy time in `/proc/stat`; this process's own time is taken off. Elsewhere the load is unknown.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_STAT = Path("/proc/stat")
# the kernel counts hundredths of a second, so a shorter interval has no load
LEAST_S = 0.1
# other programs that keep less than this share of the cores busy are told as none
QUIET = 0.05


class Meter:
    """Measures the load of others from now on.

    Example:
        >>> meter = Meter()
        >>> meter.others() is None       # too early to say
        True
    """

    def __init__(self, stat: Path = _STAT) -> None:
        self._stat = stat
        self.restart()

    def restart(self) -> None:
        """Begins a new interval."""
        self._began, self._own, self._busy = time.perf_counter(), _own_seconds(), busy_seconds(self._stat)

    def others(self) -> float | None:
        """Returns the cores that other programs kept busy on average; None where that is unknown, or the interval too short."""
        wall, busy = time.perf_counter() - self._began, busy_seconds(self._stat)
        if busy is None or self._busy is None or wall < LEAST_S:
            return None
        others = (busy - self._busy - (_own_seconds() - self._own)) / wall
        return round(min(max(others, 0.0), float(cores())), 2)


def cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def busy_seconds(stat: Path = _STAT) -> float | None:
    """Returns the busy time of the cores that this process may use; None where it is unknown.

    Time that a hypervisor gave to other machines counts as busy.
    """
    if not stat.exists() or not hasattr(os, "sched_getaffinity"):
        return None
    mine, ticks = {f"cpu{n}" for n in os.sched_getaffinity(0)}, 0
    for line in stat.read_text().splitlines():
        name, *counts = line.split()
        if name in mine:
            # user, nice, system, idle, waiting for a disk, interrupts, soft interrupts, stolen
            user, nice, system, _, _, *rest = map(int, counts[:8])
            ticks += user + nice + system + sum(rest)
    return ticks / os.sysconf("SC_CLK_TCK")


def words(others: float | None, of: int | None = None) -> str:
    """Says how busy others kept the cores.

    >>> words(1.4, 2), words(0.01, 2), words(None, 2)
    ('other programs kept 1.4 of 2 cores busy', 'no other program was busy', 'the load of other programs is unknown')
    """
    of = cores() if of is None else of
    if others is None:
        return "the load of other programs is unknown"
    if others < QUIET * of:
        return "no other program was busy"
    return f"other programs kept {others:.1f} of {of} cores busy"


def _own_seconds() -> float:
    """Returns the CPU time of this process and of the children that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
