"""Small sets of pairs for the exact kernels: rows taken by index, and attention between them under a set of booleans."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rooftile import api


def take(x: Tensor, places: Tensor) -> Tensor:
    """Rows of x (B, S, Hk, D) at places (B, H, ...): (B, H, ..., D). Head h reads head h // (H / Hk) of x.

    The gradient of a row that is taken more than once is summed in fp32, in one order.
    """
    B, S, Hk, _ = x.shape
    H = places.shape[1]
    b = torch.arange(B, device=x.device).view(-1, 1, *[1] * (places.ndim - 2))
    h = (torch.arange(H, device=x.device) // (H // Hk)).view(-1, *[1] * (places.ndim - 2))
    rows: Tensor = _TakeRows.apply(x.flatten(0, 2), (b * S + places) * Hk + h)
    return rows


class _TakeRows(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, index: Tensor) -> Tensor:
        return x.index_select(0, index.flatten()).view(*index.shape, x.shape[-1])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, index = inputs
        ctx.rows = x.shape[0]
        ctx.save_for_backward(index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32)).flatten(0, -2)
        dx = wide.new_zeros(ctx.rows, grad.shape[-1])
        # each of the two sums in a fixed order on its device; the other one would add with atomics there
        rows = index.flatten()
        dx = dx.index_put((rows,), wide, accumulate=True) if grad.is_cuda else dx.index_add(0, rows, wide)
        return dx.to(grad.dtype), None


def attend(
    q: Tensor,  # (N, t, h, D)
    k: Tensor,  # (N, s, hk, D)
    v: Tensor,  # (N, s, hk, Dv)
    seen: Tensor,  # booleans (N, 1, t, s)
    *,
    bias: Tensor | None = None,  # (N, 1, t, s)
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Exact attention over the pairs that are seen: o (N, t, h, Dv) and lse (N, h, t).

    A NaN or infinity in a token reaches the rows that see it, and no other.
    """
    lost_q, lost_k = lost(q), lost(k) | lost(v)  # (N, t, h), (N, s, hk)
    q, k, v = (torch.where(x.isfinite(), x, 0.0) for x in (q, k, v))
    numbers = torch.zeros_like(seen, dtype=torch.float32) if bias is None else bias
    o, lse = api.attention_with_lse(q, k, v, bias=numbers.masked_fill(~seen, -math.inf), **options)
    G = q.shape[2] // k.shape[2]
    sees_lost = (seen & lost_k.mT.repeat_interleave(G, dim=1)[:, :, None]).any(-1).mT  # (N, t, h)
    wrong = (sees_lost | lost_q) & (lse != -math.inf).mT
    return o.masked_fill(wrong[..., None], math.nan), lse


def lost(x: Tensor) -> Tensor:
    """Whether a row has a NaN or an infinity."""
    return ~x.isfinite().all(-1)


def best(score: Tensor, count: int) -> Tensor:
    """The indices of the `count` largest scores along the last axis, largest first; ties go to the lower index."""
    return score.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def padded(x: Tensor, before: int, after: int) -> Tensor:
    """x (B, T, H, D) with tokens of zeros at both ends."""
    return F.pad(x, (0, 0, 0, 0, before, after)) if before or after else x
