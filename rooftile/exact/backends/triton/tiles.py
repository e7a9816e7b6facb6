"""Tile sizes: decisions with their reasons, as pure functions of the spec.

The Hopper rows for bf16 were the fastest of some eight a kernel on an H200 (2026-11-21); what they reach stands in
benchmarks/results/h200.jsonl. The other rows are the largest tiles that the compiler keeps in registers
(tests/kernels/test_triton_compiles.py holds all of them to it), and none was timed.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from rooftile.exact.backends.triton.call import padded
from rooftile.exact.spec import Spec


class BlockShape(NamedTuple):
    """A kernel's tile of queries and keys, and how a program runs it."""

    BLOCK_T: int
    BLOCK_S: int
    num_warps: int
    num_stages: int

    @property
    def constants(self) -> dict[str, Any]:
        return {"TILE": self, "num_warps": self.num_warps}


class Walk(NamedTuple):
    """One walk over the queries for a tile of keys, and which of the two gradients it sums."""

    tile: BlockShape
    wants_dk: bool = True
    wants_dv: bool = True


# kernel, chip, kind of problem -> a tile for head dims up to 64, 128 and 256
TILES: dict[tuple[str, str, str], tuple[BlockShape, BlockShape, BlockShape]] = {
    ("forward", "hopper", "full"): (BlockShape(128, 64, 4, 3), BlockShape(128, 64, 8, 3), BlockShape(128, 64, 8, 2)),
    # more and smaller programs fill the chip at the end of a triangle
    ("forward", "hopper", "masked"): (BlockShape(128, 64, 4, 3), BlockShape(64, 64, 4, 3), BlockShape(128, 32, 8, 3)),
    ("forward", "hopper", "busy"): (BlockShape(64, 32, 4, 2), BlockShape(64, 32, 4, 2), BlockShape(64, 32, 8, 2)),
    ("forward", "hopper", "fp32"): (BlockShape(32, 32, 4, 1), BlockShape(32, 32, 8, 1), BlockShape(16, 16, 8, 1)),
    ("forward", "ampere", "full"): (BlockShape(128, 64, 4, 3), BlockShape(64, 64, 4, 3), BlockShape(64, 32, 8, 2)),
    ("forward", "ampere", "masked"): (BlockShape(128, 64, 4, 3), BlockShape(64, 64, 4, 3), BlockShape(64, 32, 8, 2)),
    ("forward", "ampere", "busy"): (BlockShape(64, 32, 4, 2), BlockShape(64, 32, 8, 2), BlockShape(32, 32, 4, 2)),
    ("forward", "ampere", "fp32"): (BlockShape(32, 32, 4, 1), BlockShape(32, 32, 8, 1), BlockShape(16, 16, 8, 1)),
    ("kv", "hopper", "full"): (BlockShape(64, 64, 4, 3), BlockShape(64, 128, 8, 3), BlockShape(32, 128, 8, 3)),
    ("kv", "hopper", "masked"): (BlockShape(64, 64, 4, 3), BlockShape(32, 64, 4, 3), BlockShape(32, 128, 8, 3)),
    ("kv", "hopper", "busy"): (BlockShape(32, 64, 8, 2), BlockShape(16, 64, 8, 2), BlockShape(16, 64, 8, 2)),
    ("kv", "hopper", "fp32"): (BlockShape(32, 32, 8, 1), BlockShape(16, 16, 8, 1), BlockShape(16, 16, 8, 1)),
    ("kv", "blackwell", "full"): (BlockShape(64, 64, 4, 3), BlockShape(64, 128, 8, 3), BlockShape(32, 128, 8, 2)),
    ("kv", "blackwell", "masked"): (BlockShape(64, 64, 4, 3), BlockShape(32, 64, 4, 3), BlockShape(32, 128, 8, 2)),
    ("kv", "ampere", "full"): (BlockShape(32, 64, 4, 3), BlockShape(32, 64, 8, 2), BlockShape(32, 32, 8, 2)),
    ("kv", "ampere", "masked"): (BlockShape(32, 64, 4, 3), BlockShape(32, 64, 8, 2), BlockShape(32, 32, 8, 2)),
    ("kv", "ampere", "busy"): (BlockShape(32, 32, 4, 2), BlockShape(32, 32, 4, 2), BlockShape(32, 32, 8, 2)),
    ("kv", "ampere", "fp32"): (BlockShape(32, 32, 8, 1), BlockShape(16, 16, 8, 1), BlockShape(16, 16, 8, 1)),
    ("q", "hopper", "full"): (BlockShape(64, 64, 4, 3), BlockShape(128, 64, 8, 3), BlockShape(128, 32, 8, 2)),
    ("q", "hopper", "masked"): (BlockShape(64, 64, 4, 3), BlockShape(128, 64, 8, 3), BlockShape(128, 32, 8, 2)),
    ("q", "hopper", "busy"): (BlockShape(64, 32, 4, 2), BlockShape(128, 32, 8, 2), BlockShape(64, 32, 8, 2)),
    ("q", "hopper", "fp32"): (BlockShape(32, 32, 8, 1), BlockShape(16, 16, 8, 1), BlockShape(16, 16, 8, 1)),
    ("q", "ampere", "full"): (BlockShape(64, 64, 4, 2), BlockShape(64, 32, 4, 2), BlockShape(64, 32, 8, 1)),
    ("q", "ampere", "masked"): (BlockShape(64, 64, 4, 2), BlockShape(64, 32, 4, 2), BlockShape(64, 32, 8, 1)),
    ("q", "ampere", "busy"): (BlockShape(64, 32, 4, 2), BlockShape(32, 32, 4, 2), BlockShape(32, 16, 4, 1)),
    ("q", "ampere", "fp32"): (BlockShape(32, 32, 8, 1), BlockShape(16, 16, 8, 1), BlockShape(16, 16, 8, 1)),
    # nothing but the bias, measured on an H100 (2026-11-23)
    ("bias", "hopper", "plain"): (BlockShape(64, 64, 4, 2), BlockShape(128, 64, 8, 2), BlockShape(64, 32, 8, 2)),
    ("bias", "hopper", "busy"): (BlockShape(64, 32, 4, 3), BlockShape(64, 32, 4, 3), BlockShape(64, 32, 8, 2)),
    ("bias", "hopper", "fp32"): (BlockShape(16, 32, 4, 3), BlockShape(16, 16, 4, 3), BlockShape(16, 16, 8, 3)),
    ("bias", "ampere", "busy"): (BlockShape(64, 32, 4, 3), BlockShape(32, 32, 4, 3), BlockShape(32, 64, 8, 1)),
    ("bias", "ampere", "fp32"): (BlockShape(16, 32, 4, 3), BlockShape(16, 16, 4, 3), BlockShape(16, 16, 8, 1)),
}


