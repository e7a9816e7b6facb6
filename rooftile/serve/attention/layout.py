"""`CacheLayout`: what a block of an engine's cache holds, for all layers together."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from rooftile.approximate import LokiLayers
from rooftile.kvcache import Pages
from rooftile.models import ModelConfig

# the plane of the leading dims of turned keys
LEADING = "leading dims"


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
        return cls(config.layers, config.kv_heads, config.head_dim, size, planes)

    def block_bytes(self, dtype: torch.dtype) -> int:
        """Returns the bytes of one block."""
        line = self.dim * dtype.itemsize
        if dtype == torch.float8_e4m3fn:
            # one fp32 scale per token and head
            line += 4
        beside = sum(map(math.prod, self.planes.values())) * dtype.itemsize
        return self.layers * 2 * self.size * self.heads * line + beside

    def allocate(self, blocks: int, dtype: torch.dtype, device: torch.device) -> Pages:
        """Returns the memory of this many blocks."""
        pages = Pages(blocks, self.layers, self.heads, self.dim, size=self.size, dtype=dtype, device=device)
        for name, shape in self.planes.items():
            pages.add_plane(name, *shape)
        return pages
