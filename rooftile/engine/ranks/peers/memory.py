"""`open_buffers`: the buffers of all ranks of one machine, each on its own GPU, as this rank's GPU reads and writes them."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor


def open_buffers(store: Any, rank: int, ranks: int, own: Tensor) -> list[Any]:
    """Exchanges buffers with the other ranks.

    Args:
        store: where the ranks meet; nothing secret is told there.
        rank, ranks: this rank's number and how many there are.
        own: this rank's buffer.

    Returns:
        For each rank a tensor or a storage, whose `data_ptr` is valid on this rank's GPU as long as the object lives.

    Raises:
        RuntimeError: a GPU cannot reach the memory of another.
    """
    try:
        # nothing is left that another process would have to wait for
        torch.cuda.synchronize(own.device)
        told = json.dumps([part.hex() if isinstance(part, bytes) else part for part in own.untyped_storage()._share_cuda_()[1:7]])
    except RuntimeError:
        store.set(f"{rank}", "")
        raise
    store.set(f"{rank}", told)
    return [own if other == rank else _open(store.get(f"{other}"), own.device) for other in range(ranks)]


def _open(told: bytes, device: torch.device) -> Any:
    """Opens another rank's buffer: mapped for this rank's GPU, wherever it lies."""
    if not told:
        raise RuntimeError("another rank cannot share the memory of its GPU")
    handle, size, offset, counter, place, event = json.loads(told)
    shared: Any = torch.UntypedStorage
    return shared._new_shared_cuda(
        device.index, bytes.fromhex(handle), size, offset, bytes.fromhex(counter), place, bytes.fromhex(event), False
    )
