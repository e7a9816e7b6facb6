"""Intervals of time: their union, what they leave, and what they share."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

Interval = tuple[int, int]  # ns, start and end


def union(spans: Iterable[Interval]) -> list[Interval]:
    """Intervals that do not overlap and cover the same times, sorted."""
    merged: list[Interval] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def complement(spans: Sequence[Interval], window: Interval) -> list[Interval]:
    """The times of the window that no interval of a union covers."""
    edges = [window[0], *(edge for span in spans for edge in span), window[1]]
    within = [(max(a, window[0]), min(b, window[1])) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    return [(a, b) for a, b in within if b > a]


def length(spans: Iterable[Interval]) -> int:
    """Returns the sum of their lengths."""
    return sum(end - start for start, end in spans)


def overlap(span: Interval, others: Iterable[Interval]) -> int:
    """Returns the time that an interval shares with others."""
    return sum(max(0, min(span[1], end) - max(span[0], start)) for start, end in others)


class Near:
    """Intervals, of which a loop that reads a number in each round has many: only those near another one are looked at."""

    def __init__(self, spans: Iterable[Interval]) -> None:
        self._spans = union(spans)
        self._starts, self._ends = [start for start, _ in self._spans], [end for _, end in self._spans]

    def within(self, span: Interval) -> int:
        """Returns their time within an interval; copies that run at once count once."""
        return overlap(span, self._spans[bisect_left(self._ends, span[0]) : bisect_left(self._starts, span[1])])

    def cover(self, at: int) -> bool:
        """Whether one of them has begun before a time, and ends after it."""
        n = bisect_left(self._starts, at) - 1
        return n >= 0 and at < self._ends[n]
