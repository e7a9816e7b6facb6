"""Layouts: the tokens are cut into ranges, which are dealt out to the ranks.

    contiguous   rank r of P holds range r of P
    zigzag       rank r holds ranges r and 2P - 1 - r of 2P, so that under a causal mask all ranks have as many pairs
    balanced     2P - 1 ranges at most, so that under a causal mask all ranks have as many pairs of packed documents

Where P does not divide the length, the first ranks hold one token more; nothing is padded.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.runtime.ranks import contiguous

Range = tuple[int, int]
# the ranges of each rank
Held = tuple[tuple[Range, ...], ...]
LAYOUTS = ("zigzag", "contiguous", "balanced")

# the busiest rank may have one part in SLACK more than its share of the pairs, where that saves ranges or keys that travel
SLACK = 100
# the pairs of 32 query heads of 128 that an H200 attends to (0.024 ns each) while it makes the calls of a further range (25 us),
# and while one key and value of 8 heads travel at 280 GB/s
RANGE_PAIRS, KEY_PAIRS = 1 << 20, 1 << 9


def check_layout(layout: str, has_documents: bool) -> None:
    """Raises InvalidInput for an unknown layout, and for "balanced" without documents."""
    if layout not in LAYOUTS:
        raise InvalidInput(f"layout is {layout!r}; must be one of {', '.join(map(repr, LAYOUTS))}")
    if layout == "balanced" and not has_documents:
        raise InvalidInput(
            "layout is 'balanced' without packed documents; it needs their offsets: pass cu=, or layout='zigzag', which is even "
            "for one sequence"
        )


def ranges(tokens: int, ranks: int, layout: str, cu: tuple[int, ...] | None = None) -> Held:
    """Returns the ranges [start, stop) that each rank holds, in the order in which it holds them.

    Args:
        cu: offsets of packed documents, from 0 to the number of tokens; "balanced" alone reads them.

    Example:
        >>> ranges(10, 2, "zigzag")
        (((0, 2), (7, 10)), ((2, 4), (4, 7)))
        >>> ranges(10, 2, "balanced", (0, 2, 10))
        (((3, 8),), ((0, 3), (8, 10)))
    """
    check_layout(layout, cu is not None)
    return _balanced(tokens, ranks, cu) if layout == "balanced" and cu is not None else _by_place(tokens, ranks, layout)


@cache
def _by_place(tokens: int, ranks: int, layout: str) -> Held:
    if layout == "contiguous":
        return tuple((part,) for part in contiguous(tokens, ranks))
    sizes = _sizes(tokens, ranks)
    first = _laid([size // 2 for size in sizes])
    last = _laid([size - size // 2 for size in reversed(sizes)], first[-1][1])
    return tuple(zip(first, reversed(last), strict=True))


def _sizes(tokens: int, ranks: int) -> list[int]:
    """The number of tokens of each rank."""
    return [stop - start for start, stop in contiguous(tokens, ranks)]


@lru_cache(maxsize=256)
def _balanced(tokens: int, ranks: int, cu: tuple[int, ...]) -> Held:
    """Deals documents out so that the ranks have as many tokens and as many causal pairs.

    The tokens lie on a circle, and each has the pairs of its row: its place in its document and one. All arcs of half of the
    tokens have half of the pairs in the mean, and an arc and the next one differ by less than the longest document; so there is
    an arc with half of the pairs. What it holds and what it leaves are circles again, which are halved until each is one rank's.
    A halving cuts twice, so P ranks have 2P - 1 ranges at most, and a rank has one more at most for each halving.
    """
    offsets = torch.tensor(cu, dtype=torch.int64, device="cpu")
    circle = torch.arange(tokens, dtype=torch.int64, device="cpu")
    places = circle - offsets[:-1].repeat_interleave(offsets.diff())
    # each halving has its part of the slack
    return tuple(_halved(circle, places, _sizes(tokens, ranks), SLACK * (ranks - 1).bit_length()))


def _halved(circle: Tensor, places: Tensor, sizes: list[int], slack: int) -> list[tuple[Range, ...]]:
    """Returns the ranges of ranks with these numbers of tokens, which lie on a circle, from their places in their documents."""
    if len(sizes) == 1 or not len(circle):
        return [_runs(circle)] * len(sizes)
    first, last = len(sizes) // 2, len(sizes) - len(sizes) // 2
    arc = sum(sizes[:first])
    after = (places + 1).cumsum(0)
    total, before = int(after[-1]), after - places - 1
    pairs = torch.cat([before[arc:], before[:arc] + total]) - before  # in the arc that begins at each token
    # first * last times the pairs of a rank in the busier half; integers, so that every machine finds the same
    busiest = torch.maximum(pairs * last, (total - pairs) * first)
    most = max(total * first * last * (slack + 1) // (slack * len(sizes)), int(busiest.min()))
    # nothing where the circle has been cut before: there a range begins in any case
    cut = torch.where(circle == circle.roll(1) + 1, RANGE_PAIRS + KEY_PAIRS * places, 0)
    cost = busiest + first * last * (cut + cut.roll(-arc))
    start = int(cost.where(busiest <= most, torch.iinfo(cost.dtype).max).argmin())
    circle, places = circle.roll(-start), places.roll(-start)
    return [
        *_halved(circle[:arc], places[:arc], sizes[:first], slack), *_halved(circle[arc:], places[arc:], sizes[first:], slack)
    ]  # fmt: skip


def _runs(tokens: Tensor) -> tuple[Range, ...]:
    """The ranges of these tokens; an empty one for none."""
    ends = [0, *((tokens.diff() != 1).nonzero().flatten() + 1).tolist(), len(tokens)]
    runs = [tokens[a:b] for a, b in pairwise(ends) if a < b]
    return union((int(run[0]), int(run[-1]) + 1) for run in runs) or ((0, 0),)


def _laid(sizes: list[int], start: int = 0) -> list[Range]:
    """Ranges of these sizes, one behind the other."""
    stops = list(accumulate(sizes, initial=start))
    return list(pairwise(stops))


def count(held: tuple[Range, ...]) -> int:
    """Returns the number of tokens in ranges."""
    return sum(stop - start for start, stop in held)


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
        rows.append(union(part for part, _ in parts))
    return tuple(rows), tuple(within)
