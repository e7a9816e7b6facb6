"""Moves tokens between ranks: each rank gets the keys that its queries see, and sends back the gradients of what it got.

Every rank computes the same plan from the same numbers, so no rank asks another for anything. What no query of a rank sees is not
sent: under a window a rank gets its neighbours' last keys and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rooftile.parallel.layouts import Range, count


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
        # numbers of tokens by rank, without what stays on this one
        self.counts_out, self.counts_in = (
            [0 if peer == rank else count(tuple(part)) for peer, part in enumerate(parts)] for parts in (self.sends, self.places)
        )
        # the order in which pieces of the buffer come from the ranks: theirs one after the other, by their places
        starts = [start for parts in self.places for start, _ in parts]
        self.order = sorted(range(len(starts)), key=starts.__getitem__)
        ranks = range(len(held))
        received = [sum(count(tuple(_overlaps(held[a], wanted[b]))) for a in ranks if a != b) for b in ranks]
        self.most_fetched = max(received)  # by a rank

    @property
    def tokens_sent(self) -> int:
        """Tokens that this rank sends to others."""
        return sum(self.counts_out)

    @property
    def tokens_fetched(self) -> int:
        """Tokens that this rank gets from others."""
        return sum(self.counts_in)

    def place(self, start: int) -> int:
        """Returns where a token lies in the buffer."""
        before = 0
        for low, high in self.wanted:
            if low <= start <= high:
                return before + start - low
            before += high - low
        return before

    def fetch(self, tensors: Sequence[Tensor], group: dist.ProcessGroup) -> Fetched:
        """Starts to fetch the wanted tokens of tensors (..., tokens, heads, dim), whose tokens are this rank's."""
        return Fetched(self, tensors, group)

    def give_back(self, grads: Sequence[Tensor], group: dist.ProcessGroup) -> GivenBack:
        """Starts to send gradients (..., buffer, heads, dim) of what this rank fetched to the ranks that hold it."""
        return GivenBack(self, grads, group)


class Fetched:
    """Tokens on their way; `wait` returns them."""

    def __init__(self, exchange: Exchange, tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        self._exchange, self._tensors = exchange, tensors
        self._coming = _Swap(tensors, exchange, group)

    def wait(self) -> list[Tensor]:
        """Returns tensors (..., buffer, heads, dim)."""
        exchange = self._exchange
        self._coming.wait()
        found = []
        for n, x in enumerate(self._tensors):
            pieces: list[Tensor] = []
            for peer, own in enumerate(exchange.sends):
                pieces += _slices(x, own) if peer == exchange.rank else self._coming.pieces(peer, n)
            found.append(torch.cat([pieces[place] for place in exchange.order], dim=-3) if pieces else x.narrow(-3, 0, 0))
        return found


class GivenBack:
    """Gradients on their way to the ranks that hold the tokens; `wait` returns the sums of this rank's."""

    def __init__(self, exchange: Exchange, grads: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        self._exchange, self._grads = exchange, grads
        self._coming = _Swap(grads, exchange, group, back=True)

    def wait(self) -> list[Tensor]:
        """Returns tensors (..., tokens, heads, dim) of this rank's tokens.

        Sums are in the dtype of the gradients, this rank's part first and the others in the order of the ranks, so they are the
        same from run to run.
        """
        exchange = self._exchange
        self._coming.wait()
        found = []
        for n, grad in enumerate(self._grads):
            total = _own_part(grad, exchange)
            for peer, parts in enumerate(exchange.sends):
                if peer != exchange.rank:
                    for (start, stop), piece in zip(parts, self._coming.pieces(peer, n), strict=True):
                        total[..., start:stop, :, :] += piece
            found.append(total)
        return found


def _own_part(grad: Tensor, exchange: Exchange) -> Tensor:
    """This rank's gradient of its own tokens; zero where it does not see them."""
    parts = exchange.sends[exchange.rank]
    own = _slices(grad, exchange.places[exchange.rank])
    if count(tuple(parts)) == exchange.local and own:
        return torch.cat(own, dim=-3)
    total = grad.new_zeros((*grad.shape[:-3], exchange.local, *grad.shape[-2:]))
    for (start, stop), piece in zip(parts, own, strict=True):
        total[..., start:stop, :, :] = piece
    return total


class _Swap:
    """Sends parts of tensors to every other rank, and receives theirs, all in one collective."""

    def __init__(self, tensors: Sequence[Tensor], exchange: Exchange, group: dist.ProcessGroup, *, back: bool = False) -> None:
        """Sends the plan's tokens, or with `back` what came by it to where it came from."""
        sends, comes = exchange.sends, exchange.places
        counts_out, counts_in = exchange.counts_out, exchange.counts_in
        if back:
            sends, comes, counts_out, counts_in = comes, sends, counts_in, counts_out
        self._shapes, self._comes, self._counts = [x.shape for x in tensors], comes, counts_in
        self._widths = [x.shape[:-3].numel() * x.shape[-2] * x.shape[-1] for x in tensors]
        parts = [
            part
            for peer, ranges in enumerate(sends) if counts_out[peer]
            for x in tensors for part in _slices(x, ranges)
        ]  # fmt: skip
        width, like = sum(self._widths), tensors[0]
        self._sizes = [tokens * width for tokens in counts_in]
        self._got = like.new_empty(sum(self._sizes))
        sent = _flat(parts, like)
        self._work = None
        if exchange.most_fetched and width:
            out = [tokens * width for tokens in counts_out]
            self._work = dist.all_to_all_single(self._got, sent, self._sizes, out, group=group, async_op=True)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()

    def pieces(self, peer: int, n: int) -> list[Tensor]:
        """Returns what came of tensor n from a rank, a tensor (..., tokens, heads, dim) for each of its ranges."""
        ranges, shape, width, tokens = self._comes[peer], self._shapes[n], self._widths[n], self._counts[peer]
        if not tokens:
            return []
        start = sum(self._sizes[:peer]) + tokens * sum(self._widths[:n])
        if len(ranges) == 1 or shape[:-3].numel() == 1:
            # the ranges lie back to back
            whole = self._got.narrow(0, start, tokens * width).view(*shape[:-3], tokens, *shape[-2:])
            return [whole] if len(ranges) == 1 else [*whole.split([stop - low for low, stop in ranges], dim=-3)]
        flat = self._got[start : start + tokens * width]
        return [
            part.view(*shape[:-3], stop - low, *shape[-2:])
            for part, (low, stop) in zip(flat.split([(stop - low) * width for low, stop in ranges]), ranges, strict=True)
        ]


def _flat(parts: list[Tensor], like: Tensor) -> Tensor:
    """All elements in one line."""
    if all(part.is_contiguous() for part in parts):
        return torch.cat([part.view(-1) for part in parts]) if parts else like.new_empty(0)
    # torch.cat would copy twice what is not contiguous
    found, before = like.new_empty(sum(part.numel() for part in parts)), 0
    for part in parts:
        found[before : before + part.numel()].view(part.shape).copy_(part)
        before += part.numel()
    return found


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
    # a call of attention makes dozens of these, and an index of several parts takes three times as long
    return [x.narrow(-3, start, stop - start) for start, stop in ranges]
