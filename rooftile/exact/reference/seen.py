"""Operations whose derivatives, of any order and mode, keep a NaN where it is seen.

A plain product multiplies a NaN behind the mask by a weight of zero, which is NaN. So do its gradients: with the row of `do` that
a key does not see, or with the value that a query does not see.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def poison(lost: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns NaN where `lost` is set, and 0 elsewhere."""
    return torch.where(lost, math.nan, 0.0).to(dtype)


def without_lost(x: Tensor) -> Tensor:
    """Returns x with 0 for each NaN and infinity. Its derivative is one everywhere: what is lost has a gradient too."""
    clean: Tensor = _here(_WithoutLost, _WithoutLostForward).apply(x)
    return clean


def weighted_sum(p: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Computes sum_s p (B, H, T, S) v (B, S, H, D) as (B, T, H, D), where row t uses only what `visible` shows it.

    visible: (T, S), or (1|B, 1|H, T, S).

    A NaN or infinity of v becomes NaN in the rows that see it. p is 0 behind the mask.
    """
    o: Tensor = _here(_WeightedSum, _WeightedSumForward).apply(p, v, visible)
    return o


def _here(reverse: Any, both: Any) -> Any:
    """Returns the function with gradients alone inside torch.compile, which takes none with a rule for forward mode."""
    return reverse if torch.compiler.is_compiling() else both


class _WithoutLost(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.where(x.isfinite(), x, 0.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _WithoutLostForward(_WithoutLost):
    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent.clone()


class _WeightedSum(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(p: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        lost = ~v.isfinite()
        o = torch.einsum("bhts,bshd->bthd", p, torch.where(lost, 0.0, v))
        if visible.ndim == 2:
            seen = torch.einsum("ts,bshd->bthd", visible.to(v.dtype), lost.to(v.dtype)) > 0
        else:
            seen = torch.einsum("bhts,bshd->bthd", visible.to(v.dtype).expand(p.shape), lost.to(v.dtype)) > 0
        return o + poison(seen, o.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, Tensor, None]:
        p, v, visible = ctx.saved_tensors
        # behind the mask dp may be NaN: the caller's mask drops it
        dp = torch.einsum("bthd,bshd->bhts", do, torch.where(v.isfinite(), v, math.nan))
        return dp, weighted_sum(p.mT, do, visible.mT), None


class _WeightedSumForward(_WeightedSum):
    @staticmethod
    def jvp(ctx: Any, p_tangent: Tensor, v_tangent: Tensor, _: None) -> Tensor:
        p, v, visible = ctx.saved_tensors
        return weighted_sum(p_tangent, v, visible) + weighted_sum(p, v_tangent, visible)
