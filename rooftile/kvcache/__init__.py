"""A paged KV cache: which sequence owns which blocks (`blocks`), and the tensors that hold them (`pages`)."""

from rooftile.fused.rope import Rotation, rotate
from rooftile.kvcache.blocks import BlockPool, BlockTable, Copy, OutOfBlocks
from rooftile.kvcache.pages import PagedKV, Pages
from rooftile.kvcache.reserved import ReservedPool
from rooftile.kvcache.windows import WindowPool

__all__ = [
    "BlockPool", "BlockTable", "Copy", "OutOfBlocks", "PagedKV", "Pages", "ReservedPool", "Rotation", "WindowPool",
    "rotate",
]  # fmt: skip
