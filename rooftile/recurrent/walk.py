"""Forward and backward of a recurrence, piece by piece, in plain operations: for CPUs, for fp64, and where no kernel runs.

The backward keeps nothing of the forward but its inputs: it computes the states before all pieces again, then goes back from
piece to piece, each differentiated by itself. So memory grows with one piece, and with the number of pieces times the state.

A NaN or infinity of a token reaches the outputs from this token on, and no earlier one: where a piece has one, its tokens are
computed one by one, because a product with a mask's zeros would spread it to earlier tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rooftile.recurrent.rule import Rule, Tensors, wide_dtype
from rooftile.runtime.operators import above_autograd, transformed


def forward(
    rule: Rule, tokens: Tensors, constants: Tensors, state: Tensor, cu: Tensor | None, options: Sequence[Any]
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns the outputs in the dtype of the rule's `like`, and the last state of each sequence."""
    if cu is None:
        return _forward(rule, tokens, constants, state, options)
    found = [
        _forward(rule, [None if x is None else x[None, first:last] for x in tokens], constants, state[b : b + 1], options)
        for b, (first, last) in enumerate(pairwise(cu.tolist()))
    ]
    like = tokens[rule.like]
    assert like is not None
    if not found:
        return torch.empty_like(like), state
    return torch.cat([y[0] for y, _ in found]), torch.cat([last_state for _, last_state in found])


def backward(
    rule: Rule, dy: Tensor, d_last: Tensor, tokens: Tensors, constants: Tensors, state: Tensor, cu: Tensor | None,
    options: Sequence[Any],
) -> list[Tensor]:  # fmt: skip
    """Returns the gradients of the tensors that are there, in order, and of the first state."""
    d_constants = [None if x is None else torch.zeros_like(x, dtype=wide_dtype(x)) for x in constants]
    if cu is None:
        d_tokens, d_state = _backward(rule, dy, d_last, tokens, constants, d_constants, state, options)
    else:
        parts, states = [], []
        for b, (first, last) in enumerate(pairwise(cu.tolist())):
            own = [None if x is None else x[None, first:last] for x in tokens]
            found, d_own = _backward(
                rule, dy[None, first:last], d_last[b : b + 1], own, constants, d_constants, state[b : b + 1], options
            )
            parts.append(found)
            states.append(d_own)
        columns = zip(*parts, strict=True) if parts else [()] * len(tokens)
        d_tokens = [
            None if x is None else torch.cat([part[0] for part in its]) if its else torch.zeros_like(x)
            for x, its in zip(tokens, columns, strict=True)
        ]
        d_state = torch.cat(states) if states else torch.zeros_like(state)
    pairs = zip((*tokens, *constants, state), (*d_tokens, *d_constants, d_state), strict=True)
    return [d.to(x.dtype).contiguous() for x, d in pairs if x is not None and d is not None]


def _forward(rule: Rule, tokens: Tensors, constants: Tensors, state: Tensor, options: Sequence[Any]) -> tuple[Tensor, Tensor]:
    like = tokens[rule.like]
    assert like is not None
    found = []
    for piece in _pieces(rule, tokens):
        y, state = rule.run(piece, constants, state, options)
        found.append(y.to(like.dtype))
    return torch.cat(found, 1) if found else torch.empty_like(like), state


def _backward(
    rule: Rule, dy: Tensor, d_last: Tensor, tokens: Tensors, constants: Tensors, d_constants: list[Tensor | None], state: Tensor,
    options: Sequence[Any],
) -> tuple[list[Tensor | None], Tensor]:  # fmt: skip
    """Returns the gradients of the tokens' tensors and of the first state; adds to the constants' gradients."""
    pieces = list(_pieces(rule, [*tokens, dy]))
    before = [state]
    for *piece, _ in pieces[:-1]:
        before.append(rule.run(piece, constants, before[-1], options)[1])
    found = []
    d_state = d_last
    for (*piece, d_own), past in zip(reversed(pieces), reversed(before[: len(pieces)]), strict=True):
        assert d_own is not None
        d_piece, own_constants, d_state = _differentiated(rule, d_own, d_state, piece, constants, past, options)
        found.append(d_piece)
        for total, d in zip(d_constants, own_constants, strict=True):
            if total is not None and d is not None:
                total += d
    columns = zip(*reversed(found), strict=True) if found else [()] * len(tokens)
    return [
        None if x is None else torch.cat(its, 1) if its else torch.zeros_like(x)
        for x, its in zip(tokens, columns, strict=True)
    ], d_state  # fmt: skip


def _differentiated(
    rule: Rule, dy: Tensor, d_state: Tensor, tokens: Sequence[Tensor | None], constants: Tensors, state: Tensor,
    options: Sequence[Any],
) -> tuple[list[Tensor | None], list[Tensor | None], Tensor]:  # fmt: skip
    every = [*tokens, *constants]
    there = [n for n, x in enumerate(every) if x is not None]

    def run(first: Tensor, *present: Tensor) -> tuple[Tensor, Tensor]:
        own = list(every)
        for n, x in zip(there, present, strict=True):
            own[n] = x
        return rule.run(own[: len(tokens)], own[len(tokens) :], first, options)

    # constants in the wide dtype, so that the sum over pieces rounds once
    given = [x if n < len(tokens) else x.to(wide_dtype(x)) for n in there if (x := every[n]) is not None]
    with above_autograd():
        leaves = [x.detach().requires_grad_() for x in (state, *given)]
        y, last = run(*leaves)
        d_first, *d_given = torch.autograd.grad(
            (y, last), leaves, (dy.to(y.dtype), d_state.to(last.dtype)), allow_unused=True, materialize_grads=True
        )
    placed: list[Tensor | None] = [None] * len(every)
    for n, d in zip(there, d_given, strict=True):
        placed[n] = d
    return placed[: len(tokens)], placed[len(tokens) :], d_first


def _pieces(rule: Rule, tensors: Tensors) -> Iterator[list[Tensor | None]]:
    """Yields the tensors of consecutive tokens; token by token where one is not finite."""
    first = next(x for x in tensors if x is not None)
    T = first.shape[1]
    for start in range(0, T, rule.length):
        piece = [None if x is None else x[:, start : start + rule.length] for x in tensors]
        # a transform of torch.func may not ask for numbers
        if transformed() or all(x is None or bool(x.isfinite().all()) for x in piece):
            yield piece
        else:
            for n in range(min(rule.length, T - start)):
                yield [None if x is None else x[:, n : n + 1] for x in piece]
