"""The tensors of a paged KV cache: the memory of all blocks (`Pages`), and one layer of it for attention (`PagedKV`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rooftile.drawing import notebook as shown
from rooftile.fused.rope import Rotation
from rooftile.kvcache.blocks import Copy
from rooftile.kvcache.operators import LARGEST, copy_blocks, gather, gathered_as_defined, write, write_and_rotate
from rooftile.kvcache.specs import bytes_in_words
from rooftile.runtime.devices import runs_kernels
from rooftile.runtime.words import answers_foreign_words, answers_words


@answers_words
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PagedKV:
    """One layer's keys and values in blocks, and the block tables of the sequences: what `attention_paged` reads.

    Args:
        k, v: P blocks of `size` tokens, (P, size, Hk, D) and (P, size, Hk, Dv), contiguous in the last axis.
        table: block tables, (B, N) int32. Token n of sequence b is in block table[b, n // size], slot n % size. Entries past a
            sequence's length are never read.
        lengths: tokens of each sequence in the cache, (B,) int32; the last of them are this call's queries.
        cu_q: offsets of packed queries, (B + 1,) int32; None for queries (B, T, H, D), T for every sequence.
        k_scale, v_scale: (P, size, Hk) fp32, for a cache in FP8 (torch.float8_e4m3fn) or INT8 (which histories have, and
            `attention_paged` does not read): each head's key and value is multiplied by its scale. None otherwise.
    """

    k: Tensor
    v: Tensor
    table: Tensor
    lengths: Tensor
    cu_q: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    def __repr__(self) -> str:
        blocks, size, heads, dim = self.k.shape
        dtype = str(self.k.dtype).removeprefix("torch.")
        return f"PagedKV({self.table.shape[0]} sequences in {blocks:,} blocks of {size} tokens, {heads} heads of {dim}, {dtype})"

    def _repr_html_(self) -> str:
        """Lists the sequences' tokens and blocks, up to 32 of them. Waits for the device."""
        if self.lengths.is_meta:
            return shown.card(shown.preformatted(f"{self!r}"))
        rows = [
            (n, f"{tokens:,}", ", ".join(map(str, blocks[: -(-tokens // self.size)])))
            for n, (tokens, blocks) in enumerate(zip(self.lengths[:32].tolist(), self.table[:32].tolist(), strict=True))
        ]
        more = [shown.sentence(f"and {len(self.lengths) - 32:,} more")] * (len(self.lengths) > 32)
        return shown.card(shown.sentence(f"{self!r}"), shown.table(("sequence", "tokens", "blocks"), rows, words=(0, 2)), *more)

    @property
    def size(self) -> int:
        """Tokens per block."""
        return self.k.shape[1]

    def scales_and_strides(self) -> tuple[Tensor, Tensor, int, int]:
        """Returns k_scale, v_scale and their strides per block and per token, in the form that kernels take.

        Without scales it returns tensors that are never read, and zeros.
        """
        k_scale, v_scale = self.k_scale, self.v_scale
        if k_scale is None or v_scale is None:
            # always aligned, as the lengths of a step are not: an unaligned address makes Triton compile another kernel
            return self.k, self.k, 0, 0
        if k_scale.stride() != v_scale.stride() or k_scale.stride(2) != 1:
            k_scale, v_scale = k_scale.contiguous(), v_scale.contiguous()
        return k_scale, v_scale, k_scale.stride(0), k_scale.stride(1)

    def copy_bytes(self, dtype: torch.dtype) -> int:
        """Returns how many bytes a copy of all blocks in the tables takes in `dtype`, whether they are full or not."""
        tokens = self.table.numel() * self.size
        return tokens * self.k.shape[2] * (self.k.shape[3] + self.v.shape[3]) * dtype.itemsize

    def gathered(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Copies keys and values out of their blocks, sequence after sequence.

        Returns:
            Keys (total, Hk, D), values (total, Hk, Dv) and offsets (B + 1,).
        """
        return gathered_as_defined(self.k, self.v, self.table, self.lengths, self.k_scale, self.v_scale, dtype)

    def gathered_with_room(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Does what `gathered` does, without waiting for the lengths: the copy has room for all that the tables can hold."""
        return gather(self.k, self.v, self.table, self.lengths, self.k_scale, self.v_scale, dtype)

    def cut(self, tokens: int, queries: int) -> tuple[PagedKV, PagedKV]:
        """Splits the cache into a prefix that all sequences share and the rest of each sequence.

        Args:
            tokens: the length of the shared prefix, a multiple of the block size.
            queries: how many queries there are; all of them belong to the prefix's one sequence.

        Returns:
            The prefix, as a cache of one sequence, and the rest.
        """
        blocks = tokens // self.size
        device = self.table.device
        lengths = torch.full((1,), tokens, dtype=torch.int32, device=device)
        # one sequence: its offsets are 0 and the number of queries
        cu_q = queries * torch.arange(2, dtype=torch.int32, device=device)
        shared = replace(self, table=self.table[:1, :blocks], lengths=lengths, cu_q=cu_q)
        return shared, replace(self, table=self.table[:, blocks:], lengths=self.lengths - tokens)

    def packed_queries(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Returns q (B, T, H, D) or (total, H, D) as packed queries (total, H, D), and their offsets (B + 1,)."""
        if self.cu_q is not None:
            return q, self.cu_q
        return q.flatten(0, 1), q.shape[1] * torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)


@answers_words
class Pages:
    """The memory of a KV cache: keys and values of `blocks` blocks in all layers.

    A block is contiguous through all layers, so that copying or moving it takes one copy.

    Args:
        blocks: the number of blocks.
        layers, heads, dim: the model's layers, key/value heads and head dim.
        block_size: tokens per block.
        dtype, device: the dtype and device of the tensors. With torch.float8_e4m3fn and torch.int8 each token's key and value has
            an fp32 scale per head: its largest number divided by 448 or 127.

    Example:
        >>> pages = Pages(4, layers=2, heads=1, dim=8, dtype=torch.float32)
        >>> print(pages)
        4 blocks of 16 tokens, 64 in all: 4 x 16 x 2 layers x 2 x 1 heads x 8 dims x 4 bytes = 8.19 kB
        >>> pages.write(0, torch.ones(1, 1, 8), torch.ones(1, 1, 8), slots=torch.tensor([17]))
        >>> pages.copy([Copy(source=1, target=3)])
        >>> k, v = pages.layer(0)
        >>> k.shape, k[3, 1, 0, 0].item()
        (torch.Size([4, 16, 1, 8]), 1.0)
    """

    def __init__(
        self, blocks: int, layers: int, heads: int, dim: int, *, block_size: int = 16, dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        self.storage = torch.empty(blocks, layers, 2, block_size, heads, dim, dtype=dtype, device=device)
        if runs_kernels(self.storage):
            # zeroed, since a NaN in a slot that was never written would send kernels down their slow path
            self.storage.view(torch.uint8).zero_()
        self._layers = [(self.storage[:, n, 0], self.storage[:, n, 1]) for n in range(layers)]
        self.scales: Tensor | None = None
        if dtype in LARGEST:
            self.scales = torch.empty(blocks, layers, 2, block_size, heads, dtype=torch.float32, device=device)
        self.planes: dict[str, Tensor] = {}
        self.window_pages: Pages | None = None
        """Keys and values that only windows read, in rows of which a block has one for a time (see `WindowPool`)."""

    @property
    def nbytes(self) -> int:
        """The bytes of keys, values, scales and planes."""
        return sum(memory.nbytes for memory in self._memories()) + (0 if self.window_pages is None else self.window_pages.nbytes)

    @answers_foreign_words
    def add_plane(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Adds memory that each block has beside its keys and values; it is copied whenever the block is.

        So whatever an approximate method keeps about a block's tokens follows forks, prefixes and preemption by itself.

        Returns:
            (blocks, *shape), zeros in `dtype`; in the dtype of the keys if it is None.
        """
        plane = torch.zeros(self.storage.shape[0], *shape, dtype=dtype or self.storage.dtype, device=self.storage.device)
        self.planes[name] = plane
        return plane

    def layer(self, n: int) -> tuple[Tensor, Tensor]:
        """Returns views of a layer's keys and values, (blocks, size, heads, dim) each."""
        return self._layers[n]

    def view(self, n: int, table: Tensor, lengths: Tensor, cu_q: Tensor | None = None) -> PagedKV:
        """Returns a layer in the form that attention reads."""
        k, v = self.layer(n)
        if self.scales is None:
            return PagedKV(k, v, table, lengths, cu_q)
        return PagedKV(k, v, table, lengths, cu_q, self.scales[:, n, 0], self.scales[:, n, 1])

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor, rotation: Rotation | None = None) -> None:
        """Writes keys and values of a layer into their slots.

        Args:
            layer: the layer.
            k, v: (total, heads, dim).
            slots: (total,), the block times `size` plus the place in the block; a token with a slot below 0 is left out.
            rotation: rotates keys while they are written; None to write them as they are.
        """
        write(k, v, *self.layer(layer), slots, rotation, *self._scales_of(layer))

    def write_and_rotate(self, layer: int, q: Tensor, k: Tensor, v: Tensor, slots: Tensor, rotation: Rotation | None) -> Tensor:
        """Does what `write` does, and returns q (total, q_heads, dim) rotated like the keys; on a GPU in one kernel."""
        if rotation is None:
            self.write(layer, k, v, slots)
            return q
        return write_and_rotate(q, k, v, *self.layer(layer), slots, rotation, *self._scales_of(layer))

    def _scales_of(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        return (None, None) if self.scales is None else (self.scales[:, layer, 0], self.scales[:, layer, 1])

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copies blocks in all layers at once; the result is the same as one copy after the other."""
        for memory in self._memories():
            _copy(memory, copies)

    def _memories(self) -> list[Tensor]:
        """Returns all tensors whose first axis is the block."""
        scales = [] if self.scales is None else [self.scales]
        return [memory for memory in (self.storage, *scales, *self.planes.values()) if memory.numel()]

    def __repr__(self) -> str:
        return f"Pages({self})"

    def _repr_html_(self) -> str:
        where = f"{bytes_in_words(self.nbytes)} in {str(self.storage.dtype).removeprefix('torch.')} on {self.storage.device}"
        return shown.card(shown.table(("pages", "memory"), [(self, where)], words=(0, 1)))

    def __str__(self) -> str:
        blocks, layers, _, size, heads, dim = self.storage.shape
        found = f"{blocks:,} blocks of {size} tokens, {blocks * size:,} in all"
        if not layers:
            return f"{found}: {', and '.join(map(_plane, self.planes.items()))}" if self.planes else found
        head = f"{heads} heads x {dim} dims x {self.storage.element_size()} bytes"
        if self.scales is not None:
            head = f"{heads} heads x ({dim} bytes + 4 of scale)"
        own = self.storage.nbytes + (0 if self.scales is None else self.scales.nbytes)
        beside = "".join(f", and {bytes_in_words(plane.nbytes)} of {name}" for name, plane in self.planes.items())
        windows = "" if self.window_pages is None else f", and windows in {self.window_pages}"
        return f"{found}: {blocks:,} x {size} x {layers} layers x 2 x {head} = {bytes_in_words(own)}{beside}{windows}"


def _plane(named: tuple[str, Tensor]) -> str:
    """Says how many bytes a plane takes, as a product."""
    name, plane = named
    sizes = " x ".join(f"{n:,}" for n in plane.shape)
    return f"{sizes} x {plane.element_size()} bytes of {name} = {bytes_in_words(plane.nbytes)}"


def _copy(storage: Tensor, copies: Sequence[Copy]) -> None:
    sources = {source for source, _ in copies}
    targets = {target for _, target in copies}
    if len(targets) < len(copies) or sources & targets:
        for source, target in copies:
            storage[target] = storage[source]
    elif copies:
        pairs = torch.tensor(copies)
        if storage.is_cuda:
            pairs = pairs.pin_memory().to(storage.device, non_blocking=True)
        copy_blocks(storage, pairs)
