"""The gradients of attention as formulas: the definition that the backward kernels follow.

    D_i  = sum_c dO_ic O_ic - dL_i             dL is the gradient of lse
    dV_j = sum_i P~_ij dO_i                    P~ is P after dropout
    dP_ij = dO_i . V_j                         through dropout
    dX_ij = P_ij (dP_ij - D_i)                 the gradient of the scores, bias and ALiBi included
    dS_ij = dX_ij (1 - (s_ij / softcap)^2)     before bias, through the softcap
    dQ_i = scale sum_j dS_ij K_j               dK_j = scale sum_i dS_ij Q_i
    dbias = dX summed over what was broadcast  dsink_h = sum_i -exp(sink_h - L_i) D_i

Dao et al., FlashAttention, arXiv:2205.14135, appendix B; the term dL makes merging by lse differentiable.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rooftile.exact.masks import FULL, Mask, materialise
from rooftile.exact.reference.attention import attention
from rooftile.exact.reference.pairs import softmax
from rooftile.exact.reference.philox import counters, distances, keep_mask
from rooftile.exact.spec import Grads


def gradients(
    do: Tensor,  # (B, T, H, Dv)
    dlse: Tensor,  # (B, H, T)
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, S, Hk, D)
    v: Tensor,  # (B, S, Hk, Dv)
    mask: Mask = FULL,
    **options: Any,
) -> Grads:
    """Returns gradients for finite inputs. Takes the options of `reference.attention`; dbias has bias's own shape."""
    o, _ = attention(q, k, v, mask, **options)
    bias, alibi, sinks = (options.get(name) for name in ("bias", "alibi", "sinks"))
    scale, softcap, dropout = options.get("scale"), options.get("softcap", 0.0), options.get("dropout", 0.0)
    B, T, H, D = q.shape
    S, Hk = k.shape[1:3]
    scale = D**-0.5 if scale is None else scale
    keys, values = (x.repeat_interleave(H // Hk, dim=2) for x in (k, v))
    s = torch.einsum("bthd,bshd->bhts", q, keys) * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    x = s if bias is None else s + bias
    if alibi is not None:
        x = x - alibi.reshape(-1, H, 1, 1) * distances(options.get("seed"), 0, B, T, S, q.device).to(x)
    x = x.masked_fill(~materialise(mask, T, S, q.device), -math.inf)
    terms = x if sinks is None else torch.cat([x, sinks.reshape(1, H, 1, 1).expand(B, H, T, 1)], dim=-1)
    p, _ = softmax(terms)
    p, p_sink = p[..., :S], p[..., S:]  # (B, H, T, S), and (B, H, T, 1) or nothing

    kept = 1.0
    if dropout:
        keep = keep_mask(options["seed"], dropout, *counters(options["seed"], 0, (B, H, T, S), q.device))
        kept = keep.to(q.dtype) / (1 - dropout)
    D_i = torch.einsum("bthd,bthd->bht", do, o) - dlse
    dP = torch.einsum("bthd,bshd->bhts", do, values) * kept
    dX = p * (dP - D_i[..., None])
    dS = dX * (1 - (s / softcap) ** 2) if softcap else dX

    dv = torch.einsum("bhts,bthd->bshd", p * kept, do).unflatten(2, (Hk, -1)).sum(3)
    dq = torch.einsum("bhts,bshd->bthd", dS, keys) * scale
    dk = (torch.einsum("bhts,bthd->bshd", dS, q) * scale).unflatten(2, (Hk, -1)).sum(3)
    dbias = dX.sum_to_size(bias.shape) if bias is not None else None
    dsinks = -(p_sink[..., 0] * D_i).sum((0, 2)) if sinks is not None else None
    return Grads(dq, dk, dv, dbias, dsinks)


def sinks_gradient(sinks: Tensor, lse: Tensor, rest: Tensor | float, delta: Tensor) -> Tensor:
    """Computes dsink_h = sum_i -exp(sink_h - L_i) D_i, from rows (B, H, T) or packed (H, total_q).

    L_i is lse and the rest that its rounding lost. A row with lse = -inf sees no key and has a sink of -inf: it gives nothing.
    """
    terms = torch.exp(sinks.float()[:, None] - lse - rest) * delta
    rows = terms.masked_fill(lse == -math.inf, 0.0).sum(-1)
    return -(rows.sum(0) if rows.ndim == 2 else rows).to(sinks.dtype)
