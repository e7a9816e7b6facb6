"""Lists of key blocks, which say what an attention computes and what it skips."""

from rooftile.exact.blocks.blocks import Blocks
from rooftile.exact.blocks.lists import packed, unpacked

__all__ = ["Blocks", "packed", "unpacked"]
