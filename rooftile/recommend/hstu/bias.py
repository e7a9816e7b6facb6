"""Adds to a pair's score a learned number for the distance of its positions, and one for the time between its events.

Both come from small tables, so no bias per pair is ever stored. A table of times has a row of buckets, whose borders are whole
seconds: every backend compares integers, and all find the same bucket.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.runtime.arguments import check_choice, check_count, check_number


@dataclass(frozen=True)
class RelativeBias:
    """Tables of what a pair's score gains by its distance and by the time between its events.

    Args:
        positions: (P,) or (1|H, P), float. A pair whose query is d positions behind its key reads column `zero + d`, or the first
            or last column if that lies outside.
        times: (M,) or (1|H, M), float. A pair whose query is t seconds behind its key reads the column that is the number of
            edges <= t; the first if t is negative.
        edges: (M - 1,) int64, never falling: the first second of each bucket but the first. `time_edges` makes the usual ones.
        zero: the column of distance 0. A table of the reference implementation, which has 2 N - 1 columns, has it at N - 1.

    Example:
        >>> RelativeBias(torch.zeros(4, 256), torch.zeros(4, 33), time_edges(33)).edges[:6]
        tensor([2, 2, 3, 4, 5, 7])
    """

    positions: Tensor | None = None
    times: Tensor | None = None
    edges: Tensor | None = None
    zero: int = 0


def time_edges(buckets: int, kind: str = "log", step: float | None = None, unit: float = 1.0) -> Tensor:
    """Returns the edges (buckets - 1,), int64, of buckets of seconds whose width grows.

    Args:
        buckets: how many, the last one open.
        kind: "log" puts t seconds into bucket floor(log(max(t / unit, 1)) / step), "sqrt" into floor(sqrt(t / unit) / step), as
            the reference implementation of HSTU does.
        step: 0.301 for "log" and 1.0 for "sqrt" if None.
        unit: in seconds.

    Buckets that are narrower than a second may be empty: two edges are then the same.

    Example:
        >>> time_edges(5, "sqrt")
        tensor([ 1,  4,  9, 16])
    """
    buckets, kind = check_count("buckets", buckets, 2), check_choice("kind", kind, ("log", "sqrt"))
    step, unit = check_number("step", (0.301 if kind == "log" else 1.0) if step is None else step), check_number("unit", unit)
    if step <= 0 or unit <= 0:
        raise InvalidInput(f"step is {step} and unit is {unit}; both must be above 0")
    edges: list[int] = []
    for n in range(1, buckets):
        # no power of e above 709 is a float
        exact = math.exp(min(n * step, 700)) if kind == "log" else (n * step) ** 2
        # a product that rounding has put above a whole second
        seconds = exact * unit * (1 - 1e-12)
        if seconds >= 1 << 62:
            raise InvalidInput(f"bucket {n} of {buckets} begins at {seconds:.3g} seconds; take fewer buckets or a smaller step")
        edges.append(math.ceil(seconds))
    return torch.tensor(edges)
