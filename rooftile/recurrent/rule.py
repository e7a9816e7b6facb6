"""`Rule`: what a recurrence is: one token of it, and one piece of its tokens as products of matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

Tensors = Sequence[Tensor | None]
# tokens, constants, state, options -> outputs and the state afterwards
Given = Sequence[Any]
# tokens and first states -> the states behind the tokens
Run = Callable[[Given, Tensor], Tensor]
Step = Callable[[Given, Given, Tensor, Given], tuple[Tensor, Tensor]]


class Kernels(Protocol):
    """The module of a rule's kernels. It imports Triton, so it is imported where kernels can run, and at the first call."""

    def refusal(self, tokens: Tensors, constants: Tensors, state: Tensor, options: Given) -> str | None:
        """Says why the kernels do not run such tensors (shapes and dtypes alone count), or None: what came; what they have."""

    def step_refusal(self, tokens: Tensors, constants: Tensors, state: Tensor, options: Given) -> str | None:
        """Says the same of a step."""

    def forward(
        self, tokens: Tensors, constants: Tensors, state: Tensor, cu: Tensor | None, options: Given
    ) -> tuple[Tensor, Tensor]:
        """Returns contiguous outputs in the dtype of `like`, and a new tensor with the last states, in the dtype of the first."""

    # takes dy and d_last (or None) before the arguments of `forward`; returns contiguous gradients of the tensors that are there,
    # in order, and of the first state, each in its dtype. None: plain operations compute the gradients
    backward: Callable[..., list[Tensor]] | None

    # the following three functions cost less than a whole pass; a module without `end` has none of them
    def end(self, tokens: Tensors, constants: Tensors, state: Tensor, options: Given) -> Tensor:
        """Returns a new tensor with the states behind tokens (rows, c, ...), and no outputs."""

    def end_with_map(self, tokens: Tensors, constants: Tensors, state: Tensor, options: Given) -> tuple[Tensor, Tensor]:
        """Returns the map that the rule's carry has of the tokens, and the states behind them."""

    def begin(
        self, dy: Tensor, d_last: Tensor, tokens: Tensors, constants: Tensors, state: Tensor, options: Given
    ) -> Tensor:  # fmt: skip
        """Returns the gradients of the states before tokens (rows, c, ...), and no other one."""

    def step(self, state: Tensor, tokens: Tensors, constants: Tensors, slots: Tensor | None, options: Given) -> Tensor:
        """Reads one token of each sequence, changes the states in place, and returns contiguous outputs."""


class Carry(Protocol):
    """Says what tokens are to a state: what a rank tells the others beside the state that it reaches from zero."""

    def shape(self, state: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of a map, whose states have the shape `state`."""

    def nothing(self, state: tuple[int, ...], like: Tensor) -> Tensor:
        """Returns the state of no tokens."""

    def memory(self, state: tuple[int, ...]) -> int | None:
        """Returns the number of tokens that a state knows of, None where it knows of all."""

    def map(self, run: Run, tokens: Given, constants: Given, state: Tensor, options: Given) -> Tensor:
        """Returns the map (rows, ...) of tokens (rows, c, ...); `state` has the shape of the states."""

    def join(self, map: Tensor, before: Tensor, own: Tensor) -> Tensor:
        """Returns the state behind tokens from the one before them, and from the one that they reach from zero."""

    def back(self, map: Tensor, grad: Tensor) -> Tensor:
        """Returns the gradient of the state before tokens from the gradient of the one behind them."""

    def turned(self, map: Tensor, before: Tensor, behind: Tensor) -> Tensor:
        """Returns the map that `back` takes, once the states are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A recurrence: its tensors, its options, its definition, and how several tokens are computed at once.

    Args:
        name: the name of its operators.
        tokens: the names of the tensors (B, T, ...), which have one entry for each token; a name with "?" may be None.
        constants: the names of the tensors that all tokens share.
        options: in the notation of PyTorch's schemas, such as "bool softplus".
        token: the definition: computes one token (B, ...) of each sequence from the state before it.
        piece: computes consecutive tokens (B, c, ...) from the state before them; None goes token by token.
        length: the tokens of a piece, between which the backward keeps no more than the states.
        like: the place in `tokens` of the tensor whose shape and dtype the outputs have.
        kernels: the name of the module with its kernels, which has the functions of `Kernels`; None without kernels.
        carry: how states pass from rank to rank where several hold a sequence.
    """

    name: str
    tokens: tuple[str, ...]
    constants: tuple[str, ...]
    options: tuple[str, ...]
    token: Step
    piece: Step | None
    length: int
    like: int = 0
    kernels: str | None = None
    carry: Carry | None = None

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of all tensors with a gradient but the state, in the order of the operator's arguments."""
        return (*self.tokens, *self.constants)

    def run(self, tokens: Tensors, constants: Tensors, state: Tensor, options: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Computes consecutive tokens (B, c, ...) from the state before them."""
        run = self.by_token if self.piece is None else self.piece
        return run(tokens, constants, state, options)

    def by_token(self, tokens: Tensors, constants: Tensors, state: Tensor, options: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Computes consecutive tokens (B, c, ...) one by one."""
        first = next(x for x in tokens if x is not None)
        found = []
        for t in range(first.shape[1]):
            y, state = self.token([None if x is None else x[:, t] for x in tokens], constants, state, options)
            found.append(y)
        return torch.stack(found, 1), state


def wide_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype of sums and states: fp32, or fp64 for fp64 tensors."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def repeated(x: Tensor, heads: int) -> Tensor:
    """Returns (..., G, N) as (..., heads, N): each group serves heads / G neighbours."""
    return x if x.shape[-2] == heads else x.repeat_interleave(heads // x.shape[-2], -2)
