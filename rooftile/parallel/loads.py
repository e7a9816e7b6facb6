"""Counts the visible pairs of each rank's queries, and says where a layout deals them out unevenly."""

from __future__ import annotations

from collections.abc import Sequence as Sequential
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from rooftile.exact.masks import pairs
from rooftile.exact.restrict import Piece
from rooftile.parallel.pieces import Share, share_of
from rooftile.parallel.traffic import Sequence

# beyond it the plan names a better layout
UNEVEN = 1.1


def shares(s: Sequence) -> list[Share]:
    """Returns the share of each rank, or of each row of ranks."""
    held = s.rows()
    return [share_of(s.mask, held, rank, s.cu) for rank in range(len(held))]


def loads(ranks: Sequential[Share]) -> list[float]:
    """Returns each rank's pairs over the mean of all ranks: 1 where all have as many."""
    by_rank = [sum(_pairs(local.piece) for local in share.pieces) for share in ranks]
    total = sum(by_rank)
    return [each * len(by_rank) / total if total else 1.0 for each in by_rank]


@lru_cache(maxsize=256)
def advice(s: Sequence) -> str:
    """Names layout="balanced" where zigzag deals the pairs of documents out unevenly; else says nothing."""
    if s.cu is None or s.layout != "zigzag":
        return ""
    found = loads(shares(s))
    most = max(found)
    even = max(loads(shares(replace(s, layout="balanced")))) if most > UNEVEN else most
    if even >= most:
        return ""
    word = "row" if s.inner else "rank"
    return (
        f"; {word} {found.index(most)} has {most:.2f} times its share of the documents' pairs, with layout='balanced' "
        f"the busiest has {even:.2f} times"
    )


def _pairs(piece: Piece) -> int:
    if piece.cu_q is None or piece.cu_k is None:
        return pairs(piece.mask, piece.t_stop - piece.t_start, piece.s_stop - piece.s_start)
    lengths = zip(pairwise(piece.cu_q), pairwise(piece.cu_k), strict=True)
    return sum(pairs(piece.mask, b - a, d - c) for (a, b), (c, d) in lengths)
