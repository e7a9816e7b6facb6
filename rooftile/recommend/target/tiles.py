"""Tiles of candidates and whole histories for plain operations: short users together, a long user's candidates in pieces."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

# pairs of a tile over all heads, and numbers of events that are copied together
MOST_PAIRS = 1 << 19
MOST_COPIED = 1 << 20
# candidates of a tile whose bits must not depend on their number
FIXED_ROWS = 16


class Part(NamedTuple):
    """Rows of the candidates or of the events of some users, (G, R). What is padding reads row 0 and is not there."""

    at: Tensor
    there: Tensor
    whole: slice | None  # the same rows, if they are one user's without padding


class Tile(NamedTuple):
    """Some candidates of one user, or all of several, and the users' events."""

    rows: Part
    keys: Part


def tiles(cu_q: Tensor, cu: Tensor, heads: int, dim: int, deterministic: bool) -> Iterator[Tile]:
    """Yields tiles with every candidate once, but for users without events. A tile copies `dim` numbers per event.

    deterministic: tiles have one user and a fixed number of rows, so that the products of a candidate are always the same.
    """
    candidates, events = (list(itertools.pairwise(x.tolist())) for x in (cu_q, cu))
    users = [b for b, ((i, i_end), (j, j_end)) in enumerate(zip(candidates, events, strict=True)) if i < i_end and j < j_end]
    users.sort(key=lambda b: events[b][1] - events[b][0])
    group: list[int] = []
    most_rows = 0

    def fits(rows: int, keys: int, members: int) -> bool:
        return members * rows * keys * heads <= MOST_PAIRS and members * keys * dim <= MOST_COPIED

    def joined() -> Tile:
        return _tile(cu.device, [candidates[b] for b in group], [events[b] for b in group], most_rows)

    for b in users:
        m, n = (x[b][1] - x[b][0] for x in (candidates, events))
        if deterministic or not fits(m, n, 1):
            step = FIXED_ROWS if deterministic else max(MOST_PAIRS // (n * heads), 1)
            for first in range(candidates[b][0], candidates[b][1], step):
                piece = (first, min(first + step, candidates[b][1]))
                yield _tile(cu.device, [piece], [events[b]], step if deterministic else piece[1] - first)
            continue
        # in rising order the last has the most events
        if group and not fits(max(most_rows, m), n, len(group) + 1):
            yield joined()
            group, most_rows = [], 0
        group.append(b)
        most_rows = max(most_rows, m)
    if group:
        yield joined()


def _tile(device: torch.device, candidates: list[tuple[int, int]], events: list[tuple[int, int]], rows: int) -> Tile:
    return Tile(_part(device, candidates, rows), _part(device, events, max(stop - start for start, stop in events)))


def _part(device: torch.device, ranges: list[tuple[int, int]], size: int) -> Part:
    """Ranges as rows of one size."""
    start, stop = torch.tensor(ranges, device=device).unbind(1)
    at = start[:, None] + torch.arange(size, device=device)
    there = at < stop[:, None]
    full = len(ranges) == 1 and ranges[0][1] - ranges[0][0] == size
    return Part(torch.where(there, at, 0), there, slice(*ranges[0]) if full else None)


def take(x: Tensor, part: Part, wide: torch.dtype) -> Tensor:
    """Rows of x (total, H, D) as (G, H, R, D), zeros for padding."""
    if part.whole is not None:
        return x[None, part.whole].to(wide).transpose(1, 2)
    return x[part.at].to(wide).masked_fill(~part.there[:, :, None, None], 0).transpose(1, 2)


def put(x: Tensor, part: Part, found: Tensor) -> None:
    """Writes rows (G, H, R, ...) of x (total, H, ...)."""
    if part.whole is not None:
        x[part.whole] = found[0].transpose(0, 1).to(x.dtype)
    else:
        x[part.at[part.there]] = found.transpose(1, 2)[part.there].to(x.dtype)


def add(x: Tensor, part: Part, found: Tensor) -> None:
    """Adds rows (G, H, R, D) to rows of x (total, H, D); no row of x comes twice in a part."""
    if part.whole is not None:
        x[part.whole] += found[0].transpose(0, 1)
    else:
        x[part.at[part.there]] += found.transpose(1, 2)[part.there]
