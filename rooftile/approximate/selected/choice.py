"""The choice of blocks in kernels: the tensors of a call as tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.approximate.selected.attention import kernels_on
from rooftile.approximate.selected.tiles import queries_for, table_of
from rooftile.launch import INTERPRETED, device_of

LARGEST_DIM = 256
# blocks that a program keeps in registers
MOST_BLOCKS = 64


def can_choose(q: Tensor, Hk: int, length: int, block: int, stride: int, count: int) -> bool:
    """Whether the kernel runs such a choice; otherwise plain operations do."""
    is_here = (q.is_cuda and kernels_on(q.get_device())) or (INTERPRETED and q.device.type == "cpu")
    fits = q.shape[-1] <= LARGEST_DIM and q.shape[-2] // Hk <= 128 and count <= MOST_BLOCKS
    # in fp32 the kernel reads a part of the dims at a time
    fits = fits and (q.dtype == torch.float32 or q.shape[-2] // Hk <= 64 or q.shape[-1] <= 128)
    return is_here and q.dtype != torch.float64 and fits and block // stride + length // stride <= 32


def choose(
    q: Tensor, compressed: Tensor, tokens: int, *, scale: float, length: int, stride: int, block: int, count: int, first: int,
    local: int, lse: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns the blocks (B, T, Hk, count) int32 that queries (B, T, H, D), the last T of `tokens`, choose.

    lse: of the compressed attention, (B, H, T), which saves a walk over the compressed keys.
    """
    from rooftile.approximate.selected.kernels import choice

    (B, T, H, _), (n, Hk) = q.shape, compressed.shape[1:3]
    of_queries, of_keys = (torch.arange(B + 1, device=q.device, dtype=torch.int32) * size for size in (T, n))
    table = table_of(of_queries, of_keys, B * T, queries_for(H // Hk))
    # positions are those of tokens, and not of compressed keys
    rows = table.rows.clone()
    rows[:, 2] += tokens - n
    q, compressed = (x.flatten(0, 1) if x.stride(-1) == 1 else x.contiguous().flatten(0, 1) for x in (q, compressed))
    with device_of(q):
        lse = None if lse is None else lse.mT.flatten(0, 1).float().contiguous()
        found = choice.choose(q, compressed, lse, table._replace(rows=rows), scale, length, stride, block, count, first, local)
    return found.unflatten(0, (B, T))
