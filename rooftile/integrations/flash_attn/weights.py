"""The weights of attention as flash-attn's tests read them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.exact import api
from rooftile.exact.masks import Mask
from rooftile.exact.reference.philox import keep_mask


@torch.no_grad()
def signed_weights(q: Tensor, k: Tensor, mask: Mask, seed: Tensor, dropout: float, **options: Any) -> Tensor:
    """The weights (B, H, T, S) before dropout, with a negative sign where dropout took one away.

    They are attention to the identity as values, so this holds a matrix of T x S for each head.
    """
    B, T, H = q.shape[:3]
    S, heads = k.shape[1:3]
    identity = torch.eye(S, dtype=q.dtype, device=q.device)[:, None].expand(B, S, heads, S)
    weights = api.attention(q, k, identity, mask, backend="eager", **options).transpose(1, 2)
    b, h, t, s = (torch.arange(n, device=q.device) for n in (B, H, T, S))
    kept = keep_mask(seed, dropout, b[:, None, None, None], h[:, None, None], t[:, None], s)
    return torch.where(kept, weights, -weights)
