"""A search of histories: its tensors and numbers."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

KINDS = ("exact", "lsh", "category")


class Search(NamedTuple):
    """A search: features under "exact", words of hashes under "lsh", and numbers of categories (total, 1, 1) under "category"."""

    q: Tensor  # (total_q, H, D)
    keys: Tensor  # (total, Hk, D)
    bias: Tensor | None  # (total, 1|H), added to exact scores
    cu_q: Tensor  # (B + 1,)
    cu: Tensor  # (B + 1,)
    k: int
    kind: str
    scale: float  # exact scores are products times it
    per_head: bool  # False sums the scores over heads
    deterministic: bool

    @property
    def heads(self) -> int:
        """How many heads have a choice of their own."""
        return self.q.shape[1] if self.per_head else 1
