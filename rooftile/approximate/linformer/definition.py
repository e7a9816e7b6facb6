"""The definition of Linformer's attention.

    K' = E K,  V' = F V                          per head: r rows, each a sum over all tokens
    o = softmax(scale Q K'^T) V'

A text shorter than the projections uses their first columns. Padding is zero before the projection.

Wang et al., Linformer, arXiv:2006.04768, equation 7.
"""

from __future__ import annotations

import torch
from torch import Tensor


def linformer(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, S, Hk, D)
    v: Tensor,  # (B, S, Hk, Dv)
    e: Tensor,  # (1 | Hk | H, r, N)
    f: Tensor,  # (1 | Hk | H, r, N)
    *,
    scale: float,
    key_padding_mask: Tensor | None = None,  # (B, S), True for padding
) -> Tensor:
    """Returns o (B, T, H, Dv). Computes in fp32, or in fp64 for fp64 inputs; o has the dtype of q."""
    H, S = q.shape[2], k.shape[1]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    keys, values = (x.to(wide).repeat_interleave(H // x.shape[2], dim=2) for x in (k, v))
    if key_padding_mask is not None:
        keys, values = (x.masked_fill(key_padding_mask[:, :, None, None], 0.0) for x in (keys, values))
    e_h, f_h = (x[..., :S].to(wide).repeat_interleave(H // x.shape[0], dim=0) for x in (e, f))  # (H, r, S)
    keys = torch.einsum("hrs,bshd->brhd", e_h, keys)
    values = torch.einsum("hrs,bshd->brhd", f_h, values)
    p = torch.softmax(scale * torch.einsum("bthd,brhd->bhtr", q.to(wide), keys), dim=-1)
    return torch.einsum("bhtr,brhd->bthd", p, values).to(q.dtype)
