"""The operators of a rule: forward with a gradient, backward, and one step in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor

from rooftile.errors import Unsupported
from rooftile.recurrent import walk
from rooftile.recurrent.rule import Given, Kernels, Rule, Tensors
from rooftile.recurrent.split import run as split
from rooftile.recurrent.split.context import refuse_step
from rooftile.recurrent.split.meeting import agree
from rooftile.recurrent.split.part import Part
from rooftile.recurrent.split.rules import RuleOnRank
from rooftile.recurrent.split.run import Problem
from rooftile.runtime.devices import arch, lack_of_kernels, warn_without_triton
from rooftile.runtime.launch import device_of
from rooftile.runtime.operators import below_autograd, call, define, transformed, wants_grad, watched


class Operators:
    """The operators `name`, `name_backward` and `name_step` of a rule.

    Args:
        rule: the recurrence.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule, self._by_token = rule, replace(rule, piece=None)
        self._count = len(rule.tensors) + 1
        tensors = ", ".join(f"Tensor{'?' if name.endswith('?') else ''} {name.rstrip('?')}" for name in rule.tensors)
        options = ", ".join((*rule.options, "str backend"))
        given = f"{tensors}, Tensor state, Tensor? cu, {options}"
        self._function = _function(self)
        self.forward = define(
            f"{rule.name}({given}) -> (Tensor, Tensor)", self._run, self._fake, self._function.apply,
            has_gradient=tuple(range(self._count)),
        )  # fmt: skip
        self.backward = define(
            f"{rule.name}_backward(Tensor dy, Tensor? dstate, {given}) -> Tensor[]",
            self._run_backward, self._fake_backward, partial(_refuse_twice, self), has_gradient=tuple(range(self._count + 2)),
        )  # fmt: skip
        self.step = define(
            f"{rule.name}_step(Tensor(a!) state, {tensors}, Tensor? slots, {', '.join(rule.options)}) -> Tensor",
            self._run_step,
            self._fake_step,
        )

    def __call__(
        self, tokens: Tensors, constants: Tensors, state: Tensor, cu: Tensor | None, options: Given, backend: str = "auto",
        part: Part | None = None, keeps: bool = True,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Returns the outputs, and the state after the last token of each sequence.

        With `part` they are of a sequence that several ranks share, whose last states are everywhere, or None without `keeps`.
        """
        if part is not None:
            if backend == "triton" and (reason := self.refusal(tokens, constants, state, options)) is not None:
                raise Unsupported(f"backend 'triton' cannot run {self.rule.name}: {reason}")
            given = (
                dict(zip(names, its, strict=True))
                for names, its in ((self.rule.tokens, tokens), (self.rule.constants, constants))
            )
            agree(part, self.rule.name, *given, state=tuple(state.shape), options=options, backend=backend, keeps=keeps)
            return split.run(Problem(RuleOnRank(self, options, backend), part, keeps), (*tokens, *constants), state)
        if backend == "eager" and not state.is_meta:
            return walk.forward(self._by_token, tokens, constants, state, cu, options)
        if transformed():
            return walk.forward(self.rule, tokens, constants, state, cu, options)
        if backend == "triton" and (reason := self.refusal(tokens, constants, state, options)) is not None:
            raise Unsupported(f"backend 'triton' cannot run {self.rule.name}: {reason}")
        arguments = (*tokens, *constants, state, cu, *options, backend)
        if torch.compiler.is_compiling() or watched(*arguments) or state.is_meta:
            y, last = self.forward(*arguments)
        elif wants_grad(*arguments[: self._count]):
            y, last = self._function.apply(*arguments)
        else:
            y, last = self._run(*arguments)
        return y, last

    def one(
        self, state: Tensor, tokens: Tensors, constants: Tensors, slots: Tensor | None, options: Sequence[Any]
    ) -> Tensor:  # fmt: skip
        """Reads one token of each sequence, changes the states in place, and returns the outputs."""
        refuse_step(f"a step of {self.rule.name}")
        if transformed():
            raise Unsupported(
                f"a step of {self.rule.name} under torch.func: it changes states in place and has no gradient; write "
                f"{self.rule.name} with one token and its first state"
            )
        # plain operations would keep a graph of all earlier steps in the states
        with torch.no_grad():
            found: Tensor = call(self.step, self._run_step, state, *tokens, *constants, slots, *options)
        return found

    def refusal(self, tokens: Tensors, constants: Tensors, state: Tensor, options: Given) -> str | None:
        """Says why no kernel runs such tensors, or None: what came; what the kernels have."""
        if self.rule.kernels is None:
            return "no kernels are there for it"
        if lack := lack_of_kernels(arch(state.device)):
            return lack
        return self._kernels.refusal(tokens, constants, state, options)

    @cached_property
    def _kernels(self) -> Kernels:
        assert self.rule.kernels is not None
        found: Any = import_module(self.rule.kernels)
        return cast(Kernels, found)

    def _runs_kernels(self, tokens: Tensors, constants: Tensors, state: Tensor, options: Given, backend: str) -> bool:
        if backend == "auto":
            warn_without_triton(state.is_cuda)
        return backend in ("auto", "triton") and self.refusal(tokens, constants, state, options) is None

    def run_forward(self, arguments: Given) -> tuple[Tensor, Tensor]:
        """Runs the forward without recording it, as an operator where something watches."""
        run = self.forward if watched(*arguments) or arguments[0].is_meta else self._run
        with below_autograd():
            y, last = run(*arguments)
        return y, last

    def run_end(self, arguments: Given, with_map: bool) -> Tensor | tuple[Tensor, Tensor] | None:
        """Returns the states behind tokens (rows, c, ...), and with the map, too; None where only a whole pass finds them."""
        tokens, constants, state, _, options, _ = self._split(arguments)
        if not self._runs_parts(arguments):
            return None
        with device_of(state):
            return (self._kernels.end_with_map if with_map else self._kernels.end)(tokens, constants, state, options)

    def run_begin(self, dy: Tensor, d_last: Tensor, arguments: Given) -> Tensor | None:
        """Returns the gradients of the states before tokens (rows, c, ...); None where only a whole backward finds them."""
        tokens, constants, state, _, options, _ = self._split(arguments)
        if not self._runs_parts(arguments):
            return None
        with device_of(state):
            return self._kernels.begin(dy, d_last, tokens, constants, state, options)

    def _runs_parts(self, arguments: Given) -> bool:
        """Whether kernels find states without outputs; modes that watch operators see whole passes instead."""
        if watched(*arguments) or arguments[0].is_meta:
            return False
        tokens, constants, state, _, options, backend = self._split(arguments)
        return self._runs_kernels(tokens, constants, state, options, backend) and hasattr(self._kernels, "end")

    def run_backward(self, arguments: Sequence[Any]) -> list[Tensor]:
        """Runs the backward, as an operator where something watches."""
        if torch.is_grad_enabled() or watched(*arguments) or arguments[0].is_meta:
            return list(self.backward(*arguments))
        return self._run_backward(*arguments)

    def _split(self, arguments: Sequence[Any]) -> tuple[Tensors, Tensors, Tensor, Tensor | None, Given, str]:
        tokens, n = len(self.rule.tokens), self._count - 1
        *options, backend = arguments[n + 2 :]
        return arguments[:tokens], arguments[tokens:n], arguments[n], arguments[n + 1], options, backend

    def _run(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        tokens, constants, state, cu, options, backend = self._split(arguments)
        if self._runs_kernels(tokens, constants, state, options, backend):
            with device_of(state):
                return self._kernels.forward(tokens, constants, state, cu, options)
        with torch.autocast(state.device.type, enabled=False):
            y, last = walk.forward(self.rule, tokens, constants, state, cu, options)
        # an operator returns none of its inputs
        return y.contiguous(), last.clone(memory_format=torch.contiguous_format)

    def _run_backward(self, dy: Tensor, d_last: Tensor | None, *arguments: Any) -> list[Tensor]:
        tokens, constants, state, cu, options, backend = self._split(arguments)
        if self._runs_kernels(tokens, constants, state, options, backend) and (run := self._kernels.backward) is not None:
            with device_of(state):
                return run(dy, d_last, tokens, constants, state, cu, options)
        d_last = torch.zeros_like(state) if d_last is None else d_last
        with torch.autocast(state.device.type, enabled=False):
            return walk.backward(self.rule, dy, d_last, tokens, constants, state, cu, options)

    def _step_in_kernels(self, tokens: Tensors, constants: Tensors, state: Tensor, options: Given) -> bool:
        warn_without_triton(state.is_cuda)
        if self.rule.kernels is None or lack_of_kernels(arch(state.device)):
            return False
        return self._kernels.step_refusal(tokens, constants, state, options) is None

    def _run_step(self, state: Tensor, *arguments: Any) -> Tensor:
        tokens, constants, (slots, *options) = (
            arguments[: len(self.rule.tokens)], arguments[len(self.rule.tokens) : self._count - 1], arguments[self._count - 1 :]
        )  # fmt: skip
        if self._step_in_kernels(tokens, constants, state, options):
            with device_of(state):
                return self._kernels.step(state, tokens, constants, slots, options)
        rows = None if slots is None else slots.long()
        own = state if rows is None else state.index_select(0, rows)
        with torch.autocast(state.device.type, enabled=False):
            y, last = self.rule.token(tokens, constants, own, options)
        if rows is None:
            state.copy_(last)
        else:
            state.index_copy_(0, rows, last.to(state.dtype))
        like = tokens[self.rule.like]
        return y.to(like.dtype).contiguous()

    def _fake(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        like, state = arguments[self.rule.like], arguments[self._count - 1]
        return like.new_empty(like.shape), state.new_empty(state.shape)

    def _fake_backward(self, *arguments: Any) -> list[Tensor]:
        return [x.new_empty(x.shape) for x in arguments[2 : self._count + 2] if x is not None]

    def _fake_step(self, state: Tensor, *arguments: Any) -> Tensor:
        like = arguments[self.rule.like]
        return like.new_empty(like.shape)


def _function(operators: Operators) -> Any:
    """Makes the autograd function of a rule."""
    count = len(operators.rule.tensors) + 1

    class Recurrence(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            y, last = operators.run_forward(arguments)
            ctx.save_for_backward(*arguments[: count + 1])
            ctx.options = arguments[count + 1 :]
            ctx.set_materialize_grads(False)
            return y, last

        @staticmethod
        def backward(ctx: Any, dy: Tensor | None, d_last: Tensor | None) -> Any:
            tensors = ctx.saved_tensors
            if dy is None:
                dy = torch.zeros_like(tensors[operators.rule.like])
            found = iter(operators.run_backward((dy, d_last, *tensors, *ctx.options)))
            gradients = [None if x is None else next(found) for x in tensors[:count]]
            return *gradients, None, *(None for _ in ctx.options)

    return Recurrence


class _Once(torch.autograd.Function):
    """The backward as autograd sees it when a graph of it is asked for: it runs, and a second derivative is refused."""

    @staticmethod
    def forward(ctx: Any, operators: Operators, *arguments: Any) -> Any:
        ctx.operators = operators
        with below_autograd():
            return tuple(operators.backward(*arguments))

    @staticmethod
    def backward(ctx: Any, *unused: Any) -> Any:
        raise Unsupported(f"double backward through {ctx.operators.rule.name}; backend='eager' has it")


def _refuse_twice(operators: Operators, *arguments: Any) -> list[Tensor]:
    return list(_Once.apply(operators, *arguments))
