"""The checks of a call of `target_attention`: from what a caller gives to tensors and a problem, or one sentence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.recommend.target.problem import WEIGHTS, Batch, Problem
from rooftile.runtime.arguments import check_choice, check_deterministic, check_flag, check_number, shown
from rooftile.runtime.tensors import autocast, check_offsets

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_call(
    q: Any, keys: Any, cu: Any, values: Any, bias: Any, cu_q: Any, weights: Any, scale: Any, mean: Any, deterministic: Any
) -> tuple[Batch, Problem]:
    """Returns the tensors packed, in autocast's dtype if it is on, and the numbers."""
    values = keys if values is None else values
    if isinstance(q, Tensor) and not q.is_meta and torch.is_autocast_enabled(q.device.type):
        q, keys, values = (autocast(x) for x in (q, keys, values))
    _check_tensors(q, keys, values)
    cu = check_offsets("cu", cu, keys.shape[0], "events", q.device, False)
    q, cu_q = packed("q", q, cu_q, cu)
    check_deterministic(deterministic)
    strict = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
    number = q.shape[2] ** -0.5 if scale is None else check_number("scale", scale)
    problem = Problem(check_choice("weights", weights, WEIGHTS), number, check_flag("mean", mean), strict)
    return Batch(q, keys, values, check_bias(bias, q, keys), None, cu_q, cu), problem


def _check_tensors(q: Any, keys: Any, values: Any) -> None:
    due = {"q": "(B, M, H, D), or (total_q, H, D) with cu_q", "keys": "(total, Hk, D)", "values": "(total, Hk, Dv)"}
    for name, x in (("q", q), ("keys", keys), ("values", values)):
        if not isinstance(x, Tensor) or x.is_nested or x.layout is not torch.strided:
            raise InvalidInput(f"{name} is {shown(x)}; must be a dense tensor {due[name]}")
        if x.ndim != 3 and (name != "q" or x.ndim != 4):
            raise InvalidInput(f"{name} is {tuple(x.shape)}; must be {due[name]}")
        if x.dtype is not q.dtype:
            raise InvalidInput(f"{name} is {x.dtype}; q is {q.dtype}, and q, keys and values must share one dtype")
        if x.device != q.device:
            raise InvalidInput(f"{name} is on {x.device}; q is on {q.device}, and all inputs must be on one device")
    if q.dtype not in FLOATS:
        raise InvalidInput(f"q is {q.dtype}; must be float32, bfloat16, float16 or float64")
    if not q.shape[-1] or not values.shape[-1]:
        raise InvalidInput(f"head dim is {q.shape[-1]} for q and {values.shape[-1]} for values; must be at least 1")
    if values.shape[:2] != keys.shape[:2]:
        raise InvalidInput(f"values is {tuple(values.shape)}; must be like keys, {tuple(keys.shape)}, in all but the last axis")
    check_heads("q", q, "keys", keys)


def check_heads(name: str, q: Tensor, others: str, keys: Tensor) -> None:
    """Raises InvalidInput unless the features of candidates and events agree, in width and in their numbers of heads."""
    if keys.shape[-1] != q.shape[-1]:
        raise InvalidInput(f"{others} has head dim {keys.shape[-1]}; {name} has {q.shape[-1]}, and they must agree")
    H, Hk = q.shape[-2], keys.shape[-2]
    if not H or not Hk or H % Hk:
        raise InvalidInput(f"{name} has {H} heads and {others} has {Hk}; those of {others} must divide those of {name}")


def packed(name: str, x: Tensor, cu_q: Any, cu: Tensor) -> tuple[Tensor, Tensor]:
    """Something of each candidate (B, M, ...) or (total_q, ...) as (total_q, ...), and the offsets of users among candidates."""
    B = cu.shape[0] - 1
    if cu_q is not None:
        if x.ndim == 4:
            raise InvalidInput(f"{name} is {tuple(x.shape)} and cu_q is given; packed candidates are (total_q, H, D)")
        cu_q = check_offsets("cu_q", cu_q, x.shape[0], "candidates", x.device, False)
        if cu_q.shape[0] != B + 1:
            raise InvalidInput(f"cu_q has {cu_q.shape[0] - 1} users; cu has {B}, and candidates and events have the same users")
        return x, cu_q
    if x.ndim == 3:
        raise InvalidInput(f"{name} is {tuple(x.shape)} without cu_q; give cu_q, or {name} (B, M, H, D)")
    if x.shape[0] != B:
        raise InvalidInput(f"{name} has candidates of {x.shape[0]} users; cu has {B} users")
    return x.flatten(0, 1), torch.arange(B + 1, device=x.device) * x.shape[1]


def check_bias(bias: Any, q: Tensor, keys: Tensor) -> Tensor | None:
    """A number per event, or per event and head, as (total, 1|H)."""
    if bias is None:
        return None
    total, H = keys.shape[0], q.shape[1]
    if (
        not isinstance(bias, Tensor)
        or not bias.is_floating_point()
        or tuple(bias.shape) not in ((total,), (total, 1), (total, H))
    ):
        raise InvalidInput(f"bias is {shown(bias)}; must be a float tensor ({total},) or ({total}, 1|{H}), a number per event")
    if bias.device != q.device:
        raise InvalidInput(f"bias is on {bias.device}; q is on {q.device}, and all inputs must be on one device")
    return bias[:, None] if bias.ndim == 1 else bias
