"""Puts together what the kernels of target attention take: sizes that are compiled in, tiles, and the arguments of a launch."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftile.recommend.target.problem import Batch, Problem


class Shape(NamedTuple):
    """The compile-time configuration of a kernel: its argument SPEC."""

    D: int
    DV: int
    BLOCK_D: int  # head dims as tiles hold them
    BLOCK_DV: int
    ROWS: int  # candidates per tile
    KEYS: int  # events per tile
    STAGES: int
    SOFTMAX: bool
    SILU: bool  # False without softmax: the logistic function
    BIAS: bool
    MEAN: bool
    SHARED: bool  # all heads read the events that one list has
    SAME: bool  # values are the keys, which are loaded once
    PRECISION: str  # how fp32 numbers are multiplied


class Tiles(NamedTuple):
    """The tile of a kernel: candidates, events, warps, and stages of its loop."""

    rows: int
    keys: int
    warps: int
    stages: int


# kernel -> a tile for head dims up to 64, 128 and 256, of 16-bit numbers; none depends on the number of candidates
TILES: dict[str, tuple[Tiles, Tiles, Tiles]] = {
    "outputs": (Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 3), Tiles(64, 32, 4, 2)),
    "candidates": (Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 2), Tiles(32, 32, 4, 2)),
    "events": (Tiles(64, 64, 4, 2), Tiles(32, 64, 4, 2), Tiles(32, 32, 4, 2)),
}
# and of 32-bit numbers
WIDE = (Tiles(32, 32, 4, 1), Tiles(32, 32, 8, 1), Tiles(16, 16, 8, 1))
# tiles for chosen events: a program has one candidate and walks them
CHOSEN = (Tiles(1, 32, 4, 2), Tiles(1, 32, 4, 2), Tiles(1, 16, 4, 2))


class Launch(NamedTuple):
    """The arguments that all kernels share, and their constants."""

    B: int
    H: int
    strides: tuple[tuple[int, int], ...]  # (row, head) of q, keys, values and the bias
    bias: Tensor  # the offsets stand in for an absent one
    numbers: tuple[Any, ...]
    constants: dict[str, Any]
    tile: Tiles


def launch_of(kernel: str, batch: Batch, problem: Problem) -> Launch:
    """The launch of a kernel on these tensors, whose last axes are contiguous."""
    q, keys, values, bias, events = batch[:5]
    H, D, Dv = q.shape[1], q.shape[2], values.shape[2]
    size = (max(D, Dv) > 64) + (max(D, Dv) > 128)
    wide = q.element_size() == 4
    tile = (CHOSEN if kernel == "chosen" else WIDE if wide else TILES[kernel])[size]
    strides = [(x.stride(0), x.stride(1)) for x in batch[:3]]
    if bias is None:
        strides.append((0, 0))
    else:
        strides.append((bias.stride(0), 0 if bias.shape[1] == 1 else bias.stride(1)))
    same = keys.data_ptr() == values.data_ptr() and keys.shape == values.shape and keys.stride() == values.stride()
    flags = (
        problem.weights == "softmax", problem.weights == "silu", bias is not None, problem.mean,
        events is not None and events.shape[1] == 1, same,
    )  # fmt: skip
    k = 0 if events is None else events.shape[2]
    return Launch(
        batch.cu.shape[0] - 1, H, tuple(strides), batch.cu if bias is None else bias,
        (problem.scale, H // keys.shape[1], k), _constants(D, Dv, tile, flags, wide), tile,
    )  # fmt: skip


@cache
def _constants(D: int, Dv: int, tile: Tiles, flags: tuple[bool, ...], wide: bool) -> dict[str, Any]:
    """The compile-time arguments: one dictionary per kind, by which a launch is recognised."""
    padded = (max(16, 1 << (dim - 1).bit_length()) for dim in (D, Dv))
    spec = Shape(D, Dv, *padded, tile.rows, tile.keys, tile.stages, *flags, "ieee" if wide else "tf32")
    return {"SPEC": spec, "num_warps": tile.warps}


def slots(offsets: Tensor, rows: int, block: int) -> int:
    """An upper bound of the tiles of all users, without a look at the offsets."""
    return rows // block + offsets.shape[0] - 1


def delta_of(do: Tensor, o: Tensor) -> Tensor:
    """Returns the sum of do times o for each candidate and head, (total_q, H) fp32."""
    return (do.float() * o.float()).sum(-1, dtype=torch.float32)
