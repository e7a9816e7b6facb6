"""Where a NaN shows, and where it must not.

Behind the mask nothing exists, yet 0 * NaN is NaN in a product of matrices. A backend that multiplies whole tiles
therefore computes with zeros in the places of NaN and infinities, and writes NaN afterwards where they are seen. Every
row sees an interval of keys and every key is seen by an interval of rows (`rooftile.masks`), so "is one of them seen" is
a difference of two running counts, O(T + S), for every mask.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rooftile.masks import Mask


def all_finite(*tensors: Tensor) -> bool:
    """Whether nothing here is NaN or infinite. May say no where a sum of large numbers overflows: then look closer."""
    return all(math.isfinite(x.sum().item()) for x in tensors)


def set_aside(x: Tensor) -> tuple[Tensor, Tensor]:
    """x with 0 for each NaN and infinity, and where they were."""
    lost = ~torch.isfinite(x)
    return torch.where(lost, 0.0, x), lost


def seen_by_rows(lost: Tensor, mask: Mask, T: int) -> Tensor:
    """Which rows see something lost: keys (..., S, C) to rows (..., T, C), booleans."""
    first, stop = _visible_ends(mask, T, lost.shape[-2], lost.device)
    return _any_between(lost, first, stop)


def seeing_keys(lost: Tensor, mask: Mask, S: int) -> Tensor:
    """Which keys are seen by a lost row: rows (..., T, C) to keys (..., S, C), booleans."""
    first, stop = _visible_ends(mask, lost.shape[-2], S, lost.device)
    j = torch.arange(S, device=lost.device)
    # both ends rise with the row: a key's rows begin where `stop` passes it and end where `first` does
    begin = torch.searchsorted(stop, j, right=True)
    return _any_between(lost, begin, torch.maximum(begin, torch.searchsorted(first, j, right=True)))


def _visible_ends(mask: Mask, T: int, S: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of each row (T,), the first visible key and the one after the last; both rise."""
    i = torch.arange(T, device=device) + (S - T)
    first = mask.first_key(i).clamp(0, S)
    return first, torch.maximum(first, mask.last_key(i).clamp(-1, S - 1) + 1)


def _any_between(lost: Tensor, start: Tensor, stop: Tensor) -> Tensor:
    """Whether any of lost[..., start:stop, :] is set, for vectors of starts and stops."""
    counts = torch.nn.functional.pad(lost.cumsum(-2), (0, 0, 1, 0))
    return counts.index_select(-2, stop) > counts.index_select(-2, start)
