"""Small sets of pairs for the exact kernels: rows taken by index, and attention between them under a set of booleans."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rooftile.exact import api
from rooftile.runtime.operators import in_forward_mode, transforms_active, wants_grad


def take(x: Tensor, places: Tensor) -> Tensor:
    """Rows of x (B, S, Hk, D) at places (B, H, ...): (B, H, ..., D). Head h reads head h // (H / Hk) of x.

    The gradient of a row that is taken more than once is summed in fp32, in one order.
    """
    return _take_flat(x.flatten(0, 2), _index(places, x.shape[1], x.shape[2]))


def add_rows(rows: Tensor, places: Tensor, length: int) -> Tensor:
    """Sums rows (B, H, ..., D) at their places (B, H, ...) of an axis of this length: (B, T, H, D), in one order."""
    B, H = rows.shape[:2]
    total = _add_flat(rows, _index(places, length, H), B * length * H)
    return total.view(B, length, H, rows.shape[-1])


def _index(places: Tensor, length: int, heads: int) -> Tensor:
    """The rows of a tensor (B, length, heads, D) with these axes flattened, for places (B, H, ...)."""
    B, H = places.shape[:2]
    one = [1] * (places.ndim - 2)
    b = torch.arange(B, device=places.device).view(-1, 1, *one)
    h = (torch.arange(H, device=places.device) // (H // heads)).view(-1, *one)
    return (b * length + places) * heads + h


def _rows(x: Tensor, index: Tensor) -> Tensor:
    return x.index_select(0, index.flatten()).view(*index.shape, x.shape[-1])


def _sums(rows: Tensor, index: Tensor, length: int) -> Tensor:
    total = rows.new_zeros(length, rows.shape[-1])
    rows, index = rows.flatten(0, -2), index.flatten()
    # each of the two sums in a fixed order on its device; the other one would add with atomics there
    return total.index_put((index,), rows, accumulate=True) if rows.is_cuda else total.index_add(0, index, rows)


def _take_flat(x: Tensor, index: Tensor) -> Tensor:
    return _TakeRows.apply(x, index) if _has_backward(x) else _rows(x, index)


def _add_flat(rows: Tensor, index: Tensor, length: int) -> Tensor:
    return _AddRows.apply(rows, index, length) if _has_backward(rows) else _sums(rows, index, length)


def _has_backward(x: Tensor) -> bool:
    """Whether a backward may come. In forward mode PyTorch's own rules do: Dynamo takes no Function that has one."""
    return (wants_grad(x) or transforms_active()) and not in_forward_mode()


class _TakeRows(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, index: Tensor) -> Tensor:
        return _rows(x, index)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, index = inputs
        ctx.rows = x.shape[0]
        ctx.save_for_backward(index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        dx = _add_flat(wide, index, ctx.rows)
        return dx.to(grad.dtype), None


class _AddRows(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(rows: Tensor, index: Tensor, length: int) -> Tensor:
        return _sums(rows, index, length)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return _take_flat(grad, index), None, None


def cleaned(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (B, S, H, D) with 0 for NaN and infinity, and which tokens had one, (B, S, H)."""
    finite = x.isfinite()
    return torch.where(finite, x, 0.0), ~finite.all(-1)


def take_flags(lost: Tensor, places: Tensor) -> Tensor:
    """Flags (B, S, Hk) at places (B, H, ...)."""
    return take(lost[..., None], places)[..., 0]


def attend(
    q: Tensor,  # (N, t, h, D)
    k: Tensor,  # (N, s, 1, D)
    v: Tensor,  # (N, s, 1, Dv)
    seen: Tensor,  # booleans (N, t, s)
    lost_q: Tensor,  # (N, t, h)
    lost_k: Tensor,  # (N, s)
    *,
    bias: Tensor | None = None,  # (N, t, s)
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Exact attention over the pairs that are seen: o (N, t, h, Dv) and lse (N, h, t).

    The tensors come from `cleaned`; a lost token makes the rows that see it NaN, and no other.
    """
    numbers = torch.zeros_like(seen, dtype=torch.float32) if bias is None else bias
    o, lse = api.attention_with_lse(q, k, v, bias=numbers.masked_fill(~seen, -math.inf)[:, None], **options)
    sees_lost = (seen & lost_k[:, None]).any(-1)[..., None]  # (N, t, 1)
    wrong = (sees_lost | lost_q) & seen.any(-1)[..., None]
    return o.masked_fill(wrong[..., None], math.nan), lse


def best(score: Tensor, count: int) -> Tensor:
    """The indices of the `count` largest scores along the last axis, largest first; ties go to the lower index."""
    return score.sort(dim=-1, descending=True, stable=True).indices[..., :count]
