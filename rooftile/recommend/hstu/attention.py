"""`hstu_attention`: pointwise attention over the events of many users, and its operator.

Zhai et al., Actions Speak Louder than Words, arXiv:2402.17152.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.errors import Unsupported
from rooftile.exact.masks import CAUSAL, Mask
from rooftile.recommend.foreign_words import HSTU
from rooftile.recommend.hstu import definition, tiled
from rooftile.recommend.hstu.arguments import check_call
from rooftile.recommend.hstu.bias import RelativeBias
from rooftile.recommend.hstu.problem import Problem, Users, decode_mask, encode_mask
from rooftile.recommend.hstu.refusals import pays_on_hopper, refusal_of_hopper, refusal_of_triton
from rooftile.runtime.arguments import check_backend, check_deterministic
from rooftile.runtime.devices import warn_without_triton
from rooftile.runtime.launch import device_of
from rooftile.runtime.operators import below_autograd, define, transforms_active, wants_grad, watched
from rooftile.runtime.words import answers_with

BACKENDS = ("hopper", "triton", "tiled", "eager")


@answers_with(HSTU)
def hstu_attention(
    q: Tensor,  # (total, H, D)
    k: Tensor,  # (total, H, D)
    v: Tensor,  # (total, H, Dv)
    cu: Tensor,  # (B + 1,)
    *,
    alpha: float,
    mask: Mask | None = CAUSAL,
    bias: RelativeBias | None = None,
    times: Tensor | tuple[Tensor, Tensor] | None = None,
    positions: Tensor | None = None,
    contextual: int = 0,
    targets: Tensor | int | None = None,
    scale: float | None = None,
    backend: str | None = None,
    deterministic: bool | None = None,
) -> Tensor:
    """Attention without softmax over packed users: y_i = 1 / n sum_j silu(alpha q_i k_j + bias_ij) v_j over the rows that i sees.

    A user's rows are contextual ones, then the history of events, then targets: candidates that are scored together. Contextual
    rows are seen by all, and see all but targets. Events see events by the mask. Each target sees the history as the event after
    its end would, and itself, but no other target. A user without rows is fine, and no user depends on another.

    Args:
        q: queries (total, H, D), float32, bfloat16, float16 or float64, any strides.
        k: keys (total, H, D).
        v: values (total, H, Dv).
        cu: offsets (B + 1,) of users, int32 or int64, from 0 to total.
        alpha: the factor of the scores.
        mask: among events, whose first has position 0 in it: CAUSAL, FULL, Window, Prefix, Chunk, or an intersection. With
            `& Targets(n)` it is the mask among events with targets=n.
        bias: tables of what a score gains by distance and time, `rooftile.recommend.RelativeBias`. Gradients flow to them.
        times: (total,) whole seconds of each row, rising within a user, for a bias with times; or a pair of such tensors, of
            rows as queries and as keys: the reference implementation gives queries the time of the next event.
        positions: (total,) int, rising within a user, for a bias with positions; a row's number if None, where all targets
            have the number behind the history.
        contextual: how many first rows of each user are contextual.
        targets: how many last rows of each user are targets: an int for all, or (B,).
        scale: of the sum. None divides it by n, the number of the user's rows; the reference implementation divides by the padded
            length N, which is `scale=1 / N`.
        backend: "hopper" (kernels for sm90 in bfloat16, without a bias or contextual rows), "triton" (kernels), "tiled" (plain
            operations, tile by tile) or "eager" (the definition); None or "auto" takes "hopper" where it runs and users are
            long, and then the first of the others that runs.
        deterministic: accepted as in `rooftile.attention`; results of kernels, and on a CPU, always are. With
            "tiled" on a GPU gradients of tables follow `torch.use_deterministic_algorithms`.

    Returns:
        y (total, H, Dv), contiguous, in the dtype of q.

    Raises:
        InvalidInput: an argument is wrong; says what came and what is due. On a GPU the values of cu, times and targets are not
            read.
        Unsupported: the named backend does not run this problem.

    Example:
        >>> q, k, v = (torch.randn(300, 2, 32) for _ in range(3))
        >>> hstu_attention(q, k, v, torch.tensor([0, 100, 100, 300]), alpha=32**-0.5, targets=4).shape
        torch.Size([300, 2, 32])

    Zhai et al., Actions Speak Louder than Words, arXiv:2402.17152.
    """
    q, k, v, users, problem = check_call(q, k, v, cu, alpha, mask, bias, times, positions, contextual, targets, scale)
    way = check_backend(backend, BACKENDS)
    check_deterministic(deterministic)
    reason = (refusal_of_hopper if way == "hopper" else refusal_of_triton)(q, v, users, problem)
    if way in ("hopper", "triton") and reason is not None:
        raise Unsupported(f"backend {way!r} cannot run HSTU attention: {reason}")
    if way == "eager" or transforms_active():
        with torch.autocast(q.device.type, enabled=False):
            return definition.hstu_attention(q, k, v, users, problem)
    if way == "auto":
        warn_without_triton(q.is_cuda)
        hopper = pays_on_hopper(q, users) and refusal_of_hopper(q, v, users, problem) is None
        way = "hopper" if hopper else "tiled" if reason is not None else "triton"
    arguments = (
        q, k, v, users.position_table, users.time_table, users.cu, users.targets, users.edges, users.row_times, users.key_times,
        users.positions, problem.alpha, problem.scale, problem.contextual, problem.zero, encode_mask(problem.mask), way,
    )  # fmt: skip
    if torch.compiler.is_compiling() or watched(*arguments[:11]) or q.is_meta:
        return _ATTENTION(*arguments)  # type: ignore[no-any-return]
    if wants_grad(*arguments[:5]):
        return _Attention.apply(*arguments)  # type: ignore[no-any-return, no-untyped-call]
    return _run(*arguments)


def _module(backend: str) -> Any:
    if backend == "tiled":
        return tiled
    if backend == "triton":
        from rooftile.recommend.hstu import kernels

        return kernels
    # Triton may lack Gluon, which those kernels are written in
    from rooftile.recommend.hstu import hopper

    return hopper


def _split(arguments: tuple[Any, ...]) -> tuple[Users, Problem, Any]:
    """The users, the problem and the module of what follows q, k and v in the operators."""
    position_table, time_table, cu, targets, edges, row_times, key_times, positions, *numbers, mask, backend = arguments
    alpha, scale, contextual, zero = numbers
    users = Users(cu, targets, position_table, time_table, edges, row_times, key_times, positions)
    return users, Problem(alpha, scale, decode_mask(mask), contextual, zero), _module(backend)


def _run(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    users, problem, module = _split(rest)
    with torch.no_grad(), device_of(q), torch.autocast(q.device.type, enabled=False):
        return module.forward(q, k, v, users, problem)  # type: ignore[no-any-return]


def _run_backward(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    users, problem, module = _split(rest)
    with torch.no_grad(), device_of(q), torch.autocast(q.device.type, enabled=False):
        found = module.backward(dy, q, k, v, users, problem)
    none = q.new_empty(0)
    tables = (none if d is None else d.to(table.dtype) for d, table in zip(found[3:], rest[:2], strict=True))
    return (*found[:3], *tables)  # type: ignore[return-value]


def _fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return v.new_empty(v.shape)


def _fake_backward(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    none = q.new_empty(0)
    tables = (none if table is None else table.new_empty(table.shape) for table in rest[:2])
    return (*(x.new_empty(x.shape) for x in (q, k, v)), *tables)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        ctx.save_for_backward(*arguments[:11])
        ctx.rest = arguments[11:]
        with below_autograd():
            return _ATTENTION(*arguments) if watched(*arguments[:11]) else _run(*arguments)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # read once: what checkpointing computes anew is given once
        saved = ctx.saved_tensors
        arguments = (grads[0], *saved, *ctx.rest)
        run = _BACKWARD if torch.is_grad_enabled() or watched(*arguments[:12]) else _run_backward
        dq, dk, dv, d_positions, d_times = run(*arguments)
        tables = (None if x is None else d for d, x in zip((d_positions, d_times), saved[3:5], strict=True))
        return dq, dk, dv, *tables, *[None] * 12


_GIVEN = (
    "Tensor q, Tensor k, Tensor v, Tensor? position_table, Tensor? time_table, Tensor cu, Tensor? targets, Tensor? edges, "
    "Tensor? row_times, Tensor? key_times, Tensor? positions, float alpha, float? scale, int contextual, int zero, int[] mask, "
    "str backend"
)
_ATTENTION = define(f"hstu_attention({_GIVEN}) -> Tensor", _run, _fake, _Attention.apply, has_gradient=(0, 1, 2, 3, 4))
_BACKWARD = define(
    f"hstu_attention_backward(Tensor dy, {_GIVEN}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", _run_backward, _fake_backward
)
