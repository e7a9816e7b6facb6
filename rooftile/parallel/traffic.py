"""Counts the bytes that a rank sends in a call of `context_attention`: they follow from the sizes alone."""

from __future__ import annotations

from dataclasses import dataclass

from rooftile.exact.masks import Mask
from rooftile.parallel.layouts import count, ranges
from rooftile.parallel.pieces import share_of

# gradients of keys travel in fp32, and so does lse
WIDE_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """A whole sequence, or a pack with the offsets `cu`, and how it lies on the ranks."""

    tokens: int
    ranks: int
    mask: Mask
    H: int
    Hk: int
    D: int
    Dv: int
    B: int = 1
    itemsize: int = 2
    layout: str = "zigzag"
    cu: tuple[int, ...] | None = None

    def held(self, rank: int) -> int:
        """Returns the number of tokens that a rank holds."""
        return count(ranges(self.tokens, self.ranks, self.layout)[rank])


def bytes_sent(method: str, sequence: Sequence, phase: str = "fwd") -> int:
    """Returns the most bytes that one rank sends to others.

    Args:
        method: "gather", "ulysses" or "ring".
        sequence: the problem.
        phase: "fwd", or "bwd" for the backward alone.

    Example:
        >>> bytes_sent("ring", Sequence(tokens=8192, ranks=2, mask=CAUSAL, H=32, Hk=8, D=128, Dv=128)) == 4096 * 8 * 256 * 2
        True
    """
    sent = {"gather": _gathered, "ulysses": _exchanged, "ring": _passed}[method]
    return max(sent(sequence, rank, phase == "bwd") for rank in range(sequence.ranks))


def _gathered(s: Sequence, rank: int, back: bool) -> int:
    exchange = share_of(s.mask, ranges(s.tokens, s.ranks, s.layout), rank, s.cu).exchange
    row = s.B * s.Hk * (s.D + s.Dv)
    # the backward fetches the keys again, and gives back a gradient for each that it fetched
    return row * (exchange.tokens_sent * s.itemsize + (exchange.tokens_fetched * WIDE_BYTES if back else 0))


def _exchanged(s: Sequence, rank: int, back: bool) -> int:
    keys = max(s.Hk, s.ranks)
    own = s.held(rank)
    others = s.tokens - own
    whole = s.B * (s.H * s.D + keys * (s.D + s.Dv)) * s.itemsize
    rows = s.B * s.H * (s.Dv * s.itemsize + WIDE_BYTES)
    # a rank keeps one of the parts of what it sends: its own heads of its own tokens
    if back:
        return (others * whole + own * (s.ranks - 1) * rows) // s.ranks
    return (own * (s.ranks - 1) * whole + others * rows) // s.ranks


def _passed(s: Sequence, rank: int, back: bool) -> int:
    row = s.B * s.Hk * (s.D + s.Dv)
    # every rank's keys but the next one's own, and in the backward every rank's gradients
    keys = s.tokens - s.held((rank + 1) % s.ranks)
    return row * (keys * s.itemsize + (s.tokens * WIDE_BYTES if back and s.ranks > 1 else 0))
