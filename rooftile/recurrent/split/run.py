"""A recurrence over a sequence that several ranks hold in contiguous parts, forward and backward.

Forward: each rank finds the state that its tokens reach from zero, without outputs; the states travel, each with the map that the
rank's tokens are; then each rank runs its tokens from the state that is due. So outputs are rounded once, as on one device.

Backward: the same in the opposite order, with gradients of states. The backward of the tokens between the true state before them
and the true gradient behind them is one device's, so nothing is differentiated through the maps.

A rank that no other waits for finds no state first. Ranks that others wait for send theirs before they compute more, so all ranks
compute outputs, and later gradients, at the same time.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rooftile.recurrent.rule import Carry, Given
from rooftile.recurrent.split.part import Part
from rooftile.recurrent.split.travel import Message, empty_rows, everywhere, exchange, folded, is_needed, summed


class Recurrence(Protocol):
    """A recurrence on the tokens of one rank, in numbers: nothing is recorded."""

    tokens: int  # the number of tensors of tokens, before those that all tokens share
    like: int  # the place of a tensor of tokens that is always there

    @property
    def carry(self) -> Carry:
        """How the states travel."""

    def empty(self, tensors: Given) -> Tensor:
        """Returns the outputs of no tokens."""

    def forward(self, tensors: Given, state: Tensor, cu: Tensor | None) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Returns the outputs, the states behind the tokens, and what the backward needs beside the tensors, for each token."""

    def backward(
        self, dy: Tensor, d_last: Tensor, tensors: Given, state: Tensor, cu: Tensor | None, kept: Given
    ) -> tuple[list[Tensor | None], Tensor]:
        """Returns the gradients of the tensors, None for those that are not there, and of the first states."""

    def end(self, tensors: Given, state: Tensor) -> Tensor:
        """Returns the states behind tokens (rows, c, ...)."""

    def end_with_map(self, tensors: Given, state: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the map of tokens (rows, c, ...), too."""

    def begin(self, dy: Tensor, d_last: Tensor, tensors: Given, state: Tensor, kept: Given) -> Tensor:
        """Returns the gradients of the states before tokens (rows, c, ...)."""


class Problem(NamedTuple):
    """A recurrence on this rank's part; `keeps`: the last states are returned, on every rank."""

    recurrence: Recurrence
    part: Part
    keeps: bool


def run(problem: Problem, tensors: Given, state: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns the outputs of this rank's tokens, and with `keeps` the last states of all sequences."""
    y, last = _Split.apply(problem, state, *tensors)
    return y, last


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, problem: Problem, state: Tensor, *tensors: Any) -> tuple[Tensor, Tensor | None]:
        local = _Local(problem, tensors, state.shape)
        first = local.rows_of(state).clone()
        share, carry = problem.part.own, problem.recurrence.carry
        map = turned = None
        if local.travels:
            message: Message | None = None
            if share.spans:
                message = local.end_with_map(carry.nothing(local.shape, state))
                map = message[0]
            elif share.leaves:
                message = None, local.end(local.edge(first, -1))
            messages = exchange(problem.part, message, local.shapes, local.wide(state), 1)
            if share.enters:
                local.edge(first, 0).copy_(folded(messages, carry.join))
        y, last, kept = local.forward(first)
        if map is not None:
            turned = carry.turned(map, local.edge(first, 0), local.edge(last, -1))
        ctx.save_for_backward(first, turned, *tensors, *kept)
        ctx.problem, ctx.shape, ctx.count = problem, state.shape, len(tensors)
        return y, everywhere(problem.part, last, state) if problem.keeps else None

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor, d_last: Tensor | None) -> tuple[Any, ...]:
        first, turned, *saved = ctx.saved_tensors
        problem: Problem = ctx.problem
        local = _Local(problem, saved[: ctx.count], ctx.shape, saved[ctx.count :])
        share, part, carry = problem.part.own, problem.part, problem.recurrence.carry
        if d_last is None:
            d_last = first.new_zeros(ctx.shape)
        total = summed(part, d_last) if problem.keeps else d_last
        d_rows = local.rows_of(total).clone()
        if share.leaves:
            local.edge(d_rows, -1).zero_()
        if local.travels:
            message = None
            if share.enters:
                message = (turned if share.spans else None), local.begin(dy, local.edge(d_rows, 0), first)
            messages = exchange(part, message, local.shapes, local.wide(first), -1)
            if share.leaves:
                local.edge(d_rows, -1).copy_(folded(messages, lambda map, grad, own: carry.back(map, grad) + own))
        grads, d_first = local.backward(dy, d_rows, first)
        d_state = first.new_zeros(ctx.shape)
        local.rows_of(d_state).copy_(d_first)
        if share.enters:
            # the state that came from another rank is not the caller's
            local.edge(local.rows_of(d_state), 0).zero_()
        if part.cu is not None:
            empty = empty_rows(part, first.device)
            d_state[empty] = d_last[empty]
        return None, d_state, *grads


