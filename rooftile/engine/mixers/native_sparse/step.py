"""Native Sparse Attention in one step.

Prompts are read by the functions of `rooftile.approximate`. Where kernels run they read selected and near keys in place, the
near ones for all prompts of a step at once. Compressed keys, one for every `stride` tokens, are copied for the exact kernels,
whose pages have at least 16 rows. Elsewhere each prompt is read from a copy of its keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from rooftile.approximate.native_sparse import decoding as paged
from rooftile.approximate.native_sparse.attention import far_and_chosen, with_near
from rooftile.approximate.native_sparse.selected.attention import attend_in_pages, refusal
from rooftile.approximate.native_sparse.selected.gated_sum import gated_sum
from rooftile.engine.mixers.step import StepTokens
from rooftile.exact.api import prepare_paged
from rooftile.exact.masks import CAUSAL, Window
from rooftile.exact.spec import CallSettings
from rooftile.kvcache import PagedKV, Rotation
from rooftile.kvcache.caches import Caches
from rooftile.kvcache.operators import write
from rooftile.kvcache.specs import CacheSpec, PagedKeys, Plane, WindowedKeys
from rooftile.models import Decoder, ModelConfig, NativeSparseSizes
from rooftile.models.attention_layer import AttentionLayer, Compression
from rooftile.models.mixers import BRANCHES

Pair = tuple[Tensor, Tensor]
# the plane of the compressed keys and values
COMPRESSED = "compressed keys and values"


def specs_of(config: ModelConfig, layers: tuple[int, ...], size: int) -> tuple[CacheSpec, ...]:
    """Returns what some layers of a model keep, with blocks of `size` tokens."""
    sizes, heads, dim = config.native_sparse, config.kv_heads, config.head_dim
    assert sizes is not None
    return (
        PagedKeys(layers, heads, dim),
        Plane(layers, COMPRESSED, (len(layers), 2, size // sizes.stride, heads, dim)),
        WindowedKeys(layers, heads, dim, max(sizes.window, sizes.length), BRANCHES - 1),
    )


class SparseAttention:
    """The layers of a decoder that have Native Sparse Attention, on a cache."""

    def __init__(self, decoder: Decoder, caches: Caches) -> None:
        config, pages = decoder.config, caches.pages
        assert config.native_sparse is not None
        self.sizes: NativeSparseSizes = config.native_sparse
        self.scale, self.pages, self.places = config.scale, pages, caches.places
        self.in_place = reads_in_place(config, pages.storage.dtype, pages.storage.device)
        # the inputs of the exact kernels that read prompts
        self.options = {"backend": None, "deterministic": None, "scale": config.scale}
        sparse = [n for n, mixer in enumerate(config.mixers) if mixer == "native_sparse"]
        self.compressions = {n: cast(Compression, cast(AttentionLayer, decoder.layers[n]).compression) for n in sparse}
        # (blocks, sparse layers, 2, size / stride, Hk, D)
        plane = pages.planes[COMPRESSED]
        assert pages.window_pages is not None
        self.window_pages = pages.window_pages
        # the layers of the rows, of keys that are not yet compressed and of the near branch
        self.raw = {n: 2 * place for place, n in enumerate(sparse)}
        self.near = {n: 2 * place + 1 for place, n in enumerate(sparse)}
        self.compressed: dict[int, Pair] = {n: (plane[:, place, 0], plane[:, place, 1]) for place, n in enumerate(sparse)}

    def on(self, step: StepTokens) -> SparseStep:
        """Returns what computes these layers in one step."""
        return SparseStep(self, step)


def reads_in_place(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether kernels read the keys of prompts where they lie in a cache, in this dtype and on this device."""
    assert config.native_sparse is not None
    q, v = (torch.empty(0, heads, config.head_dim, dtype=dtype, device=device) for heads in (config.heads, config.kv_heads))
    return refusal(q, v, config.kv_heads, config.native_sparse.block_size) is None


def _completes(positions: Tensor, length: int, stride: int) -> Tensor:
    """Whether the tokens at these positions complete a compressed key; padding is at -1."""
    return ((positions + 1) % stride == 0) & (positions + 1 >= length)


