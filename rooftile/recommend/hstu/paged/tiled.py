"""HSTU attention over pages on any device in plain operations: tile by tile, so that no history is ever copied out as a whole.

Stretches of rows of several users are padded and computed together, since an operation per user would cost more than its
arithmetic. They walk the keys in tiles, which they take out of their pages.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rooftile.recommend.hstu.paged.problem import Pages
from rooftile.recommend.hstu.problem import Layout, Problem, sees

# rows per stretch
ROWS = 256
# keys per tile
KEYS = 512
# pairs of a tile over all heads, and numbers of its keys and values
MOST_PAIRS = 1 << 22
MOST_NUMBERS = 1 << 23


class Stretch(NamedTuple):
    """Some rows of a user, and the keys in pages that one of them sees."""

    user: int
    first: int  # among all rows of the call
    stop: int
    place: int  # the first row's number among the user's
    low: int
    high: int


class Group(NamedTuple):
    """Stretches as tensors, on the device; rows past a stretch's end are padding."""

    users: Tensor  # (G,)
    rows: Tensor  # (G, R) of all rows
    there: Tensor  # (G, R)
    i: Tensor  # (G, R, 1): the row's number among the user's
    layout: Layout  # its numbers are tensors (G, 1, 1)


def forward(q: Tensor, given: Pages, problem: Problem) -> Tensor:
    """Returns y (total, H, Dv) in the dtype of q."""
    wide = torch.promote_types(q.dtype, torch.float32)
    assert problem.scale is not None
    y = q.new_zeros((*q.shape[:2], given.cache.v.shape[3]))
    for stretches in groups(q, given, problem):
        group = _group_of(stretches, given)
        rows = q[group.rows].to(wide)
        low, high = min(x.low for x in stretches), max(x.high for x in stretches)
        total = rows.new_zeros((*group.rows.shape, *y.shape[1:]))
        for first in range(low, high, KEYS):
            total += _tile(rows, group, torch.arange(first, min(first + KEYS, high), device=q.device), given, problem)
        if given.own_k is not None and given.own_v is not None:
            total += _own(rows, group, given.own_k, given.own_v, given, problem)
        y[group.rows[group.there]] = (total[group.there] * problem.scale).to(y.dtype)
    return y


def groups(q: Tensor, given: Pages, problem: Problem) -> Iterator[list[Stretch]]:
    """Yields stretches that are computed together: all rows of the call, each once."""
    H, numbers = q.shape[1], q.shape[1] * (q.shape[2] + given.cache.v.shape[3])
    group: list[Stretch] = []
    for stretch in sorted(stretches_of(given, problem), key=lambda x: (x.stop - x.first, x.high - x.low)):
        rows = stretch.stop - stretch.first
        crowded = (len(group) + 1) * KEYS * max(rows * H / MOST_PAIRS, numbers / MOST_NUMBERS) > 1
        # in rising order the last has the most rows
        if group and (crowded or rows > 2 * (group[0].stop - group[0].first)):
            yield group
            group = []
        group.append(stretch)
    if group:
        yield group


def stretches_of(given: Pages, problem: Problem) -> Iterator[Stretch]:
    """Cuts the rows of all users into stretches."""
    lengths, mask = given.cache.lengths.tolist(), problem.mask
    for user, (start, stop) in enumerate(itertools.pairwise(given.cu.tolist())):
        end = lengths[user]
        before = end - (0 if given.own_k is not None else stop - start)
        for first in range(start, stop, ROWS):
            last = min(first + ROWS, stop)
            # all candidates have the position behind the history
            top, bottom = (min(before + row - start, end) for row in (first, last - 1))
            low, high = max(mask.first_key(top), 0), min(mask.last_key(bottom) + 1, end)
            yield Stretch(user, first, last, before + first - start, low, max(high, low))


def _group_of(stretches: list[Stretch], given: Pages) -> Group:
    device = given.cache.table.device
    users, first, stop, place = torch.tensor([x[:4] for x in stretches], device=device).unbind(1)
    r = torch.arange(int(max(x.stop - x.first for x in stretches)), device=device)
    rows = first[:, None] + r
    there = rows < stop[:, None]
    lengths = given.cache.lengths.long()[users]
    counts = given.cu.long().diff()[users] if given.own_k is not None else torch.zeros_like(lengths)
    layout = Layout((lengths + counts)[:, None, None], 0, counts[:, None, None])
    return Group(users, torch.where(there, rows, first[:, None]), there, (place[:, None] + r)[..., None], layout)


def _tile(q: Tensor, group: Group, keys: Tensor, given: Pages, problem: Problem) -> Tensor:
    """The sums (G, R, H, Dv) of rows q (G, R, H, D) over some keys (S,)."""
    cache, j = given.cache, keys[None, None, :]
    end = group.layout.history_end
    # keys past a user's end lie in pages of others, or in none
    there = (keys < end[:, :, 0])[..., None]  # (G, S, 1)
    blocks = cache.table[group.users][:, keys // cache.size]
    at = torch.where(there[..., 0], blocks, 0).long(), (keys % cache.size).expand(blocks.shape)
    k, v = (_taken(x, scale, at, there, q.dtype) for x, scale in ((cache.k, cache.k_scale), (cache.v, cache.v_scale)))
    scores = problem.alpha * torch.einsum("grhd,gshd->ghrs", q, k)
    if given.position_table is not None:
        distance = torch.minimum(group.i, end) - torch.minimum(j, end)
        columns = (distance + problem.zero).clamp(0, given.position_table.shape[1] - 1)
        scores += given.position_table.to(q.dtype)[:, columns].transpose(0, 1)
    if given.time_table is not None and given.row_times is not None and given.key_times is not None:
        assert given.edges is not None
        seconds = given.row_times[group.rows][..., None] - given.key_times[at][:, None]
        scores += given.time_table.to(q.dtype)[:, torch.bucketize(seconds, given.edges, right=True)].transpose(0, 1)
    weights = scores * scores.sigmoid() * (sees(group.i, j, group.layout, problem.mask) & (j < end))[:, None]
    return torch.einsum("ghrs,gshd->grhd", weights, v)


def _own(q: Tensor, group: Group, k: Tensor, v: Tensor, given: Pages, problem: Problem) -> Tensor:
    """The values (G, R, H, Dv) that candidates give themselves."""
    scores = problem.alpha * (q * k[group.rows].to(q.dtype)).sum(-1)
    if given.position_table is not None:
        scores += given.position_table.to(q.dtype)[:, min(problem.zero, given.position_table.shape[1] - 1)]
    if given.time_table is not None and given.edges is not None:
        scores += given.time_table.to(q.dtype)[:, torch.bucketize(0, given.edges, right=True)]
    return (scores * scores.sigmoid())[..., None] * v[group.rows].to(q.dtype)


def _taken(cache: Tensor, scales: Tensor | None, at: tuple[Tensor, Tensor], there: Tensor, wide: torch.dtype) -> Tensor:
    """Keys or values (G, S, H, dim) out of their pages, zeros where there is none."""
    # some releases of PyTorch cannot index FP8 on a CPU, so bytes are indexed
    found = (cache.view(torch.uint8)[at].view(cache.dtype) if cache.element_size() == 1 else cache[at]).to(wide)
    if scales is not None:
        found = found * scales[at].to(wide)[..., None]
    return torch.where(there[..., None], found, 0.0)
