"""`Prefixes`: the beginnings of prompts whose blocks an engine has, as far as the prompts that it was sent tell."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence


def blocks_of(prompt: Sequence[int], salt: str, size: int) -> list[int]:
    """Returns a number for each whole block of a prompt, which stands for all tokens from the prompt's beginning to its end.

    The numbers hold in this process only, and two prompts may have the same one by chance. Then a prompt is sent to an engine
    that has not got its blocks; engines compare blocks by themselves.

    Args:
        prompt: token ids.
        salt: prompts share blocks only if their salts are equal.
        size: tokens per block.
    """
    data, width = array("q", prompt).tobytes(), 8 * size
    found, before = [], hash(salt)
    for start in range(0, len(data) - width + 1, width):
        before = hash((before, data[start : start + width]))
        found.append(before)
    return found


class Prefixes:
    """An engine's blocks, of which the ones that were used last are known.

    Args:
        most: how many blocks the engine has.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def count(self, blocks: Sequence[int]) -> int:
        """Returns how many blocks of a prompt's beginning the engine has."""
        for place, block in enumerate(blocks):
            if block not in self._blocks:
                return place
        return len(blocks)

    def add(self, blocks: Sequence[int]) -> None:
        """Notes that the engine reads a prompt."""
        # the end first: a beginning without its end is of use, an end without its beginning is not
        for block in reversed(blocks[: self._most]):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)
