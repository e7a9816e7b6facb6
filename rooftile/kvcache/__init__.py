"""A key/value cache in blocks: who owns which (`blocks`), and the tensors (`pages`)."""

from rooftile.kvcache.blocks import BlockPool, BlockTable, Copy, OutOfBlocks
from rooftile.kvcache.pages import PagedKV, Pages
from rooftile.kvcache.reserved import ReservedPool
from rooftile.kvcache.rotation import Rotation, rotate

__all__ = ["BlockPool", "BlockTable", "Copy", "OutOfBlocks", "PagedKV", "Pages", "ReservedPool", "Rotation", "rotate"]
