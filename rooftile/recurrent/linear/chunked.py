"""The chunked recurrence S <- a S + f(k) v^T as an operator: dense or packed, with states that come in and go out.

The decay `a` is 1, but for what the running largest of features with factors needs (see `by_chunks`). The schema has a place for
decays from outside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rooftile.errors import Unsupported
from rooftile.recurrent.linear import plain
from rooftile.recurrent.linear.by_chunks import RunningSums
from rooftile.recurrent.linear.features import width
from rooftile.recurrent.linear.plain import wide_dtype
from rooftile.recurrent.linear.problem import Recurrence, decode
from rooftile.runtime.devices import arch, lack_of_kernels, warn_without_triton
from rooftile.runtime.launch import device_of
from rooftile.runtime.operators import below_autograd, define, transformed, wants_grad, watched


def recur(
    q: Tensor,  # (B, T, H, D), or (total, H, D) with cu
    k: Tensor,  # (B, S, Hk, D); S = T under a causal mask
    v: Tensor,  # (B, S, Hk, Dv)
    state: RunningSums | None,
    problem: Recurrence,
    *,
    cu: Tensor | None = None,  # (B + 1,)
    projection: Tensor | None = None,  # (rows, D)
) -> tuple[Tensor, RunningSums]:
    """o (B, T, H, Dv) in the dtype of q, and the state after the last key, in fp32 (fp64 for fp64 inputs).

    Gradients flow to q, k, v and the state's sums, and from o and the sums that are returned. Neither the projection nor the
    largest has one.
    """
    state = first_sums(q, k, v, state, problem, cu, projection)
    if transformed():
        o, _, last_state = plain.forward(q, k, v, state, projection, cu, problem)
        return o, last_state
    if problem.backend == "triton" and (reason := refusal(q, v, problem)) is not None:
        raise Unsupported(f"backend 'triton' cannot run this recurrence: {reason}")
    arguments = (q, k, v, *state, None, projection, cu, problem.scale, problem.code)
    if torch.compiler.is_compiling() or watched(*arguments):
        o, _, *last = chunked_recurrence(*arguments)
    elif wants_grad(*arguments[:5]):
        o, _, *last = _Recurrence.apply(*arguments)
    else:
        o, _, *last = _run(*arguments)
    return o, RunningSums(*last)


def first_sums(
    q: Tensor, k: Tensor, v: Tensor, state: RunningSums | None, problem: Recurrence, cu: Tensor | None, projection: Tensor | None
) -> RunningSums:  # fmt: skip
    """The state before the first key: nothing, if none is given."""
    if state is not None:
        return state
    B = q.shape[0] if cu is None else cu.shape[0] - 1
    F = width(problem.feature, q.shape[-1], projection)
    dtype = wide_dtype(q)
    s = torch.zeros((B, k.shape[-2], F, v.shape[-1]), dtype=dtype, device=q.device)
    largest = torch.full(s.shape[:2], -math.inf, dtype=dtype, device=q.device)
    return RunningSums(s, torch.zeros(s.shape[:3], dtype=dtype, device=q.device), largest)


# the largest head dims of the kernels: a state of more does not stay in registers
LARGEST_DIM = 128
# the features of Performer's positive and hyperbolic maps are "exp"
_IN_KERNELS = ("identity", "relu", "elu", "exp")


def refusal(q: Tensor, v: Tensor, problem: Recurrence) -> str | None:
    """Why the kernels do not run this problem, or None: what came; what they have."""
    if lack := lack_of_kernels(arch(q.device)):
        return lack
    if q.dtype == torch.float64:
        return "float64; has float32, bfloat16, float16"
    if problem.feature not in _IN_KERNELS or (problem.feature == "exp" and not problem.normalise):
        return f"features {problem.feature!r}; has {', '.join(map(repr, _IN_KERNELS))}"
    if max(q.shape[-1], v.shape[-1]) > LARGEST_DIM:
        return f"head dims {q.shape[-1]}, {v.shape[-1]}; has up to {LARGEST_DIM}"
    return None


def runs_kernels(q: Tensor, v: Tensor, problem: Recurrence) -> bool:
    """Whether Triton's kernels run this problem; otherwise plain operations do."""
    if problem.backend == "auto":
        warn_without_triton(q.is_cuda)
    return problem.backend in ("auto", "triton") and refusal(q, v, problem) is None


