"""The definition of the attention of Sparse Transformers, for stride l and causal places j <= i.

    strided   first   i - j < window                       the last `window` keys, itself among them
              second  (i - j) mod l = 0
    fixed     first   floor(j / l) = floor(i / l)          the own block
              second  j mod l >= l - c                     the last c = `summary` places of every block

A head sees the first set, the second, or their union, in which a key of both counts once. The paper's first strided set begins
at i - l, which is one key more than a window of l.

Child et al., Generating Long Sequences with Sparse Transformers, arXiv:1904.10509, section 4.3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.exact.reference import pairs


def sees(
    T: int, S: int, H: int, pattern: str, stride: int, window: int, summary: int, heads: str, device: torch.device | None = None
) -> Tensor:  # fmt: skip
    """The pairs of each head, (H, T, S). "split" gives the first set to the first half of the heads, the larger half if odd."""
    i, j = pairs.positions(T, S, device)
    if pattern == "strided":
        first, second = i - j < window, (i - j) % stride == 0
    else:
        assert pattern == "fixed"
        first, second = j // stride == i // stride, (j % stride >= stride - summary).expand(T, S)
    sets = {"first": [first] * H, "second": [second] * H, "union": [first | second] * H}
    sets["split"] = [first] * (H - H // 2) + [second] * (H // 2)
    return torch.stack(sets[heads]) & (j <= i)


def sparse_transformer(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, S, Hk, D)
    v: Tensor,  # (B, S, Hk, Dv)
    *,
    pattern: str,
    stride: int,
    window: int,
    summary: int,
    sets: str,
    scale: float,
) -> Tensor:
    """Returns o (B, T, H, Dv) in the dtype of the inputs."""
    seen = sees(q.shape[1], k.shape[1], q.shape[2], pattern, stride, window, summary, sets, q.device)
    return pairs.attention(q, k, v, seen, scale=scale)[0]
