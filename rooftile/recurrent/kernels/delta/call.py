"""The sizes and tiles of a call, and what all its chunks need but the state."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from rooftile.recurrent.kernels.copies import is_aligned
from rooftile.recurrent.kernels.delta.chunks import _prepare
from rooftile.recurrent.kernels.delta.inverse import CHUNK, _invert
from rooftile.recurrent.kernels.parts import processors
from rooftile.recurrent.linear.kernels.tiles import is_hopper
from rooftile.recurrent.rule import Given, Tensors
from rooftile.runtime.devices import capability, lack_of_gluon
from rooftile.runtime.launch import Kernel

_start_prepare, _start_invert = Kernel(_prepare), Kernel(_invert)
# a warp for each system
INVERTING = {"num_warps": 1, "num_stages": 1}


def _by_bf16(dim: int, dim_v: int, dtype: torch.dtype) -> bool:
    """Whether products, and what kernels leave for each other, are in bf16: it has the range of sums over a long text, fp16 has not.

    Heads below 64 take products of tf32: Triton 3.6 reads beyond its shared memory in those of bf16 with 16 or 32 columns.
    """
    return dtype == torch.bfloat16 and min(dim, dim_v) >= 64


# columns of values in a tile (of keys for "prepare"), warps and stages: in bf16 on Hopper, in bf16 before it, and in fp16, fp32
# and for narrow heads
_TILES = {
    "prepare": ((128, 4, 1), (32, 4, 1), (32, 4, 1)),
    "walk": ((32, 4, 2), (32, 4, 2), (16, 4, 1)),
    "walk_back": ((32, 4, 2), (32, 4, 1), (16, 4, 1)),
    "pair_gradients": ((128, 4, 2), (128, 4, 2), (32, 4, 1)),
    "query_gradients": ((64, 4, 2), (32, 8, 2), (16, 4, 1)),
    "key_gradients": ((64, 8, 1), (32, 8, 1), (16, 4, 1)),
    "step": ((32, 4, 1), (32, 4, 1), (32, 4, 1)),
}
# tiles on Hopper in bf16, where 64 columns give each processor of a chip a program
_WIDE_TILES = {"walk": (64, 4, 2), "walk_back": (64, 4, 2)}
_PROCESSORS = 128


def tile_of(kernel: str, dim: int, dim_v: int, dtype: torch.dtype, hopper: bool, walks: int = 0) -> dict[str, Any]:
    """Returns the columns of a tile, how its products are made, warps and stages; `walks` are sequences times value heads.

    A tile of products has at least 64 rows and 16 columns, so that each of four warps owns whole pieces of it: Triton 3.6 reads
    beyond its shared memory where eight warps share 16 columns.
    """
    by_bf16 = _by_bf16(dim, dim_v, dtype)
    block_v, warps, stages = _TILES[kernel][2 if not by_bf16 else 0 if hopper else 1]
    if kernel in _WIDE_TILES and by_bf16 and hopper and walks * triton.cdiv(dim_v, 64) >= _PROCESSORS:
        block_v, warps, stages = _WIDE_TILES[kernel]
    found = {"num_warps": warps, "num_stages": stages}
    if kernel == "prepare":
        found |= {"BLOCK_D": block_v}
    else:
        block_v, least = min(block_v, max(triton.next_power_of_2(dim_v), 16)), 16 if kernel == "step" else 64
        found |= {"BLOCK_D": max(triton.next_power_of_2(dim), least), "BLOCK_V": block_v}
    # products of tf32 are as exact as fp16
    how = "bf16" if by_bf16 else "fp32" if dtype == torch.float32 else "tf32"
    return found if kernel == "step" else found | {"HOW": how}


@cache
def constants_of(
    kernel: str, heads: int, group: int, dim: int, dim_v: int, dtype: torch.dtype, hopper: bool, walks: int = 0, **own: bool
) -> dict[str, Any]:  # fmt: skip
    """Returns one dictionary for the same arguments: a launch is recognised by it."""
    sizes = {"HEADS": heads, "GROUP": group, "D": dim} | ({} if kernel == "prepare" else {"DV": dim_v})
    return sizes | own | tile_of(kernel, dim, dim_v, dtype, hopper, walks)


def _has_gluon(device: torch.device) -> bool:
    return device.type == "cuda" and capability(device) == (9, 0) and not lack_of_gluon()


class Chunks(NamedTuple):
    """A call by chunks: its tensors in a readable form, what the kernels are compiled for, and what `_prepare` leaves in memory."""

    tokens: list[Tensor]
    state: Tensor
    # offsets, or any tensor in their place
    cu: Tensor
    strides: list[tuple[int, int, int]]
    shape: tuple[int, int, int, int, torch.dtype, bool]
    flags: dict[str, bool]
    length: int
    # chunks, and sequences
    slots: int
    sequences: int
    # the inverse of 1 + M, and P
    x: Tensor
    pairs: Tensor
    # sums of exponents
    total: Tensor
    # a key's inverse length, a query's times the scale, beta in fp32, and the lengths with exponentials (6, chunks, heads, CHUNK):
    # unit, factor, beta, recall, left, reach
    vectors: Tensor
    # the exponential of a chunk's sum
    end: Tensor

    def constants(self, kernel: str, **own: bool) -> dict[str, Any]:
        walks = self.sequences * self.shape[0] if kernel in _WIDE_TILES else 0
        return constants_of(kernel, *self.shape, walks, **own, PACKED=self.flags["PACKED"])

    def empty(self, *shape: int) -> Tensor:
        """Makes a tensor of the dtype of what kernels leave for each other."""
        return torch.empty(shape, dtype=self.x.dtype, device=self.x.device)

    @property
    def suits_warpgroups(self) -> bool:
        """Whether Hopper's warpgroups walk: they have dense bf16, keys of 64 or 128 numbers, values of a multiple of 64."""
        (_, _, dim, dim_v, dtype, hopper), aligned = self.shape, all(map(is_aligned, self.tokens[:3]))
        sizes = dim in (64, 128) and dim_v % 64 == 0 and self.vectors.numel() < 1 << 31 and self.length > 0
        return dtype == torch.bfloat16 and hopper and sizes and aligned and not self.flags["PACKED"] and _has_gluon(self.x.device)

    @property
    def walkers(self) -> int:
        """The warpgroups of a program of 64 columns each: one where each program has a processor, else two, which share keys."""
        parts = self.shape[3] // 64
        return 2 if parts % 2 == 0 and self.sequences * self.shape[0] * parts > processors(self.x.device) else 1