class SparseStep:
    """Native Sparse Attention in one step: see `SparseAttention`."""

    def __init__(self, whole: SparseAttention, step: StepTokens) -> None:
        self.whole, self.step, self.sizes = whole, step, whole.sizes
        self.size = step.size
        length, stride = self.sizes.length, self.sizes.stride
        if step.single is not None:
            self.table, self.lengths = step.narrow(*step.single)
            self.near_table = step.rows_of(self.table)
        own_rows = step.rows_of(step.cells.clamp(min=0) // self.size).long()
        self.near_cells = torch.where(step.cells >= 0, own_rows * self.size + step.cells % self.size, -1)
        ends, slots = step.positions, step.slots
        if step.on_host is not None:
            # the host knows which tokens complete a compressed key, so nothing waits for the device
            completes = step.send(_completes(step.on_host.positions, length, stride).nonzero()[:, 0])
            ends, slots = ends[completes], slots[completes]
        # in a graph every token makes one, and those that are complete are written
        j = (ends[:, None] - (length - 1) + torch.arange(length, device=ends.device)).clamp(min=0)  # (m, length)
        blocks = step.table[slots].long()
        self.read = step.rows_of(blocks.gather(1, j // self.size)).long(), j % self.size
        own = blocks.gather(1, j[:, -1:] // self.size)[:, 0]
        written = own * (self.size // stride) + ends % self.size // stride
        self.written = torch.where(_completes(ends, length, stride), written, -1)
        self.near_prompts = self._near_prompts() if whole.in_place and step.chunks is not None else None
        # a call that is prepared for one layer serves all
        self._prepared: Callable[[Tensor, PagedKV], tuple[Tensor, Tensor]] | None = None

    def _near_prompts(self) -> tuple[Tensor, Tensor, Tensor]:
        """The rows of the chunks' windows as tables of a paged cache, (c, N) int32, with lengths and offsets of queries.

        A chunk's table begins with the block of the first key that its queries see: blocks before may have no rows.
        """
        chunks, known = self.step.chunks, self.step.known()
        assert chunks is not None
        lengths = known.chunk_lengths
        column = (lengths - known.cu_q.diff() - self.sizes.window + 1).clamp(min=0) // self.size
        width = int((-(-lengths // self.size) - column).max())
        column = self.step.send(column)
        at = column[:, None] + torch.arange(width, device=column.device)
        blocks = chunks.table.gather(1, at.clamp(max=chunks.table.shape[1] - 1))
        return self.step.rows_of(blocks).int(), (chunks.lengths - column * self.size).int(), chunks.cu_q

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None, *more: Tensor) -> Tensor:
        """Computes one layer; see `rooftile.models.Attend`."""
        (gates,) = more
        q = self._write(layer, q, k, v, rotation)
        split, found = self.step.split, []
        if self.near_prompts is not None:
            found.append(self._read_in_place(layer, q[:split], gates[:split]))
        else:
            for begin, end, length, table in self.step.sequences():
                found.append(self._read_prompt(layer, q[begin:end], gates[begin:end], table, length))
        if self.step.single is not None:
            found.append(self._decode(layer, q[split:], gates[split:]))
        return found[0] if len(found) == 1 else torch.cat(found)

    def _write(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None) -> Tensor:
        """Writes the keys and values of all branches, and the compressed ones that they complete; returns rotated queries."""
        whole, heads = self.whole, k.shape[1] // BRANCHES
        keys, values = k.split(heads, dim=1), v.split(heads, dim=1)
        q = whole.pages.write_and_rotate(whole.places[layer], q, keys[1], values[1], self.step.cells, rotation)
        whole.window_pages.write(whole.raw[layer], keys[0], values[0], self.near_cells, rotation)
        whole.window_pages.write(whole.near[layer], keys[2], values[2], self.near_cells, rotation)
        if len(self.written):
            compression = whole.compressions[layer]
            kc, vc = (compression(x[self.read], which) for which, x in enumerate(whole.window_pages.layer(whole.raw[layer])))
            write(kc, vc, *whole.compressed[layer], self.written, None)
        return q

    def _read_in_place(self, layer: int, q: Tensor, gates: Tensor) -> Tensor:
        """Computes the tokens of all chunks (total, H, D)."""
        whole, sizes = self.whole, self.sizes
        far, middle = [], []
        for begin, end, length, table in self.step.sequences():
            blocks = table[: -(-length // self.size)]
            one, compressed = q[begin:end], self._compressed_keys(layer, blocks.long(), length)
            o, chosen = far_and_chosen(one[None], compressed, length, options=whole.options, **sizes.keywords())
            far.append(o[0])
            pages = whole.pages.layer(whole.places[layer])
            middle.append(attend_in_pages(one, *pages, blocks, length, chosen[0], block_size=sizes.block_size, scale=whole.scale))
        assert self.near_prompts is not None
        near = PagedKV(*whole.window_pages.layer(whole.near[layer]), *self.near_prompts)
        if self._prepared is None:
            self._prepared = prepare_paged(q, near, CAUSAL & Window(sizes.window - 1), settings=CallSettings(whole.scale))
        return gated_sum((torch.cat(far), torch.cat(middle), self._prepared(q, near)[0]), gates)

    def _compressed_keys(self, layer: int, blocks: Tensor, length: int) -> Pair:
        """A copy of the compressed keys and values (1, n, Hk, D) of a sequence of `length` tokens in these blocks."""
        sizes = self.sizes
        skip, n = sizes.length // sizes.stride - 1, max((length - sizes.length) // sizes.stride + 1, 0)
        k, v = (x[blocks].flatten(0, 1)[None, skip : skip + n] for x in self.whole.compressed[layer])
        return k, v

    def _read_prompt(self, layer: int, q: Tensor, gates: Tensor, table: Tensor, length: int) -> Tensor:
        """Computes the last tokens (T, H, D) of one sequence of `length` tokens, from a copy of its keys and values."""
        whole, sizes = self.whole, self.sizes
        blocks = table[: -(-length // self.size)].long()
        compressed = self._compressed_keys(layer, blocks, length)
        selected = [x[blocks].flatten(0, 1)[None, :length] for x in whole.pages.layer(whole.places[layer])]
        # the first query of the chunk sees the keys from here on; before, blocks may have no rows
        begin = max(length - q.shape[0] - sizes.window + 1, 0)
        column = begin // self.size
        rows = self.step.rows_of(blocks[column:]).long()
        own = slice(begin - column * self.size, length - column * self.size)
        near = [x[rows].flatten(0, 1)[None, own] for x in whole.window_pages.layer(whole.near[layer])]
        o = with_near(
            q[None], compressed, (selected[0], selected[1]), (near[0], near[1]), gates[None],
            options=whole.options, window=sizes.window, **sizes.keywords(),
        )  # fmt: skip
        return o[0]

    def _decode(self, layer: int, q: Tensor, gates: Tensor) -> Tensor:
        """Computes single tokens (B, H, D)."""
        whole, sizes = self.whole, self.sizes
        pages, near = whole.pages.layer(whole.places[layer]), whole.window_pages.layer(whole.near[layer])
        return paged.decode(
            q, gates, whole.compressed[layer], pages, near, self.table, self.near_table, self.lengths,
            scale=whole.scale, window=sizes.window, **sizes.keywords(),
        )  # fmt: skip
