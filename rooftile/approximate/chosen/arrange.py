"""Arrangements of queries in which a set of keys is an interval for the exact kernels.

All queries of a block of l tokens that see one key per block are heads of one group: (B, n l, H, D) becomes (B, n, Hk l G, D).
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def padded(x: Tensor, before: int, after: int) -> Tensor:
    """x (B, T, H, D) with tokens of zeros at both ends."""
    return F.pad(x, (0, 0, 0, 0, before, after)) if before or after else x


def as_groups(q: Tensor, length: int, kv_heads: int) -> Tensor:
    """Queries (B, n l, H, D) as (B, n, Hk l G, D)."""
    return q.unflatten(1, (-1, length)).unflatten(3, (kv_heads, -1)).transpose(2, 3).flatten(2, 4)


def from_groups(o: Tensor, lse: Tensor, length: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Outputs (B, n, Hk l G, Dv) and lse (B, Hk l G, n) as (B, n l, H, Dv) and (B, H, n l)."""
    o = o.unflatten(2, (kv_heads, length, -1)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
    return o, lse.unflatten(1, (kv_heads, length, -1)).permute(0, 1, 3, 4, 2).flatten(3).flatten(1, 2)
