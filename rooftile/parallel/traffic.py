"""Counts the bytes that a rank sends in a call of `context_attention`: they follow from the sizes alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rooftile.exact.masks import Mask
from rooftile.parallel.layouts import Held, count, ranges, rows_of
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
    inner: int = 0  # ranks in a row of a mesh of two dimensions, which exchange heads; 0 without rows

    @property
    def between(self) -> Sequence:
        """The problem of a rank with its row's tokens and its own part of the heads, over the rows."""
        U = self.inner or 1
        return replace(self, ranks=self.ranks // U, H=self.H // U, Hk=max(self.Hk, U) // U, inner=0)

    def rows(self) -> Held:
        """Returns the ranges of tokens that each row holds; without rows, the ranges of each rank."""
        return rows_of(ranges(self.tokens, self.ranks, self.layout, self.cu), self.inner or 1)[0]

    def held(self, rank: int) -> int:
        """Returns the number of tokens that a rank holds."""
        return count(ranges(self.tokens, self.ranks, self.layout, self.cu)[rank])


def bytes_sent(method: str, s: Sequence, phase: str = "fwd") -> int:
    """Returns the most bytes that one rank sends to others.

    Args:
        method: "gather", "ulysses" or "ring"; "usp" or "usp-gather" where the sequence has rows of `inner` ranks.
        s: the problem.
        phase: "fwd", or "bwd" for the backward alone.

    Example:
        >>> bytes_sent("ring", Sequence(tokens=8192, ranks=2, mask=CAUSAL, H=32, Hk=8, D=128, Dv=128)) == 4096 * 8 * 256 * 2
        True
    """
    back, U = phase == "bwd", s.inner or 1
    row, found = s.rows(), []
    for rank in range(s.ranks):
        if method == "ulysses":
            found.append(_exchanged(s, s.held(rank), s.tokens, s.ranks, back))
            continue
        of_keys = _passed if method in ("ring", "usp") else _gathered
        sent = of_keys(s.between, row, rank // U, back)
        if U > 1:
            sent += _exchanged(s, s.held(rank), count(row[rank // U]), U, back)
        found.append(sent)
    return max(found)


def _gathered(s: Sequence, held: Held, rank: int, back: bool) -> int:
    exchange = share_of(s.mask, held, rank, s.cu).exchange
    row = s.B * s.Hk * (s.D + s.Dv)
    # the backward fetches the keys again, and gives back a gradient for each that it fetched
    return row * (exchange.tokens_sent * s.itemsize + (exchange.tokens_fetched * WIDE_BYTES if back else 0))


def _exchanged(s: Sequence, own: int, tokens: int, ranks: int, back: bool) -> int:
    """Bytes of a rank with `own` of the tokens that `ranks` ranks exchange for heads."""
    keys = max(s.Hk, ranks)
    others = tokens - own
    whole = s.B * (s.H * s.D + keys * (s.D + s.Dv)) * s.itemsize
    rows = s.B * s.H * (s.Dv * s.itemsize + WIDE_BYTES)
    # a rank keeps one of the parts of what it sends: its own heads of its own tokens
    if back:
        return (others * whole + own * (ranks - 1) * rows) // ranks
    return (own * (ranks - 1) * whole + others * rows) // ranks


def _passed(s: Sequence, held: Held, rank: int, back: bool) -> int:
    row = s.B * s.Hk * (s.D + s.Dv)
    # every rank's keys but the next one's own, and in the backward every rank's gradients
    keys = s.tokens - count(held[(rank + 1) % len(held)])
    return row * (keys * s.itemsize + (s.tokens * WIDE_BYTES if back and len(held) > 1 else 0))
