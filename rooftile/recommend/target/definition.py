"""The definition of target attention and of its searches, in plain operations.

    x_j = scale q . k_j + bias_j;     o = sum_j softmax(x)_j v_j,   or   o = sum_j act(x_j) v_j

over the events j of the candidate's user, all or those that a search has chosen. Without softmax nothing is divided, as in DIN,
which keeps the strength of an interest; `mean` divides by the number of the events.

A search takes the k events with the largest scores, of equal ones the latest:
exact       scores are x_j (SIM's soft search; the same scores as the attention's, as in TWIN)
lsh         scores are numbers of equal bits of two hashes (ETA)
category    the candidate's category is the event's (SIM's hard search); the latest come first

Zhou et al., Deep Interest Network, arXiv:1706.06978. Pi et al., Search-based Interest Model, arXiv:2006.05639. Chen et al.,
End-to-End Target Attention, arXiv:2108.04468. Chang et al., TWIN, arXiv:2302.02352.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from rooftile.recommend.target.problem import Batch, Problem
from rooftile.recommend.target.search.problem import Search
from rooftile.recommend.target.weights import pointwise, softmax

# rows are taken together as long as all their products fit
MOST_PRODUCTS = 1 << 22


def target_attention(batch: Batch, problem: Problem) -> Tensor:
    """Returns o (total_q, H, Dv) in the dtype of q."""
    q, values, H = batch.q, batch.values, batch.q.shape[1]
    empty = 0 * (q[:0].sum() + batch.keys[:0].sum()) + values.new_zeros((0, H, values.shape[2]))
    parts = [empty if batch.bias is None else empty + 0 * batch.bias[:0].sum()]
    for rows, start, n in _rows(batch.cu_q, batch.cu, H * max(q.shape[2], values.shape[2])):
        if batch.events is None:
            at = torch.arange(n, device=q.device).expand(rows.stop - rows.start, H, n)
        else:
            at = batch.events[rows].long().expand(-1, H, -1)
        if n:
            parts.append(_attend(batch, problem, rows, start, at))
        else:
            parts.append(0 * q[rows, :, :1] * values.new_zeros(values.shape[2]))
    return torch.cat(parts).to(q.dtype)


def _attend(batch: Batch, problem: Problem, rows: slice, start: int, at: Tensor) -> Tensor:
    """Some candidates of a user, whose events at places `at` (R, H, k) are read."""
    h = torch.arange(at.shape[1], device=at.device)[:, None]
    kv = h // (batch.q.shape[1] // batch.keys.shape[1])
    seen, row = at >= 0, start + at.clamp(min=0)
    keys, values = (torch.where(seen[..., None], x[row, kv], 0.0).to(batch.wide) for x in (batch.keys, batch.values))
    x = problem.scale * (batch.q[rows, :, None].to(batch.wide) * keys).sum(-1)  # (R, H, k)
    if batch.bias is not None:
        x = x + torch.where(seen, batch.bias[row, h if batch.bias.shape[1] > 1 else 0 * h].to(batch.wide), 0.0)
    w = softmax(x, seen)[0] if problem.weights == "softmax" else pointwise(x, seen, problem.weights)
    if problem.mean:
        w = w / seen.sum(-1, keepdim=True).clamp(min=1).to(w.dtype)
    return (w[..., None] * values).sum(2)


def search(given: Search) -> Tensor:
    """Returns the events that are chosen, (total_q, 1|H, k) int32: places in the user's history, the best first, -1 for none."""
    q, keys = given.q, given.keys
    wide = q.dtype if not q.is_floating_point() else torch.promote_types(q.dtype, torch.float32)
    H = q.shape[1]
    parts = [q.new_zeros((0, given.heads, given.k), dtype=torch.int32)]
    for rows, start, n in _rows(given.cu_q, given.cu, H * q.shape[2]):
        own = keys[start : start + n].repeat_interleave(H // max(keys.shape[1], 1), 1).to(wide)  # (n, H, D)
        bias = None if given.bias is None else given.bias[start : start + n].to(wide)
        parts.append(_best(_scores(given, q[rows, None].to(wide), own[None], bias), given.k))
    return torch.cat(parts)


def _scores(given: Search, q: Tensor, keys: Tensor, bias: Tensor | None) -> Tensor:
    """The scores (R, n, 1|H) of q (R, 1, H, D) and keys (1, n, H, D); -inf hides."""
    if given.kind == "category":
        return torch.where(q == keys, 0.0, -math.inf)[..., 0]
    if given.kind == "lsh":
        bits = torch.arange(32, device=q.device)
        differ = ((q ^ keys)[..., None] >> bits) & 1
        x = -differ.sum((-2, -1)).to(torch.float32)
    else:
        x = given.scale * (q * keys).sum(-1)
        x = x if bias is None else x + bias[None]
    return x if given.per_head else x.sum(-1, keepdim=True)


def _best(x: Tensor, k: int) -> Tensor:
    """The k best of scores (R, n, h) as (R, h, k), of equal ones the latest."""
    n = x.shape[1]
    # a stable sort of what is turned around keeps the latest of equals first
    values, order = x.flip(1).sort(dim=1, descending=True, stable=True)
    found = torch.where(values == -math.inf, -1, n - 1 - order)[:, :k].transpose(1, 2).int()
    return torch.cat([found, found.new_full((*found.shape[:2], k - found.shape[2]), -1)], -1)


def _rows(cu_q: Tensor, cu: Tensor, per_pair: int) -> Iterator[tuple[slice, int, int]]:
    """Yields some candidates of a user, the row of the user's first event, and how many they are."""
    for (first, stop), (start, end) in zip(itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu.tolist()), strict=True):
        step = max(MOST_PRODUCTS // max((end - start) * per_pair, 1), 1)
        for row in range(first, stop, step):
            yield slice(row, min(row + step, stop)), start, end - start
