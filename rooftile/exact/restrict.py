"""Cuts attention to a range of queries: each piece is an ordinary problem over a range of keys, aligned bottom-right as all are.

A query's position in a piece is `t + S - T` of the *piece*. So a piece ends at the last key that its mask may show, and where
that key lies behind the last query, both sides of a window move by the difference. Causal masks and windows give one piece, a
prefix gives two at most, and so do chunks of one size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm

from rooftile.exact.masks import FULL, UNBOUNDED, Mask


@dataclass(frozen=True, slots=True)
class Piece:
    """Queries [t_start, t_stop) over keys [s_start, s_stop) under a mask that counts positions within the piece.

    For packed sequences the ranges are of the whole pack, and `cu_q` and `cu_k` are the offsets of the piece's own sequences,
    from 0. `ahead` is the number of keys behind the last query: distances between positions are greater by it.
    """

    mask: Mask
    t_start: int
    t_stop: int
    s_start: int
    s_stop: int
    ahead: int = 0
    cu_q: tuple[int, ...] | None = None
    cu_k: tuple[int, ...] | None = None


def restrict(mask: Mask, t_start: int, t_stop: int, T: int, S: int) -> list[Piece]:
    """Returns the pieces of attention from queries [t_start, t_stop) of T to S keys; together they show each visible pair once.

    A piece whose queries see nothing has no keys. An empty range of queries has no piece.

    Example:
        >>> restrict(CAUSAL, 4, 8, 16, 16)
        [Piece(mask=CAUSAL, t_start=4, t_stop=8, s_start=0, s_stop=8, ahead=0, cu_q=None, cu_k=None)]
    """
    if t_stop <= t_start:
        return []
    shift = S - T
    cuts = sorted({t_start + shift, *_cuts(mask, t_start + shift, t_stop + shift), t_stop + shift})
    return [_piece(mask, a, b, S, shift) for a, b in pairwise(cuts)]


def over_keys(piece: Piece, s_start: int, s_stop: int) -> Piece | None:
    """Returns the part of a piece over the keys [s_start, s_stop): only queries that see one of them; None if there is none.

    The piece has no chunks and is not packed: a chunk's borders would have to fall on the range's.
    """
    assert not piece.mask.chunks
    assert piece.cu_q is None
    low, high = max(piece.s_start, s_start) - piece.s_start, min(piece.s_stop, s_stop) - piece.s_start
    queries, shift = piece.t_stop - piece.t_start, piece.s_stop - piece.s_start - (piece.t_stop - piece.t_start)
    left, right = piece.mask.left, piece.mask.right
    first = 0 if right is None else max(0, low - right - shift)
    stop = queries if left is None else min(queries, high + left - shift)
    last = stop - 1 + shift
    high = high if right is None else min(high, last + right + 1)
    if first >= stop or low >= high:
        return None
    # the last query lies at the last key of the part, and the window moves by as much
    ahead = high - 1 - last
    sees_left = left is None or last - left <= low
    sees_right = right is None or first + shift + right >= high - 1
    mask = Mask(None if sees_left else left + ahead, None if sees_right else right - ahead)  # type: ignore[operator]
    return Piece(
        mask, piece.t_start + first, piece.t_start + stop, piece.s_start + low, piece.s_start + high, piece.ahead + ahead
    )  # fmt: skip


def restrict_packed(mask: Mask, t_start: int, t_stop: int, cu: Sequence[int], same_first_key: bool = False) -> list[Piece]:
    """Returns the pieces of self-attention from tokens [t_start, t_stop) of sequences that lie back to back, with offsets `cu`.

    A sequence that lies whole in the range keeps its mask, so all of these are one piece; the first and the last may be cut.

    Args:
        same_first_key: sequences of one piece begin at the same key of their own, so that one slice of a bias serves them.
    """
    found: list[Piece] = []
    first_key = 0
    for low, high in pairwise(cu):
        a, b = max(low, t_start), min(high, t_stop)
        if a >= b:
            continue
        n = high - low
        whole = a == low and b == high
        parts = [Piece(mask, 0, n, 0, n)] if whole else restrict(mask, a - low, b - low, n, n)
        for part in parts:
            moved = Piece(
                part.mask, part.t_start + low, part.t_stop + low, part.s_start + low, part.s_stop + low, part.ahead,
                (0, part.t_stop - part.t_start), (0, part.s_stop - part.s_start),
            )  # fmt: skip
            joined = _joined(found[-1], moved) if found else None
            if joined is None or (same_first_key and part.s_start != first_key):
                found.append(moved)
                first_key = part.s_start
            else:
                found[-1] = joined
    return found


def _cuts(mask: Mask, start: int, stop: int) -> Iterator[int]:
    """Positions between start and stop where the form of the mask changes."""
    if mask.prefix is not None and start < mask.prefix < stop:
        yield mask.prefix
    if not mask.chunks or mask.right == 0:
        return
    if len(mask.chunks) == 1:
        # whole chunks are one piece, which ends where its last chunk ends
        last = stop // mask.chunks[0] * mask.chunks[0]
        if start < last < stop:
            yield last
        return
    for n in mask.chunks:
        yield from range((start // n + 1) * n, stop, n)


def _piece(mask: Mask, start: int, stop: int, S: int, shift: int) -> Piece:
    """The piece of the positions [start, stop), over which the mask has one form."""
    chunks, prefix, right = mask.chunks, mask.prefix, mask.right
    if prefix is not None:
        # behind the prefix the mask is causal, and before it the prefix is the last key
        right = 0 if start >= prefix else right
    first = max(mask.first_key(start), 0)
    last = max(min(mask.last_key(stop - 1) + 1, S), first)
    if last == first:
        return Piece(FULL, start - shift, stop - shift, first, first)
    if chunks and right != 0 and any(start // n != (stop - 1) // n for n in chunks):
        # several whole chunks: `_cuts` left only what ends where a chunk ends
        return Piece(Mask(mask.left, right, None, chunks), start - shift, stop - shift, first, stop)
    if chunks and right != 0:
        chunks = ()
    if chunks:
        first = max(first // lcm(*chunks) * lcm(*chunks), 0)
    ahead = last - stop
    left = None if mask.left is None or mask.left + ahead >= UNBOUNDED else mask.left + ahead
    return Piece(
        Mask(left, None if right is None else right - ahead, None, chunks), start - shift, stop - shift, first, last, ahead
    )


def _joined(a: Piece, b: Piece) -> Piece | None:
    """Both pieces in one call, or None: their masks differ, or keys lie between them."""
    assert a.cu_q is not None
    assert a.cu_k is not None
    if a.mask != b.mask or a.ahead != b.ahead or a.t_stop != b.t_start or a.s_stop != b.s_start:
        return None
    cu_q, cu_k = (*a.cu_q, b.t_stop - a.t_start), (*a.cu_k, b.s_stop - a.s_start)
    return Piece(a.mask, a.t_start, b.t_stop, a.s_start, b.s_stop, a.ahead, cu_q, cu_k)
