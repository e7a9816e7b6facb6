"""Compares rows: the geometric mean and the worst of the ratios to a peer, or of one file to a later one.

A ratio above 1 means that the first is faster. Only cases that both timed count, and a comparison says how many.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from rooftile.errors import InvalidInput
from rooftile_lab.bench.results import Row, latest


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One backend and one peer in one phase, or one backend before and after."""

    backend: str
    against: str
    phase: str
    cases: int
    geomean: float  # the peer's time over the backend's
    worst: float
    worst_case: str
    best: float
    best_case: str

    def json(self) -> dict[str, Any]:
        """The fields as a dictionary that json can write."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.phase}: {self.backend} is {self.geomean:.2f}x {self.against} over {self.cases} cases "
            f"(worst {self.worst:.2f}x at {self.worst_case}, best {self.best:.2f}x at {self.best_case})"
        )


def against_peer(rows: Iterable[Row], backend: str, peer: str) -> list[Comparison]:
    """One Comparison per phase, from the last rows of each case, which must be of one run.

    Raises InvalidInput if no case was timed on both.
    """
    timed = _timed(rows)
    found = []
    for phase in dict.fromkeys(row.phase for row in timed):
        ours = {row.case: row for row in timed if (row.backend, row.phase) == (backend, phase)}
        theirs = {row.case: row for row in timed if (row.backend, row.phase) == (peer, phase)}
        # clocks change from run to run: only times of one run are compared
        shared = [case for case in ours if case in theirs and ours[case].date == theirs[case].date]
        ratios = {case: _us(theirs[case]) / _us(ours[case]) for case in shared}
        if ratios:
            found.append(_comparison(ratios, backend, peer, phase))
    if not found:
        has = ", ".join(dict.fromkeys(row.backend for row in timed)) or "none"
        raise InvalidInput(f"no case was timed on both {backend!r} and {peer!r} in one run; timed backends: {has}")
    return found


def before_after(before: Iterable[Row], after: Iterable[Row]) -> list[Comparison]:
    """One Comparison per backend and phase that both files timed: how much faster `after` is."""
    old = {(row.backend, row.phase, row.case, row.device): row for row in _timed(before)}
    ratios: dict[tuple[str, str], dict[str, float]] = {}
    for row in _timed(after):
        match = old.get((row.backend, row.phase, row.case, row.device))
        if match is not None:
            ratios.setdefault((row.backend, row.phase), {})[row.case] = _us(match) / _us(row)
    if not ratios:
        raise InvalidInput("the two files share no timed case of one backend and phase on one device; nothing to compare")
    return [_comparison(found, backend, "before", phase) for (backend, phase), found in ratios.items()]


def _timed(rows: Iterable[Row]) -> list[Row]:
    return [row for row in latest(rows) if row.median_us is not None]


def _us(row: Row) -> float:
    assert row.median_us is not None
    return row.median_us


def _comparison(ratios: dict[str, float], backend: str, against: str, phase: str) -> Comparison:
    worst, best = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
    return Comparison(
        backend=backend,
        against=against,
        phase=phase,
        cases=len(ratios),
        geomean=math.exp(sum(math.log(ratio) for ratio in ratios.values()) / len(ratios)),
        worst=ratios[worst],
        worst_case=worst,
        best=ratios[best],
        best_case=best,
    )
