"""The choice of blocks in kernels: the tensors of a call as tiles."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from rooftile.approximate.native_sparse.selected.attention import LARGEST_DIM, LARGEST_GROUP, refusal_of_device
from rooftile.approximate.native_sparse.selected.tiles import TileTable, queries_for, table_of
from rooftile.runtime.launch import device_of

# blocks that a program keeps in registers
MOST_BLOCKS = 64
# strides of a block of tokens and of a compressed block
MOST_STRIDES = 32


def refusal(q: Tensor, Hk: int, length: int, block_size: int, stride: int, count: int) -> str | None:
    """Why the kernel does not make such a choice, or None: what came; what it has."""
    dim, group = q.shape[-1], q.shape[-2] // Hk
    # in fp32 the kernel reads a part of the dims at a time
    most = LARGEST_GROUP if q.dtype == torch.float32 or dim <= 128 else 64
    if reason := refusal_of_device(q):
        return reason
    if dim > LARGEST_DIM:
        return f"head dim {dim}; has up to {LARGEST_DIM}"
    if group > most:
        return f"{group} query heads to a key head, of dim {dim}, {q.dtype}; has up to {most}"
    if count > MOST_BLOCKS:
        return f"{count} blocks to a query; has up to {MOST_BLOCKS}"
    if (block_size + length) // stride > MOST_STRIDES:
        return f"blocks of {block_size} and {length} tokens in strides of {stride}; has up to {MOST_STRIDES} strides in both"
    return None


def choose(
    q: Tensor, compressed: Tensor, tokens: int, *, scale: float, length: int, stride: int, block_size: int, count: int,
    first: int, local: int, lse: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns the blocks (B, T, Hk, count) int32 that queries (B, T, H, D), the last T of `tokens`, choose.

    lse: of the compressed attention, (B, H, T), which saves a walk over the compressed keys.
    """
    from rooftile.approximate.native_sparse.selected.kernels import block_choice

    (B, T, H, _), (n, Hk) = q.shape, compressed.shape[1:3]
    table = _table(B, T, n, tokens, queries_for(H // Hk), q.device)
    q, compressed = (x.flatten(0, 1) if x.stride(-1) == 1 else x.contiguous().flatten(0, 1) for x in (q, compressed))
    with device_of(q):
        lse = None if lse is None else lse.mT.flatten(0, 1).float().contiguous()
        found = block_choice.choose(q, compressed, lse, table, scale, length, stride, block_size, count, first, local)
    return found.unflatten(0, (B, T))


def _table(B: int, T: int, n: int, tokens: int, queries: int, device: torch.device) -> TileTable:
    """The tiles of B sequences of T queries and n compressed keys, where the last query is the last of `tokens`."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # what is made now belongs to the graph
        return _tiles(B, T, n, tokens, queries, device)
    return _remembered(B, T, n, tokens, queries, device)


@lru_cache(maxsize=16)
def _remembered(*sizes: Any) -> TileTable:
    """A table is thirty small operations, whose launches take the host longer than the kernel runs on a short text."""
    # an inference tensor would be one for every later call
    with torch.inference_mode(False):
        return _tiles(*sizes)


def _tiles(B: int, T: int, n: int, tokens: int, queries: int, device: torch.device) -> TileTable:
    of_queries, of_keys = (torch.arange(B + 1, device=device, dtype=torch.int32) * size for size in (T, n))
    table = table_of(of_queries, of_keys, B * T, queries)
    # positions count tokens, and not compressed keys
    table.rows[:, 2] += tokens - n
    return table
