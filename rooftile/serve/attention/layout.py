"""`CacheLayout`: what a block of an engine's cache holds, for all layers together."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from rooftile.approximate import LokiLayers
from rooftile.kvcache import Pages
from rooftile.models import ModelConfig
from rooftile.models.mixers import BRANCHES

# the plane of the leading dims of turned keys
LEADING = "leading dims"
# the plane of the compressed keys and values of Native Sparse Attention
COMPRESSED = "compressed keys and values"


def first_pairs(config: ModelConfig) -> tuple[int, ...]:
    """Returns, for each layer, the number of the first pair of keys and values that it has in a block; then their count.

    A layer of Native Sparse Attention has one pair per branch.
    """
    return tuple(accumulate((BRANCHES if mixer == "native_sparse" else 1 for mixer in config.mixers), initial=0))


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The sizes of a cache's blocks.

    Args:
        layers: pairs of keys and values that a block holds.
        heads, dim: key heads, and their size.
        size: tokens per block.
        planes: what a block holds beside: for each plane its shape, in the dtype of the keys.
    """

    layers: int
    heads: int
    dim: int
    size: int
    planes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, config: ModelConfig, size: int, loki: LokiLayers | None = None) -> CacheLayout:
        """Returns the layout of a model's cache."""
        planes: dict[str, tuple[int, ...]] = {}
        if loki is not None:
            planes[LEADING] = (config.layers, size, config.kv_heads, loki.leading)
        sparse = config.mixers.count("native_sparse")
        if config.native_sparse is not None and sparse:
            planes[COMPRESSED] = (sparse, 2, size // config.native_sparse.stride, config.kv_heads, config.head_dim)
        return cls(first_pairs(config)[-1], config.kv_heads, config.head_dim, size, planes)

    def block_bytes(self, dtype: torch.dtype) -> int:
        """Returns the bytes of one block."""
        line = self.dim * dtype.itemsize
        if dtype == torch.float8_e4m3fn:
            # one fp32 scale per token and head
            line += 4
        beside = sum(map(math.prod, self.planes.values())) * dtype.itemsize
        return self.layers * 2 * self.size * self.heads * line + beside

    @property
    def most_blocks(self) -> int:
        """The most blocks that a cache may have: with Loki, a table numbers each row of each block, in 32 bits."""
        return (1 << 31) // (self.layers * 2 * self.size * self.heads) if LEADING in self.planes else 1 << 31

    def working_bytes(self, tokens: int, answers: int, query_heads: int, dtype: torch.dtype) -> int:
        """Returns what approximate methods take in a step, besides what exact attention takes.

        A prompt of Native Sparse Attention is read from a copy of its keys and values. Loki's scores of pages are sums, shares
        and sorted places: about six numbers of four bytes per head and page.

        Args:
            tokens: the longest sequence.
            answers: the most answers that run at once.
            query_heads: the model's.
            dtype: that of the keys.
        """
        copied = 4 * tokens * self.heads * self.dim * dtype.itemsize if COMPRESSED in self.planes else 0
        scores = 24 * answers * query_heads * -(-tokens // self.size) if LEADING in self.planes else 0
        return copied + scores

    def allocate(self, blocks: int, dtype: torch.dtype, device: torch.device) -> Pages:
        """Returns the memory of this many blocks."""
        pages = Pages(blocks, self.layers, self.heads, self.dim, size=self.size, dtype=dtype, device=device)
        for name, shape in self.planes.items():
            pages.add_plane(name, *shape)
        return pages
