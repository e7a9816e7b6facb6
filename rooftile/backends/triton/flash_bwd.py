"""The backward, kernel by kernel: which ones a problem needs, and in which order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile.backends.launch import remember
from rooftile.backends.triton import flash_bwd_bias, flash_bwd_kv, flash_bwd_q, row_stats
from rooftile.backends.triton.arguments import Call, call_of, strides_of
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
    tensors = (stats, call.q, call.k, call.v, do, stats)
    for fill in flash_bwd_kv.launchers(call, backward_kv_walks(spec), strides):
        fill(*tensors, dk, dv, *call.option_tensors)
    for fill in flash_bwd_q.launchers(call, backward_q_tile(spec), strides):
        fill(*tensors, dq, *call.option_tensors)
    dbias = flash_bwd_bias.launch(call, backward_bias_tile(spec), do, strides, stats) if spec.bias_grad else None
    dsinks = None if options.sinks is None else sinks_gradient(options.sinks, lse, delta)
    return Grads(dq, dk, dv, dbias, dsinks)


_REPAIRS: dict[tuple[Any, ...], Callable[..., None]] = {}


def repair(
    lost: Tensor, grads: Grads, do: Tensor, q: Tensor, k: Tensor, v: Tensor, stats: Tensor, options: Options, spec: Spec
) -> None:
    """Computes dq, dk and dv once more if `lost`, one int32, is not zero when the kernels run.

    For backends whose gradients lost what a mask should hide: the kernels here set non-finite rows aside where they must.
    `stats` are the words of `row_stats`, and `q`, `k`, `v` and `do` have a contiguous last axis.
    """
    # most repairs find nothing to do, so that finding the kernels would be what they cost
    tensors = (lost, q, k, v, do, stats, grads.dk, grads.dv, grads.dq, *(q if x is None else x for x in options))
    aligned = tuple([x.data_ptr() % 16 == 0 for x in tensors])
    dtypes = tuple([x.dtype for x in tensors[9:]])
    key = (
        spec, aligned, dtypes,
        q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), do.stride(), options.cu_q is not None and options.cu_q.shape,
    )  # fmt: skip
    ready = _REPAIRS.get(key)
    if ready is None:
        ready = _repairing(call_of(q, k, v, options, spec), strides_of(do))
        remember(_REPAIRS, key, ready)
    ready(*tensors)


def _repairing(call: Call, do_strides: tuple[int, ...]) -> Callable[..., None]:
    fill_keys = flash_bwd_kv.launchers(call, backward_kv_walks(call.spec), do_strides, repair=True)
    fill_queries = flash_bwd_q.launchers(call, backward_q_tile(call.spec), do_strides, repair=True)

    def run(lost, q, k, v, do, stats, dk, dv, dq, *options) -> None:
        for fill in fill_keys:
            fill(lost, q, k, v, do, stats, dk, dv, *options)
        for fill in fill_queries:
            fill(lost, q, k, v, do, stats, dq, *options)

    return run
