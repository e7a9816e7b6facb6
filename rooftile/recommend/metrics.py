"""Measures of recommendations: hit rate, NDCG, and the area under the curve by group.

A tie counts against the true item in a rank, so that equal scores for all items earn nothing, and as half in an area.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.runtime.arguments import check_count, shown


def ranks(scores: Tensor, due: Tensor) -> Tensor:
    """Returns how many other items have at least the true item's score, (n,): 0 is the best rank.

    Args:
        scores: (n, items), float.
        due: (n,) int64, the true item of each row.

    A true item whose score is NaN has the last rank.

    Example:
        >>> ranks(torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.5, 0.0]]), torch.tensor([2, 0]))
        tensor([1, 1])
    """
    if not isinstance(scores, Tensor) or scores.ndim != 2 or not scores.is_floating_point():
        raise InvalidInput(f"scores is {shown(scores)}; must be float (n, items)")
    if not isinstance(due, Tensor) or due.shape != scores.shape[:1] or due.dtype not in (torch.int32, torch.int64):
        raise InvalidInput(f"due is {shown(due)}; must be int64 ({scores.shape[0]},), the true item of each row")
    if not due.numel():
        raise InvalidInput("scores has no rows, so there is no rank")
    if not 0 <= int(due.min()) <= int(due.max()) < scores.shape[1]:
        worst = int(due.min()) if int(due.min()) < 0 else int(due.max())
        raise InvalidInput(f"due has the item {worst}; scores has items 0 to {scores.shape[1] - 1}")
    own = scores.gather(1, due.long()[:, None])
    # not below: NaN is not below anything
    return (~(scores < own)).sum(1) - 1


def hit_rate(scores: Tensor, due: Tensor, k: int) -> float:
    """Returns HR@k: the share of rows whose true item is among the k best.

    Args:
        scores, due: as in `ranks`.
        k: at least 1.

    Example:
        >>> hit_rate(torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.4, 0.0]]), torch.tensor([2, 0]), 1)
        0.5
    """
    return float((ranks(scores, due) < check_count("k", k)).double().mean())


def ndcg(scores: Tensor, due: Tensor, k: int) -> float:
    """Returns NDCG@k with one true item per row: the mean of 1 / log2(rank + 2) where the rank is below k, and 0 elsewhere.

    Args:
        scores, due: as in `ranks`.
        k: at least 1.

    Example:
        >>> ndcg(torch.tensor([[0.9, 0.7, 0.2]]), torch.tensor([0]), 3)
        1.0
    """
    found = ranks(scores, due)
    return float(torch.where(found < check_count("k", k), 1 / (found.double() + 2).log2(), 0.0).mean())


def auc(scores: Tensor, labels: Tensor, groups: Tensor | None = None) -> float:
    """Returns the area under the ROC curve: how often a positive has a higher score than a negative, ties as half.

    Args:
        scores: (n,) float.
        labels: (n,) bool or 0 and 1.
        groups: (n,) int, such as users. Then it is the mean of the groups' areas, each by its number of rows; groups that have
            one label alone are left out.

    Raises:
        InvalidInput: the shapes do not match, a score is NaN, or there is no pair of a positive and a negative.

    Example:
        >>> auc(torch.tensor([0.9, 0.2, 0.4, 0.4]), torch.tensor([1, 0, 1, 0]))
        0.875
    """
    if not isinstance(scores, Tensor) or scores.ndim != 1 or not scores.is_floating_point():
        raise InvalidInput(f"scores is {shown(scores)}; must be float (n,)")
    for name, x in (("labels", labels), ("groups", groups)):
        if x is not None and (not isinstance(x, Tensor) or x.shape != scores.shape):
            raise InvalidInput(f"{name} is {shown(x)}; must be of shape {tuple(scores.shape)}, like scores")
    if groups is not None and (groups.is_floating_point() or groups.is_complex()):
        raise InvalidInput(f"groups is {shown(groups)}; must be whole numbers, such as users")
    if bool(scores.isnan().any()):
        raise InvalidInput("scores has NaN, which has no order")
    if not bool(((labels == 0) | (labels == 1)).all()):
        raise InvalidInput("labels has other values than 0 and 1")
    positive = labels.bool()
    if groups is None:
        groups = torch.zeros_like(positive, dtype=torch.long)
    order = scores.argsort()
    order = order[groups[order].argsort(stable=True)]
    # rows of one group and one score tie
    group = groups[order].unique_consecutive(return_inverse=True)[1]
    tie = torch.stack([group.double(), scores[order].double()]).unique_consecutive(dim=1, return_inverse=True)[1]
    yes, no = (torch.bincount(tie[x[order]], minlength=len(order)).double() for x in (positive, ~positive))
    group_of = torch.zeros_like(group).index_copy(0, tie, group)
    in_group = [torch.zeros(len(order), dtype=torch.double, device=group.device).index_add(0, group_of, x) for x in (yes, no)]
    # negatives of the group with a lower score
    below = no.cumsum(0) - no - (in_group[1].cumsum(0) - in_group[1])[group_of]
    won = torch.zeros_like(in_group[0]).index_add(0, group_of, yes * (below + no / 2))
    pairs, rows = in_group[0] * in_group[1], in_group[0] + in_group[1]
    counted = pairs > 0
    if not bool(counted.any()):
        raise InvalidInput("no group has a positive and a negative row, so there is nothing to compare")
    return float((won[counted] / pairs[counted] * rows[counted]).sum() / rows[counted].sum())
