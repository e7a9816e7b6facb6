"""Steps on tensors before a call that several rooms share: the dtype of autocast, and the offsets of packed sequences."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.runtime.arguments import shown
from rooftile.runtime.operators import mapped, transformed


def autocast(x: Any) -> Any:
    """Converts a tensor to the dtype of autocast, which is on; leaves float64 and what is no float as it is."""
    if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


def check_offsets(name: str, cu: Tensor, total: int, what: str, device: torch.device, read: bool) -> Tensor:
    """Packed offsets on the tensors' device, checked as far as can be known without waiting for the GPU.

    read: check the values too, wherever they are.
    """
    if not isinstance(cu, Tensor):
        raise InvalidInput(f"{name} is {shown(cu)}; must be a tensor (B + 1,) of int32 or int64 offsets")
    if cu.ndim != 1 or cu.shape[0] < 1 or cu.dtype not in (torch.int32, torch.int64):
        raise InvalidInput(f"{name} is {cu.dtype} {tuple(cu.shape)}; must be int32 or int64 of shape (B + 1,)")
    if transformed() and mapped(cu):
        raise InvalidInput(f"{name} is mapped by torch.vmap; must be the same for all samples: pack them all into one call")
    if (cu.device.type == "cpu" or read) and not torch.compiler.is_compiling():
        offsets = cu.tolist()
        if offsets[0] != 0:
            raise InvalidInput(f"{name} starts at {offsets[0]}; must start at 0")
        if any(b < a for a, b in itertools.pairwise(offsets)):
            raise InvalidInput(f"{name} falls somewhere; must never fall: {shown(offsets)}")
        if offsets[-1] != total:
            raise InvalidInput(f"{name} ends at {offsets[-1]}; must end at {total}, the number of {what}")
    cu = cu.contiguous()
    return cu if cu.device == device else cu.to(device, non_blocking=True)
