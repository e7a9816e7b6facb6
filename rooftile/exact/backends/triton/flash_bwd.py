"""The backward, kernel by kernel: which ones a problem needs, and in which order."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rooftile.exact.backends.device.row_stats import rest_of
from rooftile.exact.backends.triton import flash_bwd_bias, flash_bwd_kv, flash_bwd_q, row_stats
from rooftile.exact.backends.triton.call import TritonCall, call_of, lists_of_keys, lists_of_queries, strides_of, with_stand_ins
from rooftile.exact.backends.triton.tiles import backward_kv_walks, backward_q_tile
from rooftile.exact.reference.gradients import sinks_gradient
from rooftile.exact.spec import BackwardInputs, Grads, Options, Spec, grad_dtype
from rooftile.runtime.launch import BoundedCache, empties, kind_of

# the backward of each kind of call that was seen: a graph of torch.compile, and whoever is watched, prepares none
_PLANS = BoundedCache()
Backward = Callable[[BackwardInputs], Grads]


def backward(inputs: BackwardInputs, spec: Spec) -> Grads:
    do, dlse, q, k, v, o, lse, options = inputs
    call = call_of(q, k, v, options, spec)
    if do is None:
        do = torch.zeros_like(o)
    # a gradient may come in expanded, and an output in the layout of another operator
    o, do = (x if x.stride(-1) == 1 else x.contiguous() for x in (o, do))
    lse, dlse = lse.contiguous(), None if dlse is None else dlse.contiguous()
    key = (spec, kind_of(do, dlse, call.q, call.k, call.v, o, lse, *call.options))
    ready = _PLANS.get(key)
    if ready is None:
        ready = _PLANS[key] = _plan(call, do, dlse, o)
    return ready(BackwardInputs(do, dlse, call.q, call.k, call.v, o, lse, call.options))


def prepare(inputs: BackwardInputs, spec: Spec) -> Backward | None:
    """The backward of tensors like these with all but the outputs and the launches done; None if one of them must be copied."""
    do, dlse, q, k, v, o, lse, options = inputs
    if do is None or not q.stride(-1) == k.stride(-1) == v.stride(-1) == o.stride(-1) == do.stride(-1) == 1:
        return None
    if not all(x is None or x.is_contiguous() for x in (lse, dlse, options.sinks)):
        return None
    return _plan(call_of(q, k, v, options, spec), do, dlse, o)


def _plan(call: TritonCall, do: Tensor, dlse: Tensor | None, o: Tensor) -> Backward:
    """The backward of tensors like the call's; it holds no tensor."""
    do_strides = strides_of(do)
    stats_of = row_stats.plan(call, strides_of(o), do_strides, has_dlse=dlse is not None)
    fill = _fill(call, do_strides)
    new_dq, new_dk, new_dv = (empties(tuple(x.shape), grad_dtype(x, call.spec), x.device) for x in (call.q, call.k, call.v))
    spec = call.spec

    def run(inputs: BackwardInputs) -> Grads:
        do, dlse, q, k, v, o, lse, options = inputs
        delta, words, rests = stats_of(o, do, lse, dlse)
        dq, dk, dv = new_dq(), new_dk(), new_dv()
        fill(q, k, v, do, words, rests, dq, dk, dv, options)
        dbias = None
        if spec.bias_grad:
            dbias = flash_bwd_bias.gradient(q, k, v, do, words, rests, options, spec)
        dsinks = None if options.sinks is None else sinks_gradient(options.sinks, lse, rest_of(rests, lse), delta)
        return Grads(dq, dk, dv, dbias, dsinks)

    return run


def _fill(call: TritonCall, do_strides: tuple[int, ...]) -> Callable[..., None]:
    """The launches that fill dq and the rests of far rows, then dk and dv."""
    of_keys = flash_bwd_kv.plan(call, backward_kv_walks(call.spec), do_strides)
    of_queries = flash_bwd_q.plan(call, backward_q_tile(call.spec), do_strides)

    def fill(
        q: Tensor, k: Tensor, v: Tensor, do: Tensor, words: Tensor, rests: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
        options: Options,
    ) -> None:  # fmt: skip
        others = with_stand_ins(options, q)
        for launch in of_queries:
            launch(q, k, v, do, words, rests, dq, *others, *lists_of_queries(options, q))
        for launch in of_keys:
            launch(q, k, v, do, words, rests, dk, dv, *others, *lists_of_keys(options, q))

    return fill
