"""Attention to a paged cache without a kernel for it: what lies in the blocks is gathered, and is packed sequences then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from rooftile.kvcache import PagedKV
from rooftile.spec import Options, Spec

Gather = Callable[[PagedKV, torch.dtype], tuple[Tensor, Tensor, Tensor]]
Forward = Callable[[Tensor, Tensor, Tensor, Options, Spec], tuple[Tensor, Tensor]]


def attend(
    forward: Forward, q: Tensor, cache: PagedKV, options: Options, spec: Spec, gather: Gather = PagedKV.gathered
) -> tuple[Tensor, Tensor]:
    """o and lse, as `attention_paged` has them, by a backend's forward on packed sequences."""
    k, v, cu_k = gather(cache, q.dtype)
    rows, cu_q = cache.packed_queries(q)
    o, lse = forward(rows, k, v, options._replace(cu_q=cu_q, cu_k=cu_k), replace(spec, layout="packed"))
    return like_queries(q, o, lse)


def like_queries(q: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Packed o (total, H, Dv) and lse (H, total), with the axes that q has."""
    if q.ndim == 4:
        lse = lse.unflatten(1, q.shape[:2]).transpose(0, 1).contiguous()
    return o.view(*q.shape[:-1], o.shape[-1]), lse
