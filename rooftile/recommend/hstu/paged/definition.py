"""The definition of HSTU attention over pages: `hstu_attention` of users whose events are copied out, and of it the last rows.

Rows are appended events, whose keys and values are the last in the pages; or candidates, which stand behind the history, see it
and themselves, and are in no page.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from rooftile.recommend.hstu import definition
from rooftile.recommend.hstu.paged.problem import Pages
from rooftile.recommend.hstu.problem import Problem, Users


def hstu_attention_paged(q: Tensor, given: Pages, problem: Problem) -> Tensor:
    """Returns y (total, H, Dv) in the dtype of q."""
    cache = given.cache
    k, v, cu_k = cache.gathered(q.dtype)
    lengths, slots = cu_k.diff().tolist(), _slots(given)
    found = [q.new_zeros((0, q.shape[1], v.shape[2]))]
    for b, (start, stop) in enumerate(itertools.pairwise(given.cu.tolist())):
        keys, values = (x[cu_k[b] : cu_k[b + 1]].to(q.dtype) for x in (k, v))
        times = None if given.key_times is None else given.key_times.flatten()[slots[b]]
        if given.own_k is not None and given.own_v is not None:
            keys, values = torch.cat([keys, given.own_k[start:stop]]), torch.cat([values, given.own_v[start:stop]])
            times = None if times is None or given.row_times is None else torch.cat([times, given.row_times[start:stop]])
        before = keys.shape[0] - (stop - start)
        queries = torch.cat([q.new_zeros(before, *q.shape[1:]), q[start:stop]])
        row_times = None if times is None or given.row_times is None else torch.cat([times[:before], given.row_times[start:stop]])
        users = Users(
            torch.tensor([0, keys.shape[0]]), torch.tensor([keys.shape[0] - lengths[b]]), given.position_table, given.time_table,
            given.edges, row_times, times,
        )  # fmt: skip
        found.append(definition.hstu_attention(queries, keys, values, users, problem)[before:])
    return torch.cat(found)


def _slots(given: Pages) -> list[Tensor]:
    """The slots of each user's events."""
    cache, size = given.cache, given.cache.size
    places = [torch.arange(n, device=cache.table.device) for n in cache.lengths.tolist()]
    return [row[place // size].long() * size + place % size for row, place in zip(cache.table, places, strict=True)]