def prepared(tokens: Tensors, state: Tensor, cu: Tensor | None, options: Given) -> Chunks:
    """Computes what all chunks need but the state."""
    q, k, v, g, beta = given = readable(tokens)
    scale, qk_norm = options
    packed, length, (heads, dim_v), dim = cu is not None, q.shape[-3], v.shape[-2:], q.shape[-1]
    sequences = state.shape[0]
    slots = length // CHUNK.value + sequences if packed else -(-length // CHUNK.value) * sequences
    device, wide = q.device, torch.bfloat16 if _by_bf16(dim, dim_v, q.dtype) else torch.float32
    square = (slots, heads, CHUNK.value, CHUNK.value)
    chunks = Chunks(
        given, state.contiguous(), k if cu is None else cu, [_strides(x, packed) for x in given],
        (heads, heads // k.shape[-2], dim, dim_v, q.dtype, is_hopper(q.device)), {"QK_NORM": qk_norm, "PACKED": packed}, length, slots, sequences,
        torch.empty(square, dtype=wide, device=device), torch.empty(square, dtype=wide, device=device),
        torch.empty(square[:-1], dtype=torch.float64, device=device),
        torch.empty((6, *square[:-1]), dtype=torch.float32, device=device),
        torch.empty((slots, heads), dtype=torch.float32, device=device),
    )  # fmt: skip
    if v.numel():
        systems = torch.empty(square, dtype=torch.float32, device=device)
        unit, factor, beta_wide, recall, left, reach = chunks.vectors
        written = (systems, chunks.pairs, chunks.total, beta_wide, unit, factor, recall, left, reach, chunks.end, chunks.cu)
        numbers = (*chunks.strides[:2], *chunks.strides[3:], scale, length, sequences)
        own = chunks.constants("prepare", QK_NORM=qk_norm)
        _start_prepare((slots, k.shape[-2], 1), (q, k, g, beta, *written, *numbers), own)
        _start_invert((slots * heads, 1, 1), (systems, chunks.x), INVERTING)
    return chunks


def given_or(stand_in: Tensor, *tensors: Tensor | None) -> Tensor:
    """Returns the tensor that is there, or another in the place of what a kernel does not touch."""
    return next((x for x in tensors if x is not None), stand_in)


def _strides(x: Tensor, packed: bool) -> tuple[int, int, int]:
    """Returns the strides of sequences, tokens and heads."""
    return (0, x.stride(0), x.stride(1)) if packed else (x.stride(0), x.stride(1), x.stride(2))


def readable(tokens: Tensors) -> list[Tensor]:
    """Returns q, k, v, g and beta, the first three with their last axis in one piece."""
    found = []
    for n, x in enumerate(tokens):
        assert x is not None
        found.append(x if n > 2 or x.stride(-1) == 1 else x.contiguous())
    return found
