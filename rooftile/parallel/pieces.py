"""The share of one rank: pieces of the mask for its tokens, the places of their keys once they are there, and the exchange."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from rooftile.exact.masks import Mask
from rooftile.exact.restrict import Piece, restrict, restrict_packed
from rooftile.parallel.exchange import Exchange, union
from rooftile.parallel.layouts import Range, ranges


@dataclass(frozen=True, slots=True)
class LocalPiece:
    """A piece whose queries [rows) are this rank's own tokens, over keys [keys) of the buffer."""

    piece: Piece
    rows: Range
    keys: Range


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a problem that one rank computes."""

    pieces: tuple[LocalPiece, ...]
    exchange: Exchange
    tokens: int


@lru_cache(maxsize=256)
def share_of(mask: Mask, tokens: int, layout: str, rank: int, ranks: int, cu: tuple[int, ...] | None) -> Share:
    """Returns what a rank computes of self-attention over `tokens` tokens; `cu` are the offsets of packed sequences."""
    held = ranges(tokens, ranks, layout)
    cut = [[_pieces(mask, part, tokens, cu) for part in parts] for parts in held]
    wanted = [union((p.s_start, p.s_stop) for part in parts for p in part) for parts in cut]
    exchange = Exchange(held, wanted, rank)
    found, before = [], 0
    for (start, stop), part in zip(held[rank], cut[rank], strict=True):
        for piece in part:
            place = exchange.place(piece.s_start)
            rows = before + piece.t_start - start, before + piece.t_stop - start
            found.append(LocalPiece(piece, rows, (place, place + piece.s_stop - piece.s_start)))
        before += stop - start
    # the one with the most keys first: the others' tiles fill the processors that its last tiles leave idle
    found.sort(key=lambda local: local.keys[0] - local.keys[1])
    return Share(tuple(found), exchange, before)


def _pieces(mask: Mask, part: Range, tokens: int, cu: tuple[int, ...] | None) -> list[Piece]:
    if cu is None:
        return restrict(mask, *part, tokens, tokens)
    return restrict_packed(mask, *part, cu)