class _Local:
    """This rank's tokens: all of them, and the tokens of the sequences that cross its borders."""

    def __init__(self, problem: Problem, tensors: Given, states: tuple[int, ...], kept: Given = ()) -> None:
        self._tensors, self._kept, self._recurrence = tensors, kept, problem.recurrence
        share = self._share = problem.part.own
        like = tensors[self._recurrence.like]
        self._packed = share.rows is not None
        self._cu = torch.tensor(share.cu, dtype=torch.int32, device=like.device) if self._packed else None
        self._count = like.shape[0 if self._packed else 1]
        # the shape of states that cross a border
        self.shape = (1, *states[1:]) if self._packed else tuple(states)
        self.shapes = self._recurrence.carry.shape(self.shape), self.shape
        self.travels = is_needed(problem.part) and prod(self.shape) > 0

    def rows_of(self, states: Tensor) -> Tensor:
        """Returns the states of the sequences that have tokens here."""
        return states if self._share.rows is None else states[slice(*self._share.rows)]

    def edge(self, states: Tensor, place: int) -> Tensor:
        """Returns the states of the first (0) or last (-1) sequence here; without offsets, of all sequences."""
        if not self._packed:
            return states
        return states[:1] if place == 0 else states[-1:]

    def wide(self, x: Tensor) -> Tensor:
        """Returns a tensor with the dtype and the device of messages."""
        return x.new_empty(0, dtype=torch.promote_types(x.dtype, torch.float32))

    def crossing(self, place: int) -> list[Any]:
        """Returns the tensors, with the tokens (rows, c, ...) of the first or last sequence here."""
        if not self._packed:
            return list(self._tensors)
        cu = self._share.cu
        own = slice(cu[0], cu[1]) if place == 0 else slice(cu[-2], cu[-1])
        return self._sliced(self._tensors, lambda x: x[None, own])

    def forward(self, first: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        if not self._count:
            return self._recurrence.empty(self._tensors), first.clone(), ()
        return self._recurrence.forward(self._tensors, first, self._cu)

    def backward(self, dy: Tensor, d_last: Tensor, first: Tensor) -> tuple[list[Tensor | None], Tensor]:
        if not self._count:
            return [None if x is None else torch.zeros_like(x) for x in self._tensors], d_last
        return self._recurrence.backward(dy, d_last, self._tensors, first, self._cu, self._kept)

    def end(self, first: Tensor) -> Tensor:
        """Returns the state behind the last sequence here."""
        tensors, count = self._remembered()
        return self._recurrence.end(tensors, first) if count else first

    def end_with_map(self, first: Tensor) -> Message:
        """Returns the map of the last sequence here, and the state behind it."""
        tensors, _ = self._remembered()
        return self._recurrence.end_with_map(tensors, first)

    def _remembered(self) -> tuple[list[Any], int]:
        """Returns the tokens of the last sequence here that a state knows of, and their number."""
        tensors = self.crossing(-1)
        count = tensors[self._recurrence.like].shape[1]
        if (memory := self._recurrence.carry.memory(self.shape)) is not None:
            tensors = self._sliced(tensors, lambda x: x[:, max(count - memory, 0) :])
        return tensors, count

    def begin(self, dy: Tensor, d_last: Tensor, first: Tensor) -> Tensor:
        """Returns the gradient of the state before the first sequence here."""
        if not self._count:
            return d_last
        tensors, each = self.crossing(0), [dy, *self._kept]
        if self._packed:
            each = [x[None, : self._share.cu[1]] for x in each]
        if (memory := self._recurrence.carry.memory(self.shape)) is not None:
            tensors, each = self._sliced(tensors, lambda x: x[:, :memory]), [x[:, :memory] for x in each]
        return self._recurrence.begin(each[0], d_last, tensors, self.edge(first, 0), each[1:])

    def _sliced(self, tensors: Given, cut: Any) -> list[Any]:
        n = self._recurrence.tokens
        return [x if place >= n or x is None else cut(x) for place, x in enumerate(tensors)]
