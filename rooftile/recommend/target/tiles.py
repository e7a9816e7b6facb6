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


class Tile(NamedTuple):
    """Some candidates of one user, or all of several, and the users' events. What is padding reads row 0 and is not there."""

    rows: Tensor  # (G, R)
    rows_there: Tensor  # (G, R)
    keys: Tensor  # (G, S)
    keys_there: Tensor  # (G, S)


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
    keys = max(stop - start for start, stop in events)
    return Tile(*_padded(device, candidates, rows), *_padded(device, events, keys))


def _padded(device: torch.device, ranges: list[tuple[int, int]], size: int) -> tuple[Tensor, Tensor]:
    """The numbers of ranges as rows of one size, and which are no padding."""
    start, stop = torch.tensor(ranges, device=device).unbind(1)
    at = start[:, None] + torch.arange(size, device=device)
    there = at < stop[:, None]
    return torch.where(there, at, 0), there


def take(x: Tensor, at: Tensor, there: Tensor, wide: torch.dtype) -> Tensor:
    """Rows of x (total, H, D) as (G, H, R, D), zeros for padding."""
    if at.shape[0] == 1 and bool(there.all()):
        found = x[None, int(at[0, 0]) : int(at[0, 0]) + at.shape[1]].to(wide)
    else:
        found = x[at].to(wide).masked_fill(~there[:, :, None, None], 0)
    return found.transpose(1, 2)
