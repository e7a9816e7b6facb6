"""Deals tokens out to the ranks of a group, and puts them together again."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.parallel.layouts import Range, count, ranges, rows_of
from rooftile.runtime.arguments import shown, whole
from rooftile.runtime.ranks import Grid, Ranks, grid_of
from rooftile.runtime.tensors import check_offsets


def shard(x: Tensor, group: Any = None, dim: int = 1, layout: str = "zigzag", cu: Tensor | None = None) -> Tensor:
    """Returns this rank's tokens of a whole tensor: inputs, targets, or a whole sequence's q, k and v.

    Args:
        x: the whole tensor, the same on every rank; `dim` is its axis of tokens.
        group: a process group, a DeviceMesh of one or two dimensions, or None for the default group.
        layout: "zigzag" (rank r holds ranges r and 2P - 1 - r of 2P: causal work is even for one sequence), "contiguous", or
            "balanced" (causal work is even for packed documents: the busiest rank has at most 1 % more than its share of the
            pairs, and twice the longest document's length).
        cu: offsets (B + 1,) of the documents in the whole pack, the same on every rank; they are read. "balanced" needs them.

    A length that P does not divide is cut unevenly in every layout: the first ranks hold one token more. Packed documents are cut
    as one sequence.

    Raises:
        InvalidInput: a layout that there is not, or "balanced" without documents.

    Example:
        >>> shard(tokens, mesh["cp"], dim=1)      # doctest: +SKIP
    """
    ranks = grid_of(group)
    dim = _axis(x, dim)
    held = ranges(x.shape[dim], ranks.count, layout, _offsets(cu, x.shape[dim]))[ranks.rank]
    return torch.cat([x.narrow(dim, start, stop - start) for start, stop in held], dim)


def unshard(
    local: Tensor, group: Any = None, dim: int = 1, layout: str = "zigzag", tokens: int | None = None, cu: Tensor | None = None
) -> Tensor:  # fmt: skip
    """Returns the whole tensor from every rank's tokens: the opposite of `shard`.

    Args:
        local: this rank's tokens; `dim` is their axis.
        tokens: the whole length, for lengths that the number of ranks does not divide. None: `cu` says it, or every rank holds as
            many.
        cu: as `shard` got it.

    Differentiable: a rank's gradient is the sum of what every rank's loss asks of its tokens.
    """
    ranks = grid_of(group)
    dim = _axis(local, dim)
    if tokens is None and isinstance(cu, Tensor) and cu.ndim == 1 and len(cu):
        tokens = int(cu[-1])
    total = local.shape[dim] * ranks.count if tokens is None else whole(tokens)
    if total is None or total < 0:
        raise InvalidInput(f"tokens is {shown(tokens)}; must be an integer of at least 0, the whole length")
    held = ranges(total, ranks.count, layout, _offsets(cu, total))
    own = count(held[ranks.rank])
    if own != local.shape[dim]:
        raise InvalidInput(
            f"local has {local.shape[dim]} tokens on rank {ranks.rank}; the layout {layout!r} gives it {own} of {total}: "
            "pass tokens= where the ranks' lengths differ"
        )
    tokens_first = local.movedim(dim, 0)
    if isinstance(ranks, Grid):
        # the row's tokens first
        held, within = rows_of(held, ranks.inner.count)
        tokens_first, ranks = _Unsharded.apply(tokens_first, within[ranks.outer.rank], ranks.inner), ranks.outer
    whole_first: Tensor = _Unsharded.apply(tokens_first, held, ranks)
    return whole_first.movedim(0, dim)


def positions(tokens: int, group: Any = None, layout: str = "zigzag", cu: Tensor | None = None) -> Tensor:
    """Returns the positions of this rank's tokens in the whole sequence, int64 on the CPU: what rotary embeddings need.

    Args:
        tokens: the whole sequence's length.
        cu: offsets (B + 1,) of packed documents; positions are then those within each document. "balanced" needs them.
    """
    ranks = grid_of(group)
    offsets = _offsets(cu, tokens)
    found = torch.cat([torch.arange(start, stop) for start, stop in ranges(tokens, ranks.count, layout, offsets)[ranks.rank]])
    if offsets is None:
        return found
    starts = torch.tensor(offsets)
    return found - starts[torch.searchsorted(starts, found, right=True) - 1]


def _offsets(cu: Tensor | None, tokens: int) -> tuple[int, ...] | None:
    """Returns the offsets of documents in numbers."""
    if cu is None:
        return None
    return tuple(check_offsets("cu", cu, tokens, "tokens of the whole pack", torch.device("cpu"), True).tolist())


def _axis(x: Tensor, dim: int) -> int:
    if not isinstance(x, Tensor) or not -x.ndim <= dim < x.ndim:
        raise InvalidInput(f"got {shown(x)} with dim {dim}; must be a tensor with that axis, its axis of tokens")
    return dim % x.ndim


class _Unsharded(torch.autograd.Function):
    """Rows of every rank, in the order of the whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, held: tuple[tuple[Range, ...], ...], ranks: Ranks) -> Tensor:
        ctx.held, ctx.ranks = held, ranks
        sizes, width = [count(parts) for parts in held], x.shape[1:].numel()
        sent = x.contiguous().view(-1).repeat(ranks.count)
        got = x.new_empty(sum(sizes) * width)
        own = sizes[ranks.rank] * width
        dist.all_to_all_single(got, sent, [size * width for size in sizes], [own] * ranks.count, group=ranks.group)
        found = x.new_empty((sum(sizes), *x.shape[1:]))
        flat = got.view(found.shape)
        before = 0
        for start, stop in (part for parts in held for part in parts):
            found[start:stop] = flat[before : before + stop - start]
            before += stop - start
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        held, ranks = ctx.held, ctx.ranks
        sizes, width = [count(parts) for parts in held], grad.shape[1:].numel()
        sent = torch.cat([grad[start:stop].reshape(-1) for parts in held for start, stop in parts])
        own = sizes[ranks.rank] * width
        got = grad.new_empty(own * ranks.count)
        dist.all_to_all_single(got, sent, [own] * ranks.count, [size * width for size in sizes], group=ranks.group)
        # in fp32 and in the order of the ranks: the same from run to run
        total = (
            got.view(ranks.count, sizes[ranks.rank], *grad.shape[1:]).to(torch.promote_types(grad.dtype, torch.float32)).sum(0)
        )
        return total.to(grad.dtype), None, None
