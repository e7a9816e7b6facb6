"""Norms over numbers that several ranks hold in parts: each rank adds up its squares, and the ranks add these sums up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from rooftile.fused.norm import normalised_as_defined
from rooftile.models.placement import Placement
from rooftile.models.projection import Norm


def normalise_parts(parts: Sequence[tuple[Tensor, Norm]], placement: Placement) -> list[Tensor]:
    """Returns rows (total, size) whose other numbers other ranks hold, each normalised (RMS), with one sum over ranks for all.

    Numbers that several ranks hold count once for each: every number of such a row is held by equally many ranks.
    """
    squares = placement.summed(torch.cat([x.float().square().mean(-1, keepdim=True) for x, _ in parts], dim=-1))
    means = (squares / placement.ranks).split(1, dim=-1)
    return [normalised_as_defined(x, norm, mean=mean) for (x, norm), mean in zip(parts, means, strict=True)]


def gated_norm_of_part(y: Tensor, gate: Tensor, norm: Norm, groups: int, placement: Placement) -> Tensor:
    """Returns RMSNorm(y silu(gate)) w of rows (total, size) that lie in one of `groups` groups, each on several ranks."""
    value = y.float() * functional.silu(gate.float())
    each = placement.ranks // groups
    means = value.new_zeros(len(value), groups)
    mine = slice(placement.rank // each, placement.rank // each + 1)
    means[:, mine] = value.square().mean(-1, keepdim=True) / each
    mean = placement.summed(means)[:, mine]
    return (value * torch.rsqrt(mean + norm.eps) * norm.weight.float()).to(y.dtype)
