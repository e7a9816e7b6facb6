"""Moves rows out of a padded batch and back, each row once in either direction.

PyTorch's own rules for these gradients cost more than the moves: `index_select`'s adds rows atomically into zeros, as rows
might occur twice, and `index_copy` copies what it writes into.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Rows of x (N, ...), as (M, ...).

    Args:
        x: (N, ...), any dtype.
        rows: (M,) int64, each from 0 to N - 1 and none twice.

    Differentiable, also twice and in forward mode.

    Example:
        >>> take_rows(torch.arange(5), torch.tensor([3, 1]))
        tensor([3, 1])
    """
    if torch.compiler.is_compiling():
        # Dynamo takes no function with a rule of its own for forward mode
        return x.index_select(0, rows)
    return _Take.apply(x, rows)  # type: ignore[no-any-return]


def put_rows(x: Tensor, rows: Tensor, count: int) -> Tensor:
    """Zeros (count, ...) with the rows of x (M, ...) in the given places: the transpose of `take_rows`.

    Example:
        >>> put_rows(torch.tensor([7, 8]), torch.tensor([3, 1]), 5)
        tensor([0, 8, 0, 7, 0])
    """
    if torch.compiler.is_compiling():
        return x.new_zeros((count, *x.shape[1:])).index_copy(0, rows, x)
    return _Put.apply(x, rows, count)  # type: ignore[no-any-return]


class _Take(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, rows: Tensor) -> Tensor:
        return x.index_select(0, rows)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        x, rows = inputs
        ctx.save_for_backward(rows)
        ctx.save_for_forward(rows)
        ctx.count = x.shape[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return put_rows(grad, rows, ctx.count), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        (rows,) = ctx.saved_tensors
        return take_rows(tangent, rows)


class _Put(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, rows: Tensor, count: int) -> Tensor:
        return x.new_zeros((count, *x.shape[1:])).index_copy_(0, rows, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
        _, rows, ctx.count = inputs
        ctx.save_for_backward(rows)
        ctx.save_for_forward(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return take_rows(grad, rows), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        (rows,) = ctx.saved_tensors
        return put_rows(tangent, rows, ctx.count)
