"""Tokens sorted by expert: a row for each token and each of its experts. Nothing is read by the host."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Sorted(NamedTuple):
    """The rows, N K of them, by rising expert; the rows of one expert stay in the order of their tokens."""

    order: Tensor  # (N K,) int64: the place of each row among (token, choice)
    tokens: Tensor  # (N K,) int64: the token of each row
    experts: Tensor  # (N K,) int32: the expert of each row
    bounds: Tensor  # (E + 1,) int32: expert e has the rows from bounds[e] to bounds[e + 1]

    @property
    def ends(self) -> Tensor:
        """Returns where the rows of each expert end (E,)."""
        return self.bounds[1:]

    def back(self, rows: Tensor) -> Tensor:
        """Sorted rows (N K, ...) by token and choice."""
        return torch.empty_like(rows).index_copy_(0, self.order, rows)


def sort(experts: Tensor, count: int) -> Sorted:
    """Sorts the choices (N, K) of tokens among `count` experts."""
    ids, order = experts.flatten().sort(stable=True)
    # rows of choices below 0, which are no experts, lie in front of the first bound
    every = torch.arange(-1, count, dtype=ids.dtype, device=ids.device)
    bounds = torch.searchsorted(ids, every, right=True, out_int32=True)
    return Sorted(order, order.div(experts.shape[1], rounding_mode="floor"), ids, bounds)
