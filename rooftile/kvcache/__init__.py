"""A paged KV cache: which sequence owns which blocks (`blocks`), and the tensors that hold them (`pages`).

specs      what a kind of layer keeps: frozen descriptions, with their bytes
blocks     BlockPool: which blocks belong to which sequence
windows    WindowPool: rows that a block has while a window reads it
reserved   ReservedPool: the allocator that paging replaced
states     states of sequences, and which of them are kept for prefixes
histories  Histories: users' events, which stay until another user needs their blocks
pages      the memory of blocks
caches     the memory of everything that a model's layers keep
"""

from rooftile.fused.rope import Rotation, rotate
from rooftile.kvcache.blocks import BlockPool, BlockTable, Copy, OutOfBlocks
from rooftile.kvcache.histories import Histories
from rooftile.kvcache.pages import PagedKV, Pages
from rooftile.kvcache.reserved import ReservedPool
from rooftile.kvcache.windows import WindowPool

__all__ = [
    "BlockPool", "BlockTable", "Copy", "Histories", "OutOfBlocks", "PagedKV", "Pages", "ReservedPool", "Rotation", "WindowPool",
    "rotate",
]  # fmt: skip
