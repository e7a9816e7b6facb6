"""Non-finite inputs: which rows see one, and which keys a non-finite row sees.

A NaN behind the mask must not reach any output, yet 0 * NaN is NaN in a matrix product. So a backend that multiplies whole
tiles replaces NaN and infinities by zeros, and afterwards writes NaN to the rows that see one. Every row sees an interval of
keys, and an interval of rows sees each key (`rooftile.exact.masks`). So "does this row see one" is a difference of two running
counts, O(T + S), for every mask.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rooftile.exact.masks import Mask


def all_finite(*tensors: Tensor) -> bool:
    """Whether no tensor holds NaN or infinity. May return False for finite tensors whose sum overflows: then check further."""
    return all(math.isfinite(x.sum().item()) for x in tensors)


def set_aside(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns x with 0 for each NaN and infinity, and a boolean tensor that marks them."""
    lost = ~torch.isfinite(x)
    return torch.where(lost, 0.0, x), lost


def seen_by_rows(lost: Tensor, mask: Mask, T: int) -> Tensor:
    """Marks the rows that see a lost key: booleans, keys (..., S, C) to rows (..., T, C)."""
    first, stop = _visible_ends(mask, T, lost.shape[-2], lost.device)
    return _any_between(lost, first, stop)


def seeing_keys(lost: Tensor, mask: Mask, S: int) -> Tensor:
    """Marks the keys that a lost row sees: booleans, rows (..., T, C) to keys (..., S, C)."""
    first, stop = _visible_ends(mask, lost.shape[-2], S, lost.device)
    j = torch.arange(S, device=lost.device)
    # both ends rise with the row: a key's rows begin where `stop` passes it and end where `first` does
    begin = torch.searchsorted(stop, j, right=True)
    return _any_between(lost, begin, torch.maximum(begin, torch.searchsorted(first, j, right=True)))


def _visible_ends(mask: Mask, T: int, S: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns each row's visible keys [first, stop), two tensors (T,); both rise."""
    i = torch.arange(T, device=device) + (S - T)
    first = mask.first_key(i).clamp(0, S)
    return first, torch.maximum(first, mask.last_key(i).clamp(-1, S - 1) + 1)


def _any_between(lost: Tensor, start: Tensor, stop: Tensor) -> Tensor:
    """Whether any of lost[..., start:stop, :] is set, for vectors of starts and stops."""
    counts = torch.nn.functional.pad(lost.cumsum(-2), (0, 0, 1, 0))
    return counts.index_select(-2, stop) > counts.index_select(-2, start)
