"""Moves tokens between ranks: each rank gets the keys that its queries see, and sends back the gradients of what it got.

Every rank computes the same plan from the same numbers, so no rank asks another for anything. What no query of a rank sees is not
sent: under a window a rank gets its neighbours' last keys and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rooftile.parallel.layouts import Range, count


def union(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Returns the ranges as few disjoint ones that rise."""
    found: list[Range] = []
    for start, stop in sorted(ranges):
        if start == stop:
            continue
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return tuple(found)


class Exchange:
    """A plan of one rank: the tokens that it sends to each other rank, and the places of those that come.

    `buffer` is the number of tokens that the rank has afterwards: those of its wanted ranges, in rising order.
    """

    def __init__(self, held: Sequence[tuple[Range, ...]], wanted: Sequence[tuple[Range, ...]], rank: int) -> None:
        self.rank, self.wanted = rank, wanted[rank]
        self.local, self.buffer = count(held[rank]), count(wanted[rank])
        # by rank: ranges of the local tokens that it gets, and ranges of the buffer that it fills
        self.sends = [_overlaps(held[rank], wanted[peer]) for peer in range(len(held))]
        self.places = [_overlaps(wanted[rank], held[peer], by_second=True) for peer in range(len(held))]
        ranks = range(len(held))
        self.is_needed = any(_overlaps(held[a], wanted[b]) for a in ranks for b in ranks if a != b)

    @property
    def tokens_sent(self) -> int:
        """Tokens that this rank sends to others."""
        return sum(count(tuple(part)) for peer, part in enumerate(self.sends) if peer != self.rank)

    @property
    def tokens_fetched(self) -> int:
        """Tokens that this rank gets from others."""
        return sum(count(tuple(part)) for peer, part in enumerate(self.places) if peer != self.rank)

    def place(self, start: int) -> int:
        """Returns where a token lies in the buffer."""
        before = 0
        for low, high in self.wanted:
            if low <= start <= high:
                return before + start - low
            before += high - low
        return before

    def fetch(self, x: Tensor, group: dist.ProcessGroup) -> Fetched:
        """Starts to fetch the wanted tokens of x (..., tokens, heads, dim), whose tokens are this rank's."""
        return Fetched(self, x, group)

    def give_back(self, grad: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Returns the gradient of this rank's tokens from every rank's gradient (..., buffer, heads, dim) of what it fetched.

        Sums are in the dtype of `grad` and in the order of the ranks, so they are the same from run to run.
        """
        got = _Swap(grad, self.places, self.sends, self.rank, group, self.is_needed)
        got.wait()
        found = grad.new_zeros((*grad.shape[:-3], self.local, *grad.shape[-2:]))
        for peer, parts in enumerate(self.sends):
            pieces = _slices(grad, self.places[peer]) if peer == self.rank else got.pieces(peer)
            for (start, stop), piece in zip(parts, pieces, strict=True):
                found[..., start:stop, :, :] += piece
        return found


class Fetched:
    """Tokens on their way; `wait` returns them."""

    def __init__(self, exchange: Exchange, x: Tensor, group: dist.ProcessGroup) -> None:
        self._exchange, self._x = exchange, x
        self._coming = _Swap(x, exchange.sends, exchange.places, exchange.rank, group, exchange.is_needed)

    def wait(self) -> Tensor:
        """Returns (..., buffer, heads, dim)."""
        exchange, x = self._exchange, self._x
        self._coming.wait()
        found = x.new_empty((*x.shape[:-3], exchange.buffer, *x.shape[-2:]))
        for peer, parts in enumerate(exchange.places):
            own = peer == exchange.rank
            pieces = _slices(x, exchange.sends[peer]) if own else self._coming.pieces(peer)
            for (start, stop), piece in zip(parts, pieces, strict=True):
                found[..., start:stop, :, :] = piece
        return found


class _Swap:
    """Sends parts of x to every other rank, and receives theirs, all in one collective."""

    def __init__(
        self, x: Tensor, outgoing: list[list[Range]], incoming: list[list[Range]], rank: int, group: dist.ProcessGroup,
        is_needed: bool,
    ) -> None:  # fmt: skip
        self._shape, self._incoming, self._rank = x.shape, incoming, rank
        self._width = x.shape[:-3].numel() * x.shape[-2:].numel()
        parts = [
            part.reshape(-1) for peer, ranges in enumerate(outgoing) if peer != rank for part in _slices(x, ranges)
        ]  # fmt: skip
        out = [0 if peer == rank else count(tuple(ranges)) * self._width for peer, ranges in enumerate(outgoing)]
        self._sizes = [0 if peer == rank else count(tuple(ranges)) * self._width for peer, ranges in enumerate(incoming)]
        self._got = x.new_empty(sum(self._sizes))
        self._sent = torch.cat(parts) if parts else x.new_empty(0)
        self._work = None
        if is_needed and self._width:
            self._work = dist.all_to_all_single(self._got, self._sent, self._sizes, out, group=group, async_op=True)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()

    def pieces(self, peer: int) -> list[Tensor]:
        """Returns what came from a rank, a tensor (..., tokens, heads, dim) for each of its ranges."""
        start = sum(self._sizes[:peer])
        flat = self._got[start : start + self._sizes[peer]]
        sizes = [(stop - low) * self._width for low, stop in self._incoming[peer]]
        return [
            part.view(*self._shape[:-3], stop - low, *self._shape[-2:])
            for part, (low, stop) in zip(flat.split(sizes), self._incoming[peer], strict=True)
        ]


def _overlaps(first: Sequence[Range], second: Sequence[Range], by_second: bool = False) -> list[Range]:
    """Returns the ranges common to both, counted in the tokens of `first`.

    They come in the order of the ranges that their owner holds: those of `first`, or of `second` with `by_second`.
    """
    before, starts = 0, []
    for low, high in first:
        starts.append(before)
        before += high - low
    found = []
    for (place, (low, high)), (a, b) in (
        ((x, y) for y in second for x in zip(starts, first, strict=True))
        if by_second
        else ((x, y) for x in zip(starts, first, strict=True) for y in second)
    ):
        start, stop = max(low, a), min(high, b)
        if start < stop:
            found.append((place + start - low, place + stop - low))
    return found


def _slices(x: Tensor, ranges: Sequence[Range]) -> list[Tensor]:
    return [x[..., start:stop, :, :] for start, stop in ranges]
