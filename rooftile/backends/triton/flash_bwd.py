"""The backward, kernel by kernel: which ones a problem needs, and in which order."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.backends.triton import flash_bwd_bias, flash_bwd_kv, flash_bwd_q, row_stats
from rooftile.backends.triton.arguments import call_of, strides_of
from rooftile.backends.triton.tiles import backward_bias_tile, backward_kv_walks, backward_q_tile
from rooftile.spec import Grads, Options, Spec


def backward(
    do: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    options: Options,
    spec: Spec,
) -> Grads:
    call = call_of(q, k, v, options, spec)
    if do is None:
        do = torch.zeros_like(o)
    # a gradient may come in expanded, and an output in the layout of another operator
    o, do = (x if x.stride(-1) == 1 else x.contiguous() for x in (o, do))
    lse, dlse = lse.contiguous(), None if dlse is None else dlse.contiguous()
    strides = strides_of(do)
    delta, stats = row_stats.launch(call, o, lse, do, dlse, strides)
    dk, dv = flash_bwd_kv.launch(call, backward_kv_walks(spec), do, strides, stats)
    dq = flash_bwd_q.launch(call, backward_q_tile(spec), do, strides, stats)
    dbias = flash_bwd_bias.launch(call, backward_bias_tile(spec), do, strides, stats) if spec.bias_grad else None
    return Grads(dq, dk, dv, dbias, _sinks_gradient(options.sinks, lse, delta))


def _sinks_gradient(sinks: Tensor | None, lse: Tensor, delta: Tensor) -> Tensor | None:
    """dsink_h = sum_i -exp(sink_h - L_i) D_i. A sink is part of every row, so lse is finite."""
    if sinks is None:
        return None
    weight = torch.exp(sinks.float()[:, None] - lse)  # (B, H, T) or (H, total_q)
    rows = (weight * delta).sum(-1)
    return -(rows.sum(0) if rows.ndim == 2 else rows).to(sinks.dtype)
