"""Tiles of listed blocks: what `rooftile.Blocks` shows to the heads of one portion."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rooftile.exact.backends.tiled.tiles import KEYS, Tile, rows_for
from rooftile.exact.blocks import Blocks, unpacked
from rooftile.exact.masks import Mask, key_range, sees_all


class Listed(NamedTuple):
    """The lists of one sequence and some key heads, with G query heads for each."""

    size: tuple[int, int]
    slots: Tensor  # (1|heads, 1|G, blocks of queries, blocks of keys): the place in the list, -1 if not listed
    bits: Tensor | None  # (1|heads, 1|G, blocks of queries, n, size[0], words)

    @classmethod
    def of(cls, blocks: Blocks, heads: slice, group: int, Hk: int, S: int) -> Listed:
        """The lists of the key heads `heads` out of Hk, from the lists of one sequence."""
        slots = blocks.slots(-(-S // blocks.block_size[1]))[0]
        bits = None if blocks.bits is None or not blocks.bits.shape[3] else blocks.bits[0]
        bits = None if bits is None else _of_heads(bits, heads, group, Hk)
        return cls(blocks.block_size, _of_heads(slots, heads, group, Hk), bits)

    def query_tiles(self, T: int, group: int) -> Iterator[tuple[int, int]]:
        """Yields tiles of queries, each within one block."""
        step = min(rows_for(group), self.size[0])
        for start in range(0, T, self.size[0]):
            stop = min(start + self.size[0], T)
            for t in range(start, stop, step):
                yield t, min(t + step, stop)

    def key_tiles(self, mask: Mask, t: int, t_stop: int, T: int, S: int) -> Iterator[Tile]:
        """Yields the tiles of queries [t, t_stop) that one of the heads lists, each within one block."""
        rows, keys = self.size
        start, stop = key_range(mask, t, t_stop, T, S)
        slots = self.slots[:, :, t // rows]
        in_part = 0 if self.bits is None else self.bits.shape[3]
        for block in ((slots >= 0).any(0).any(0)).nonzero()[:, 0].tolist():
            whole = bool((slots[..., block] >= in_part).all())
            for s in range(max(block * keys, start), min((block + 1) * keys, stop), KEYS):
                s_stop = min(s + KEYS, (block + 1) * keys, stop)
                yield Tile(t, t_stop, s, s_stop, not whole or not sees_all(mask, t, t_stop, s, s_stop, T, S))

    def hidden(self, tile: Tile) -> Tensor:
        """Marks the pairs of a tile that the lists hide: booleans that broadcast to (heads, G, rows, keys)."""
        rows, keys = self.size
        i, j = tile.t // rows, tile.s // keys
        slots = self.slots[:, :, i, j]
        hidden = (slots < 0)[..., None, None]
        if self.bits is None:
            return hidden
        n = self.bits.shape[3]
        h, g = (torch.arange(m)[(...,) + (None,) * (1 - axis)] for axis, m in enumerate(slots.shape))
        words = self.bits[h, g, i, slots.clamp(0, n - 1).long()]  # (1|heads, 1|G, size[0], words)
        part = unpacked(words)[..., tile.t - i * rows : tile.t_stop - i * rows, tile.s - j * keys : tile.s_stop - j * keys]
        return hidden | (~part & (slots < n)[..., None, None])


def _of_heads(x: Tensor, heads: slice, group: int, Hk: int) -> Tensor:
    """The part of a tensor (1|Hk|H, ...) for some key heads, as (1|heads, 1|G, ...)."""
    if x.shape[0] == 1:
        return x[:, None]
    if x.shape[0] == Hk:
        return x[heads, None]
    return x.unflatten(0, (Hk, group))[heads]
