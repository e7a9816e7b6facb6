"""Sums behind keys, and gradients of those before them, without outputs: what a rank tells the others before it computes more."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.recurrent.linear.by_chunks import RunningSums
from rooftile.recurrent.linear.kernels import by_features
from rooftile.recurrent.linear.kernels.call import Call, readable
from rooftile.recurrent.linear.kernels.gradients import row_gradients
from rooftile.recurrent.linear.problem import Recurrence


def end(
    q: Tensor, k: Tensor, v: Tensor, state: RunningSums, projection: Tensor | None, problem: Recurrence
) -> RunningSums:  # fmt: skip
    """Returns the sums behind keys (B, S, Hk, D)."""
    q, k, v = (readable(x) for x in (q, k, v))
    if projection is not None:
        return by_features.Call(q, k, v, state, projection, None, problem).last
    return Call(q, k, v, None, problem).states(k, v, None, None, state, False)[2]


def begin(
    do: Tensor, d_last: RunningSums, o: Tensor, den: Tensor, q: Tensor, k: Tensor, v: Tensor, state: RunningSums,
    projection: Tensor | None, problem: Recurrence,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of S and z before the keys."""
    q, k, v = (readable(x) for x in (q, k, v))
    do, o, den = do.contiguous(), o.contiguous(), den.contiguous()
    weight, unit = row_gradients(do, o, den) if problem.normalise else (torch.ones_like(den), torch.zeros_like(den))
    if projection is None:
        first = Call(q, k, v, None, problem).states(q, do, weight, unit, d_last, True)[2]
    else:
        # queries are weighed by the largest exponents of all keys before them
        call = by_features.Call(q, k, v, state, projection, None, problem)
        first = call.scan(call.sums(q, do, call.slots_q, weight, unit), d_last, call.T, True)[1]
    return first.s, first.z
