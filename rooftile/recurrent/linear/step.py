"""One token of each sequence: the recurrence of `by_chunks`, on sums that change in place."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.recurrent.linear.by_chunks import EMPTY, RunningSums, exp_of_difference
from rooftile.recurrent.linear.features import features
from rooftile.recurrent.linear.problem import Recurrence


def read_token(q: Tensor, k: Tensor, v: Tensor, state: RunningSums, projection: Tensor | None, problem: Recurrence) -> Tensor:
    """Adds keys and values (B, Hk, D) to the sums in place, and returns o (B, H, Dv) of queries (B, H, D), in the dtype of q.

    It computes in the dtype of the sums, and never waits for the device.
    """
    wide = state.s.dtype
    f_q, _ = features(q.to(wide), problem.feature, projection, problem.scale)
    f_k, m = features(k.to(wide), problem.feature, projection, problem.scale)
    if m is not None:
        largest = torch.maximum(state.largest, m)
        keep = exp_of_difference(state.largest, largest)
        state.s.mul_(keep[..., None, None])
        state.z.mul_(keep[..., None])
        state.largest.copy_(largest)
        f_k = f_k * (m - largest).exp()[..., None]
    state.s.add_(f_k[..., None] * v[..., None, :].to(wide))
    state.z.add_(f_k)
    f_q = f_q.unflatten(1, (k.shape[1], -1))  # (B, Hk, G, F)
    o = f_q @ state.s  # (B, Hk, G, Dv)
    if problem.normalise:
        den = f_q @ state.z[..., None]
        empty = den.abs() < EMPTY
        o = (o / den.masked_fill(empty, 1.0)).masked_fill(empty, 0.0)
    return o.flatten(1, 2).to(q.dtype)
