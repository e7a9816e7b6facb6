"""The shortest length from which a method is faster than exact attention on this machine.

Both are timed at powers of two, upwards. The crossover is the shortest length from which the method is faster at every longer one
that was measured, interpolated between powers of two: on logarithmic axes the ratio of the times is nearly a straight line.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftile.cost.session import Session
from rooftile.exact.spec import DTYPES
from rooftile.hardware.clock import clock_for
from rooftile_lab.bench.methods.table import WAYS, WHOLE, sizes_of
from rooftile_lab.bench.methods.way import Way, drawn_for, exact_roof, roof_of
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import contest, timed_row, times_of, with_measures
from rooftile_lab.bench.run import Progress
from rooftile_lab.bench.works import step

SHORTEST = 256
LIMITS = {"cuda": 65_536, "cpu": 16_384}
NAMES = (*WHOLE, "nsa-groups-of-4")
# twice the length takes two to four times as long: linear methods the one, exact attention the other
GROWTH = (2.0, 4.0)


class Point(NamedTuple):
    """The times at one length."""

    N: int
    method_us: float
    exact_us: float


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search. `at` is None where the method is not faster at the longest length."""

    points: tuple[Point, ...]
    at: float | None
    why_ended: str  # why no longer one was measured

    @property
    def longest(self) -> int:
        return self.points[-1].N if self.points else 0

    def words(self) -> str:
        """The result for a table.

        >>> Found((Point(256, 2.0, 1.0),), None, "the limit").words()
        'not below 256 (the limit)'
        """
        if not self.points:
            return f"not measured ({self.why_ended})"
        if self.at is None:
            return f"not below {self.longest:,} ({self.why_ended})"
        return f"{rounded(self.at):,}" if self.at > self.points[0].N else f"{self.points[0].N:,} or below"


def crossing(points: Sequence[Point]) -> float | None:
    """The length from which the method is faster; None if it is not at the last point.

    >>> crossing([Point(256, 4.0, 1.0), Point(512, 4.0, 4.0), Point(1024, 4.0, 16.0)])
    512.0
    """
    ratios = [math.log(point.method_us / point.exact_us) for point in points]
    slower = [n for n, ratio in enumerate(ratios) if ratio >= 0]
    if not slower:
        return float(points[0].N) if points else None
    last = slower[-1]
    if last == len(points) - 1:
        return None
    share = ratios[last] / (ratios[last] - ratios[last + 1])
    return points[last].N * (points[last + 1].N / points[last].N) ** share


def search(
    times: Callable[[int], tuple[float, float]], limit: int, seconds: float, *, shortest: int = SHORTEST,
    now: Callable[[], float] = time.perf_counter,
) -> Found:  # fmt: skip
    """Times both at powers of two up to a limit, as long as the next length is expected to end within the seconds.

    Args:
        times: of the method and of exact attention at a length, in µs.
        limit: the longest length.
        seconds: for the whole search; the shortest length is always measured.
        now: a clock in seconds.
    """
    points: list[Point] = []
    began, N, why, last, growth = now(), shortest, "the limit", 0.0, GROWTH[1]
    while limit >= N:
        start = now()
        if points and start - began + growth * last > seconds:
            why = "the time budget"
            break
        try:
            points.append(Point(N, *times(N)))
        except torch.OutOfMemoryError:
            why = f"out of memory at {N:,}"
            break
        before, last, N = last, now() - start, 2 * N
        if before > 0:
            growth = min(max(last / before, GROWTH[0]), GROWTH[1])
    return Found(tuple(points), crossing(points), why)


