"""Chooses one format for each item: the least total time whose losses add up to no more than allowed.

It is a knapsack with one choice an item, solved exactly over losses in whole steps: time(i, s) is the least time of the first i
items whose losses are at most s steps, and

    time(i, s) = min over options of time(i - 1, s - loss) + time of the option
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

STEPS = 1000


def choose(times: Sequence[Sequence[float]], losses: Sequence[Sequence[float]], max_loss: float | None) -> list[int] | None:
    """Returns the number of the option of each item; None if no choice loses so little.

    Args:
        times, losses: of each item's options. Losses are not negative.
        max_loss: the largest sum of losses; None allows any.

    Losses are rounded up to whole steps of max_loss / 1,000, so that their true sum never exceeds it.

    Example:
        >>> choose([[4.0, 1.0], [4.0, 3.0]], [[0.0, 0.2], [0.0, 0.2]], max_loss=0.3)
        [1, 0]
    """
    if max_loss is None:
        return [min(range(len(one)), key=lambda n: (one[n], lost[n])) for one, lost in zip(times, losses, strict=True)]
    allowed = [[_steps(loss, max_loss) for loss in lost] for lost in losses]
    best = torch.zeros(STEPS + 1, dtype=torch.float64)  # by the steps that the items so far may lose
    chosen = []
    for one, lost in zip(times, allowed, strict=True):
        # the lower loss first: of equal times it wins
        order = sorted(range(len(one)), key=lambda n: lost[n])
        with_each = torch.full((len(one), STEPS + 1), math.inf, dtype=torch.float64)
        for row, n in enumerate(order):
            if lost[n] <= STEPS:
                with_each[row, lost[n] :] = best[: STEPS + 1 - lost[n]] + one[n]
        best, rows = with_each.min(0)
        chosen.append([order[row] for row in rows.tolist()])
    if math.isinf(best[-1].item()):
        least = [min(range(len(lost)), key=lambda n: lost[n]) for lost in losses]
        # rounding up may have made too much of them
        return least if sum(min(lost) for lost in losses) <= max_loss else None
    found, left = [], STEPS
    for options, lost in zip(reversed(chosen), reversed(allowed), strict=True):
        found.append(options[left])
        left -= lost[found[-1]]
    return found[::-1]


def _steps(loss: float, max_loss: float) -> int:
    if loss <= 0:
        return 0
    if max_loss == 0:
        return STEPS + 1
    # a loss of a whole number of steps is one, whatever the division rounds to
    return min(math.ceil(min(loss / max_loss, 2.0) * STEPS - 1e-6), STEPS + 1)
