"""The parts of a step without the profiler: it takes its time between operators, so gaps are what the operators leave."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from rooftile.diagnosis.observer import Observer
from rooftile.diagnosis.watching.timeline import Gap, Timeline

PROFILED = Timeline(
    wall_us=1000.0, busy_us=700.0, launches=10, op_us={}, op_calls={}, calls_us={}, kernels={}, start_ns=0,
    gaps=(Gap(0, 300_000, "host", ""),),
)  # fmt: skip


def observed(timeline: Timeline, step_us: float) -> Observer:
    observer = Observer("a step", 1.0)
    observer._profiles = [(2 * n, SimpleNamespace(timeline=timeline)) for n in range(3)]
    observer._taken = [step_us] * 6
    return observer


@pytest.mark.parametrize(("step_us", "gaps_us"), [(1000.0, 300.0), (800.0, 100.0), (700.0, 0.0), (400.0, 0.0)])
def test_operators_and_gaps_are_the_step(step_us: float, gaps_us: float) -> None:
    observer = observed(PROFILED, step_us)
    assert 300 * observer._shrink_of_gaps == pytest.approx(gaps_us)
    assert 700 * observer._shrink + gaps_us == pytest.approx(step_us)


def test_a_step_without_gaps_is_its_operators() -> None:
    observer = observed(replace(PROFILED, gaps=(), busy_us=1000.0), 900.0)
    assert observer._shrink_of_gaps == 1.0
    assert observer._shrink == pytest.approx(0.9)


def test_a_step_that_takes_longer_without_a_profiler_has_the_gaps_that_were_seen() -> None:
    observer = observed(PROFILED, 1200.0)
    assert (observer._shrink_of_gaps, observer._shrink) == (1.0, 1.0)
