"""An operation with a gradient of its own: two operators, one forward and one backward, around kernels or plain operations.

Autograd runs the backward operator. A derivative of a derivative, forward mode and transforms of `torch.func` see plain
operations instead: the gradient's own formula, or the definition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rooftile.runtime.operators import below_autograd, define, needs_steps, transforms_active, wants_grad, watched

Run = Callable[..., tuple[Tensor, ...]]


class Operation:
    """An operation on tensors that come first among its arguments.

    Args:
        name: the operator's; its backward is `name`_backward.
        arguments: in PyTorch's notation.
        results: how many tensors it returns.
        run: computes the results, by a kernel or by the definition.
        defined: computes them in plain operations.
        run_gradients: takes the gradients of the results, the results and the arguments.
        gradients: the same in plain operations, which can be differentiated again.
        fake: returns empty results.
        fake_gradients: returns empty gradients.
        given_to: the argument that each gradient belongs to, by its place; a gradient may belong to two.
        differentiable: how many results have a gradient; the others come after them.
        unused: places among the results and then the tensors that gradients do not read; they get None.
    """

    def __init__(
        self, name: str, arguments: str, *, results: int, run: Run, defined: Run, run_gradients: Run, gradients: Run, fake: Run,
        fake_gradients: Run, given_to: Mapping[int, int], differentiable: int = 1, unused: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        self.run, self.defined, self.run_gradients, self.gradients = run, defined, run_gradients, gradients
        self.given_to, self.results, self.differentiable = given_to, results, differentiable
        self._unused = unused
        self._tensors = sum("Tensor" in one for one in arguments.split(","))
        self.operator = define(
            f"{name}({arguments}) -> {_tensors(results)}", _one_of(run, results), _one_of(fake, results),
            _one_of(self._autograd, results),
        )  # fmt: skip
        count = max(given_to.values()) + 1
        read = [f"Tensor y{n}" for n in range(results)] + arguments.split(", ")
        read = [one.replace("Tensor ", "Tensor? ") if n in unused else one for n, one in enumerate(read)]
        due = [f"Tensor d{n}" for n in range(differentiable)]
        self.backward = define(
            f"{name}_backward({', '.join(due + read)}) -> {_tensors(count)}", _one_of(run_gradients, count),
            _one_of(fake_gradients, count),
        )  # fmt: skip

    def __call__(self, *arguments: Any) -> tuple[Tensor, ...]:
        """Runs the operation."""
        tensors = [x for x in arguments[: self._tensors] if x is not None]
        if torch.compiler.is_compiling():
            return self.defined(*arguments) if transforms_active() else _many(self.operator(*arguments))
        if wants_grad(*tensors) and not _transformed():
            return _Function.apply(self, *arguments)
        if needs_steps(*tensors):
            return self.defined(*arguments)
        if watched(*arguments):
            with torch.no_grad():
                return _many(self.operator(*arguments))
        return self.run(*arguments)

    def _autograd(self, *arguments: Any) -> tuple[Tensor, ...]:
        if wants_grad(*(x for x in arguments[: self._tensors] if x is not None)):
            found: tuple[Tensor, ...] = _Function.apply(self, *arguments)
            return found
        with below_autograd():
            return _many(self.operator(*arguments))


def _tensors(count: int) -> str:
    """The results of an operator in PyTorch's notation, in which one result is no tuple."""
    return "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"


def _one_of(run: Run, count: int) -> Callable[..., Any]:
    return run if count > 1 else lambda *arguments: run(*arguments)[0]


def _many(found: Any) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else tuple(found)


def in_transform() -> bool:
    """Whether a transform of torch.func or forward mode is active, also while a compiler traces."""
    return transforms_active() if torch.compiler.is_compiling() else _transformed()


def _transformed() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operation: Operation, *arguments: Any) -> Any:
        with below_autograd():
            seen = watched(*arguments) or arguments[0].is_meta
            found = _many((operation.operator if seen else operation.run)(*arguments))
        ctx.operation, ctx.rest = operation, arguments[operation._tensors :]
        held = (*found, *arguments[: operation._tensors])
        ctx.save_for_backward(*(None if n in operation._unused else x for n, x in enumerate(held)))
        ctx.mark_non_differentiable(*found[operation.differentiable :])
        # PyTorch would make zeros for every result without a gradient, also for results that have no gradient by definition
        ctx.set_materialize_grads(False)
        ctx.made = [(x.shape, x.dtype, x.device) for x in found[: operation.differentiable]]
        return found

    @staticmethod
    def backward(ctx: Any, *dy: Any) -> Any:
        operation = ctx.operation
        dy = tuple(
            torch.zeros(shape, dtype=dtype, device=device) if each is None else each
            for each, (shape, dtype, device) in zip(dy, ctx.made, strict=False)
        )
        arguments = (*dy, *ctx.saved_tensors, *ctx.rest)
        if torch.is_grad_enabled():
            found = operation.gradients(*arguments)
        elif watched(*arguments) or dy[0].is_meta:
            found = _many(operation.backward(*arguments))
        else:
            found = operation.run_gradients(*arguments)
        given = [None] * (operation._tensors + len(ctx.rest))
        for place, n in operation.given_to.items():
            if ctx.needs_input_grad[place + 1]:
                given[place] = found[n]
        return None, *given
