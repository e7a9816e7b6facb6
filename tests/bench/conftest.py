"""A clock for tests of benchmarks: each call runs once, and its time is given."""

from __future__ import annotations

import pytest

from rooftile_lab.bench.methods import crossover
from rooftile_lab.bench.suites import approximate


class Ticks:
    """A clock that runs each work once and says that it took 5 and 6 µs."""

    peak_kind = "counted"

    def samples(self, work) -> list[float]:
        work()
        return [5.0, 6.0]

    def peak_bytes(self, work) -> int:
        work()
        return 7


@pytest.fixture
def ticking(monkeypatch) -> None:
    """Nothing is timed, and the definition is asked at 70 tokens."""
    for module in (approximate, crossover):
        monkeypatch.setattr(module, "clock_for", lambda device, turn_ms=25.0: Ticks())
    monkeypatch.setattr(approximate, "ROUNDS", 1)
    monkeypatch.setattr("rooftile_lab.bench.methods.check.ON_CPU", 70)
