"""The operators of a rule as the recurrence of one rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from rooftile.recurrent import walk
from rooftile.recurrent.rule import Carry, Given, Rule


class Operators(Protocol):
    """The methods of `rooftile.recurrent.operator.Operators` that run a rule without recording it."""

    rule: Rule

    def run_forward(self, arguments: Given) -> tuple[Tensor, Tensor]: ...

    def run_backward(self, arguments: Given) -> list[Tensor]: ...

    def run_end(self, arguments: Given, with_map: bool) -> Any: ...

    def run_begin(self, dy: Tensor, d_last: Tensor, arguments: Given) -> Tensor | None: ...


class RuleOnRank:
    """A rule on the tokens of one rank.

    Args:
        operators: the operators of the rule.
        options: of the rule.
        backend: "eager" goes token by token; others as in the operators.
    """

    def __init__(self, operators: Operators, options: Given, backend: str) -> None:
        assert operators.rule.carry is not None
        self._operators, self._rule, self._options, self._backend = operators, operators.rule, tuple(options), backend
        self._by_token = replace(operators.rule, piece=None) if backend == "eager" else None
        self.tokens, self.like = len(self._rule.tokens), self._rule.like
        self.carry: Carry = operators.rule.carry

    def empty(self, tensors: Given) -> Tensor:
        return torch.empty_like(tensors[self.like])

    def forward(self, tensors: Given, state: Tensor, cu: Tensor | None) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        if self._by_token is None:
            return *self._operators.run_forward((*tensors, state, cu, *self._options, self._backend)), ()
        with torch.autocast(state.device.type, enabled=False):
            y, last = walk.forward(self._by_token, *self._parted(tensors), state, cu, self._options)
        return y.contiguous(), last.clone(), ()

    def backward(
        self, dy: Tensor, d_last: Tensor, tensors: Given, state: Tensor, cu: Tensor | None, kept: Given
    ) -> tuple[list[Tensor | None], Tensor]:
        dy, d_last = dy.contiguous(), d_last.contiguous()
        if self._by_token is None:
            found = self._operators.run_backward((dy, d_last, *tensors, state, cu, *self._options, self._backend))
        else:
            with torch.autocast(state.device.type, enabled=False):
                found = walk.backward(self._by_token, dy, d_last, *self._parted(tensors), state, cu, self._options)
        *others, d_first = found
        grads = iter(others)
        return [None if x is None else next(grads) for x in tensors], d_first

    def end(self, tensors: Given, state: Tensor) -> Tensor:
        found = None if self._by_token is not None else self._operators.run_end(self._given(tensors, state), False)
        return self.forward(tensors, state, None)[1] if found is None else found

    def end_with_map(self, tensors: Given, state: Tensor) -> tuple[Tensor, Tensor]:
        tokens, constants = self._parted(tensors)
        if self._by_token is None and tokens[self.like].shape[1]:
            found = self._operators.run_end(self._given(tensors, state), True)
            if found is not None:
                return found
        end = self.end(tensors, state)

        def run(tokens: Given, first: Tensor) -> Tensor:
            return self.end((*tokens, *constants), first)

        return self.carry.map(run, tokens, constants, state, self._options), end

    def begin(self, dy: Tensor, d_last: Tensor, tensors: Given, state: Tensor, kept: Given) -> Tensor:
        found = None
        if self._by_token is None:
            found = self._operators.run_begin(dy, d_last, self._given(tensors, state))
        return self.backward(dy, d_last, tensors, state, None, kept)[1] if found is None else found

    def _given(self, tensors: Given, state: Tensor) -> Given:
        return (*tensors, state, None, *self._options, self._backend)

    def _parted(self, tensors: Given) -> tuple[Any, Any]:
        return tensors[: self.tokens], tensors[self.tokens :]
