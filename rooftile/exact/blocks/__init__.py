"""Lists of key blocks: an attention computes the listed blocks and skips the others."""

from rooftile.exact.blocks.blocks import Blocks
from rooftile.exact.blocks.lists import packed, unpacked

__all__ = ["Blocks", "packed", "unpacked"]
