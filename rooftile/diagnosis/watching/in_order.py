"""The time of each operator of a step, by the order of its calls: equal shapes may differ in dtypes, or be in lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rooftile.diagnosis.records import OperatorRow
from rooftile.diagnosis.watching.timeline import Timeline


def call_times_us(operations: Sequence[OperatorRow], timeline: Timeline) -> dict[tuple[object, ...], float]:
    """Returns the mean time of a call of each row, by the row's key.

    The nth call of an operator is its nth event. A profiler names no dtypes, and no shapes of tensors in lists, such as
    `_foreach_mul_` takes. Where the profiled step has called the operator more or less often, it is the mean by shapes.

    Args:
        operations: all rows of the step.
        timeline: of the step, or of one like it.
    """
    places: dict[tuple[object, ...], list[int]] = {}
    so_far: Counter[str] = Counter()
    calls = [(index, row) for row, operation in enumerate(operations) for index in operation.indices]
    for operation in (operations[row] for _, row in sorted(calls)):
        places.setdefault(operation.key, []).append(so_far[operation.op])
        so_far[operation.op] += 1
    times: dict[tuple[object, ...], float] = {}
    for operation in operations:
        events = timeline.calls_us.get(operation.op, ())
        if len(events) == so_far[operation.op]:
            own = [events[place] for place in places[operation.key]]
            times[operation.key] = sum(own) / len(own)
        else:
            times[operation.key] = timeline.us_of(operation.op, operation.shapes)
    return times
