"""Attention as torch operators: one schema, one fake, one autograd and for every backend and every option.

`rooftile::attention(q, k, v, options, spec, backend) -> (o, lse)` and its backward; and `rooftile::attention_paged`, which only a
compiler sees. The spec crosses as a string and the optional tensors as a list in the spec's order
(`rooftile.spec.option_names`), so a new option changes nothing here.

The autograd rule is registered by hand rather than by `torch.library.register_autograd`, which flattens the tensor list
by pytree on each call that wants gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rooftile import dispatch
from rooftile.errors import Unsupported
from rooftile.kvcache import PagedKV
from rooftile.launch import BoundedCache
from rooftile.masks import Mask
from rooftile.operators import below_autograd, define, wants_grad, watched
from rooftile.spec import Options, Spec, decode, option_names


def attend(q: Tensor, k: Tensor, v: Tensor, options: Options, spec: str, backend: str) -> tuple[Tensor, Tensor]:
    """The operator, or what it would run where nobody watches: two trips through the dispatcher cost host time."""
    listed = [x for x in options if x is not None]
    if torch.compiler.is_compiling() or watched(q, k, v, *listed):
        return attention(q, k, v, listed, spec, backend)
    if wants_grad(q, k, v, *listed):
        return _Attention.apply(q, k, v, spec, backend, *listed)
    return dispatch.BACKENDS[backend].forward(q, k, v, options, decode(spec))


def attend_paged(q: Tensor, cache: PagedKV, options: Options, spec: str, backend: str) -> tuple[Tensor, Tensor]:
    """The operator of a paged cache, for a compiler; there are no gradients."""
    listed = [x for x in options if x is not None]
    found: tuple[Tensor, Tensor] = torch.ops.rooftile.attention_paged.default(
        q, cache.k, cache.v, cache.table, cache.lengths, cache.cu_q, cache.k_scale, cache.v_scale, listed, spec, backend
    )
    return found


# calls seen before, by all that a plain call depends on
_PREPARED = BoundedCache()
_NUMBERS = frozenset((type(None), int, float))
_FLAGS = frozenset((type(None), bool))


def signature(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale, softcap, dropout, deterministic, needs_lse: bool, backend
) -> tuple[Any, ...] | None:  # fmt: skip
    """What a call without options depends on; None for one that is not as plain as that.

    A call with a known signature was checked when it was first made. Without gradients it costs an allocation and a launch.
    """
    if type(mask) is not Mask or k is None or v is None or torch.compiler.is_compiling() or watched(q, k, v):
        return None
    # True equals 1, and a list has no hash
    plain = type(scale) in _NUMBERS and type(softcap) in _NUMBERS and type(dropout) in _NUMBERS
    if not plain or type(deterministic) not in _FLAGS or (backend is not None and type(backend) is not str):
        return None
    if forward_ad._current_level >= 0 or torch.is_autocast_enabled(q.device.type):
        return None
    if q.is_nested or k.is_nested or v.is_nested or not q.layout is k.layout is v.layout is torch.strided:
        return None
    # a kernel compiled for aligned addresses may be given no others
    if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16:
        return None
    return (
        q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.dtype, k.dtype, v.dtype,
        q.device, k.device, v.device, mask, torch.are_deterministic_algorithms_enabled(),
        scale, softcap, dropout, deterministic, needs_lse, backend, wants_grad(q, k, v),
    )  # fmt: skip


def prepared(key: tuple[Any, ...]) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    return _PREPARED.get(key)


def remember(key: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, spec: str, backend: str) -> None:
    """Lets the backend prepare calls like this one, if it can; with gradients, only the checks are done beforehand."""
    if wants_grad(q, k, v):
        _PREPARED[key] = lambda q, k, v: _Attention.apply(q, k, v, spec, backend)
        return
    prepare = getattr(dispatch.BACKENDS[backend], "prepare", None)
    ready = prepare(q, k, v, decode(spec)) if prepare is not None else None
    if ready is not None:
        _PREPARED[key] = ready


def named_options(spec: Spec, options: list[Tensor]) -> Options:
    """The list that crossed the schema, by name."""
    return Options(**dict(zip(option_names(spec), options, strict=True)))


def _run(q: Tensor, k: Tensor, v: Tensor, options: list[Tensor], spec: str, backend: str) -> tuple[Tensor, Tensor]:
    problem = decode(spec)
    return dispatch.BACKENDS[backend].forward(q, k, v, named_options(problem, options), problem)


def _run_backward(do, dlse, q, k, v, o, lse, options, spec: str, backend: str) -> list[Tensor]:
    problem = decode(spec)
    named = named_options(problem, options)
    if problem.precision is not None:
        # rounding has no gradient: that of attention in the inputs' dtype is taken, which needs its own output and lse
        problem = replace(problem, precision=None)
        o, lse = dispatch.BACKENDS[backend].forward(q, k, v, named, problem)
    grads = dispatch.backward_of(backend)(do, dlse, q, k, v, o, lse, named, problem)
    return [grad for grad in grads if grad is not None]


def _run_paged(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, cu_q: Tensor | None, k_scale: Tensor | None,
    v_scale: Tensor | None, options: list[Tensor], spec: str, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    problem = decode(spec)
    cache = PagedKV(k, v, table, lengths, cu_q, k_scale, v_scale)
    return dispatch.BACKENDS[backend].attend_paged(q, cache, named_options(problem, options), problem)


def _fake_paged(
    q, k, v, table, lengths, cu_q, k_scale, v_scale, options, spec: str, backend: str
) -> tuple[Tensor, Tensor]:
    return _fake(q, k, v, options, spec, backend)


def _fake(q: Tensor, k: Tensor, v: Tensor, options: list[Tensor], spec: str, backend: str) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    rows = (q.shape[0], q.shape[2], q.shape[1]) if q.ndim == 4 else (q.shape[1], q.shape[0])
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(rows, dtype=wide)


def _fake_backward(do, dlse, q, k, v, o, lse, options, spec: str, backend: str) -> list[Tensor]:
    problem = decode(spec)
    wanted = _differentiable(problem)
    extra = [x for name, x in zip(option_names(problem), options, strict=True) if name in wanted]
    return [x.new_empty(x.shape) for x in (q, k, v, *extra)]


def _differentiable(spec: Spec) -> tuple[str, ...]:
    """The options that a backward returns gradients for, in the order of Grads."""
    return ("bias",) * spec.bias_grad + ("sinks",) * spec.has_sinks


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, spec, backend, *options):
        o, lse = _forward(q, k, v, options, spec, backend)
        ctx.save_for_backward(q, k, v, o, lse, *options)
        ctx.spec, ctx.backend = spec, backend
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx, do, dlse):
        q, k, v, o, lse, *options = ctx.saved_tensors
        as_operator = torch.is_grad_enabled() or watched(do, dlse, q, k, v, o, lse, *options)
        run = attention_backward if as_operator else _run_backward
        found = run(do, dlse, q, k, v, o, lse, options, ctx.spec, ctx.backend)
        spec = decode(ctx.spec)
        extra = dict(zip(_differentiable(spec), found[3:], strict=True))
        return *found[:3], None, None, *(extra.get(name) for name in option_names(spec))


class _AttentionBackward(torch.autograd.Function):
    """The backward as autograd sees it when a graph of it is asked for: it runs, and a second derivative is refused."""

    @staticmethod
    def forward(ctx, do, dlse, spec, backend, count, *tensors):
        ctx.backend = backend
        with below_autograd():
            return tuple(attention_backward(do, dlse, *tensors[:count], tensors[count:], spec, backend))

    @staticmethod
    def backward(ctx, *grads):
        raise Unsupported(
            f"double backward through backend {ctx.backend!r}; only backend='eager' has it: "
            "call rooftile.attention(..., backend='eager') where gradients of gradients are needed"
        )


def _autograd(q: Tensor, k: Tensor, v: Tensor, options: list[Tensor], spec: str, backend: str) -> tuple[Tensor, Tensor]:
    if wants_grad(q, k, v, *options):
        return _Attention.apply(q, k, v, spec, backend, *options)
    return _forward(q, k, v, options, spec, backend)


def _forward(q: Tensor, k: Tensor, v: Tensor, options: list[Tensor], spec: str, backend: str) -> tuple[Tensor, Tensor]:
    """The operator below autograd, or its kernel at once."""
    if not watched(q, k, v, *options):
        return _run(q, k, v, options, spec, backend)
    with below_autograd():
        return attention(q, k, v, options, spec, backend)


def _autograd_backward(do, dlse, q, k, v, o, lse, options, spec: str, backend: str) -> list[Tensor]:
    tensors = (q, k, v, o, lse, *options)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (do, dlse, *tensors)):
        return list(_AttentionBackward.apply(do, dlse, spec, backend, 5, *tensors))
    with below_autograd():
        return attention_backward(do, dlse, q, k, v, o, lse, options, spec, backend)


attention = define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor[] options, str spec, str backend) -> (Tensor, Tensor)",
    _run,
    _fake,
    _autograd,
)
attention_backward = define(
    "attention_backward(Tensor? do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor[] options, "
    "str spec, str backend) -> Tensor[]",
    _run_backward, _fake_backward, _autograd_backward,
)  # fmt: skip
attention_paged = define(
    "attention_paged(Tensor q, Tensor k, Tensor v, Tensor table, Tensor lengths, Tensor? cu_q, Tensor? k_scale, Tensor? v_scale, "
    "Tensor[] options, str spec, str backend) -> (Tensor, Tensor)",
    _run_paged, _fake_paged,
)  # fmt: skip
