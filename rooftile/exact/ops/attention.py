"""Attention and its backward as operators: one schema, one fake and one autograd rule for every backend and every option.

`rooftile::attention(q, k, v, options, spec, backend) -> (o, lse)`. The spec crosses as a string, and the optional tensors as a
list in the order of `rooftile.exact.spec.option_names`, so a new option changes nothing here.

The autograd rule is registered by hand rather than by `torch.library.register_autograd`, which flattens the tensor list
by pytree on each call that wants gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rooftile.errors import Unsupported
from rooftile.exact import dispatch
from rooftile.exact.masks import FULL, Mask
from rooftile.exact.ops import transforms
from rooftile.exact.spec import (
    NO_OPTIONS,
    BackwardInputs,
    CallSettings,
    Grads,
    Options,
    Spec,
    decode,
    differentiable,
    grad_dtype,
    option_names,
    output_dtype,
)
from rooftile.runtime.launch import BoundedCache
from rooftile.runtime.operators import autocast_on, below_autograd, define, transformed, wants_grad, watched


def attend(q: Tensor, k: Tensor, v: Tensor, options: Options, spec: str, backend: str) -> tuple[Tensor, Tensor]:
    """The operator, or its function where nothing watches the call: two trips through the dispatcher cost host time."""
    given = listed(options)
    # on meta the operator gives shapes and dtypes
    if torch.compiler.is_compiling() or watched(q, k, v, *given) or q.is_meta:
        if transformed():
            return transforms.attend(q, k, v, given, spec, backend)
        return attention(q, k, v, given, spec, backend)
    if wants_grad(q, k, v, *given):
        return _apply(q, k, v, _PreparedCall(spec, backend), *given)
    return dispatch.BACKENDS[backend].forward(q, k, v, options, decode(spec))


Forward = Callable[[Tensor, Tensor, Tensor, Options], tuple[Tensor, Tensor]]

# calls of attention by backend since the process began, those inside compiled graphs aside
RAN: Counter[str] = Counter()
# calls seen before, by all that a plain call depends on
_PREPARED = BoundedCache()
# types whose values have a hash, and are equal only if they mean the same once their types are
_PLAIN_TYPES = frozenset((type(None), bool, int, float, str))
# the types of call settings that were found to be plain
_PLAIN_KINDS = BoundedCache()


def signature(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, options: Options, settings: CallSettings
) -> tuple[Any, ...] | None:
    """Everything that a plain call depends on besides its tensors' contents; None for a call that is not plain.

    A call whose signature is known was checked when it was first made. A plain call may carry sinks, and offsets of packed
    sequences that are on a GPU. It has no bias, ALiBi, dropout or recipe, and nothing watches it.
    """
    if mask is None:
        mask = FULL
    if type(mask) is not Mask or not isinstance(q, Tensor) or not isinstance(k, Tensor) or not isinstance(v, Tensor):
        return None
    if torch.compiler.is_compiling() or watched(q, k, v) or forward_ad._current_level >= 0:
        return None
    kinds = tuple(map(type, settings))
    if (kinds not in _PLAIN_KINDS and not _are_plain(kinds)) or settings.precision != "native":
        return None
    if settings.dropout or settings.seed is not None:
        return None
    if q.is_nested or k.is_nested or v.is_nested or not q.layout is k.layout is v.layout is torch.strided:
        return None
    device = q.device
    if device.type == "meta":
        return None
    if autocast_on() and torch.is_autocast_enabled(device.type):
        due = torch.get_autocast_dtype(device.type)
        if not q.dtype is k.dtype is v.dtype is due:
            return None
    # a kernel compiled for aligned addresses may be given no others
    if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16:
        return None
    extra = () if options is NO_OPTIONS else _signature_of(options, device)
    if extra is None:
        return None
    return (
        q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.dtype, k.dtype, v.dtype, device, k.device, v.device,
        mask, torch.are_deterministic_algorithms_enabled(), settings, kinds, wants_grad(q, k, v, options.sinks), extra,
    )  # fmt: skip


def _are_plain(kinds: tuple[type, ...]) -> bool:
    if _PLAIN_TYPES.issuperset(kinds):
        _PLAIN_KINDS[kinds] = True
        return True
    return False


def _signature_of(options: Options, device: torch.device) -> tuple[Any, ...] | None:
    """The part of a signature that sinks and offsets on a GPU make; None if there are other options."""
    found: list[Any] = []
    for name, x in zip(Options._fields, options, strict=True):
        if x is None:
            continue
        # offsets on the host are read at every call, and strided ones are copied
        may = name == "sinks" or (name in ("cu_q", "cu_k") and device.type != "cpu")
        if not may or watched(x) or not isinstance(x, Tensor) or x.device != device:
            return None
        if not x.is_contiguous() or x.data_ptr() % 16:
            return None
        found += name, x.shape, x.stride(), x.dtype
    return tuple(found)


def prepared(key: tuple[Any, ...]) -> tuple[Forward, str] | None:
    """The forward that was prepared for calls with this signature, and its backend."""
    return _PREPARED.get(key)


def remember(key: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, options: Options, spec: str, backend: str) -> None:
    """Prepares calls like this one, which was checked: the backend's launches where it can, else only the checks are saved."""
    prepare = getattr(dispatch.BACKENDS[backend], "prepare", None)
    run: Forward | None = None if prepare is None else prepare(q, k, v, options, decode(spec))
    if wants_grad(q, k, v, options.sinks):
        call = _PreparedCall(spec, backend, run)
        _PREPARED[key] = (lambda q, k, v, options: _apply(q, k, v, call, *listed(options))), backend
    elif run is not None:
        _PREPARED[key] = run, backend


