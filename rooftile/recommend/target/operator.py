"""The operator of target attention with its gradients, and what runs it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.recommend.target import chosen, tiled
from rooftile.recommend.target.problem import Batch, Problem
from rooftile.runtime.devices import arch, lack_of_kernels
from rooftile.runtime.launch import device_of
from rooftile.runtime.operators import below_autograd, define, wants_grad, watched


def attend(batch: Batch, problem: Problem, backend: str) -> Tensor:
    """Returns o (total_q, H, Dv)."""
    arguments = (*batch, *problem, backend)
    if torch.compiler.is_compiling() or watched(*batch) or batch.q.is_meta:
        return _ATTENTION(*arguments)[0]  # type: ignore[no-any-return]
    if wants_grad(*batch[:4]):
        return _Attention.apply(*arguments)[0]  # type: ignore[no-any-return, no-untyped-call]
    return _run(*arguments)[0]


def _split(arguments: tuple[Any, ...]) -> tuple[Batch, Problem, Any]:
    """The tensors, the numbers, and the module that runs them."""
    batch, problem, backend = Batch(*arguments[:7]), Problem(*arguments[7:-1]), arguments[-1]
    if backend == "triton":
        from rooftile.recommend.target import kernels

        return batch, problem, kernels
    return batch, problem, tiled if batch.events is None else chosen


def refusal(batch: Batch) -> str | None:
    """Says why no kernel runs such tensors; None if one does."""
    if lack := lack_of_kernels(arch(batch.q.device)):
        return lack
    if batch.q.dtype == torch.float64:
        return "q is float64; has float32, bfloat16 and float16"
    if max(batch.q.shape[2], batch.values.shape[2]) > 256:
        return f"head dim is {batch.q.shape[2]} for q and {batch.values.shape[2]} for values; has up to 256"
    return None


def _run(*arguments: Any) -> tuple[Tensor, Tensor]:
    batch, problem, module = _split(arguments)
    with torch.no_grad(), device_of(batch.q), torch.autocast(batch.q.device.type, enabled=False):
        return module.forward(batch, problem)  # type: ignore[no-any-return]


def _run_backward(do: Tensor, o: Tensor, lse: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, problem, module = _split(arguments)
    with torch.no_grad(), device_of(batch.q), torch.autocast(batch.q.device.type, enabled=False):
        *rows, dbias = module.backward(do, o, lse, batch, problem)
    return *rows, batch.q.new_empty(0) if dbias is None else dbias.to(batch.bias.dtype)  # type: ignore[union-attr]


def _fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    batch = Batch(*arguments[:7])
    shape = batch.lse_shape if arguments[7] == "softmax" else (0, 0)
    return batch.q.new_empty(*batch.q.shape[:2], batch.values.shape[2]), batch.q.new_empty(shape, dtype=batch.wide)


def _fake_backward(do: Tensor, o: Tensor, lse: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    q, *_, bias = arguments[:4]
    return *(x.new_empty(x.shape) for x in arguments[:3]), q.new_empty(0) if bias is None else bias.new_empty(bias.shape)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        with below_autograd():
            o, lse = _ATTENTION(*arguments) if watched(*arguments[:7]) else _run(*arguments)
        ctx.mark_non_differentiable(lse)
        ctx.save_for_backward(o, lse, *arguments[:7])
        ctx.rest = arguments[7:]
        return o, lse

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # read once: what checkpointing computes anew is given once
        saved = ctx.saved_tensors
        arguments = (grads[0], *saved, *ctx.rest)
        run = _BACKWARD if torch.is_grad_enabled() or watched(*arguments[:10]) else _run_backward
        *rows, dbias = run(*arguments)
        return *rows, None if saved[5] is None else dbias, *[None] * 8


_GIVEN = (
    "Tensor q, Tensor keys, Tensor values, Tensor? bias, Tensor? events, Tensor cu_q, Tensor cu, str weights, float scale, "
    "bool mean, bool deterministic, str backend"
)
_ATTENTION = define(f"target_attention({_GIVEN}) -> (Tensor, Tensor)", _run, _fake, _Attention.apply, has_gradient=(0, 1, 2, 3))
_BACKWARD = define(
    f"target_attention_backward(Tensor do, Tensor o, Tensor lse, {_GIVEN}) -> (Tensor, Tensor, Tensor, Tensor)",
    _run_backward, _fake_backward,
)  # fmt: skip
