"""Attention under the transforms of torch.func: `grad`, `vjp`, `jacrev`, `vmap`, and their compositions.

The kernels are an ordinary call's, run where the tensors are plain. An axis that `vmap` maps joins the batch, which copies
no tensor that is mapped along its first axis. Samples are computed one after the other where joining them would change the
answer: with dropout, whose mask depends on the position in the batch; with a recipe, whose scales may span the batch; with
packed sequences; and with sinks that differ between samples, or whose gradient is wanted per sample.

There is one derivative. `rooftile.exact.api` sees most calls that need more, and gives them to `eager`;
the others raise `Unsupported`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rooftile.errors import Unsupported
from rooftile.exact.spec import Spec, decode, differentiable, option_names
from rooftile.runtime.operators import DEFINED

# the axis of each tensor that vmap maps, None for a tensor that all samples share
Dims = Sequence[int | None]


def attend(q: Tensor, k: Tensor, v: Tensor, options: list[Tensor], spec: str, backend: str) -> tuple[Tensor, Tensor]:
    """The operator `rooftile::attention` under transforms. Returns o and lse."""
    o, lse = _TransformedAttention.apply(spec, backend, q, k, v, *options)
    return o, lse


class _TransformedAttention(torch.autograd.Function):
    @staticmethod
    def forward(spec, backend, *tensors):
        q, k, v, *options = tensors
        return DEFINED["attention"](q, k, v, options, spec, backend)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.spec, ctx.backend, q, k, v, *options = inputs
        ctx.save_for_backward(q, k, v, *output, *options)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, do, dlse):
        names = option_names(decode(ctx.spec))
        wanted = dict(zip(names, ctx.needs_input_grad[5:], strict=True))
        spec = replace(decode(ctx.spec), needs_grad=True, bias_grad=wanted.get("bias", False))
        found = _Backward.apply(spec.code, ctx.backend, do, dlse, *ctx.saved_tensors)
        extra = dict(zip(differentiable(spec), found[3:], strict=True))
        return None, None, *found[:3], *(extra.get(name) for name in names)

    @staticmethod
    def jvp(ctx, *tangents):
        raise _refusal("forward-mode derivatives", ctx.backend)

    @staticmethod
    def vmap(info, in_dims, spec, backend, *tensors):
        problem, dims = decode(spec), in_dims[2:]
        names = ("q", "k", "v", *option_names(problem))
        run = lambda *tensors: _TransformedAttention.apply(spec, backend, *tensors)  # noqa: E731
        mapped = {name for name, dim in zip(names, dims, strict=True) if dim is not None}
        if not _joins(problem) or "sinks" in mapped:
            return _one_by_one(run, info.batch_size, dims, tensors)
        found = run(*_joined(names, tensors, dims, info.batch_size, bias_grad=False))
        return tuple(x.unflatten(0, (info.batch_size, -1)) for x in found), (0, 0)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(spec, backend, do, dlse, q, k, v, o, lse, *options):
        return tuple(DEFINED["attention_backward"](do, dlse, q, k, v, o, lse, list(options), spec, backend))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.backend = inputs[1]

    @staticmethod
    def backward(ctx, *grads):
        raise _refusal("double backward", ctx.backend)

    @staticmethod
    def jvp(ctx, *tangents):
        raise _refusal("forward-mode derivatives of gradients", ctx.backend)

    @staticmethod
    def vmap(info, in_dims, spec, backend, *tensors):
        problem, dims = decode(spec), in_dims[2:]
        names = ("do", "dlse", "q", "k", "v", "o", "lse", *option_names(problem))
        run = lambda *tensors: _Backward.apply(spec, backend, *tensors)  # noqa: E731
        if not _joins(problem) or problem.has_sinks:
            return _one_by_one(run, info.batch_size, dims, tensors)
        # the gradient of a bias that sequences share has a part from each, which autograd adds up
        found = run(*_joined(names, tensors, dims, info.batch_size, bias_grad=problem.bias_grad))
        return tuple(x.unflatten(0, (info.batch_size, -1)) for x in found), (0,) * len(found)


def _joins(spec: Spec) -> bool:
    """Whether samples may be computed as sequences of one batch."""
    return spec.layout == "dense" and not spec.dropout and spec.precision is None


def _joined(names: Sequence[str], tensors: Sequence[Tensor | None], dims: Dims, N: int, bias_grad: bool) -> list[Tensor | None]:
    """Returns the tensors with the mapped axis in the batch: N samples of B sequences each."""
    joined: list[Tensor | None] = []
    n = names.index("q")
    q = tensors[n]
    assert q is not None
    B = _mapped_first(q, dims[n], N).shape[1]
    for name, x, dim in zip(names, tensors, dims, strict=True):
        if x is None or (dim is None and _serves_all(name, x, bias_grad)):
            joined.append(x)
            continue
        x = _mapped_first(x, dim, N)
        if name == "alibi" and x.ndim == 2:
            x = x[:, None]
        if name in ("bias", "alibi"):
            x = x.expand(N, B, *x.shape[2:])
        joined.append(x.flatten(0, 1))
    return joined


def _serves_all(name: str, x: Tensor, bias_grad: bool) -> bool:
    """Whether every sequence of every sample reads the same; a gradient is due per sample."""
    if name == "bias":
        return x.shape[0] == 1 and not bias_grad
    return name == "sinks" or (name == "alibi" and x.ndim == 1)


def _mapped_first(x: Tensor, dim: int | None, N: int) -> Tensor:
    return x.expand(N, *x.shape) if dim is None else x.movedim(dim, 0)


def _one_by_one(
    run: Callable[..., tuple[Tensor, ...]], N: int, dims: Dims, tensors: Sequence[Tensor | None]
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Runs each sample separately; returns the stacked results and their mapped axes, as a vmap rule does."""
    found = [
        run(*(x if x is None or dim is None else x.select(dim, n) for x, dim in zip(tensors, dims, strict=True)))
        for n in range(N)
    ]
    stacked = tuple(torch.stack(parts) for parts in zip(*found, strict=True))
    return stacked, (0,) * len(stacked)


def _refusal(asked: str, backend: str) -> Unsupported:
    return Unsupported(
        f"{asked} through backend {backend!r}; only backend='eager' has it: "
        "call rooftile.attention(..., backend='eager') where derivatives of derivatives are needed"
    )
