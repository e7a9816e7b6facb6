"""The backward, kernel by kernel: which ones a problem needs, and in which order."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.backends.triton import flash_bwd_bias, flash_bwd_kv, flash_bwd_q, row_stats
from rooftile.backends.triton.arguments import call_of, strides_of
from rooftile.backends.triton.tiles import backward_bias_tile, backward_kv_walks, backward_q_tile
from rooftile.reference.gradients import sinks_gradient
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
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    flash_bwd_kv.launch(call, backward_kv_walks(spec), do, strides, stats, dk, dv)
    flash_bwd_q.launch(call, backward_q_tile(spec), do, strides, stats, dq)
    dbias = flash_bwd_bias.launch(call, backward_bias_tile(spec), do, strides, stats) if spec.bias_grad else None
    dsinks = None if options.sinks is None else sinks_gradient(options.sinks, lse, delta)
    return Grads(dq, dk, dv, dbias, dsinks)


def repair(
    lost: Tensor, grads: Grads, do: Tensor, q: Tensor, k: Tensor, v: Tensor, stats: Tensor, options: Options, spec: Spec
) -> None:
    """Computes dq, dk and dv once more if `lost`, one int32, is not zero when the kernels run.

    For backends whose gradients lost what a mask should hide: the kernels here set non-finite rows aside where they must.
    `stats` are the words of `row_stats`.
    """
    call = call_of(q, k, v, options, spec)
    strides = strides_of(do)
    flash_bwd_kv.launch(call, backward_kv_walks(spec), do, strides, stats, grads.dk, grads.dv, lost)
    flash_bwd_q.launch(call, backward_q_tile(spec), do, strides, stats, grads.dq, lost)
