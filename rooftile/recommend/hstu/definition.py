"""The definition of HSTU attention, in plain operations.

    y_i = 1 / n  sum over the rows j that row i sees of  silu(alpha q_i k_j + bias_ij) v_j

The sum is over rows of one user, who has n; a `scale` stands in place of 1 / n if it is given. There is no softmax: weights may
be negative, and do not add up to one.

Conventions, and how they meet the reference implementation (generative-recommenders): it divides by the padded length of a batch,
which is `scale=1 / N` here; contextual rows come first and targets last, and count as one position each, as there.

Zhai et al., Actions Speak Louder than Words, arXiv:2402.17152.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.nn import functional as F

from rooftile.recommend.hstu.problem import Layout, Problem, Users, sees

# rows are taken together as long as all their products fit
MOST_PRODUCTS = 1 << 22


def hstu_attention(q: Tensor, k: Tensor, v: Tensor, users: Users, problem: Problem) -> Tensor:
    """Returns y (total, H, Dv) in the dtype of the inputs: q and k (total, H, D), v (total, H, Dv)."""
    ends = users.cu.tolist()
    targets = [0] * (len(ends) - 1) if users.targets is None else users.targets.tolist()
    parts = [v.new_zeros((0, *v.shape[1:])) + 0 * q[:0].sum() + 0 * k[:0].sum()]
    for b, (start, stop) in enumerate(itertools.pairwise(ends)):
        layout = Layout(stop - start, problem.contextual, targets[b])
        per_row = max(stop - start, 1) * q.shape[1] * max(q.shape[2], v.shape[2])
        step = max(MOST_PRODUCTS // per_row, 1)
        for first in range(start, stop, step):
            parts.append(_rows(q, k, v, users, problem, layout, start, first, min(first + step, stop)))
    return torch.cat(parts)


def _rows(
    q: Tensor, k: Tensor, v: Tensor, users: Users, problem: Problem, layout: Layout, start: int, first: int, stop: int
) -> Tensor:
    """The rows [first, stop) of the user whose rows begin at `start`."""
    end = start + layout.rows
    i = torch.arange(first - start, stop - start, device=q.device)[:, None]
    j = torch.arange(layout.rows, device=q.device)[None, :]
    seen = sees(i, j, layout, problem.mask)[..., None, None]  # (R, n, 1, 1)
    # a pair that is not seen has no value and no gradient, NaN or not
    keys, values = (torch.where(seen, x[None, start:end], 0.0) for x in (k, v))  # (R, n, H, D)
    scores = problem.alpha * (q[first:stop, None] * keys).sum(-1)  # (R, n, H)
    scores = scores + bias(users, problem, layout, start, i, j).to(scores.dtype)
    weights = F.silu(torch.where(seen[..., 0], scores, 0.0))
    scale = 1 / layout.rows if problem.scale is None else problem.scale
    return (weights[..., None] * values).sum(1) * scale


def bias(users: Users, problem: Problem, layout: Layout, start: int, i: Tensor, j: Tensor) -> Tensor:
    """Returns the bias of rows i (R, 1) and j (1, n) of a user as (R, n, 1|H); zero if there are no tables."""
    found = torch.zeros((), device=i.device)
    if users.position_table is not None:
        table = users.position_table
        found = found + table[:, position_columns(users, problem, layout, start, i, j)].permute(1, 2, 0)
    if users.time_table is not None:
        found = found + users.time_table[:, time_columns(users, start, i, j)].permute(1, 2, 0)
    return found


def position_columns(users: Users, problem: Problem, layout: Layout, start: int | Tensor, i: Tensor, j: Tensor) -> Tensor:
    """The columns of the table of positions, (R, n)."""
    assert users.position_table is not None
    if users.positions is None:
        end = torch.as_tensor(layout.history_end, device=i.device)
        distance = torch.minimum(i, end) - torch.minimum(j, end)
    else:
        distance = users.positions[start + i] - users.positions[start + j]
    return (distance + problem.zero).clamp(0, users.position_table.shape[1] - 1)


def time_columns(users: Users, start: int | Tensor, i: Tensor, j: Tensor) -> Tensor:
    """The columns of the table of times, (R, n)."""
    assert users.row_times is not None
    assert users.key_times is not None
    assert users.edges is not None
    between = users.row_times[start + i] - users.key_times[start + j]
    return torch.bucketize(between, users.edges, right=True)
