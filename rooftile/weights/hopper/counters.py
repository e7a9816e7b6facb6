"""Counters of tiles that several programs share: zeros, which a kernel leaves at zero.

Kernels of one stream run one after the other, so they share counters. A graph may be replayed beside another, on any stream, so
each product in it has its own. They come from a reserve that was zeroed before: to zero them in the graph would cost one more
node per product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.runtime.launch import current_stream, is_capturing

# counters of a stream, at first; and of graphs, at a time: 4 MiB, which is some thirty graphs of a model of 32 layers
FIRST, RESERVE = 1 << 14, 1 << 20

_OF_STREAM: dict[tuple[int, int], Tensor] = {}
# the reserves of a device; graphs refer to all of them, so none is ever freed. Only the last has counters left
_RESERVES: dict[int, list[Tensor]] = {}
_LEFT: dict[int, Tensor] = {}


def zeros(count: int, device: torch.device) -> Tensor:
    """Returns at least `count` int32 zeros that no other kernel uses meanwhile."""
    index = device.index
    if is_capturing():
        left = _LEFT.get(index)
        if left is None or left.shape[0] < count:
            return torch.zeros(count, dtype=torch.int32, device=device)
        # cut to a multiple of 16 bytes: a launch goes by whether an address is one
        _LEFT[index] = left[-(-count // 4) * 4 :]
        return left[:count]
    if index not in _LEFT or _LEFT[index].shape[0] < RESERVE // 4:
        reserve = _LEFT[index] = torch.zeros(RESERVE, dtype=torch.int32, device=device)
        _RESERVES.setdefault(index, []).append(reserve)
    key = (index, current_stream(index))
    found = _OF_STREAM.get(key)
    if found is None or found.shape[0] < count:
        found = _OF_STREAM[key] = torch.zeros(max(count, FIRST), dtype=torch.int32, device=device)
    return found
