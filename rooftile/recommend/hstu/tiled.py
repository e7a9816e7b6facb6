"""HSTU attention on any device in plain operations: tile by tile, so that no matrix of all pairs is ever held.

Short users are padded and computed together, since an operation per user would cost more than its arithmetic. A long user's rows
are cut into blocks, each with the keys that some of its rows see. The backward computes each tile again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rooftile.exact.masks import Mask
from rooftile.exact.reference.seen import weighted_sum
from rooftile.recommend.hstu.definition import position_columns, time_columns
from rooftile.recommend.hstu.problem import Layout, Problem, Users, sees

# rows per block of a long user; users that are no longer are computed together
BLOCK = 256
# pairs of a tile, over all heads
MOST_PAIRS = 1 << 22


class Tile(NamedTuple):
    """Some rows of one user, or all rows of several: which rows, which keys, and what they see of each other."""

    rows: Tensor  # (G, R) of all rows
    keys: Tensor  # (G, S)
    seen: Tensor  # (G, 1, R, S)
    rows_there: Tensor  # (G, R): not padding
    keys_there: Tensor  # (G, S)
    factor: Tensor  # (G, 1, 1, 1): of the sum
    positions: Tensor | None  # (G, R, S): columns of the tables
    times: Tensor | None


class Gradients(NamedTuple):
    """The gradients of queries, keys, values and tables."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    d_positions: Tensor | None
    d_times: Tensor | None


def forward(q: Tensor, k: Tensor, v: Tensor, users: Users, problem: Problem) -> Tensor:
    """Returns y (total, H, Dv) in the dtype of v."""
    wide = torch.promote_types(q.dtype, torch.float32)
    y = v.new_zeros(v.shape)
    finite = bool(v.isfinite().all())
    for tile in tiles(users, problem, q.shape[1]):
        scores = _scores(q, k, tile, users, problem, wide)
        weights = scores * scores.sigmoid() * tile.seen
        found = _product(weights, _take(v, tile.keys, wide), tile.seen, finite) * tile.factor.to(wide)
        y[tile.rows[tile.rows_there]] = found[tile.rows_there].to(y.dtype)
    return y


def backward(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, users: Users, problem: Problem) -> Gradients:
    """Returns the gradients of y's inputs for a gradient dy (total, H, Dv) of y, tables' in fp32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v))
    tables = [
        None if table is None else torch.zeros(table.shape, dtype=wide, device=q.device)
        for table in (users.position_table, users.time_table)
    ]
    finite = bool(torch.stack([x.isfinite().all() for x in (q, k, dy)]).all())
    for tile in tiles(users, problem, q.shape[1]):
        q_tile, k_tile, v_tile = (_take(x, at, wide) for x, at in ((q, tile.rows), (k, tile.keys), (v, tile.keys)))
        dy_tile = _take(dy, tile.rows, wide) * tile.factor.to(wide)
        scores = _scores(q, k, tile, users, problem, wide)
        gate = scores.sigmoid()
        weights = scores * gate * tile.seen
        d_weights = torch.einsum("grhd,gshd->ghrs", dy_tile, v_tile)
        # what is not seen may be NaN
        d_scores = torch.where(tile.seen, d_weights * gate * (1 + scores * (1 - gate)), 0.0)
        seen_by = tile.seen.mT
        _add(dq, tile.rows, tile.rows_there, problem.alpha * _product(d_scores, k_tile, tile.seen, finite))
        _add(dk, tile.keys, tile.keys_there, problem.alpha * _product(d_scores.mT, q_tile, seen_by, finite))
        _add(dv, tile.keys, tile.keys_there, _product(weights.mT, dy_tile, seen_by, finite))
        for d_table, columns in zip(tables, (tile.positions, tile.times), strict=True):
            if d_table is not None and columns is not None:
                _add_columns(d_table, columns, d_scores)
    d_positions, d_times = tables
    return Gradients(dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_positions, d_times)


def tiles(users: Users, problem: Problem, H: int) -> Iterator[Tile]:
    """Yields tiles that hold every pair of a row and a key that it sees just once."""
    ends = users.cu.tolist()
    lengths = [b - a for a, b in itertools.pairwise(ends)]
    targets = [0] * len(lengths) if users.targets is None else users.targets.tolist()
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    group: list[int] = []
    for user in order:
        n = lengths[user]
        if n > BLOCK:
            yield from _long(users, problem, ends[user], n, targets[user])
        elif n:
            # in rising order the last is the longest
            if group and (len(group) + 1) * n * n * H > MOST_PAIRS:
                yield _together(users, problem, group, ends, targets)
                group = []
            group.append(user)
    if group:
        yield _together(users, problem, group, ends, targets)


def _together(users: Users, problem: Problem, group: list[int], ends: list[int], targets: list[int]) -> Tile:
    """One tile with all rows of some users."""
    device = users.cu.device
    start, rows, last = (
        torch.tensor(numbers, device=device)
        for numbers in ([ends[u] for u in group], [ends[u + 1] - ends[u] for u in group], [targets[u] for u in group])
    )
    every = torch.arange(int(rows[-1]), device=device)
    return _tile(users, problem, start, Layout(rows[:, None, None], problem.contextual, last[:, None, None]), every, every)


def _long(users: Users, problem: Problem, start: int, n: int, targets: int) -> Iterator[Tile]:
    """Tiles of blocks of a user's rows."""
    device = users.cu.device
    rows, last = (torch.full((1, 1, 1), number, device=device) for number in (n, targets))
    layout = Layout(rows, problem.contextual, last)
    for first in range(0, n, BLOCK):
        stop = min(first + BLOCK, n)
        keys = torch.tensor([j for low, high in seen_ranges(problem.mask, problem.contextual, n, targets, first, stop)
                             for j in range(low, high)], dtype=torch.long, device=device)  # fmt: skip
        yield _tile(users, problem, torch.tensor([start], device=device), layout, torch.arange(first, stop, device=device), keys)


