"""A recurrence on split sequences by exchanging tokens for heads: two all-to-alls, and between them every token of some heads.

So each rank runs its heads once, from the true first state, and the numbers are one device's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rooftile.recurrent.rule import wide_dtype
from rooftile.recurrent.split.part import Part
from rooftile.runtime.ranks import contiguous


class Dealt(NamedTuple):
    """The tokens of each rank, and the axis of tokens; heads are on the axis behind it."""

    part: Part
    lengths: tuple[int, ...]
    axis: int


def run_by_heads(
    part: Part, tokens: Sequence[Tensor], state: Tensor, cu: Tensor | None,
    call: Callable[[list[Tensor], Tensor, Tensor | None], tuple[Tensor, Tensor | None]], keeps: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Returns the outputs of this rank's tokens, and with `keeps` the last states of all heads, on every rank.

    Args:
        tokens: this rank's tokens, all heads of them.
        state: the first states (rows, heads, ...).
        call: the recurrence, of all tokens of some heads.
    """
    axis = 1 if cu is None else 0
    dealt = Dealt(part, _lengths(part, tokens[0].shape[axis], tokens[0].device), axis)
    own = [_ToHeads.apply(x, dealt) for x in tokens]
    heads = state.shape[1] // part.ranks.count
    first = state.narrow(1, part.ranks.rank * heads, heads).contiguous()
    y, last = call(own, first, None if cu is None else cu.to(state.device, torch.int32))
    y = _ToTokens.apply(y, dealt)
    return y, _Gathered.apply(last, part) if keeps else None


def _lengths(part: Part, own: int, device: torch.device) -> tuple[int, ...]:
    """Returns the number of tokens of each rank: from the offsets, or told by all, which waits for a GPU."""
    if part.cu is not None:
        return tuple(stop - start for start, stop in contiguous(part.cu[-1], part.ranks.count))
    found = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(part.ranks.count)]
    dist.all_gather(found, torch.tensor([own], device=device), group=part.ranks.group)
    return tuple(int(x) for x in torch.cat(found).tolist())


class _ToHeads(torch.autograd.Function):
    """(..., tokens of this rank, all heads, ...) to (..., all tokens, heads of this rank, ...)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dealt: Dealt) -> Tensor:
        ctx.dealt = dealt
        return _to_heads(x, dealt)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _to_tokens(grad, ctx.dealt), None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dealt: Dealt) -> Tensor:
        ctx.dealt = dealt
        return _to_tokens(x, dealt)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _to_heads(grad, ctx.dealt), None


def _to_heads(x: Tensor, dealt: Dealt) -> Tensor:
    part, lengths, axis = dealt
    P, rank = part.ranks.count, part.ranks.rank
    x = (
        x.movedim(axis, 0).unflatten(axis + 1, (P, -1)).movedim(axis + 1, 0).contiguous()
    )  # (P, tokens, ..., heads of a rank, ...)
    one = x.shape[2:]
    got = x.new_empty((sum(lengths), *one))
    sizes = [length * one.numel() for length in lengths]
    dist.all_to_all_single(got.view(-1), x.view(-1), sizes, [sizes[rank]] * P, group=part.ranks.group)
    return got.movedim(0, axis)


def _to_tokens(x: Tensor, dealt: Dealt) -> Tensor:
    part, lengths, axis = dealt
    P, rank = part.ranks.count, part.ranks.rank
    x = x.movedim(axis, 0).contiguous()  # (all tokens, ..., heads of this rank, ...)
    one = x.shape[1:]
    got = x.new_empty((P, lengths[rank], *one))
    sizes = [length * one.numel() for length in lengths]
    dist.all_to_all_single(got.view(-1), x.view(-1), [sizes[rank]] * P, sizes, group=part.ranks.group)
    return got.movedim(0, axis + 1).flatten(axis + 1, axis + 2).movedim(0, axis)


class _Gathered(torch.autograd.Function):
    """The states of all heads from the heads of each rank; a gradient is the sum of what all ranks ask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Part) -> Tensor:
        ctx.part = part
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(part.ranks.count)]
        if x.numel():
            dist.all_gather(parts, x.contiguous(), group=part.ranks.group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        part: Part = ctx.part
        total = grad.to(wide_dtype(grad)).contiguous().clone()
        if total.numel():
            dist.all_reduce(total, group=part.ranks.group)
        heads = grad.shape[1] // part.ranks.count
        return total.narrow(1, part.ranks.rank * heads, heads).to(grad.dtype).contiguous(), None
