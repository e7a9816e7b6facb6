"""The counters from which programs draw their tiles: two zeros that a kernel leaves at zero."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.runtime.launch import current_stream, is_capturing

_OF_STREAM: dict[tuple[int, int], Tensor] = {}


def counter(device: torch.device) -> Tensor:
    """Two int32 zeros that no other kernel uses meanwhile.

    Kernels of one stream run one after the other, so they share a pair. A graph being captured gets its own, since it may
    be replayed on any stream.
    """
    if is_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    key = (device.index, current_stream(device.index))
    found = _OF_STREAM.get(key)
    if found is None:
        found = _OF_STREAM[key] = torch.zeros(2, dtype=torch.int32, device=device)
    return found
