"""Arrangements in which a set of keys is an interval for the exact kernels.

Key heads join the batch, where that is a view of the tensors. All queries of a block of l tokens that see one key per block are
heads of one group: (B, n l, H, D) becomes (B Hk, n, l G, D).

The last c places of each block of l tokens lie side by side, so that KEYS / c blocks have KEYS of these summary keys together.
Then tiles are whole:

    earlier groups   every query of a group of blocks sees all of their keys: listed blocks
    own group        block r of a group sees the first r c of its KEYS keys: one listed block, with bits

The two parts see different keys, so their outputs join by lse. Nothing is copied but the summary keys and values.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rooftile.exact import api
from rooftile.exact.blocks import Blocks, packed
from rooftile.exact.blocks.lists import LEAST
from rooftile.exact.masks import CAUSAL, Mask

Part = tuple[Tensor, Tensor]
# summary keys of a group of blocks
KEYS = 128
# backends that have lists of blocks, also with bits
BACKENDS = (None, "triton", "tiled")


def padded(x: Tensor, before: int, after: int) -> Tensor:
    """x (B, T, H, D) with tokens of zeros at both ends."""
    return F.pad(x, (0, 0, 0, 0, before, after)) if before or after else x


def attend_by_head(q: Tensor, k: Tensor, v: Tensor, mask: Mask = CAUSAL, **options: Any) -> tuple[Tensor, Tensor]:
    """Attention with a batch of key heads: o (N, T, H, Dv) and lse (N, H, T).

    A short sequence of many heads is usual here, and would look like a tensor with swapped axes.
    """
    (N, _, H, _), Hk = q.shape, k.shape[2]
    q = q.unflatten(2, (Hk, H // Hk)).transpose(1, 2).flatten(0, 1)  # (N Hk, T, G, D)
    k, v = (x.transpose(1, 2).flatten(0, 1).unsqueeze(2) for x in (k, v))  # (N Hk, S, 1, D)
    o, lse = api.attention_with_lse(q, k, v, mask, **options)
    return o.unflatten(0, (N, Hk)).transpose(1, 2).flatten(2, 3), lse.unflatten(0, (N, Hk)).flatten(1, 2)


def as_groups(q: Tensor, length: int, kv_heads: int) -> Tensor:
    """Queries (B, n l, H, D) as (B, n, Hk l G, D)."""
    return q.unflatten(1, (-1, length)).unflatten(3, (kv_heads, -1)).transpose(2, 3).flatten(2, 4)


def from_groups(o: Tensor, lse: Tensor, length: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Outputs (B, n, Hk l G, Dv) and lse (B, Hk l G, n) as (B, n l, H, Dv) and (B, H, n l)."""
    o = o.unflatten(2, (kv_heads, length, -1)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
    return o, lse.unflatten(1, (kv_heads, length, -1)).permute(0, 1, 3, 4, 2).flatten(3).flatten(1, 2)


def by_column(x: Tensor, stride: int) -> Tensor:
    """(B, n l, H, D) as (B l, n, H, D); a view if B is 1."""
    return x.unflatten(1, (-1, stride)).transpose(1, 2).flatten(0, 1)


def from_columns(o: Tensor, lse: Tensor, stride: int) -> Part:
    """Outputs (B l, n, H, Dv) and lse (B l, H, n) as (B, n l, H, Dv) and (B, H, n l)."""
    o = o.unflatten(0, (-1, stride)).transpose(1, 2).flatten(1, 2)
    return o, lse.unflatten(0, (-1, stride)).permute(0, 2, 3, 1).flatten(2)


def summaries_are_tiles(q: Tensor, stride: int, summary: int, backend: str | None) -> bool:
    """Whether the tiles of this pattern are whole, and a backend that computes them runs."""
    there = backend in BACKENDS and (q.is_cuda or backend is not None)
    return there and stride % LEAST == 0 and KEYS % summary == 0 and q.shape[1] >= stride


def summaries_before(q: Tensor, k: Tensor, v: Tensor, stride: int, summary: int, options: dict[str, Any]) -> list[Part]:
    """Attention to the summary places of the blocks before the own one: a part for earlier groups, and one for the own group."""
    T, S = q.shape[1], k.shape[1]
    rows = KEYS // summary * stride
    before, after = (S - T) % rows, -S % rows
    first, groups = (S - T) // rows, -(-S // rows)
    q = padded(q, before, after)  # whole groups
    k, v = (padded(x, 0, after).unflatten(1, (-1, stride))[:, :, stride - summary :].flatten(1, 2) for x in (k, v))
    parts = [_own_group(q, k, v, first, groups, rows, stride, summary, options)]
    if groups > 1:
        blocks = _earlier(first, groups, rows, q.device)
        parts.append(api.attention_with_lse(q, k, v, blocks=blocks, **options))
    return [(o[:, before : before + T], lse[..., before : before + T]) for o, lse in parts]


def _own_group(
    q: Tensor, k: Tensor, v: Tensor, first: int, groups: int, rows: int, stride: int, summary: int, options: dict[str, Any]
) -> Part:  # fmt: skip
    B, own = q.shape[0], groups - first
    k, v = (x.unflatten(1, (groups, KEYS))[:, first:].flatten(0, 1) for x in (k, v))
    q = q.unflatten(1, (own, rows)).flatten(0, 1)  # (B groups, rows, H, D)
    o, lse = api.attention_with_lse(q, k, v, blocks=_staircase(stride, summary, q.device), **options)
    return o.unflatten(0, (B, own)).flatten(1, 2), lse.unflatten(0, (B, own)).transpose(1, 2).flatten(2)


@lru_cache(maxsize=64)
def _staircase(stride: int, summary: int, device: torch.device) -> Blocks:
    """Block r of a group sees the first r summary keys of its group, times c; the first block sees none."""
    with torch.inference_mode(False):
        n = KEYS // summary
        seen = torch.arange(KEYS, device=device) < summary * torch.arange(n, device=device)[:, None]
        bits = packed(seen)[:, None].expand(n, stride, KEYS // 32)
        counts = (torch.arange(n, device=device) > 0).int()
        indices = torch.zeros(1, 1, n, 1, dtype=torch.int32, device=device)
        return Blocks(counts[None, None], indices, (stride, KEYS), bits[None, None, :, None].contiguous())


@lru_cache(maxsize=64)
def _earlier(first: int, groups: int, rows: int, device: torch.device) -> Blocks:
    """Group i sees the keys of the groups before it; the queries begin with group `first`."""
    with torch.inference_mode(False):
        counts = torch.arange(first, groups, dtype=torch.int32, device=device)
        indices = torch.arange(groups - 1, dtype=torch.int32, device=device).expand(1, 1, groups - first, groups - 1)
        return Blocks(counts[None, None], indices.contiguous(), (rows, KEYS))