@cache
def forward_tile(spec: Spec) -> BlockShape:
    return _tile("forward", spec)


@cache
def backward_kv_walks(spec: Spec) -> tuple[Walk, ...]:
    tile = _tile("kv", spec)
    if _width(spec) + (spec.dtype == torch.float32) >= 2:
        return Walk(tile, wants_dv=False), Walk(tile, wants_dk=False)
    return (Walk(tile),)


@cache
def backward_q_tile(spec: Spec) -> BlockShape:
    return _tile("q", spec)


@cache
def backward_bias_tile(spec: Spec) -> BlockShape:
    if spec.device == "sm90" and spec.dtype != torch.float32 and spec.options_on == ("bias",):
        return TILES["bias", "hopper", "plain"][_width(spec)]
    return _tile("bias", spec)


def _tile(kernel: str, spec: Spec) -> BlockShape:
    tile = _table(kernel, spec)
    if spec.block_size is None:
        return tile
    # a tile lies within a listed block: the largest power of two that divides it
    rows, keys = (size & -size for size in spec.block_size)
    return tile._replace(BLOCK_T=min(tile.BLOCK_T, rows), BLOCK_S=min(tile.BLOCK_S, keys))


def _table(kernel: str, spec: Spec) -> BlockShape:
    kind, width = _kind(spec), _width(spec)
    # 227 KiB of shared memory and matrix units that read it: Hopper, and Blackwell's data-centre chips
    if spec.device in ("sm100", "sm103"):
        return TILES.get((kernel, "blackwell", kind), TILES[kernel, "hopper", kind])[width]
    return TILES[kernel, "hopper" if spec.device == "sm90" else "ampere", kind][width]


def _kind(spec: Spec) -> str:
    if spec.dtype == torch.float32:
        return "fp32"
    # what is added to a tile's scores, and the random bits of dropout, take registers that a large tile needs
    if spec.has_bias or spec.has_alibi or spec.dropout:
        return "busy"
    # a head dim between two powers of two is a masked one
    whole = all(dim >= 16 and dim & (dim - 1) == 0 for dim in (spec.dim, spec.dim_v))
    return "full" if spec.mask.is_full and whole else "masked"


def _width(spec: Spec) -> int:
    return {64: 0, 128: 1, 256: 2}[max(64, padded(max(spec.dim, spec.dim_v)))]