def seen_ranges(mask: Mask, c: int, n: int, targets: int, first: int, stop: int) -> list[tuple[int, int]]:
    """Returns disjoint ranges with every key that some row of [first, stop) sees: contextual ones, history, own targets."""
    end = n - targets
    if first < c:
        low, high = c, end
    else:
        top, bottom = min(first, end) - c, min(stop - 1, end) - c
        low, high = max(mask.first_key(top), 0) + c, min(mask.last_key(bottom) + c + 1, end)
    found = [(0, min(c, end)), (low, max(high, low)), (max(first, end), max(stop, end))]
    return [(a, b) for a, b in found if a < b]


def _tile(users: Users, problem: Problem, start: Tensor, layout: Layout, rows: Tensor, keys: Tensor) -> Tile:
    """The tile of rows (R,) and keys (S,) of users whose rows begin at start (G,)."""
    i, j, at = rows[None, :, None], keys[None, None, :], start[:, None, None]
    n = layout.rows
    seen = sees(i, j, layout, problem.mask)
    # padding reads the user's first row, and is not seen
    i, j = torch.where(i < n, i, 0), torch.where(j < n, j, 0)
    scale = 1 / n.double() if problem.scale is None else torch.full_like(n, problem.scale, dtype=torch.float64)
    return Tile(
        rows=(at + i)[:, :, 0], keys=(at + j)[:, 0], seen=seen[:, None], rows_there=(rows < n[:, 0]), keys_there=(keys < n[:, 0]),
        factor=scale[..., None],
        positions=None if users.position_table is None else position_columns(users, problem, layout, at, i, j),
        times=None if users.time_table is None else time_columns(users, at, i, j),
    )  # fmt: skip


def _scores(q: Tensor, k: Tensor, tile: Tile, users: Users, problem: Problem, wide: torch.dtype) -> Tensor:
    """The scores (G, H, R, S) in the wide dtype, 0 where a row does not see the key."""
    scores = problem.alpha * torch.einsum("grhd,gshd->ghrs", _take(q, tile.rows, wide), _take(k, tile.keys, wide))
    for table, columns in ((users.position_table, tile.positions), (users.time_table, tile.times)):
        if table is not None and columns is not None:
            scores = scores + table.to(wide)[:, columns].transpose(0, 1)
    return torch.where(tile.seen, scores, 0.0)


def _take(x: Tensor, at: Tensor, wide: torch.dtype) -> Tensor:
    return x[at].to(wide)


def _product(weights: Tensor, x: Tensor, seen: Tensor, finite: bool) -> Tensor:
    """Sums weights (G, H, R, S) times x (G, S, H, D) as (G, R, H, D); a NaN of x stays where it is seen."""
    if finite:
        return torch.einsum("ghrs,gshd->grhd", weights, x)
    return weighted_sum(weights, x, seen)


def _add(total: Tensor, at: Tensor, there: Tensor, found: Tensor) -> None:
    """Adds rows of a tile to all rows; no row is twice in a tile."""
    total[at[there]] += found[there]


def _add_columns(table: Tensor, columns: Tensor, d_scores: Tensor) -> None:
    """Adds the gradients (G, H, R, S) of scores to the columns (G, R, S) of a table (1|H, M)."""
    found = d_scores.transpose(0, 1).flatten(1)  # (H, G R S)
    if table.shape[0] == 1:
        found = found.sum(0, keepdim=True)
    table.index_add_(1, columns.flatten(), found)
