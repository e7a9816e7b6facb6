"""The definition of Loki's attention, for one query per sequence.

    P: the eigenvectors of the keys' covariance per head, largest first        K' = K P, q' = q P, not centred
    x_j = q'_{1..r} . k'_j,{1..r}                                              approximate scores, r = dims * D
    the n = keep * S keys with the largest x_j are seen: each query head chooses its own
    o = softmax(scale q K^T) V over these

by pages ("page"): a group of heads chooses alike. With p = softmax(scale x) of each head, a page has the sum of p over its keys
and the group's heads, and the n / page size pages with the largest sum are seen.

Singhania et al., Loki: Low-rank Keys for Efficient Sparse Attention, arXiv:2406.02542, algorithm 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.exact.reference import pairs


def components(keys: Tensor) -> Tensor:
    """P (Hk, D, D) of keys (N, Hk, D), in fp64: column c is the c-th eigenvector. Its largest entry is positive."""
    x = keys.double()
    x = x - x.mean(0)
    return directions(torch.einsum("nhd,nhe->hde", x, x) / max(x.shape[0] - 1, 1))


def directions(covariance: Tensor) -> Tensor:
    """P (Hk, D, D) of the keys' covariance per head, (Hk, D, D)."""
    p = torch.linalg.eigh(covariance).eigenvectors.flip(-1)
    largest = p.gather(1, p.abs().argmax(1, keepdim=True))
    return p * torch.where(largest < 0, -1.0, 1.0)


def scores(q: Tensor, k: Tensor, dims: int) -> Tensor:
    """x (B, H, S) from turned q (B, 1, H, D) and k (B, S, Hk, D), in fp32."""
    G = q.shape[2] // k.shape[2]
    return torch.einsum("bhd,bshd->bhs", q[:, 0, :, :dims].float(), k[..., :dims].float().repeat_interleave(G, dim=2))


def choose_tokens(q: Tensor, k: Tensor, dims: int, count: int) -> Tensor:
    """The places (B, H, count) of the keys that each head sees, rising."""
    return pairs.first_by_score(scores(q, k, dims), count).sort(dim=-1).values


def choose_pages(q: Tensor, k: Tensor, dims: int, count: int, page: int, scale: float) -> Tensor:
    """The pages (B, Hk, count) that each group sees, rising. The last page may be short."""
    Hk = k.shape[2]
    p = torch.softmax(scores(q, k, dims) * scale, dim=-1)
    p = torch.nn.functional.pad(p, (0, -p.shape[-1] % page)).unflatten(-1, (-1, page)).sum(-1)  # (B, H, pages)
    return pairs.first_by_score(p.unflatten(1, (Hk, -1)).sum(2), count).sort(dim=-1).values


def loki(
    q: Tensor,  # (B, 1, H, D)
    k: Tensor,  # (B, S, Hk, D)
    v: Tensor,  # (B, S, Hk, Dv)
    chosen: Tensor,  # (B, H, n) places, or (B, Hk, n) pages
    page: int = 1,
    *,
    scale: float,
) -> Tensor:
    """Returns o (B, 1, H, Dv). q and k are both turned by P or both not: products are the same."""
    j = torch.arange(k.shape[1], device=k.device) // page
    seen = (chosen[..., None] == j).any(-2)  # (B, H or Hk, S)
    seen = seen.repeat_interleave(q.shape[2] // seen.shape[1], dim=1)
    return pairs.attention(q, k, v, seen[:, :, None], scale=scale)[0]
