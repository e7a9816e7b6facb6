"""The backward, kernel by kernel: which ones a problem needs, and in which order."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.backends.triton import flash_bwd_bias, flash_bwd_kv, flash_bwd_q, row_stats
from rooftile.backends.triton.call import Call, call_of, strides_of
from rooftile.backends.triton.tiles import backward_bias_tile, backward_kv_walks, backward_q_tile
from rooftile.launch import BoundedCache
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
    _fill(stats, call, do, stats, dq, dk, dv, repair=False)
    dbias = flash_bwd_bias.launch(call, backward_bias_tile(spec), do, strides, stats) if spec.bias_grad else None
    dsinks = None if options.sinks is None else sinks_gradient(options.sinks, lse, delta)
    return Grads(dq, dk, dv, dbias, dsinks)


def repair(
    lost: Tensor, grads: Grads, do: Tensor, q: Tensor, k: Tensor, v: Tensor, stats: Tensor, options: Options, spec: Spec
) -> None:
    """Computes dq, dk and dv once more if `lost`, one int32, is not zero when the kernels run.

    For backends whose gradients lost what a mask should hide: the kernels here set non-finite rows aside where they must.
    `stats` are the words of `row_stats`, and `do` has a contiguous last axis.
    """
    _fill(lost, call_of(q, k, v, options, spec), do, stats, grads.dq, grads.dk, grads.dv, repair=True)


_FILLS = BoundedCache()


def _fill(
    lost: Tensor, call: Call, do: Tensor, stats: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, *, repair: bool
) -> None:
    """Fills dk and dv, then dq, by kernels that are looked up once for tensors like these."""
    q, k, v = call.q, call.k, call.v
    options, strides = call.option_tensors, strides_of(do)
    key = (
        call.spec, repair, q.device, q.shape, k.shape, call.B, call.strides, strides, tuple([x.dtype for x in options]),
        tuple([x.data_ptr() % 16 for x in (lost, q, k, v, do, stats, dq, dk, dv, *options)]),
    )  # fmt: skip
    ready = _FILLS.get(key)
    if ready is None:
        ready = (
            flash_bwd_kv.launchers(call, backward_kv_walks(call.spec), strides, repair=repair),
            flash_bwd_q.launchers(call, backward_q_tile(call.spec), strides, repair=repair),
        )
        _FILLS[key] = ready
    for fill in ready[0]:
        fill(lost, q, k, v, do, stats, dk, dv, *options)
    for fill in ready[1]:
        fill(lost, q, k, v, do, stats, dq, *options)
