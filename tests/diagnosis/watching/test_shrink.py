"""The parts of a step without the profiler: it takes its time between operators, so gaps are what the operators leave."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from rooftile.diagnosis.observer import Observer
from rooftile.diagnosis.watching.chosen_step import ChosenStep
from rooftile.diagnosis.watching.timeline import Gap, Timeline

PROFILED = Timeline(
    wall_us=1000.0, busy_us=700.0, launches=10, op_us={}, op_calls={}, calls_us={}, kernels={}, start_ns=0,
    gaps=(Gap(0, 300_000, "host", ""),),
)  # fmt: skip


def observed(timeline: Timeline, step_us: float) -> tuple[float, float]:
    """The gaps in µs, and the share of an operator's time, of a step that takes so long without the profiler."""
    step = ChosenStep([step_us] * 6, [(2 * n, SimpleNamespace(timeline=timeline)) for n in range(3)])
    return sum(step.idle.by_cause.values()), step.shrink


@pytest.mark.parametrize(("step_us", "gaps_us"), [(1000.0, 300.0), (800.0, 100.0), (700.0, 0.0), (400.0, 0.0)])
def test_operators_and_gaps_are_the_step(step_us: float, gaps_us: float) -> None:
    found_us, shrink = observed(PROFILED, step_us)
    assert found_us == pytest.approx(gaps_us)
    assert 700 * shrink + found_us == pytest.approx(step_us)


def test_a_step_without_gaps_is_its_operators() -> None:
    assert observed(replace(PROFILED, gaps=(), busy_us=1000.0), 900.0) == (0.0, pytest.approx(0.9))


def test_a_step_that_takes_longer_without_a_profiler_has_the_gaps_that_were_seen() -> None:
    assert observed(PROFILED, 1200.0) == (300.0, 1.0)


def test_noisy_steps_that_were_all_timed_before_the_profiles_are_their_median() -> None:
    step = ChosenStep([1000.0, 2000.0, 1400.0, 1500.0], [(4, SimpleNamespace(timeline=PROFILED)) for _ in range(3)])
    assert step.us == pytest.approx(1450.0)
    assert "all times are medians, of a step of 1.45 ms" in step.noise()[0]


def test_steps_that_begin_anew_leave_nothing_of_the_steps_before() -> None:
    """A better way to tell steps apart may be found after the others had been chosen from."""
    observer = Observer("a step", 1.0)
    for us in (1000.0, 800.0):
        with observer._beginning():
            observer._taken = [us] * 6
            observer._profiles = [(2 * n, SimpleNamespace(timeline=PROFILED)) for n in range(3)]
        assert observer._step.us == us
