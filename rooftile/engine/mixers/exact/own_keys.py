"""The own keys of chunks, all of which every rank computes: a small cache apart from the blocks, for one layer at a time.

It has the dtype of the cache and is written and read by the same kernels, so attention sees the same numbers as in the blocks.
Each rank keeps the key heads that it attends with.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rooftile.engine.mixers.step import StepTokens
from rooftile.kvcache import PagedKV, Pages, Rotation
from rooftile.kvcache.context_share import ContextShare


class OwnChunks(NamedTuple):
    """The chunks of a step in that cache."""

    follow: bool  # whether some chunk follows tokens that are in the blocks
    before: Tensor  # (c,) int32: how many of the tokens before each chunk this rank holds
    cells: Tensor  # (n,) slots of the step's tokens; -1 for single tokens
    table: Tensor  # (c, N) int32: blocks of each chunk
    lengths: Tensor  # (c,) int32: tokens of each chunk
    cu_q: Tensor

    @classmethod
    def of(cls, step: StepTokens, share: ContextShare, own: OwnKeys) -> OwnChunks:
        """Lays out the chunks of a step, each from the beginning of a block on."""
        assert step.chunks is not None
        host, size = step.known(), own.size
        ends = host.cu_q.numpy()
        lengths = np.diff(ends)
        blocks = -(-lengths // size)
        first = np.cumsum(blocks) - blocks
        cells = np.full(len(host.tokens), -1)
        cells[: ends[-1]] = np.arange(ends[-1]) + np.repeat(first * size - ends[:-1], lengths)
        # entries behind a chunk's last block are never read
        table = np.minimum(first[:, None] + np.arange(blocks.max()), own.blocks - 1)
        starts = host.chunk_lengths - torch.from_numpy(lengths)
        packed = torch.cat([share.held(starts), torch.from_numpy(np.concatenate((lengths, table.ravel(), cells)))])
        before, taken, places, slots = step.send(packed).split([len(lengths), len(lengths), table.size, len(cells)])
        places = places.view(table.shape)
        return cls(bool(starts.any()), before.int(), slots, places.int(), taken.int(), step.chunks.cu_q)


class OwnKeys:
    """The memory of the chunks' own keys.

    Args:
        share: this rank's share.
        heads: the key heads of a layer.
        group: query heads of each.
        dim: their size.
        tokens: the most tokens of all chunks of a step.
        chunks: the most chunks of a step.
        dtype: the dtype of the cache.
        device: the device.
    """

    def __init__(
        self, share: ContextShare, *, heads: int, group: int, dim: int, tokens: int, chunks: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._keys = slice(share.rank * heads // share.ranks, (share.rank + 1) * heads // share.ranks)
        self.heads = self._keys.stop - self._keys.start
        """How many key heads this rank attends with; where there are more ranks than heads, some have none."""
        self.queries = slice(self._keys.start * group, self._keys.stop * group)
        """Their query heads."""
        self.size, self.blocks = share.size, most_blocks(tokens, chunks, share.size)
        blocks, kept = (self.blocks, self.heads) if self.heads else (1, 1)
        self._pages = Pages(blocks, 1, kept, dim, block_size=self.size, dtype=dtype, device=device)

    def write(self, k: Tensor, v: Tensor, cells: Tensor, rotation: Rotation | None) -> None:
        """Writes this rank's heads of a layer's keys and values (n, Hk, D), and rotates keys."""
        if self.heads:
            self._pages.write(0, k[:, self._keys], v[:, self._keys], cells, rotation)

    def view(self, chunks: OwnChunks) -> PagedKV:
        """Returns the chunks as sequences of their own."""
        return self._pages.view(0, chunks.table, chunks.lengths, chunks.cu_q)


def most_blocks(tokens: int, chunks: int, size: int) -> int:
    """Returns how many blocks hold this many tokens in this many chunks, however long each is."""
    return tokens // size + min(chunks, tokens)