def _run(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, largest: Tensor, decay: Tensor | None,
    projection: Tensor | None, cu: Tensor | None, scale: float, code: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert decay is None, "the decay is 1"
    problem = decode(code, scale)
    if runs_kernels(q, v, problem):
        from rooftile.recurrent.linear import kernels

        with device_of(q):
            o, den, last = kernels.forward(q, k, v, RunningSums(s, z, largest), projection, cu, problem)
        return o, den, last.s, last.z, largest.clone() if last.largest is largest else last.largest
    with torch.autocast(q.device.type, enabled=False):
        o, den, last = plain.forward(q, k, v, RunningSums(s, z, largest), projection, cu, problem)
    # an operator returns none of its inputs
    return o.contiguous(), den.contiguous(), *(x.clone(memory_format=torch.contiguous_format) for x in last)


def _run_backward(
    do: Tensor, ds: Tensor | None, dz: Tensor | None, o: Tensor, den: Tensor, q: Tensor, k: Tensor, v: Tensor, s: Tensor,
    z: Tensor, largest: Tensor, decay: Tensor | None, projection: Tensor | None, cu: Tensor | None, scale: float, code: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    problem = decode(code, scale)
    d_last = RunningSums(_or_zeros(ds, s), _or_zeros(dz, z), largest)
    state = RunningSums(s, z, largest)
    if runs_kernels(q, v, problem):
        from rooftile.recurrent.linear import kernels

        with device_of(q):
            return kernels.backward(do, d_last, o, den, q, k, v, state, projection, cu, problem)
    with torch.autocast(q.device.type, enabled=False):
        return plain.backward(do, d_last, o, den, q, k, v, state, projection, cu, problem)


def _or_zeros(x: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if x is None else x


def _fake(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, largest: Tensor, decay: Tensor | None,
    projection: Tensor | None, cu: Tensor | None, scale: float, code: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    rows = q.shape[:-1]
    others = (x.new_empty(x.shape) for x in (s, z, largest))
    return q.new_empty((*rows, v.shape[-1])), q.new_empty(rows, dtype=wide_dtype(q)), *others


def _fake_backward(*arguments: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in arguments[5:10])


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        o, den, s, z, largest = run_forward(arguments)
        ctx.save_for_backward(o, den, *arguments[:9])
        ctx.options = arguments[9:]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(den, largest)
        return o, den, s, z, largest

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, _: Any, ds: Tensor | None, dz: Tensor | None, __: Any) -> Any:
        o, den, *tensors = ctx.saved_tensors
        do = torch.zeros_like(o) if do is None else do
        arguments = (do, ds, dz, o, den, *tensors, *ctx.options)
        return *run_backward(arguments), None, None, None, None, None, None


def run_forward(arguments: Sequence[Any]) -> tuple[Tensor, ...]:
    """Runs the forward without recording it, as an operator where something watches."""
    run = chunked_recurrence if watched(*arguments) or arguments[0].is_meta else _run
    with below_autograd():
        return tuple(run(*arguments))


def run_backward(arguments: Sequence[Any]) -> tuple[Tensor, ...]:
    """Runs the backward, as an operator where something watches."""
    if torch.is_grad_enabled() or watched(*arguments) or arguments[0].is_meta:
        return tuple(chunked_recurrence_backward(*arguments))
    return _run_backward(*arguments)


def run_end(
    q: Tensor, k: Tensor, v: Tensor, state: RunningSums, projection: Tensor | None, problem: Recurrence
) -> RunningSums | None:  # fmt: skip
    """Returns the sums behind keys (B, S, Hk, D), and no outputs; None where only a whole pass finds them."""
    if watched(q, k, v) or q.is_meta or not k.shape[1] or not runs_kernels(q, v, problem):
        return None
    from rooftile.recurrent.linear import kernels

    with device_of(q):
        return kernels.end(q, k, v, state, projection, problem)


def run_begin(
    do: Tensor, ds: Tensor, dz: Tensor, kept: Sequence[Tensor], q: Tensor, k: Tensor, v: Tensor, state: RunningSums,
    projection: Tensor | None, problem: Recurrence,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """Returns the gradients of S and z before the keys, and no other one; None where only a whole backward finds them.

    kept: o and the sums of weights.
    """
    if watched(q, k, v, do) or q.is_meta or not k.shape[1] or not runs_kernels(q, v, problem):
        return None
    from rooftile.recurrent.linear import kernels

    with device_of(q):
        o, den = kept
        return kernels.begin(do, RunningSums(ds, dz, state.largest), o, den, q, k, v, state, projection, problem)


class _RecurrenceBackward(torch.autograd.Function):
    """The backward as autograd sees it when a graph of it is asked for: it runs, and a second derivative is refused."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        with below_autograd():
            return tuple(chunked_recurrence_backward(*arguments))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise Unsupported(
            "double backward through linear attention in chunks; backend='eager' has it: name it where gradients of "
            "gradients are needed"
        )


_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor state, Tensor norm, Tensor largest, Tensor? decay, Tensor? projection, "
    "Tensor? cu, float scale, str code"
)
chunked_recurrence = define(
    f"chunked_recurrence({_TENSORS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _run, _fake, _Recurrence.apply, has_gradient=tuple(range(5)),
)  # fmt: skip
chunked_recurrence_backward = define(
    f"chunked_recurrence_backward(Tensor do, Tensor? dstate, Tensor? dnorm, Tensor o, Tensor den, {_TENSORS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _run_backward, _fake_backward, _RecurrenceBackward.apply, has_gradient=tuple(range(10)),
)  # fmt: skip
