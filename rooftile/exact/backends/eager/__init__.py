"""The definition as a backend: any problem, O(T S) memory, plain torch operations.

It is also the only one with double backward and forward-mode derivatives: `rooftile.exact.api` runs `attend` outside the
operator, so that autograd sees every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from rooftile.exact import reference
from rooftile.exact.backends import paged_by_gather
from rooftile.exact.backends.eager import quantised
from rooftile.exact.blocks import Blocks
from rooftile.exact.spec import BackwardInputs, Grads, Options, Spec, grad_dtype, option_names
from rooftile.kvcache import PagedKV
from rooftile.numerics.hadamard import SHORTEST
from rooftile.numerics.recipe import QuantisedQKV, quantise_qkv

NAME = "eager"

OPTIONS = ("softcap", "bias", "alibi", "sinks", "dropout", "blocks")


def refusals(spec: Spec) -> Iterator[str]:
    if spec.v_order == "columns":
        yield "values quantised in columns; reads rows, which quantise_qkv(..., backend='eager') makes"
    yield from (f"{name}; has {', '.join(OPTIONS)}" for name in spec.options_on if name not in OPTIONS)
    if spec.partial and spec.needs_grad:
        yield "gradients by an lse that has other keys, too; has them of a whole softmax"
    if spec.precision is not None:
        for name in ("bias", "alibi"):
            if getattr(spec, f"has_{name}"):
                yield f"{name} with precision {spec.precision}; has masks, groups, softcap and sinks with it"
        if spec.dropout:
            yield f"dropout with precision {spec.precision}; has none with it"
        if spec.block_size is not None:
            yield f"blocks with precision {spec.precision}; has masks, groups, softcap and sinks with it"
        if spec.forward_mode:
            yield f"forward-mode or second derivatives with precision {spec.precision}; has gradients"
        if spec.dtype == torch.float64:
            yield f"float64 with precision {spec.precision}; has float32, bfloat16, float16"
        if spec.precision.incoherent and spec.precision.qk != "native" and spec.dim % SHORTEST:
            yield f"head dim {spec.dim} has no Hadamard transform; has multiples of {SHORTEST}, or Precision(incoherent=False)"


def attend(q: Tensor, k: Tensor, v: Tensor, options: Options, spec: Spec) -> tuple[Tensor, Tensor]:
    """Computes o and lse with operations that autograd can differentiate any number of times."""
    blocks = None
    if spec.block_size is not None:
        blocks = Blocks(options.block_counts, options.block_indices, spec.block_size, options.block_bits)
    # compute half precision in fp32 and round once
    wide = torch.float64 if spec.dtype == torch.float64 else torch.float32
    shared = {
        "scale": spec.scale,
        "softcap": spec.softcap,
        "bias": options.bias,
        "alibi": options.alibi,
        "sinks": options.sinks,
        "dropout": spec.dropout,
        "seed": options.seed,
    }
    with torch.autocast(q.device.type, enabled=False):
        q, k, v = (x.to(wide) for x in (q, k, v))
        if spec.layout == "packed":
            o, lse = reference.attention_packed(q, k, v, options.cu_q, options.cu_k, spec.mask, blocks=blocks, **shared)
        else:
            seen = None if blocks is None else blocks.pairs(q.shape[1], k.shape[1])
            o, lse = reference.attention(q, k, v, spec.mask, seen=seen, **shared)
    return (o if spec.partial else o.to(spec.dtype)).contiguous(), lse.contiguous()


def forward(q: Tensor, k: Tensor, v: Tensor, options: Options, spec: Spec) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        if spec.precision is None:
            return attend(q, k, v, options, spec)
        with torch.autocast(q.device.type, enabled=False):
            return attend_quantised(quantise(q, k, v, options, spec), options, spec)


def quantise(q: Tensor, k: Tensor, v: Tensor, options: Options, spec: Spec) -> QuantisedQKV:
    """Quantises q, k and v by the spec's recipe."""
    assert spec.precision is not None
    return quantise_qkv(q, k, v, spec.precision, options.cu_q, options.cu_k)


def attend_quantised(qkv: QuantisedQKV, options: Options, spec: Spec) -> tuple[Tensor, Tensor]:
    """Computes o and lse from the result of `quantise`."""
    with torch.autocast(qkv.q.device.type, enabled=False):
        return quantised.attend(qkv, options.sinks, spec)


def attend_paged(q: Tensor, cache: PagedKV, options: Options, spec: Spec) -> tuple[Tensor, Tensor]:
    return paged_by_gather.attend(attend, q, cache, options, spec)


def backward(inputs: BackwardInputs, spec: Spec) -> Grads:
    do, dlse, q, k, v, _, _, options = inputs
    wanted = [name for name in option_names(spec) if name == "sinks" or (name == "bias" and spec.bias_grad)]
    with torch.enable_grad(), _autograd_again():
        leaves = [x.detach().to(grad_dtype(x, spec)).requires_grad_() for x in (q, k, v)]
        extra = {name: getattr(options, name).detach().requires_grad_() for name in wanted}
        outputs = attend(*leaves, options._replace(**extra), spec)
        given = [(x, g) for x, g in zip(outputs, (do, dlse), strict=True) if g is not None]
        found = torch.autograd.grad(
            [x for x, _ in given], [*leaves, *extra.values()], [g for _, g in given], materialize_grads=True
        )
    by_name = {f"d{name}": g.contiguous() for name, g in zip(extra, found[3:], strict=True)}
    return Grads(*(g.contiguous() for g in found[:3]), **by_name)


def _autograd_again() -> AbstractContextManager[object]:
    """Re-enables autograd inside an operator, which PyTorch runs with recording disabled."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.AutogradOther):
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)