def measure(
    session: Session, names: Sequence[str] = NAMES, limit: int | None = None, seconds: float = 300.0, *,
    phases: Sequence[str] = ("fwd", "bwd", "decode"), say: Progress = lambda words: None, rounds: int = 3, turn_ms: float = 25.0,
) -> Iterator[tuple[str, str, Found, list[Row]]]:  # fmt: skip
    """Way, phase, result and rows of each search. The seconds are shared by the searches that are left.

    Args:
        session: the run.
        names: of ways.
        limit: the longest length; None takes the limit of the kind of device.
        seconds: for all searches.
        phases: those to search.
        say: called with each step.
        rounds, turn_ms: turns of the two at each length, and how long a turn is about.
    """
    limit = LIMITS[session.device.type] if limit is None else limit
    left = [(WAYS[name], phase) for name in names for phase in WAYS[name].phases if phase in phases]
    ends = time.perf_counter() + seconds
    while left:
        way, phase = left.pop(0)
        share = (ends - time.perf_counter()) / (len(left) + 1)
        rows: list[Row] = []

        def times(N: int, way: Way = way, phase: str = phase, rows: list[Row] = rows) -> tuple[float, float]:
            say(f"{way.name}, {phase}, {N:,} tokens")
            both = timed(session, way, phase, N, rounds, turn_ms)
            rows += both.values()
            us = times_of(both)
            return us["rooftile"], us["exact"]

        if session.device.type == "cuda":
            # kernels compile at the first call, whose time says nothing of how long the next length takes
            say(f"{way.name}, {phase}: compiling")
            timed(session, way, phase, min(SHORTEST, limit), 1)
        found = search(times, limit, share)
        rows.append(summary(session, way, phase, found))
        yield way.name, phase, found, rows


def timed(session: Session, way: Way, phase: str, N: int, rounds: int, turn_ms: float = 25.0) -> dict[str, Row]:
    """The rows of a method and of exact attention at a length."""
    sizes = sizes_of(way, session.device.type, N)
    q, k, v = drawn_for(phase, sizes, session.device, DTYPES[session.dtype])
    x = way.tensors(q, k, v)

    def method(*leaves: Tensor) -> Tensor:
        return way.run(x._replace(leaves=leaves))

    works = {"rooftile": step(method, x.leaves, phase), "exact": step(way.exact_for(k, v), (q, k, v), phase)}
    for work in works.values():
        work()
    roofs = {
        "rooftile": roof_of(way.cost(sizes, phase, q.element_size()), session.ceilings, session.dtype),
        "exact": exact_roof(way, sizes, phase, session.ceilings, session.dtype),
    }
    clock = clock_for(session.device, turn_ms)
    rows = contest(session, works, clock, roofs=roofs, rounds=rounds, **named(session, way, phase, N))
    us = times_of(rows)
    return {name: with_measures(row, of_exact_ratio=us["exact"] / us[name]) for name, row in rows.items()}


def named(session: Session, way: Way, phase: str, N: int | None = None) -> dict[str, Any]:
    """The fields that rows of one length, or of one search, share."""
    sizes = sizes_of(way, session.device.type, N or SHORTEST)
    settings: dict[str, object] = {"heads": f"{sizes.H}/{sizes.Hk}", "dim": sizes.D}
    if session.device.type == "cpu":
        settings["threads"] = torch.get_num_threads()
    case = f"{way.name}-crossover" + (f"-{N}" if N else "")
    return {"suite": "approximate", "case": case, "phase": phase, "dtype": session.dtype, "settings": settings}


def summary(session: Session, way: Way, phase: str, found: Found) -> Row:
    """The row of a search: the crossover and the longest length, or why there is no crossover."""
    row = timed_row(session, [], backend="rooftile", **named(session, way, phase))
    row = with_measures(row, shortest_tokens=found.points[0].N if found.points else 0, longest_tokens=found.longest)
    if found.at is None:
        return replace(row, reason=found.words())
    return with_measures(row, crossover_tokens=found.at)


def rounded(N: float) -> int:
    """Two figures, as a length between two powers of two is interpolated.

    >>> rounded(3456.7)
    3500
    """
    digits = max(len(str(int(N))) - 2, 0)
    return int(round(N, -digits))
