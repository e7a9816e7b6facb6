"""Attention to chosen blocks by plain operations: the keys of a few queries at a time are gathered, and T x S scores never are.

In the packed layout. Each query has its own copy of its keys, so what it does not see is set aside before the products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

# an lse within this is rounded by no more than the scores that it came from
FAR = 64.0
# numbers of gathered keys at a time
NUMBERS = 1 << 24


def forward(
    q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float, block: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns o (total, H, Dv) in the dtype of q, and lse (total, H) in fp32 at least."""
    pieces = [
        _attend(q[rows], k, v, places, sees, scale) for rows, places, sees in _pieces(q, k, chosen, cu_q, cu_k, block)
    ]  # fmt: skip
    if not pieces:
        wide = torch.promote_types(q.dtype, torch.float32)
        return q.new_zeros(*q.shape[:2], v.shape[-1]), torch.full(q.shape[:2], -math.inf, dtype=wide, device=q.device)
    return torch.cat([o for o, _ in pieces]).to(q.dtype), torch.cat([lse for _, lse in pieces])


def backward(
    do: Tensor, lse: Tensor, delta: Tensor, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, cu_q: Tensor, cu_k: Tensor,
    scale: float, block: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns dq, dk and dv in the dtypes of q, k and v, from lse and delta (total, H)."""
    wide, Hk = lse.dtype, k.shape[1]
    dq = torch.zeros_like(q, memory_format=torch.contiguous_format)
    dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (k, v))
    heads = torch.arange(Hk, device=k.device)[:, None]
    for rows, places, sees in _pieces(q, k, chosen, cu_q, cu_k, block):
        keys, values = _gathered(k, v, places, sees, wide)
        own, part = (x[rows].to(wide).unflatten(1, (Hk, -1)) for x in (q, do))  # (rows, Hk, group, D)
        top, D = (x[rows].unflatten(1, (Hk, -1))[..., None] for x in (lse, delta))
        hidden = ~sees[:, :, None]
        p = torch.exp(torch.einsum("thgd,thjd->thgj", own, keys) * scale - top).masked_fill(hidden, 0.0)
        # lse has lost what its rounding took: where it is far from 0, the weights would not add up to one
        p = torch.where(is_far(top), p / p.sum(-1, keepdim=True), p)
        dp = torch.einsum("thgd,thjd->thgj", part, values)
        ds = (p * (dp - D) * scale).masked_fill(hidden, 0.0)
        dq[rows] = torch.einsum("thgj,thjd->thgd", ds, keys).flatten(1, 2).to(q.dtype)
        for sums, weights, factor in ((dk, ds, own), (dv, p, part)):
            terms = torch.einsum("thgj,thgd->thjd", weights, factor).masked_fill(~sees[..., None], 0.0)
            sums.index_put_((places, heads), terms, accumulate=True)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def is_far(lse: Tensor) -> Tensor:
    """Whether the weights of a row, computed from its lse, would not add up to one."""
    return (lse.abs() > FAR) & lse.isfinite()


def _pieces(
    q: Tensor, k: Tensor, chosen: Tensor, cu_q: Tensor, cu_k: Tensor, block: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:  # fmt: skip
    """Yields some rows, the places of their keys and whether they see them, both (rows, Hk, n block)."""
    if not k.shape[0] or not chosen.numel():
        # no query sees a key
        return
    row = torch.arange(q.shape[0], device=q.device)
    of = (torch.searchsorted(cu_q, row, right=True) - 1).clamp(min=0)
    first, S = cu_k[of], cu_k.diff()[of]
    position = row - cu_q[of] + S - cu_q.diff()[of]
    # a block that is listed twice is seen once
    listed = chosen.sort(dim=-1).values
    listed[..., 1:] = torch.where(listed[..., 1:] == listed[..., :-1], -1, listed[..., 1:])
    step = max(NUMBERS // max(listed[:1].numel() * block * k.shape[-1], 1), 1)
    token = torch.arange(block, device=q.device)
    for start in range(0, q.shape[0], step):
        rows = slice(start, start + step)
        j = (listed[rows, ..., None] * block + token).flatten(-2)  # (rows, Hk, n block)
        sees = (j >= 0) & (j < S[rows, None, None]) & (j <= position[rows, None, None])
        yield rows, torch.where(sees, first[rows, None, None] + j, 0), sees


def _gathered(k: Tensor, v: Tensor, places: Tensor, sees: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """Each row's own keys and values (rows, Hk, n block, D), 0 where it sees none."""
    heads = torch.arange(k.shape[1], device=k.device)[:, None]
    keys, values = (x[places, heads].to(wide).masked_fill(~sees[..., None], 0.0) for x in (k, v))
    return keys, values


def _attend(q: Tensor, k: Tensor, v: Tensor, places: Tensor, sees: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Returns o (rows, H, Dv) and lse (rows, H) of some rows, in fp32 at least."""
    wide, Hk = torch.promote_types(q.dtype, torch.float32), k.shape[1]
    keys, values = _gathered(k, v, places, sees, wide)
    x = torch.einsum("thgd,thjd->thgj", q.to(wide).unflatten(1, (Hk, -1)), keys) * scale
    x = x.masked_fill(~sees[:, :, None], -math.inf)
    top = x.detach().amax(-1, keepdim=True)
    top = torch.where(top == -math.inf, 0.0, top)
    p = torch.exp(x - top)
    total = p.sum(-1)
    o = torch.einsum("thgj,thjd->thgd", p, values) / torch.where(total == 0, 1.0, total)[..., None]
    lse = top[..., 0] + torch.where(total == 0, -math.inf, torch.log(torch.where(total == 0, 1.0, total)))
    return o.flatten(1, 2), lse.flatten(1, 2)