class _PreparedCall:
    """One signature of calls with gradients: what runs them forward, and backward by what comes in."""

    __slots__ = ("_backwards", "backend", "forward", "spec")

    def __init__(self, spec: str, backend: str, forward: Forward | None = None) -> None:
        self.spec, self.backend, self.forward = spec, backend, forward
        self._backwards = BoundedCache(64)

    def backward(self, do, dlse, q, k, v, o, lse, options: list[Tensor]) -> Callable[[BackwardInputs], Grads] | None:
        """Returns the prepared backward for tensors with these strides, or None if there is none or a mode observes them."""
        if self.forward is None or torch.is_grad_enabled() or watched(do, dlse, q, k, v, o, lse, *options):
            return None
        addresses = q.data_ptr() | k.data_ptr() | v.data_ptr() | o.data_ptr() | lse.data_ptr()
        for x in (do, dlse, *options):
            if x is not None:
                addresses |= x.data_ptr()
        if addresses % 16:
            return None
        # what was saved may come back with other strides, from a hook that keeps it on the host
        key = (
            None if do is None else do.stride(), None if dlse is None else dlse.stride(),
            q.stride(), k.stride(), v.stride(), o.stride(), lse.stride(), q.device,
        )  # fmt: skip
        if key not in self._backwards:
            prepare, problem = dispatch.prepare_backward_of(self.backend), decode(self.spec)
            ready = None
            if prepare is not None and problem.precision is None:
                ready = prepare(BackwardInputs(do, dlse, q, k, v, o, lse, named_options(problem, options)), problem)
            self._backwards[key] = ready
        return self._backwards[key]


def listed(options: Options) -> list[Tensor]:
    """The tensors that there are, in the order of `option_names`."""
    return [x for x in options if x is not None]


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
        # rounding has no gradient: attention in the inputs' dtype gives the gradient, which needs its own output and lse
        problem = replace(problem, precision=None)
        o, lse = dispatch.BACKENDS[backend].forward(q, k, v, named, problem)
    grads = dispatch.backward_of(backend)(BackwardInputs(do, dlse, q, k, v, o, lse, named), problem)
    return [grad for grad in grads if grad is not None]


def fake_attention(q: Tensor, k: Tensor, v: Tensor, options: list[Tensor], spec: str, backend: str) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    rows = (q.shape[0], q.shape[2], q.shape[1]) if q.ndim == 4 else (q.shape[1], q.shape[0])
    return q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=output_dtype(q, decode(spec))), q.new_empty(rows, dtype=wide)


def _fake_backward(do, dlse, q, k, v, o, lse, options, spec: str, backend: str) -> list[Tensor]:
    problem = decode(spec)
    wanted = differentiable(problem)
    extra = [x for name, x in zip(option_names(problem), options, strict=True) if name in wanted]
    found = [x.new_empty(x.shape, dtype=grad_dtype(x, problem)) for x in (q, k, v)]
    return [*found, *(x.new_empty(x.shape) for x in extra)]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, call, *options):
        if call.forward is None:
            o, lse = run_forward(q, k, v, list(options), call.spec, call.backend)
        else:
            o, lse = call.forward(q, k, v, named_options(decode(call.spec), options) if options else NO_OPTIONS)
        ctx.save_for_backward(q, k, v, o, lse, *options)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx, do, dlse):
        q, k, v, o, lse, *options = ctx.saved_tensors
        call = ctx.call
        spec = decode(call.spec)
        ready = call.backward(do, dlse, q, k, v, o, lse, options)
        if ready is not None:
            named = named_options(spec, options) if options else NO_OPTIONS
            grads = ready(BackwardInputs(do, dlse, q, k, v, o, lse, named))
            found = [grad for grad in grads if grad is not None]
        else:
            found = run_backward(do, dlse, q, k, v, o, lse, options, call.spec, call.backend)
        if not options:
            return *found, None
        extra = dict(zip(differentiable(spec), found[3:], strict=True))
        return *found[:3], None, *(extra.get(name) for name in option_names(spec))


_apply = _Attention.apply


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
        return _apply(q, k, v, _PreparedCall(spec, backend), *options)
    return run_forward(q, k, v, options, spec, backend)


def run_forward(q: Tensor, k: Tensor, v: Tensor, options: list[Tensor], spec: str, backend: str) -> tuple[Tensor, Tensor]:
    """The operator below autograd, or its kernel at once."""
    if not watched(q, k, v, *options) and not q.is_meta:
        return _run(q, k, v, options, spec, backend)
    with below_autograd():
        return attention(q, k, v, options, spec, backend)


def run_backward(do, dlse, q, k, v, o, lse, options: list[Tensor], spec: str, backend: str) -> list[Tensor]:
    """The operator of the backward, or its kernels at once."""
    seen = torch.is_grad_enabled() or watched(do, dlse, q, k, v, o, lse, *options) or q.is_meta
    run = attention_backward if seen else _run_backward
    found: list[Tensor] = run(do, dlse, q, k, v, o, lse, options, spec, backend)
    return found


def _autograd_backward(do, dlse, q, k, v, o, lse, options, spec: str, backend: str) -> list[Tensor]:
    tensors = (q, k, v, o, lse, *options)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (do, dlse, *tensors)):
        return list(_AttentionBackward.apply(do, dlse, spec, backend, 5, *tensors))
    with below_autograd():
        return attention_backward(do, dlse, q, k, v, o, lse, options, spec, backend)


attention = define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor[] options, str spec, str backend) -> (Tensor, Tensor)",
    _run,
    fake_attention,
    _autograd,
)
attention_backward = define(
    "attention_backward(Tensor? do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor[] options, "
    "str spec, str backend) -> Tensor[]",
    _run_backward, _fake_backward, _autograd_backward,
)  # fmt: skip
