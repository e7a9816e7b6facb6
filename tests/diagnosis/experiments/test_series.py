"""All leading operators within one budget, and none of them under a watcher."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

import rooftile as rt
from rooftile.diagnosis.experiments import series
from rooftile.diagnosis.experiments.deadline import Deadline
from rooftile.diagnosis.experiments.evidence import Evidence
from rooftile.diagnosis.experiments.series import Recorded, measure_all
from rooftile.diagnosis.records import OperatorRow, Sample

CPU = torch.device("cpu")


def is_settled(row: int, found: Evidence) -> bool:
    return True


def recorded(function=torch.ops.aten.add.Tensor, *args) -> Recorded:
    operation = OperatorRow(
        module="", op=str(function), phase="forward", calls=1, flops=1000, special=0, bytes=1000, where="", dtype="fp32",
        device="cpu", key=(), indices=(0,),
    )  # fmt: skip
    return Recorded(Sample(operation, function, args or (torch.randn(100), 1.0), {}), None)


def test_every_operator_is_timed_before_any_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    made = Evidence(time_us=1.0, spread_us=0.0, in_context_us=None)
    monkeypatch.setattr(series, "alone", lambda sample, *rest: done.append(f"alone {sample.args[0]}") or made)
    monkeypatch.setattr(series, "with_intensity", lambda e, sample, *rest: done.append(f"more {sample.args[0]}") or e)
    measure_all({n: recorded(torch.add, n) for n in range(3)}, CPU, Deadline(5), is_settled)
    assert done == ["alone 0", "alone 1", "alone 2", "more 0", "more 1", "more 2"]


def test_products_need_no_compiler_and_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(series, "alone", lambda *rest: Evidence(time_us=1.0, spread_us=0.0, in_context_us=None))
    monkeypatch.setattr(series, "with_intensity", lambda e, sample, *rest: done.append(sample.function.__name__) or e)
    measure_all(
        {0: recorded(), 1: recorded(torch.ops.aten.mm.default, torch.ones(3, 3), torch.ones(3, 3))},
        CPU, Deadline(5), is_settled,
    )  # fmt: skip
    assert done == ["mm.default", "add.Tensor"]


def test_a_slope_that_a_verdict_needs_is_measured_first(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    monkeypatch.setattr(series, "alone", lambda *rest: Evidence(time_us=1.0, spread_us=0.0, in_context_us=None))
    monkeypatch.setattr(series, "with_intensity", lambda e, sample, *rest: done.append(sample.args[1]) or e)
    rows = {n: recorded(torch.ops.aten.add.Tensor, torch.ones(3), n) for n in range(4)}
    measure_all(rows, CPU, Deadline(5), lambda row, e: row in (0, 2))
    assert done == [1, 3, 0, 2]


def test_an_unsettled_operator_is_measured_again_and_the_exacter_times_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    spreads = iter([0.5, 0.1, 0.3])
    monkeypatch.setattr(
        series, "alone", lambda *rest: Evidence(time_us=2.0, spread_us=next(spreads), in_context_us=None, gain=0.4, slope=None)
    )
    monkeypatch.setattr(series, "with_intensity", lambda e, *rest: replace(e, slope=0.9))
    found, _ = measure_all({0: recorded()}, CPU, Deadline(5), lambda row, e: False)
    assert (found[0].spread_us, found[0].slope, found[0].gain) == (0.1, 0.9, 0.4)
    assert next(spreads, None) is None


def test_where_the_budget_ends_the_evidence_says_so() -> None:
    found, notes = measure_all({n: recorded() for n in range(3)}, CPU, Deadline(-1), is_settled)
    # the most expensive one is timed in any case, as it is short
    assert list(found) == [0]
    assert found[0].why_not["intensity"] == "the budget ended before it"
    assert found[0].fixed_us is not None
    assert notes == [
        "2 kinds of operator (add), whose calls take up to 0 us, had no experiment in the budget: a larger --budget has more"
    ]


def test_what_cannot_run_again_is_a_note() -> None:
    def refuses(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("only once\nand never again")

    found, notes = measure_all({0: recorded(refuses, torch.ones(3)), 1: recorded()}, CPU, Deadline(5), is_settled)
    assert list(found) == [1]
    assert notes == [f"{refuses} could not be run again: only once"]


def test_experiments_run_under_no_watcher() -> None:
    """A watched call takes several times as long; three steps are watched: for the device, the counts and the inputs."""
    watched, others = 0, 0

    def noted(x: torch.Tensor) -> torch.Tensor:
        nonlocal watched, others
        frame = sys._getframe()
        while frame is not None and not frame.f_code.co_filename.endswith("dispatched.py"):
            frame = frame.f_back
        watched, others = watched + (frame is not None), others + (frame is None)
        return x + 1

    with torch.library._scoped_library("rooftile_test", "FRAGMENT") as library:
        library.define("noted(Tensor x) -> Tensor")
        library.impl("noted", noted, "CPU")
        found = rt.diagnose(torch.ops.rooftile_test.noted, torch.randn(1000), budget=0.3)
    (op,) = [op for op in found.ops if op.op == "rooftile_test::noted"]
    assert op.experiments["size"]["fixed_us"] > 0
    assert watched == 3
    assert others > 30
