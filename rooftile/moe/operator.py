"""The experts as an operator with a gradient, and the choice of what runs it.

The gradient keeps the tokens, the routing and the products before the activation. What a kernel keeps of these is in the order of
`sorting.sort`, so that one backward reads what any forward wrote.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.errors import Unsupported
from rooftile.moe import by_expert, definition
from rooftile.moe.problem import Options, QuantisedWeights, Weights, decode
from rooftile.moe.quantised import dense
from rooftile.runtime.devices import arch, lack_of_kernels, runs_kernels
from rooftile.runtime.operators import (
    below_autograd,
    define,
    in_forward_mode,
    transformed,
    transforms_active,
    wants_grad,
    watched,
)  # fmt: skip

BACKENDS = ("triton", "tiled", "eager")
# the places of arguments that have a gradient: tokens, gates and weights
_DIFFERENTIABLE = (0, *range(2, 10))


def run_experts(
    u: Tensor, chosen: Tensor, gates: Tensor, weights: Weights | QuantisedWeights, options: Options
) -> Tensor:  # fmt: skip
    """u (N, d), chosen (N, K) int32 and gates (N, K) in fp32 or fp64 to (N, d)."""
    if isinstance(weights, QuantisedWeights):
        plain = (u, gates, *(x for x in weights if isinstance(x, Tensor)))
        if options.backend != "eager" and not (torch.compiler.is_compiling() or watched(*plain) or wants_grad(*plain)):
            return _run_quantised(u, chosen, gates, weights, options)
        # a graph and a gradient see the numbers that the codes stand for
        weights = dense(weights, u.dtype)
    if options.backend == "eager" or _in_transform():
        return definition.experts(u, chosen, gates, weights, options.activation)
    if options.backend == "triton" and not u.is_meta and (lack := _lack_of_kernels(u, weights)):
        raise Unsupported(f"backend 'triton': {lack}; name 'tiled' or none")
    arguments = (u, chosen, gates, *weights, False, options.code)
    if torch.compiler.is_compiling() or watched(*arguments):
        return experts(*arguments)[0]
    if wants_grad(u, gates, *weights):
        return _Experts.apply(*arguments)[0]
    return _run(*arguments)[0]


def _in_transform() -> bool:
    """Whether a transform of torch.func or forward mode has to see plain operations."""
    return transforms_active() if torch.compiler.is_compiling() else transformed() or in_forward_mode()


def _lack_of_kernels(u: Tensor, weights: Weights | QuantisedWeights) -> str:
    """Says why the kernels do not take these tensors; an empty text if they do."""
    if u.dtype == torch.float64:
        return "u is torch.float64; needs bfloat16, float16 or float32"
    if not weights.down.shape[-1]:
        return f"down is {tuple(weights.down.shape)}; needs at least one number for each expert"
    return lack_of_kernels(arch(u.device))


def _takes_kernels(u: Tensor, weights: Weights | QuantisedWeights, backend: str) -> bool:
    return backend == "triton" or (backend == "auto" and runs_kernels(u) and not _lack_of_kernels(u, weights))


def _run_quantised(u: Tensor, chosen: Tensor, gates: Tensor, weights: QuantisedWeights, options: Options) -> Tensor:
    """The forward with quantised weights: a call, and no operator, for no gradient goes through it."""
    if options.backend == "triton" and (lack := _lack_of_kernels(u, weights)):
        raise Unsupported(f"backend 'triton': {lack}; name 'tiled' or none")
    with torch.no_grad(), torch.autocast(u.device.type, enabled=False):
        if _takes_kernels(u, weights, options.backend):
            from rooftile.moe import kernels

            return kernels.forward(u, chosen, gates, weights, options, keep=False)[0]
        return by_expert.forward(u, chosen, gates, weights, options)[0]


def _run(u: Tensor, chosen: Tensor, gates: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    *weights, keep, code = rest
    # the dtypes are the caller's, also where autocast is on
    with torch.autocast(u.device.type, enabled=False):
        given, options = Weights(*weights), decode(code)
        if _takes_kernels(u, given, options.backend):
            # imported where Triton is known to be there
            from rooftile.moe import kernels

            y, p, shared = kernels.forward(u, chosen, gates, given, options, keep)
        else:
            y, p, shared = by_expert.forward(u, chosen, gates, given, options)
    return (y, p, shared) if keep else (y, p[:0].clone(), shared[:0].clone())


def _run_backward(
    dy: Tensor, p: Tensor, shared: Tensor, u: Tensor, chosen: Tensor, gates: Tensor, *rest: Any
) -> tuple[Tensor, ...]:  # fmt: skip
    *weights, needs_weights, code = rest
    with torch.autocast(u.device.type, enabled=False):
        given, options = Weights(*weights), decode(code)
        if _takes_kernels(u, given, options.backend):
            from rooftile.moe import kernels

            backward = kernels.backward
        else:
            backward = by_expert.backward
        found = backward(dy, p, shared, u, chosen, gates, given, options, needs_weights)
    return tuple(u.new_empty(0) if x is None else x.contiguous() for x in found)


def _fake(u: Tensor, chosen: Tensor, gates: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    *weights, keep, _ = rest
    up, *_, shared_up, _, _ = weights
    N, K = chosen.shape
    shared = 0 if shared_up is None else shared_up.shape[0]
    p = u.new_empty((N * K if keep else 0, up.shape[1]))
    return u.new_empty(u.shape), p, u.new_empty((N if keep else 0, shared))


def _fake_backward(dy: Tensor, p: Tensor, shared: Tensor, u: Tensor, chosen: Tensor, gates: Tensor, *rest: Any) -> Any:
    *weights, needs_weights, _ = rest
    found = (x.new_empty(x.shape) if needs_weights and x is not None else u.new_empty(0) for x in weights)
    return u.new_empty(u.shape), gates.new_empty(gates.shape), *found


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        *tensors, keep, code = arguments
        run = experts if watched(*arguments) or tensors[0].is_meta else _run
        with below_autograd():
            y, p, shared = run(*tensors, True, code)
        ctx.save_for_backward(p, shared, *tensors)
        ctx.code = code
        if not keep:
            p, shared = p.new_empty((0, p.shape[1])), shared.new_empty((0, shared.shape[1]))
        ctx.mark_non_differentiable(p, shared)
        ctx.set_materialize_grads(False)
        return y, p, shared

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: Any) -> Any:
        if dy is None:
            return (None,) * 12
        p, shared, *tensors = ctx.saved_tensors
        arguments = (dy, p, shared, *tensors, any(ctx.needs_input_grad[3:10]), ctx.code)
        seen = torch.is_grad_enabled() or watched(*arguments) or dy.is_meta
        du, dgates, *found = (experts_backward if seen else _run_backward)(*arguments)
        weights = (x if wanted else None for x, wanted in zip(found, ctx.needs_input_grad[3:10], strict=True))
        return du, None, dgates, *weights, None, None


class _ExpertsBackward(torch.autograd.Function):
    """The backward as autograd sees it when a graph of it is asked for: it runs, and a second derivative is refused."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        with below_autograd():
            return tuple(experts_backward(*arguments))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise Unsupported(
            "double backward through experts on sorted rows; backend='eager' has it: name it where gradients of gradients are "
            "needed"
        )


_TENSORS = (
    "Tensor u, Tensor experts, Tensor gates, Tensor up, Tensor down, Tensor? up_bias, Tensor? down_bias, Tensor? shared_up, "
    "Tensor? shared_down, Tensor? shared_gate"
)
experts = define(
    f"experts({_TENSORS}, bool keep, str code) -> (Tensor, Tensor, Tensor)", _run, _fake, _Experts.apply,
    has_gradient=_DIFFERENTIABLE,
)  # fmt: skip
experts_backward = define(
    f"experts_backward(Tensor dy, Tensor p, Tensor shared, {_TENSORS}, bool needs_weights, str code) -> "
    f"({', '.join(['Tensor'] * 9)})",
    _run_backward, _fake_backward, _ExpertsBackward.apply, has_gradient=tuple(n for n in range(13) if n != 4),
)  # fmt: skip
