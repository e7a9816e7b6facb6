"""The training of Routing Transformer's centroids: an exponential mean of their members, and a loss that keeps tokens near.

Roy et al., Efficient Content-Based Sparse Attention with Routing Transformers, arXiv:2003.05997.
"""

from __future__ import annotations

import torch
from torch import Tensor, distributed

from rooftile.approximate.arguments import check_qkv
from rooftile.approximate.chosen_arguments import as_given, check_fraction
from rooftile.approximate.gathered.pairs import take
from rooftile.approximate.routing.attention import Members, check_centroids, check_clusters, check_members
from rooftile.approximate.routing.definition import normed
from rooftile.runtime.arguments import check_number
from rooftile.runtime.words import answers_foreign_words


@answers_foreign_words
def update_centroids(
    centroids: Tensor,  # (H, c, D)
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, S, Hk, D)
    members: Members | Tensor,
    *,
    decay: float = 0.999,
) -> Tensor:
    """Moves centroids towards their members: decay times the old one, and the rest from the mean of its queries and its keys.

    Queries and keys count half each. A centroid without queries or without keys moves towards the others; one without members
    stays. Where torch.distributed runs, members of all ranks count, so that the centroids stay equal.

    Args:
        centroids: (H, c, D).
        q, k, members: of a call of `routing`, in training.
        decay: from 0 to 1.

    Returns:
        New centroids (H, c, D) in the dtype of the old. Nothing has a gradient.

    Example:
        >>> centroids = torch.randn(8, 16, 64)
        >>> _, members = routing(q, k, v, centroids)  # doctest: +SKIP
        >>> centroids = update_centroids(centroids, q, k, members)  # doctest: +SKIP
    """
    q, k, _, _ = check_qkv(q, k, k)
    wide = check_centroids(centroids, q)
    decay = 0.0 if decay == 0 and not isinstance(decay, bool) else check_fraction("decay", decay)
    with torch.no_grad(), as_given(q):
        sums = torch.stack([*_sums(q, k, wide, members)])  # (2, H, c, D + 1): a row's sum and how many there are
        if distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(sums)
        total, count = sums[..., :-1], sums[..., -1:]
        means = (total / count.clamp(min=1)).sum(0)
        target = means / (count > 0).sum(0).clamp(min=1)
        moved = decay * wide + (1 - decay) * target
        return torch.where((count > 0).any(0), moved, wide).to(centroids.dtype)


@answers_foreign_words
def commitment_loss(q: Tensor, k: Tensor, centroids: Tensor, *, commitment: float = 1e-4) -> Tensor:
    """The mean squared difference of normed queries and keys from their nearest centroids, times `commitment`: a scalar in fp32.

    It keeps tokens near the centroids; gradients flow to q and k. Queries and keys count half each.

    Args:
        q: queries (B, T, H, D).
        k: keys (B, S, Hk, D).
        centroids: (H, c, D).
        commitment: 1e-4 in the paper's code.

    Example:
        >>> q, k = torch.randn(1, 32, 4, 16), torch.randn(1, 32, 4, 16)
        >>> commitment_loss(q, k, torch.randn(4, 8, 16)).shape
        torch.Size([])
    """
    q, k, _, _ = check_qkv(q, k, k)
    wide = check_centroids(centroids, q)
    commitment = check_number("commitment", commitment)
    loss = q.new_zeros((), dtype=wide.dtype)
    with as_given(q):
        for x in (q, k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)):
            x = normed(x.to(wide.dtype))
            best = torch.einsum("bthd,hcd->bthc", x.detach(), wide).argmax(-1)  # (B, T, H)
            near = wide[torch.arange(x.shape[2], device=x.device), best]  # (B, T, H, D)
            loss = loss + (x - near).square().sum() / max(x.numel(), 1)
    return loss * (commitment / 2)


def _sums(q: Tensor, k: Tensor, centroids: Tensor, members: Members | Tensor) -> list[Tensor]:
    """The sums of the queries and of the keys of each cluster, and their number: (H, c, D + 1) each."""
    H, c, _ = centroids.shape
    found = []
    strict = isinstance(members, Tensor)
    pair = check_clusters(members, q, k, centroids) if strict else check_members(members, q, k, centroids)
    for n, x in enumerate((q, k.repeat_interleave(H // k.shape[2], dim=2))):
        x = normed(x.to(centroids.dtype))
        x = torch.cat([x, torch.ones_like(x[..., :1])], dim=-1)
        if isinstance(pair, Tensor):
            own = torch.nn.functional.one_hot(pair[:, pair.shape[1] - x.shape[1] :].long(), c).to(x.dtype)  # (B, T, H, c)
            found.append(torch.einsum("bthd,bthc->hcd", x, own))
        else:
            found.append(take(x, pair[n].long()).sum((0, 3)))
    return found
