"""The mean of several profiled steps, where a program's steps differ by what they wait for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from rooftile.diagnosis.watching.host_place import HostPlace
from rooftile.diagnosis.watching.timeline import Timeline


def mean_step(timelines: Sequence[Timeline]) -> Timeline:
    """Returns one timeline with mean times, the gaps of all steps, and the launches and kernels of the median step.

    Two workers of a loader take turns, so that every second step waits: no single step is like the program.
    """
    count = len(timelines)
    middle = sorted(timelines, key=lambda one: one.wall_us)[count // 2]
    work: Counter[HostPlace] = Counter()
    for one in timelines:
        for place, us in one.host_work.items():
            work[place] += us / count  # type: ignore[assignment]
    own = middle.calls_us
    return replace(
        middle,
        wall_us=sum(one.wall_us for one in timelines) / count,
        busy_us=sum(one.busy_us for one in timelines) / count,
        op_us={key: _mean([one.op_us[key] for one in timelines if key in one.op_us]) for key in middle.op_us},
        calls_us={name: _each(times, [one.calls_us.get(name, ()) for one in timelines]) for name, times in own.items()},
        gaps=tuple(gap for one in timelines for gap in one.gaps),
        steps=count,
        host_work=dict(work.most_common()),
        replayed_us=sum(one.replayed_us for one in timelines) / count,
        copied_us=sum(one.copied_us for one in timelines) / count,
    )  # fmt: skip


def _each(times: tuple[float, ...], alike: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """The mean of each call's times; one step's times where others have more or fewer calls."""
    if any(len(one) != len(times) for one in alike):
        return times
    return tuple(_mean(each) for each in zip(*alike, strict=True))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
