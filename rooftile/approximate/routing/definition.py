"""The definition of Routing Transformer's attention, with centroids mu_c for each head.

    q, k <- layer norm without scale and shift
    cluster c takes the `width` queries with the largest q . mu_c, and the `width` keys with the largest k . mu_c
    a query of the cluster sees the cluster's keys, and if causal those at its place and before
    o_i = mean of softmax(scale q_i K_c^T) V_c over the clusters c that took i, 0 if none did

    strict: each token goes to its nearest centroid, argmax_c (q + k) . mu_c, and sees the tokens of its cluster

Roy et al., Efficient Content-Based Sparse Attention with Routing Transformers, arXiv:2003.05997, algorithm 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.exact.reference import pairs


def normed(x: Tensor) -> Tensor:
    """x with mean 0 and variance 1 along the last axis, which is computed in fp32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide - wide.mean(-1, keepdim=True)
    return (wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()).to(x.dtype)


def taken(x: Tensor, centroids: Tensor, width: int) -> Tensor:
    """The places of the `width` tokens of (B, T, H, D) that each centroid (H, c, D) takes: (B, H, c, width), rising."""
    score = torch.einsum("bthd,hcd->bhct", normed(x.float()), centroids.float())
    return pairs.first_by_score(score, width).sort(dim=-1).values


def nearest(q: Tensor, k: Tensor, centroids: Tensor) -> Tensor:
    """The centroid of each token, (B, T, H); ties go to the lower index. k has as many heads as q."""
    score = torch.einsum("bthd,hcd->bthc", normed(q.float()) + normed(k.float()), centroids.float())
    return score.argmax(-1)


def routing(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, S, Hk, D)
    v: Tensor,  # (B, S, Hk, Dv)
    queries: Tensor,  # (B, H, c, w): places of the queries of each cluster
    keys: Tensor,  # (B, H, c, w'): of its keys
    *,
    causal: bool,
    scale: float,
) -> Tensor:
    """Returns o (B, T, H, Dv) in the dtype of the inputs."""
    B, T, H, _ = q.shape
    S = k.shape[1]
    q, k = normed(q), normed(k)
    i, j = pairs.positions(T, S, q.device)
    total, count = 0.0, q.new_zeros(B, H, T)
    for c in range(queries.shape[2]):
        holds_q = _flags(queries[:, :, c], T)  # (B, H, T)
        holds_k = _flags(keys[:, :, c], S)  # (B, H, S)
        seen = holds_q[..., None] & holds_k[:, :, None]
        if causal:
            seen = seen & (j <= i)
        total = total + pairs.attention(q, k, v, seen, scale=scale)[0]
        count = count + holds_q
    return total / count.clamp(min=1).mT[..., None]


def routing_strict(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, S, Hk, D)
    v: Tensor,  # (B, S, Hk, Dv)
    clusters: Tensor,  # (B, S, H); the queries are the last T tokens
    *,
    causal: bool,
    scale: float,
) -> Tensor:
    """Returns o (B, T, H, Dv) in the dtype of the inputs."""
    T, S = q.shape[1], k.shape[1]
    own = clusters.mT  # (B, H, S)
    seen = own[:, :, S - T :, None] == own[:, :, None]
    if causal:
        i, j = pairs.positions(T, S, q.device)
        seen = seen & (j <= i)
    return pairs.attention(normed(q), normed(k), v, seen, scale=scale)[0]


def _flags(places: Tensor, length: int) -> Tensor:
    """True at the places (B, H, w) of an axis of this length."""
    flags = torch.zeros(*places.shape[:2], length, dtype=torch.bool, device=places.device)
    return flags.scatter(-1, places.long(), True)
