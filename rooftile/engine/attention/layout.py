"""`CacheLayout`: what a block of an engine's cache holds, for all layers together."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch

from rooftile.approximate import LokiLayers
from rooftile.kvcache import Pages, WindowPool
from rooftile.models import ModelConfig
from rooftile.models.mixers import BRANCHES

# the plane of the leading dims of turned keys
LEADING = "leading dims"
# the plane of the compressed keys and values of Native Sparse Attention
COMPRESSED = "compressed keys and values"


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The sizes of a cache's blocks.

    Args:
        layers: pairs of keys and values that a block holds.
        heads, dim: key heads, and their size.
        size: tokens per block.
        planes: what a block holds beside: for each plane its shape, in the dtype of the keys.
        near_layers: pairs of keys and values that only a window reads, those of near branches and those that are not yet
            compressed; they are in rows that are fewer than blocks (see `WindowPool`).
        window: how many tokens.
        block: tokens of a block that Native Sparse Attention chooses.
        chosen: how many such blocks a token chooses.
        stride: tokens between the beginnings of two compressed keys.
    """

    layers: int
    heads: int
    dim: int
    size: int
    planes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    near_layers: int = 0
    window: int = 1
    block: int = 64
    chosen: int = 16
    stride: int = 16

    @classmethod
    def of(cls, config: ModelConfig, size: int, loki: LokiLayers | None = None) -> CacheLayout:
        """Returns the layout of a model's cache."""
        planes: dict[str, tuple[int, ...]] = {}
        if loki is not None:
            planes[LEADING] = (config.layers, size, config.kv_heads, loki.leading)
        sparse = config.mixers.count("native_sparse")
        if config.native_sparse is not None and sparse:
            planes[COMPRESSED] = (sparse, 2, size // config.native_sparse.stride, config.kv_heads, config.head_dim)
        whole = cls(config.layers, config.kv_heads, config.head_dim, size, planes, (BRANCHES - 1) * sparse)
        sizes = config.native_sparse
        if sizes is None:
            return whole
        return replace(
            whole, window=max(sizes.window, sizes.length), block=sizes.block_size, chosen=sizes.count, stride=sizes.stride
        )  # fmt: skip

    def block_bytes(self, dtype: torch.dtype) -> int:
        """Returns the bytes of one block."""
        line = self.dim * dtype.itemsize
        if dtype == torch.float8_e4m3fn:
            # one fp32 scale per token and head
            line += 4
        beside = sum(map(math.prod, self.planes.values())) * dtype.itemsize
        return self.layers * 2 * self.size * self.heads * line + beside

    def row_bytes(self, dtype: torch.dtype) -> int:
        """Returns the bytes of one row: the keys and values of a block that only a window reads."""
        return self.near_layers * 2 * self.size * self.heads * self.dim * dtype.itemsize

    def rows(self, blocks: int, answers: int, tokens: int, *, paged: bool = True) -> int:
        """Returns how many rows `blocks` blocks have: enough for all windows at once, and at most one per block.

        Args:
            blocks: the number of blocks.
            answers: the most answers that run at once.
            tokens: the most tokens that a step reads.
            paged: whether blocks give their rows back; else each block has one.
        """
        if not self.near_layers or not paged:
            return blocks
        # a prompt that is kept for further answers holds the rows of one more
        return min(blocks, WindowPool.rows_for(self.window, self.size, answers=answers + 1, tokens=tokens))

    def blocks_in(self, room: int, dtype: torch.dtype, *, answers: int, tokens: int, paged: bool = True) -> int:
        """Returns how many blocks, with the rows that they need, fit into `room` bytes; `rows` explains the other arguments."""
        each, row = self.block_bytes(dtype), self.row_bytes(dtype)
        blocks = room // (each + row)
        rows = self.rows(blocks, answers, tokens, paged=paged)
        return blocks if rows == blocks else (room - rows * row) // each

    @property
    def most_blocks(self) -> int:
        """The most blocks that a cache may have: with Loki, a table numbers each row of each block, in 32 bits."""
        return (1 << 31) // (self.layers * 2 * self.size * self.heads) if LEADING in self.planes else 1 << 31

    def working_bytes(
        self, tokens: int, answers: int, query_heads: int, dtype: torch.dtype, *, step: int = 0, in_place: bool = False
    ) -> int:  # fmt: skip
        """Returns what approximate methods take in a step, besides what exact attention takes.

        A prompt of Native Sparse Attention that kernels read in place takes a copy of its compressed keys and values, sorted
        lists of the blocks that a step's tokens chose, the outputs of two branches beside the near one, and queries and outputs
        of the compressed branch in an order of its own. Another prompt is read from a copy of all its keys and values. In
        decoding a head has two sums per block, and about ten parts of its outputs. Loki's scores of pages are sums, shares and
        sorted places: about six numbers of four bytes per head and page.

        Args:
            tokens: the longest sequence.
            answers: the most answers that run at once.
            query_heads: the model's.
            dtype: that of the keys.
            step: the most tokens that a step reads.
            in_place: whether kernels read prompts in place.
        """
        if COMPRESSED in self.planes:
            line = self.dim * dtype.itemsize
            copied = 4 * tokens * self.heads * line
            if in_place:
                # int32 and int64 numbers of each entry: the sorted blocks, their order, bits, words, and masks
                listed = 64 * step * self.heads * self.chosen
                copied = 2 * (tokens // self.stride) * self.heads * line + listed + 4 * step * query_heads * line
            return copied + 4 * answers * query_heads * (2 * -(-tokens // self.block) + 10 * self.dim)
        return 24 * answers * query_heads * -(-tokens // self.size) if LEADING in self.planes else 0

    def allocate(self, blocks: int, rows: int, dtype: torch.dtype, device: torch.device) -> Pages:
        """Returns the memory of this many blocks and rows."""
        pages = Pages(blocks, self.layers, self.heads, self.dim, block_size=self.size, dtype=dtype, device=device)
        for name, shape in self.planes.items():
            pages.add_plane(name, *shape)
        if self.near_layers:
            pages.near = Pages(rows, self.near_layers, self.heads, self.dim, block_size=self.size, dtype=dtype, device=device)
        return pages
