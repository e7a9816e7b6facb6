"""How far repeated measurements lie apart: a title states a difference only where it is larger.

A spread is half of the distance between the quartiles, as a share of the median.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median, quantiles


def spread_of(samples: Sequence[float]) -> float:
    """Returns the spread of samples; of fewer than four, half of their whole range; 0 of one.

    >>> spread_of([1.0, 2.0, 2.0, 2.0, 3.0]), spread_of([7.0])
    (0.25, 0.0)
    """
    if len(samples) < 2:
        return 0.0
    low, high = (min(samples), max(samples)) if len(samples) < 4 else quantiles(samples, n=4)[::2]
    return relative(low, median(samples), high)


def relative(low: float | None, middle: float | None, high: float | None) -> float:
    """Returns the spread of a median with its quartiles; 0 where they are unknown."""
    return (high - low) / 2 / middle if low is not None and high is not None and middle else 0.0


def usual(spreads: Iterable[float]) -> float:
    """Returns the spread of a run: the median of all that were measured in it, 0 if none was."""
    known = [one for one in spreads if one > 0]
    return median(known) if known else 0.0
