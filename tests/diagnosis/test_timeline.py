"""A profiled step: its operators, and the times in which nothing ran."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from rooftile.diagnosis.timeline import Profiled, Timeline, _complement, _union


def profiled(step: Callable[[], object], names: set[str]) -> Timeline:
    step()
    with Profiled(torch.device("cpu"), lambda: names) as found:
        step()
    return found.timeline


def test_operators_are_those_that_were_named() -> None:
    layer, x = nn.Linear(64, 32), torch.randn(8, 64)

    def step() -> None:
        layer(x).relu().sum().backward()

    found = profiled(step, {"aten::addmm", "aten::relu", "aten::mm"})
    assert {name for name, _ in found.op_us} == {"aten::addmm", "aten::relu", "aten::mm"}
    assert found.op_calls["aten::relu", ((8, 32),)] == 1
    # the gradient of the weight
    assert found.op_calls["aten::mm", ((32, 8), (8, 64))] == 1
    assert all(us > 0 for us in found.op_us.values())
    assert 0 < found.busy_us <= found.wall_us


def test_a_sleep_is_found_with_its_line() -> None:
    x = torch.randn(64, 64)

    def step() -> None:
        x @ x
        time.sleep(0.05)
        x @ x

    found = profiled(step, {"aten::mm"})
    assert found.idle_us["host"] > 45_000
    line = step.__code__.co_firstlineno + 2
    longest, us = next(iter(found.lines.items()))
    assert longest == f"tests/diagnosis/test_timeline.py:{line}"
    assert us > 45_000


def test_gaps_are_what_intervals_leave() -> None:
    spans = _union([(5, 7), (1, 3), (6, 9), (3, 4)])
    assert spans == [(1, 4), (5, 9)]
    assert _complement(spans, (0, 10)) == [(0, 1), (4, 5), (9, 10)]
    assert _complement([], (2, 4)) == [(2, 4)]
    assert _complement([(2, 4)], (2, 4)) == []
