"""The share of one rank: pieces of the mask for its tokens, the places of their keys once they are there, and the exchange."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from rooftile.exact.masks import Mask
from rooftile.exact.restrict import Piece, restrict, restrict_packed
from rooftile.parallel.exchange import Exchange
from rooftile.parallel.layouts import Held, Range, count, union
from rooftile.parallel.options import Start


@dataclass(frozen=True, slots=True)
class LocalPiece:
    """A piece whose queries [rows) are this rank's own tokens, over keys [keys) of the buffer."""

    piece: Piece
    rows: Range
    keys: Range
    starts: tuple[Start, ...]  # one per sequence

    @property
    def columns(self) -> Range:
        """The keys of its longest sequence, counted within the sequence: columns of a bias."""
        cu, key = self.piece.cu_k, self.starts[0].key
        longest = self.keys[1] - self.keys[0] if cu is None else max(b - a for a, b in pairwise(cu))
        return key, key + longest


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a problem that one rank computes."""

    pieces: tuple[LocalPiece, ...]
    exchange: Exchange
    tokens: int


@lru_cache(maxsize=256)
def share_of(mask: Mask, held: Held, rank: int, cu: tuple[int, ...] | None, same_first_key: bool = False) -> Share:
    """Returns what a rank computes of self-attention over the tokens that all ranks hold.

    Args:
        held: the ranges of tokens that each rank holds.
        cu: offsets of packed sequences.
        same_first_key: as for `restrict_packed`.
    """
    tokens = sum(map(count, held))
    cut = [[_pieces(mask, part, tokens, cu, same_first_key) for part in parts] for parts in held]
    wanted = [union((p.s_start, p.s_stop) for part in parts for p in part) for parts in cut]
    exchange = Exchange(held, wanted, rank)
    found, before = [], 0
    for (start, stop), part in zip(held[rank], cut[rank], strict=True):
        for piece in part:
            place = exchange.place(piece.s_start)
            rows = before + piece.t_start - start, before + piece.t_stop - start
            found.append(LocalPiece(piece, rows, (place, place + piece.s_stop - piece.s_start), _starts(piece, cu)))
        before += stop - start
    # the one with the most keys first: the others' tiles fill the processors that its last tiles leave idle
    found.sort(key=lambda local: local.keys[0] - local.keys[1])
    return Share(tuple(found), exchange, before)


def _pieces(mask: Mask, part: Range, tokens: int, cu: tuple[int, ...] | None, same_first_key: bool) -> list[Piece]:
    if cu is None:
        return restrict(mask, *part, tokens, tokens)
    return restrict_packed(mask, *part, cu, same_first_key)


def _starts(piece: Piece, cu: tuple[int, ...] | None) -> tuple[Start, ...]:
    if cu is None or piece.cu_q is None or piece.cu_k is None:
        return (Start(0, piece.t_start, piece.s_start),)
    found = []
    for query, key in zip(piece.cu_q[:-1], piece.cu_k[:-1], strict=True):
        sequence = bisect_right(cu, piece.t_start + query) - 1
        found.append(Start(sequence, piece.t_start + query - cu[sequence], piece.s_start + key - cu[sequence]))
    return tuple(found)
