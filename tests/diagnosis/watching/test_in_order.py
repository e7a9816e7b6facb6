"""The time of a row, from the order of the calls: equal shapes in several dtypes, and tensors in lists."""

from __future__ import annotations

import pytest
import torch

from rooftile.diagnosis.records import OperatorRow
from rooftile.diagnosis.watching.in_order import call_times_us
from rooftile.diagnosis.watching.timeline import Timeline
from rooftile.diagnosis.watching.watch import Watch


def timeline(calls_us: dict[str, tuple[float, ...]]) -> Timeline:
    op_us = {(name, ()): sum(times) / len(times) for name, times in calls_us.items()}
    return Timeline(
        wall_us=1e3, busy_us=1e3, launches=4, op_us=op_us, op_calls={(name, ()): len(times) for name, times in calls_us.items()},
        calls_us=calls_us, kernels={}, gaps=(), start_ns=0,
    )  # fmt: skip


def watched() -> list[OperatorRow]:
    small, large = [torch.ones(3)], [torch.ones(300), torch.ones(200)]
    narrow = torch.ones(64, 64)
    with Watch() as watch:
        torch._foreach_mul_(large, 2.0)
        torch._foreach_mul_(small, 2.0)
        wide = narrow.to(torch.bfloat16)
        wide.to(torch.float32)
        torch._foreach_mul_(large, 2.0)
    return watch.operations


def test_each_row_has_the_times_of_its_own_calls() -> None:
    times = timeline({"aten::_foreach_mul_": (100.0, 4.0, 120.0), "aten::_to_copy": (30.0, 70.0)})
    rows = watched()
    found = [call_times_us(rows, times)[row.key] for row in rows]
    assert [row.op for row in rows] == ["aten::_foreach_mul_", "aten::_foreach_mul_", "aten::_to_copy", "aten::_to_copy"]
    assert found == [110.0, 4.0, 30.0, 70.0]


def test_a_step_with_other_calls_has_the_mean() -> None:
    rows = watched()
    found = call_times_us(rows, timeline({"aten::_foreach_mul_": (100.0, 4.0), "aten::_to_copy": (30.0, 70.0)}))
    assert [found[row.key] for row in rows] == [pytest.approx(52.0), pytest.approx(52.0), 30.0, 70.0]
