"""Jagged nested tensors (B, j, H, D) as packed sequences, and back. Values and offsets are shared, nothing is copied."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.exact.spec import Call
from rooftile.runtime.arguments import shown


def packed_of(call: Call) -> Call:
    """Returns a call with nested q, k and v as a packed one (total, H, D), with the offsets among its options."""
    # Any: PyTorch's types do not know what a nested tensor has
    tensors: tuple[Any, Any, Any] = call.q, call.k, call.v
    q, k, v = tensors
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or not x.is_nested or x.layout is not torch.jagged:
            raise InvalidInput(f"{name} is {_storage_of(x)}; a nested call needs q, k and v nested, with layout=torch.jagged")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4 or x._ragged_idx != 1 or x.lengths() is not None:
            due = "must be (B, j, H, D), ragged in its second axis, without holes"
            raise InvalidInput(f"{name} is nested {tuple(x.shape)}; {due}")
    if call.options.bias is not None:
        raise InvalidInput("bias with nested tensors; has none: use attention_packed, whose bias is (H, total_q, J)")
    cu_q, cu_k, cu_v = q.offsets(), k.offsets(), v.offsets()
    if cu_v is not cu_k and not torch.equal(cu_v, cu_k):
        raise InvalidInput("v has other lengths than k; they must agree in each sequence")
    options = call.options._replace(cu_q=cu_q, cu_k=cu_k)
    return call._replace(q=q.values(), k=k.values(), v=v.values(), options=options, is_packed=True)


def nested_of(o: Tensor, lse: Tensor, cu_q: Tensor) -> tuple[Tensor, Tensor]:
    """Returns packed o (total, H, Dv) and lse (H, total) as nested (B, j, H, Dv) and (B, H, j), with the offsets of q."""
    o, lse = (torch.nested.nested_tensor_from_jagged(x, cu_q) for x in (o, lse.T))
    return o, lse.transpose(1, 2)


def _storage_of(x: object) -> str:
    if not isinstance(x, Tensor):
        return shown(x)
    return f"{'nested' if x.is_nested else 'not nested'}, with layout {x.layout}"
