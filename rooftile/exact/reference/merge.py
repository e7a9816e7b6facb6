"""Merging attention over disjoint sets of keys: exact, and differentiable in every o and lse.

    lse = log sum_r exp(lse_r)          o = sum_r exp(lse_r - lse) o_r

A part that sees no key has lse = -inf and weight 0, whatever its o.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merges parts (o (B, T, H, Dv), lse (B, H, T)), or packed (total, H, Dv) and (H, total), into one such pair."""
    lses = torch.stack([lse for _, lse in parts])  # (R, B, H, T)
    empty = lses == -math.inf
    pivot = lses.detach().amax(0)
    pivot = torch.where(pivot == -math.inf, 0.0, pivot)
    # the lse of an empty part stays out of the graph: the gradient of exp(-inf) would be 0 * inf
    weights = torch.where(empty, 0.0, torch.exp(torch.where(empty, 0.0, lses) - pivot))  # (R, B, H, T)
    total = weights.sum(0)
    nothing = total == 0
    lse = torch.where(nothing, -math.inf, torch.log(torch.where(nothing, 1.0, total)) + pivot)
    shares = weights / torch.where(nothing, 1.0, total)
    o = sum(
        share.mT[..., None] * torch.where(gone.mT[..., None], 0.0, out.to(share.dtype))
        for share, gone, (out, _) in zip(shares, empty, parts, strict=True)
    )
    return o.to(parts[0][0].dtype), lse
