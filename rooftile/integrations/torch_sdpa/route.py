"""Chooses who runs a call of SDPA, a backend of Rooftile or PyTorch's own kernel, and runs the backend."""

from __future__ import annotations

from collections import Counter
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rooftile.exact import dispatch
from rooftile.exact.backends import eager, sdpa
from rooftile.exact.masks import Mask
from rooftile.exact.spec import DTYPE_NAMES, BackwardInputs, Options, Spec
from rooftile.runtime.devices import arch

# these would run the stock kernel itself, or the O(T S) definition
NO_GAIN = (sdpa.NAME, eager.NAME)

# the backend that `enable` named
named: str | None = None
# forward calls by the backend that ran them, and by why PyTorch's own kernel did, since the process began
RAN: Counter[str] = Counter()
REFUSED: Counter[str] = Counter()


@cache
def choose(backend: str | None, **problem: Any) -> tuple[ModuleType, Spec] | str:
    """Chooses the backend for a problem, given as Spec fields. Returns it and the Spec, or why the stock kernel runs."""
    spec = Spec(**problem)
    chosen = dispatch.select(spec) if backend is None else dispatch.BACKENDS[backend]
    refusal = next(chosen.refusals(spec), None)
    if refusal is not None:
        return f"{chosen.NAME}: {refusal}"
    if chosen.NAME in NO_GAIN:
        return f"PyTorch's kernel is the fastest on {spec.device}"
    return chosen, spec


def refuse(reason: str) -> None:
    """Counts a forward call that PyTorch's own kernel runs."""
    REFUSED[reason] += 1


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, options: Options) -> tuple[Tensor, Tensor] | None:
    """Returns o and lse of (B, T, H, D) or (total, H, D) tensors; None where the stock kernel runs."""
    plan = _plan(q, k, v, mask, scale, False, options)
    if isinstance(plan, str):
        refuse(plan)
        return None
    RAN[plan[0].NAME] += 1
    o, lse = plan[0].forward(q, k, v, options, plan[1])
    return o, lse


def backward(do, q, k, v, o, lse, mask: Mask, scale: float | None, options: Options):
    """Returns dq, dk and dv; None where the stock kernel runs."""
    plan = _plan(q, k, v, mask, scale, True, options)
    if isinstance(plan, str):
        return None
    return dispatch.backward_of(plan[0].NAME)(BackwardInputs(do, None, q, k, v, o, lse.contiguous(), options), plan[1])[:3]


def _plan(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, needs_grad: bool, options: Options
) -> tuple[ModuleType, Spec] | str:
    """Chooses the backend for these tensors, or says why the stock kernel runs."""
    if q.dtype not in DTYPE_NAMES or not q.numel() or not k.numel() or q.shape[-2] % k.shape[-2]:
        return "an unusual dtype, no elements, or heads that do not divide"
    # the operators have checked the shapes
    return choose(
        named,
        dtype=q.dtype,
        dim=q.shape[-1],
        dim_v=v.shape[-1],
        group=q.shape[-2] // k.shape[-2],
        mask=mask,
        layout="dense" if options.cu_q is None else "packed",
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        needs_grad=needs_grad,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        device=arch(q.device),
    )


def laid_out_like(x: Tensor, like: Tensor) -> Tensor:
    """Returns x with the strides of empty_like(like), as the operator's fake has them."""
    due = torch.empty_like(like)
    return x if x.stride() == due.stride() else due.copy_(x)


def unused(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns placeholders for the generator's state, its offset and the debug mask of a flash call without dropout."""
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    return state, torch.zeros((), dtype=torch.uint64, device=query.device), query.new_empty(0)
