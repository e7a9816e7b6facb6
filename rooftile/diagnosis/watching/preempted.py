"""The time that other programs take from a thread that could run."""

from __future__ import annotations

from pathlib import Path

SCHEDULER = Path("/proc/thread-self/schedstat")


def preempted_us() -> float:
    """Returns the µs that this thread has waited for a core so far; 0 where the system does not count them, as Linux does."""
    try:
        _, waited_ns, _ = SCHEDULER.read_text().split()
    except (OSError, ValueError):
        return 0.0
    return int(waited_ns) / 1e3
