"""A problem of target attention: its numbers, and the tensors of candidates and histories."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

WEIGHTS = ("softmax", "sigmoid", "silu")


class Problem(NamedTuple):
    """The numbers of a call. It holds no length, so a batch of other users is the same problem."""

    weights: str
    scale: float  # scores are products times it
    mean: bool  # the number of events that were read divides the sum
    deterministic: bool  # a candidate's bits depend on nothing but the candidate and its user


class Batch(NamedTuple):
    """The tensors of a call."""

    q: Tensor  # (total_q, H, D), candidates
    keys: Tensor  # (total, Hk, D), events
    values: Tensor  # (total, Hk, Dv)
    bias: Tensor | None  # (total, 1|H)
    events: Tensor | None  # (total_q, 1|H, k) int32, places in the user's history, -1 for none; None reads the whole history
    cu_q: Tensor  # (B + 1,) offsets of users among candidates
    cu: Tensor  # (B + 1,) offsets of users among events

    @property
    def wide(self) -> torch.dtype:
        """The dtype of sums and scores."""
        return torch.promote_types(self.q.dtype, torch.float32)

    @property
    def lse_shape(self) -> tuple[int, int]:
        return self.q.shape[0], self.q.shape[1]


class Gradients(NamedTuple):
    """The gradients of candidates, keys, values and the bias."""

    dq: Tensor
    dkeys: Tensor
    dvalues: Tensor
    dbias: Tensor | None


def first_events(batch: Batch) -> Tensor:
    """Returns for each candidate the row of its user's first event, (total_q,)."""
    rows = torch.arange(batch.q.shape[0], device=batch.q.device)
    user = torch.searchsorted(batch.cu_q[1:].long(), rows, right=True)
    return batch.cu.long()[user]
