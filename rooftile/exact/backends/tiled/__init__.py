"""Exact attention on the CPU in tiles that stay in cache: vectorised torch, forward and backward, O(T + S) memory.

Each sequence is computed separately, and its heads in blocks, in a fixed order. So the bits of a sequence never depend on
the run or on its neighbours in the batch.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rooftile.exact.backends import paged_by_gather
from rooftile.exact.spec import BackwardInputs, Grads, Options, Spec, grad_dtype, output_dtype
from rooftile.kvcache import PagedKV

NAME = "tiled"

OPTIONS = ("softcap", "bias", "alibi", "sinks", "dropout", "blocks")


def refusals(spec: Spec) -> Iterator[str]:
    if spec.device != "cpu":
        yield f"tensors are on {spec.device}; has cpu"
    if spec.precision is not None:
        yield f"precision {spec.precision}; computes in the dtype of its inputs"
    yield from (f"{name}; has {', '.join(OPTIONS)}" for name in spec.options_on if name not in OPTIONS)
    if spec.forward_mode:
        yield "forward-mode or second derivatives; has gradients (use backend='eager')"


# its products are in fp32, which autocast would round to half precision
@torch.autocast("cpu", enabled=False)
def forward(q: Tensor, k: Tensor, v: Tensor, options: Options, spec: Spec) -> tuple[Tensor, Tensor]:
    from rooftile.exact.backends.tiled import flash_fwd
    from rooftile.exact.backends.tiled.heads import blocks

    # (B, H, T) or (H, total): moves the axis of rows behind the axis of heads
    shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    o = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=output_dtype(q, spec))
    lse = q.new_empty(shape, dtype=torch.promote_types(q.dtype, torch.float32))
    for heads in blocks(q, k, v, options, spec):
        flash_fwd.run(heads, heads.place.of_queries(o), heads.place.of_rows(lse))
    return o, lse


def attend_paged(q: Tensor, cache: PagedKV, options: Options, spec: Spec) -> tuple[Tensor, Tensor]:
    return paged_by_gather.attend(forward, q, cache, options, spec)


@torch.autocast("cpu", enabled=False)
def backward(inputs: BackwardInputs, spec: Spec) -> Grads:
    do, dlse, q, k, v, o, lse, options = inputs
    from rooftile.exact.backends.tiled import flash_bwd
    from rooftile.exact.backends.tiled.heads import blocks

    wide = lse.dtype
    dq, dk, dv = (torch.empty(x.shape, dtype=grad_dtype(x, spec)) for x in (q, k, v))
    # gradients that many rows add to are summed in the wide dtype and rounded once
    dbias = torch.zeros(options.bias.shape, dtype=wide) if spec.bias_grad else None
    dsinks = torch.zeros(options.sinks.shape, dtype=wide) if spec.has_sinks else None
    for heads in blocks(q, k, v, options, spec):
        place = heads.place
        incoming = flash_bwd.Incoming(
            do=None if do is None else place.of_queries(do),
            dlse=None if dlse is None else place.of_rows(dlse),
            o=place.of_queries(o),
            lse=place.of_rows(lse),
        )
        grads = Grads(
            place.of_queries(dq),
            place.of_keys(dk),
            place.of_keys(dv),
            None if dbias is None else place.of_bias(dbias),
            None if dsinks is None else place.of_heads(dsinks),
        )
        flash_bwd.run(heads, incoming, grads)
    if dbias is not None:
        dbias = dbias.to(options.bias.dtype)
    if dsinks is not None:
        dsinks = dsinks.to(options.sinks.dtype)
    return Grads(dq, dk, dv, dbias, dsinks)


def backward_of_inputs(do: Tensor, q: Tensor, k: Tensor, v: Tensor, options: Options, spec: Spec) -> Grads:
    """Computes the gradients where another backend ran the forward: its o would not go with the weights computed here."""
    o, lse = forward(q, k, v, options, spec)
    return backward(BackwardInputs(do, None, q, k, v, o, lse, options), spec)
