"""Softmax over a chosen set of pairs: the definition that the methods which choose keys share.

    x_ij = scale q_i . k_j + bias_ij         for the pairs (i, j) that are seen
    lse_i = log sum_j exp x_ij               over the seen j
    o_i = sum_j exp(x_ij - lse_i) v_j

A row that sees no key gives 0 and lse = -inf. A NaN or infinity in a token reaches the rows that see it, and no other.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attention(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, S, Hk, D)
    v: Tensor,  # (B, S, Hk, Dv)
    seen: Tensor,  # booleans that broadcast to (B, H, T, S)
    *,
    scale: float,
    bias: Tensor | None = None,  # broadcasts to (B, H, T, S)
) -> tuple[Tensor, Tensor]:
    """Returns o (B, T, H, Dv) and lse (B, H, T), in the dtype of the inputs."""
    G = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(G, dim=2) for x in (k, v))
    lost_q, lost_k = ~q.isfinite().all(-1), ~(k.isfinite().all(-1) & v.isfinite().all(-1))  # (B, T, H), (B, S, H)
    q, k, v = (torch.where(x.isfinite(), x, 0.0) for x in (q, k, v))

    x = torch.einsum("bthd,bshd->bhts", q, k) * scale  # (B, H, T, S)
    if bias is not None:
        x = x + bias.to(x.dtype)
    seen = seen.expand_as(x)
    x = x.masked_fill(~seen, -math.inf)
    weights, lse = softmax(x)
    o = torch.einsum("bhts,bshd->bthd", weights, v)
    lost = seen & (lost_q.mT[..., None] | lost_k.mT[:, :, None])
    return o.masked_fill(lost.any(-1).mT[..., None], math.nan), lse


def softmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax over the last axis, and its log of a sum: 0 and -inf, with zero gradients, where all scores are -inf."""
    if x.shape[-1] == 0:
        return x, x.sum(-1) - math.inf
    pivot = x.detach().amax(-1, keepdim=True)
    pivot = torch.where(pivot == -math.inf, 0.0, pivot)
    terms = torch.exp(x - pivot)
    total = terms.sum(-1, keepdim=True)
    nothing = total == 0
    total = torch.where(nothing, 1.0, total)
    lse = torch.where(nothing, -math.inf, torch.log(total) + pivot)
    return terms / total, lse[..., 0]


def positions(T: int, S: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """The places i (T, 1) of queries and j (1, S) of keys, aligned bottom-right: the last query is at the last key."""
    return torch.arange(T, device=device)[:, None] + (S - T), torch.arange(S, device=device)[None, :]


def first_by_score(score: Tensor, count: int) -> Tensor:
    """The indices of the `count` largest along the last axis, largest first; ties go to the lower index."""
    return score.sort(dim=-1, descending=True, stable=True).indices[..., :count]
