"""Layouts: the tokens are cut into ranges, which are dealt out to the ranks.

    contiguous   rank r of P holds range r of P
    zigzag       rank r holds ranges r and 2P - 1 - r of 2P, so that under a causal mask all ranks have as many pairs

Where P does not divide the length, the first ranks hold one token more; nothing is padded.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate, pairwise

from rooftile.errors import InvalidInput
from rooftile.runtime.ranks import contiguous

Range = tuple[int, int]
# the ranges of each rank
Held = tuple[tuple[Range, ...], ...]
LAYOUTS = ("zigzag", "contiguous")


@cache
def ranges(tokens: int, ranks: int, layout: str) -> Held:
    """Returns the ranges [start, stop) that each rank holds, in the order in which it holds them.

    Example:
        >>> ranges(10, 2, "zigzag")
        (((0, 2), (7, 10)), ((2, 4), (4, 7)))
    """
    if layout not in LAYOUTS:
        raise InvalidInput(f"layout is {layout!r}; must be one of {', '.join(map(repr, LAYOUTS))}")
    if layout == "contiguous":
        return tuple((part,) for part in contiguous(tokens, ranks))
    sizes = [tokens // ranks + (r < tokens % ranks) for r in range(ranks)]
    first = _laid([size // 2 for size in sizes])
    last = _laid([size - size // 2 for size in reversed(sizes)], first[-1][1])
    return tuple(zip(first, reversed(last), strict=True))


def _laid(sizes: list[int], start: int = 0) -> list[Range]:
    """Ranges of these sizes, one behind the other."""
    stops = list(accumulate(sizes, initial=start))
    return list(pairwise(stops))


def count(held: tuple[Range, ...]) -> int:
    """Returns the number of tokens in ranges."""
    return sum(stop - start for start, stop in held)


def rows_of(held: Held, inner: int) -> tuple[Held, tuple[Held, ...]]:
    """Returns the ranges that each row of `inner` ranks holds, and for each row the ranges of its ranks within its tokens.

    Example:
        >>> rows_of(ranges(8, 4, "contiguous"), 2)
        ((((0, 4),), ((4, 8),)), ((((0, 2),), ((2, 4),)), (((0, 2),), ((2, 4),))))
    """
    rows, within = [], []
    for first in range(0, len(held), inner):
        parts = sorted((part, n) for n, own in enumerate(held[first : first + inner]) for part in own)
        ends = list(accumulate((stop - start for (start, stop), _ in parts), initial=0))
        places = dict(zip(parts, pairwise(ends), strict=True))
        within.append(tuple(tuple(places[part, n] for part in own) for n, own in enumerate(held[first : first + inner])))
        joined: list[Range] = []
        for (start, stop), _ in parts:
            if joined and joined[-1][1] == start:
                joined[-1] = joined[-1][0], stop
            elif start < stop:
                joined.append((start, stop))
        rows.append(tuple(joined))
    return tuple(rows), tuple(within)
