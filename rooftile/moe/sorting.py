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
    ends: Tensor  # (E,) int32: where the rows of each expert end

    def back(self, rows: Tensor) -> Tensor:
        """Sorted rows (N K, ...) by token and choice."""
        return torch.empty_like(rows).index_copy_(0, self.order, rows)


def sort(experts: Tensor, count: int) -> Sorted:
    """Sorts the choices (N, K) of tokens among `count` experts."""
    ids, order = experts.flatten().sort(stable=True)
    every = torch.arange(count, dtype=ids.dtype, device=ids.device)
    ends = torch.searchsorted(ids, every, right=True, out_int32=True)
    return Sorted(order, order.div(experts.shape[1], rounding_mode="floor"), ids, ends)
