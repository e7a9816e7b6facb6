"""Native Sparse Attention in an engine.

Each branch has keys and values of its own, so such a layer takes three of the cache's layers. A compressed key is kept with the
block that has its last token, in the plane COMPRESSED: forks, prefixes and preemption need nothing new. Prompts are read one by
one from a gathered copy, by `rooftile.approximate.native_sparse`; single tokens together, by `approximate.paged.native_sparse`.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from rooftile import approximate
from rooftile.approximate.paged import native_sparse as paged
from rooftile.kvcache import Pages, Rotation
from rooftile.kvcache.operators import write
from rooftile.masks import CAUSAL, Window
from rooftile.models import Decoder, NativeSparseSizes
from rooftile.models.layers import Compression
from rooftile.models.mixers import BRANCHES
from rooftile.serve.attention.layout import COMPRESSED, first_pairs
from rooftile.serve.attention.step import Step
from rooftile.spec import Asked

Pair = tuple[Tensor, Tensor]


class SparseAttention:
    """The layers of a decoder that have Native Sparse Attention, on a cache."""

    def __init__(self, decoder: Decoder, pages: Pages, asked: Asked) -> None:
        config = decoder.config
        assert config.native_sparse is not None
        self.sizes: NativeSparseSizes = config.native_sparse
        self.scale, self.pages, self.asked = config.scale, pages, asked
        self.near = CAUSAL & Window(self.sizes.window - 1)
        self.first = first_pairs(config)
        sparse = [n for n, mixer in enumerate(config.mixers) if mixer == "native_sparse"]
        self.compressions = {n: cast(Compression, decoder.layers[n].compression) for n in sparse}
        # (blocks, sparse layers, 2, size / stride, Hk, D)
        plane = pages.planes[COMPRESSED]
        self.compressed: dict[int, Pair] = {n: (plane[:, place, 0], plane[:, place, 1]) for place, n in enumerate(sparse)}

    def on(self, step: Step) -> SparseStep:
        """Returns what computes these layers in one step."""
        return SparseStep(self, step)


def _completes(positions: Tensor, length: int, stride: int) -> Tensor:
    """Whether the tokens at these positions complete a compressed key; padding is at -1."""
    return ((positions + 1) % stride == 0) & (positions + 1 >= length)


class SparseStep:
    """Native Sparse Attention in one step: see `SparseAttention`."""

    def __init__(self, whole: SparseAttention, step: Step) -> None:
        self.whole, self.step, self.sizes = whole, step, whole.sizes
        self.size = step.size
        length, stride = self.sizes.length, self.sizes.stride
        ends, slots = step.positions, step.slots
        if step.on_host is not None:
            # the host knows which tokens complete a compressed key, so nothing waits for the device
            completes = step.send(_completes(step.on_host.positions, length, stride).nonzero()[:, 0])
            ends, slots = ends[completes], slots[completes]
        # in a graph every token makes one, and those that are complete are written
        j = (ends[:, None] - (length - 1) + torch.arange(length, device=ends.device)).clamp(min=0)  # (m, length)
        blocks = step.table[slots].long()
        self.read = blocks.gather(1, j // self.size), j % self.size
        own = blocks.gather(1, j[:, -1:] // self.size)[:, 0]
        written = own * (self.size // stride) + ends % self.size // stride
        self.written = torch.where(_completes(ends, length, stride), written, -1)

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None, gates: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        """Computes one layer; see `rooftile.models.Attend`."""
        assert gates is not None
        q = self._write(layer, q, k, v, rotation)
        split, found = self.step.split, []
        for begin, end, length, table in self.step.sequences():
            found.append(self._read_prompt(layer, q[begin:end], gates[begin:end], table, length))
        if self.step.single is not None:
            found.append(self._decode(layer, q[split:], gates[split:]))
        return found[0] if len(found) == 1 else torch.cat(found)

    def _write(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None) -> Tensor:
        """Writes the keys and values of all branches, and the compressed ones that they complete; returns rotated queries."""
        pages, first, cells = self.whole.pages, self.whole.first[layer], self.step.cells
        heads = k.shape[1] // BRANCHES
        keys, values = k.split(heads, dim=1), v.split(heads, dim=1)
        q = pages.write_and_rotate(first, q, keys[0], values[0], cells, rotation)
        for n in range(1, BRANCHES):
            pages.write(first + n, keys[n], values[n], cells, rotation)
        if len(self.written):
            compression = self.whole.compressions[layer]
            kc, vc = (compression(x[self.read], which) for which, x in enumerate(pages.layer(first)))
            write(kc, vc, *self.whole.compressed[layer], self.written, None)
        return q

    def _read_prompt(self, layer: int, q: Tensor, gates: Tensor, table: Tensor, length: int) -> Tensor:
        """Computes the last tokens (T, H, D) of one sequence of `length` tokens, from a copy of its keys and values."""
        sizes, first = self.sizes, self.whole.first[layer]
        blocks = table[: -(-length // self.size)].long()
        skip, n = sizes.length // sizes.stride - 1, max((length - sizes.length) // sizes.stride + 1, 0)
        compressed = [x[blocks].flatten(0, 1)[None, skip : skip + n] for x in self.whole.compressed[layer]]
        selected, near = ([x[blocks].flatten(0, 1)[None, :length] for x in self.whole.pages.layer(first + b)] for b in (1, 2))
        o = approximate.native_sparse(
            q[None], (compressed[0], compressed[1]), (selected[0], selected[1]), (near[0], near[1]), gates[None],
            scale=self.whole.scale, window=sizes.window, **sizes.keywords(),
        )  # fmt: skip
        return o[0]

    def _decode(self, layer: int, q: Tensor, gates: Tensor) -> Tensor:
        """Computes single tokens (B, H, D)."""
        assert self.step.single is not None
        table, lengths = self.step.narrow(*self.step.single)
        whole, sizes, first = self.whole, self.sizes, self.whole.first[layer]
        return paged.decode(
            q, gates, whole.compressed[layer], whole.pages.layer(first + 1), whole.pages.layer(first + 2), table, table, lengths,
            scale=whole.scale, window=sizes.window, **sizes.keywords(),
        )  # fmt: skip
