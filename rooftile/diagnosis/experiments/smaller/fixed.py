"""E6: the operator's size halved, quartered, ... What is left at nothing is its fixed part."""

from __future__ import annotations

from collections.abc import Sequence

from rooftile.diagnosis.experiments.call import RepeatableCall
from rooftile.diagnosis.experiments.smaller.axes import CallAxis, SmallerCall, piece
from rooftile.diagnosis.watching.compiled import GeneratedKernel
from rooftile.errors import Unsupported

SHARES = (1 / 2, 1 / 4, 1 / 16, 1 / 64, 0.0)
# a line through sizes that are nearly the same says nothing about size zero
SMALL_ENOUGH = 0.55


def smaller(call: RepeatableCall, axes: Sequence[CallAxis]) -> list[SmallerCall]:
    """Returns the call at smaller sizes, down to the smallest.

    Raises Unsupported where it cannot be cut to half.
    """
    if isinstance(call.function, GeneratedKernel):
        raise Unsupported("its sizes are compiled in")
    if not axes:
        raise Unsupported("none of its dimensions can be cut")
    found = {made.share: made for made in (piece(call, axes, share) for share in SHARES)}
    smaller_calls = [made for share, made in found.items() if share < 1]
    if not smaller_calls or min(made.share for made in smaller_calls) > SMALL_ENOUGH:
        raise Unsupported("it cannot be cut to half of its size")
    return smaller_calls


def fixed_us(shares: Sequence[float], times_us: Sequence[float]) -> float:
    """Returns the time at size zero: of the line that fits best in relative terms, and never more than the shortest time.

    Example:
        >>> round(fixed_us([1.0, 0.5, 0.25], [110.0, 60.0, 35.0]), 6)
        10.0
    """
    # least squares of (a + b share) / time - 1
    x = [1 / time for time in times_us]
    y = [share / time for share, time in zip(shares, times_us, strict=True)]
    xx, xy, yy = sum(v * v for v in x), sum(v * w for v, w in zip(x, y, strict=True)), sum(w * w for w in y)
    determinant = xx * yy - xy * xy
    at_zero = (sum(x) * yy - sum(y) * xy) / determinant if determinant else min(times_us)
    return min(max(at_zero, 0.0), min(times_us))
