"""The parts of a step without the profiler: what each recorded event took is in gaps, and in the operators around others."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from rooftile.diagnosis.observer import Observer
from rooftile.diagnosis.watching.timeline import Gap, Timeline

PROFILED = Timeline(
    wall_us=1000.0, busy_us=700.0, launches=10, op_us={}, op_calls={}, calls_us={}, kernels={}, start_ns=0, recorded=40,
    gaps=(Gap(0, 300_000, "host", ""),),
)  # fmt: skip


def observed(timeline: Timeline, step_us: float) -> Observer:
    observer = Observer("a step", 1.0)
    observer._profiles = [(2 * n, SimpleNamespace(timeline=timeline)) for n in range(3)]
    observer._taken = [step_us] * 6
    return observer


@pytest.mark.parametrize("step_us", [1000.0, 800.0, 400.0])
def test_operators_and_gaps_are_the_step(step_us: float) -> None:
    observer = observed(PROFILED, step_us)
    gaps_us, operators_us = 300 * observer._shrink_of_gaps, 700 * observer._shrink
    assert gaps_us + operators_us == pytest.approx(step_us)
    # a quarter of the events lie in gaps, and 1000 - step_us is what all events took
    assert gaps_us == pytest.approx(300 - (1000 - step_us) / 4)


def test_gaps_that_the_profiler_has_made_are_none() -> None:
    shallow = replace(PROFILED, recorded=10)
    observer = observed(shallow, 650.0)
    assert observer._shrink_of_gaps == 0.0
    assert observer._shrink == pytest.approx(650 / 700)


def test_a_step_without_gaps_is_its_operators() -> None:
    observer = observed(replace(PROFILED, gaps=(), busy_us=1000.0), 900.0)
    assert observer._shrink_of_gaps == 1.0
    assert observer._shrink == pytest.approx(0.9)
