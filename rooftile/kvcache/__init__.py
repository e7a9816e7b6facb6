"""A key/value cache in blocks: who owns which (`blocks`), and the tensors (`pages`)."""

from rooftile.kvcache.blocks import BlockPool, BlockTable, OutOfBlocks

__all__ = ["BlockPool", "BlockTable", "OutOfBlocks"]
