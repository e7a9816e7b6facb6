"""Arrangements in which a set of keys is an interval for the exact kernels.

Key heads join the batch, where that is a view of the tensors. All queries of a block of l tokens that see one key per block are
heads of one group: (B, n l, H, D) becomes (B Hk, n, l G, D).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from rooftile import api
from rooftile.masks import CAUSAL


def padded(x: Tensor, before: int, after: int) -> Tensor:
    """x (B, T, H, D) with tokens of zeros at both ends."""
    return F.pad(x, (0, 0, 0, 0, before, after)) if before or after else x


def attend_by_head(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Causal attention with a batch of key heads: o (N, T, H, Dv) and lse (N, H, T).

    A short sequence of many heads is usual here, and would look like a tensor with swapped axes.
    """
    (N, _, H, _), Hk = q.shape, k.shape[2]
    q = q.unflatten(2, (Hk, H // Hk)).transpose(1, 2).flatten(0, 1)  # (N Hk, T, G, D)
    k, v = (x.transpose(1, 2).flatten(0, 1).unsqueeze(2) for x in (k, v))  # (N Hk, S, 1, D)
    o, lse = api.attention_with_lse(q, k, v, CAUSAL, **options)
    return o.unflatten(0, (N, Hk)).transpose(1, 2).flatten(2, 3), lse.unflatten(0, (N, Hk)).flatten(1, 2)


def as_groups(q: Tensor, length: int, kv_heads: int) -> Tensor:
    """Queries (B, n l, H, D) as (B, n, Hk l G, D)."""
    return q.unflatten(1, (-1, length)).unflatten(3, (kv_heads, -1)).transpose(2, 3).flatten(2, 4)


def from_groups(o: Tensor, lse: Tensor, length: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Outputs (B, n, Hk l G, Dv) and lse (B, Hk l G, n) as (B, n l, H, Dv) and (B, H, n l)."""
    o = o.unflatten(2, (kv_heads, length, -1)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
    return o, lse.unflatten(1, (kv_heads, length, -1)).permute(0, 1, 3, 4, 2).flatten(3).flatten(1, 2)
