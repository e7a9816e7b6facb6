"""The tensors of a paged key/value cache: blocks of memory (`Pages`), and one layer of them as attention reads it (`PagedKV`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rooftile.fused import Rotation, runs_on
from rooftile.kvcache.blocks import Copy
from rooftile.kvcache.operators import copy_blocks, gather, gathered_as_defined, write, write_and_rotate


@dataclass(frozen=True, slots=True, eq=False)
class PagedKV:
    """One layer's keys and values in blocks, and which blocks are whose: what `attention_paged` reads.

    k (P, size, Hk, D) and v (P, size, Hk, Dv) are P blocks of `size` tokens, contiguous in their last axis. Token n of sequence b
    is in block table[b, n // size], slot n % size. table (B, N) is int32; what lies past a sequence's length is never read.
    lengths (B,), int32, counts a sequence's tokens in the cache: those of this call's queries are among them, the last ones.
    cu_q (B + 1,), int32, are the offsets of packed queries; None for (B, T, H, D), the same number for every sequence.
    k_scale and v_scale (P, size, Hk), fp32, belong to k and v in FP8 (torch.float8_e4m3fn): each key and value is times its own.
    """

    k: Tensor
    v: Tensor
    table: Tensor
    lengths: Tensor
    cu_q: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def size(self) -> int:
        """Tokens of a block."""
        return self.k.shape[1]

    def scales_and_strides(self) -> tuple[Tensor, Tensor, int, int]:
        """k_scale, v_scale and their strides from block to block and from token to token, as kernels take them.

        Without scales, tensors that nobody reads and zeros stand in their place.
        """
        k_scale, v_scale = self.k_scale, self.v_scale
        if k_scale is None or v_scale is None:
            return self.lengths, self.lengths, 0, 0
        if k_scale.stride() != v_scale.stride() or k_scale.stride(2) != 1:
            k_scale, v_scale = k_scale.contiguous(), v_scale.contiguous()
        return k_scale, v_scale, k_scale.stride(0), k_scale.stride(1)

    def copy_bytes(self, dtype: torch.dtype) -> int:
        """Bytes that a copy of every token in the tables takes in `dtype`, full or not."""
        tokens = self.table.numel() * self.size
        return tokens * self.k.shape[2] * (self.k.shape[3] + self.v.shape[3]) * dtype.itemsize

    def gathered(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values out of their blocks, sequence after sequence: (total, Hk, D), (total, Hk, Dv), offsets (B + 1,)."""
        return gathered_as_defined(self.k, self.v, self.table, self.lengths, self.k_scale, self.v_scale, dtype)

    def gathered_with_room(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """`gathered` into memory for all that the tables can hold, and more, so that nobody waits for the lengths."""
        return gather(self.k, self.v, self.table, self.lengths, self.k_scale, self.v_scale, dtype)

    def cut(self, tokens: int, queries: int) -> tuple[PagedKV, PagedKV]:
        """The first tokens, which all sequences share, as one sequence's that all queries belong to; and the rest of each."""
        blocks = tokens // self.size
        device = self.table.device
        lengths = torch.full((1,), tokens, dtype=torch.int32, device=device)
        # 0 and the number of all
        cu_q = queries * torch.arange(2, dtype=torch.int32, device=device)
        shared = replace(self, table=self.table[:1, :blocks], lengths=lengths, cu_q=cu_q)
        return shared, replace(self, table=self.table[:, blocks:], lengths=self.lengths - tokens)

    def packed_queries(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """q (B, T, H, D) or (total, H, D) as (total, H, D), and its offsets."""
        if self.cu_q is not None:
            return q, self.cu_q
        return q.flatten(0, 1), q.shape[1] * torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)


class Pages:
    """Memory for the keys and values of `blocks` blocks, in all layers.

    A block is one piece of memory through all layers, so that copying one, or moving it elsewhere, is one copy.

    Args:
        blocks: how many blocks.
        layers, heads, dim: of the model; heads are those of keys and values.
        size: tokens of a block.
        dtype, device: of the tensors. torch.float8_e4m3fn has a scale in fp32 for each token's key and value of a head: the
            largest number of it over 448.

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
        self, blocks: int, layers: int, heads: int, dim: int, *, size: int = 16, dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        self.storage = torch.empty(blocks, layers, 2, size, heads, dim, dtype=dtype, device=device)
        if runs_on(self.storage):
            # a slot that nobody has written holds no NaN: kernels would take their slow way around it
            self.storage.view(torch.uint8).zero_()
        self._layers = [(self.storage[:, n, 0], self.storage[:, n, 1]) for n in range(layers)]
        self.scales: Tensor | None = None
        if dtype == torch.float8_e4m3fn:
            self.scales = torch.empty(blocks, layers, 2, size, heads, dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of all, scales included."""
        return self.storage.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def layer(self, n: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, (blocks, size, heads, dim) each: views."""
        return self._layers[n]

    def view(self, n: int, table: Tensor, lengths: Tensor, cu_q: Tensor | None = None) -> PagedKV:
        """A layer as attention reads it."""
        k, v = self.layer(n)
        if self.scales is None:
            return PagedKV(k, v, table, lengths, cu_q)
        return PagedKV(k, v, table, lengths, cu_q, self.scales[:, n, 0], self.scales[:, n, 1])

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor, rotation: Rotation | None = None) -> None:
        """Puts keys and values (total, heads, dim) of a layer into their slots (total,): block x size + place in it.

        What has a slot below 0 is left out. Keys are turned by `rotation` on their way.
        """
        write(k, v, *self.layer(layer), slots, rotation, *self._scales_of(layer))

    def write_and_rotate(self, layer: int, q: Tensor, k: Tensor, v: Tensor, slots: Tensor, rotation: Rotation | None) -> Tensor:
        """`write`, and q (total, q_heads, dim) turned as the keys are: on a GPU in one kernel."""
        if rotation is None:
            self.write(layer, k, v, slots)
            return q
        return write_and_rotate(q, k, v, *self.layer(layer), slots, rotation, *self._scales_of(layer))

    def _scales_of(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        return (None, None) if self.scales is None else (self.scales[:, layer, 0], self.scales[:, layer, 1])

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copies blocks, in all layers at once; as if one after the other."""
        for storage in (self.storage,) if self.scales is None else (self.storage, self.scales):
            _copy(storage, copies)

    def __str__(self) -> str:
        blocks, layers, _, size, heads, dim = self.storage.shape
        head = f"{heads} heads x {dim} dims x {self.storage.element_size()} bytes"
        if self.scales is not None:
            head = f"{heads} heads x ({dim} bytes + 4 of scale)"
        return (
            f"{blocks:,} blocks of {size} tokens, {blocks * size:,} in all: {blocks:,} x {size} x {layers} layers x 2 x "
            f"{head} = {_bytes(self.nbytes)}"
        )


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


def _bytes(n: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:,.3g} GB"
