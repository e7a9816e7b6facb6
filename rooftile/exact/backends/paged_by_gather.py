"""Attention to a paged KV cache without a kernel for it: gathers the blocks into packed sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from rooftile.exact.spec import Options, Spec
from rooftile.kvcache import PagedKV

Gather = Callable[[PagedKV, torch.dtype], tuple[Tensor, Tensor, Tensor]]
Forward = Callable[[Tensor, Tensor, Tensor, Options, Spec], tuple[Tensor, Tensor]]


def attend(
    forward: Forward, q: Tensor, cache: PagedKV, options: Options, spec: Spec, gather: Gather = PagedKV.gathered
) -> tuple[Tensor, Tensor]:
    """Returns o and lse of `attention_paged`, through a backend's forward on packed sequences."""
    k, v, cu_k = gather(cache, q.dtype)
    rows, cu_q = cache.packed_queries(q)
    o, lse = forward(rows, k, v, options._replace(cu_q=cu_q, cu_k=cu_k), as_packed(spec))
    return like_queries(q, o, lse)


@cache
def as_packed(spec: Spec) -> Spec:
    """The spec of the same call on packed sequences."""
    return replace(spec, layout="packed", queries="any")


def like_queries(q: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Reshapes packed o (total, H, Dv) and lse (H, total) to the axes of q."""
    if q.ndim == 4:
        lse = lse.unflatten(1, q.shape[:2]).transpose(0, 1).contiguous()
    return o.view(*q.shape[:-1], o.shape[-1]), lse
