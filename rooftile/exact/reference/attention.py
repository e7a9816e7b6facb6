"""The definition of attention.

    x_ij = scale q_i . k_j                     and softcap * tanh(x / softcap) if there is a softcap
    x_ij += bias_ij - slope |i - j|            and -inf where the mask hides j from i
    m_i = max_j x_ij                           the sink is a key with a score of its own and a value of zero
    l_i = sum_j exp(x_ij - m_i)                and exp(sink - m_i)
    p_ij = exp(x_ij - m_i) / l_i               dropped with probability d, else divided by 1 - d
    o_i = sum_j p_ij v_j                       lse_i = m_i + log l_i

Weights are never computed as exp(x - lse): lse is one rounded number, and where all scores of a row share a large offset it
has lost log l, so that the weights would not add up to one.

A row with no visible key (and no sink) gives 0 and lse = -inf. A NaN behind the mask reaches no output and no gradient:
non-finite inputs are replaced by zeros first, and NaN is written to the pairs that see them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rooftile.exact.blocks import Blocks
from rooftile.exact.masks import FULL, Mask, materialise
from rooftile.exact.reference.philox import counters, distances, keep_mask
from rooftile.exact.reference.seen import poison, weighted_sum, without_lost


def attention(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, S, Hk, D)
    v: Tensor,  # (B, S, Hk, Dv)
    mask: Mask = FULL,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    bias: Tensor | None = None,  # broadcasts to (B, H, T, S)
    alibi: Tensor | None = None,  # (H,) or (B, H)
    sinks: Tensor | None = None,  # (H,)
    dropout: float = 0.0,
    seed: Tensor | None = None,  # int64 (1,), or (1 + 4 B,) with places
    seen: Tensor | None = None,  # booleans (1|B, 1|Hk|H, T, S): pairs that the mask may show
    batch: int = 0,  # the index of the first sequence, for dropout
) -> tuple[Tensor, Tensor]:
    """Returns o (B, T, H, Dv) and lse (B, H, T), in the dtype of the inputs. Differentiable, also twice and forward."""
    B, T, H, D = q.shape
    S, Hk = k.shape[1:3]
    visible = None if mask.is_full and seen is None else materialise(mask, T, S, q.device)  # (T, S)
    if visible is not None and seen is not None:
        heads = seen if seen.shape[1] in (1, H) else seen.repeat_interleave(H // Hk, dim=1)
        visible = visible & heads  # (1|B, 1|H, T, S)
    if visible is not None:
        lost_q, lost_k = (~x.isfinite().all(-1) for x in (q, k))  # (B, T, H), (B, S, Hk)
        q, k = without_lost(q), without_lost(k)
    k, v = (x.repeat_interleave(H // Hk, dim=2) for x in (k, v))

    x = torch.einsum("bthd,bshd->bhts", q, k) * (D**-0.5 if scale is None else scale)  # (B, H, T, S)
    if visible is not None:
        lost = lost_q.mT[..., None] | lost_k.mT.repeat_interleave(H // Hk, dim=1)[:, :, None]
        x = x + poison(lost & visible, x.dtype)
    if softcap:
        if visible is not None:
            # the derivative of tanh at an overflow behind the mask is NaN, which a gradient of zero would not hide
            x = x.masked_fill(~visible, 0.0)
        x = softcap * torch.tanh(x / softcap)
    if bias is not None:
        x = x + bias.to(x.dtype)
    if alibi is not None:
        x = x - alibi.to(x.dtype).reshape(-1, H, 1, 1) * distances(seed, batch, B, T, S, q.device).to(x.dtype)
    if visible is not None:
        x = x.masked_fill(~visible, -math.inf)

    terms = x if sinks is None else torch.cat([x, sinks.to(x.dtype).reshape(1, H, 1, 1).expand(B, H, T, 1)], dim=-1)
    pivot, total, lse = _sums(terms)  # (B, H, T)
    p = torch.exp(x - pivot[..., None]) / torch.where(total == 0, 1.0, total)[..., None]
    if visible is not None:
        # 0 / NaN is NaN
        p = p.masked_fill(~visible, 0.0)
    if dropout:
        kept = keep_mask(seed, dropout, *counters(seed, batch, (B, H, T, S), q.device))
        p = torch.where(kept, p / (1 - dropout), 0.0)
    o = torch.einsum("bhts,bshd->bthd", p, v) if visible is None else weighted_sum(p, v, visible)
    return o, lse


def attention_packed(
    q: Tensor,  # (total_q, H, D)
    k: Tensor,  # (total_k, Hk, D)
    v: Tensor,  # (total_k, Hk, Dv)
    cu_q: Tensor,  # (B + 1,)
    cu_k: Tensor,  # (B + 1,)
    mask: Mask = FULL,
    *,
    bias: Tensor | None = None,  # broadcasts to (1, H, total_q, J), J at least the longest key sequence
    alibi: Tensor | None = None,  # (H,) or (B, H)
    blocks: Blocks | None = None,  # lists in the places of packed sequences
    **options,
) -> tuple[Tensor, Tensor]:
    """Runs `attention` on each sequence separately. Returns o (total_q, H, Dv) and lse (H, total_q)."""
    ends_q, ends_k = cu_q.tolist(), cu_k.tolist()
    outs, lses = [], []
    for b in range(len(ends_q) - 1):
        rows, keys = slice(ends_q[b], ends_q[b + 1]), slice(ends_k[b], ends_k[b + 1])
        here = bias
        if bias is not None:
            here = bias if bias.shape[-2] == 1 else bias[..., rows, :]
            here = here[..., : ends_k[b + 1] - ends_k[b]]
        slopes = alibi[b] if alibi is not None and alibi.ndim == 2 and alibi.shape[0] > 1 else alibi
        seen = None
        if blocks is not None:
            size, T = blocks.block_size[0], ends_q[b + 1] - ends_q[b]
            first = ends_q[b] // size + b
            seen = blocks.of_slots(first, first - (-T // size)).pairs(T, ends_k[b + 1] - ends_k[b])
        o, lse = attention(
            q[None, rows], k[None, keys], v[None, keys], mask, bias=here, alibi=slopes, batch=b, seen=seen, **options
        )
        outs.append(o[0])
        lses.append(lse[0])
    if not outs:
        return q.new_zeros((0, q.shape[1], v.shape[-1])), q.new_zeros((q.shape[1], 0))
    return torch.cat(outs), torch.cat(lses, dim=-1)


def _sums(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns m, l and m + log l over the last axis; for an empty sum 0, 0 and -inf, without gradients."""
    if x.shape[-1] == 0:
        none = x.sum(-1)
        return none, none, none - math.inf
    pivot = x.detach().amax(-1)
    pivot = torch.where(pivot == -math.inf, 0.0, pivot)
    total = torch.exp(x - pivot[..., None]).sum(-1)
    lse = torch.where(total == 0, -math.inf, torch.log(torch.where(total == 0, 1.0, total))) + pivot
    return pivot, total, lse
