"""Puts together what the kernels of HSTU attention take: sizes that are compiled in, tiles, and the arguments of a launch."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftile.recommend.hstu.problem import Problem, Users


class Shape(NamedTuple):
    """The compile-time configuration of a kernel: its argument SPEC."""

    D: int
    DV: int
    BLOCK_D: int  # head dims as tiles hold them
    BLOCK_DV: int
    ROWS: int  # queries per tile
    KEYS: int  # keys per tile
    STAGES: int
    LEFT: bool  # which bounds the mask has
    RIGHT: bool
    PREFIX: bool
    CHUNK: bool
    CONTEXTUAL: bool
    TARGETS: bool
    POSITIONS: bool  # a table of positions
    PLACED: bool  # positions of the caller's own
    TIMES: bool  # a table of times
    PRECISION: str  # how fp32 numbers are multiplied


class Tiles(NamedTuple):
    """The tile of a kernel: queries, keys, warps, and stages of its loop."""

    rows: int
    keys: int
    warps: int
    stages: int


# kernel -> a tile for head dims up to 64, 128 and 256, of 16-bit numbers: the fastest of three to six on an H200, where timed. Four
# warps and one product of 64 rows each; eight took up to twice as long
TILES: dict[str, tuple[Tiles, Tiles, Tiles]] = {
    "forward": (Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 3), Tiles(64, 32, 4, 2)),
    "forward with bias": (Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 2)),
    "keys": (Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2), Tiles(32, 32, 4, 2)),
    "keys with bias": (Tiles(64, 64, 4, 2), Tiles(32, 64, 4, 2), Tiles(32, 32, 4, 2)),
    "rows": (Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2), Tiles(32, 32, 4, 2)),
    "rows with bias": (Tiles(64, 32, 4, 2), Tiles(64, 32, 4, 2), Tiles(32, 32, 4, 2)),
}
# and of 32-bit numbers
WIDE = (Tiles(32, 32, 4, 1), Tiles(32, 32, 8, 1), Tiles(16, 16, 8, 1))


class Launch(NamedTuple):
    """The arguments that all kernels share, and their constants."""

    B: int
    H: int
    programs: int
    strides: tuple[tuple[int, int], ...]  # (row, head) of q, k and v
    users: tuple[Tensor, ...]  # cu, targets, tables, edges, times and positions; cu stands in for what is absent
    numbers: tuple[Any, ...]
    constants: dict[str, Any]
    tile: Tiles


def launch_of(kernel: str, q: Tensor, k: Tensor, v: Tensor, users: Users, problem: Problem, cut: str) -> Launch:
    """The launch of a kernel whose programs own tiles of rows or of keys, as `cut` says."""
    total, H, D = q.shape
    B, Dv = users.cu.shape[0] - 1, v.shape[2]
    has_bias = users.position_table is not None or users.time_table is not None
    tile = tile_of(f"{kernel} with bias" if has_bias else kernel, max(D, Dv), q.element_size() == 4)
    flags = flags_of(users, problem)
    block = tile.rows if cut == "rows" else tile.keys
    stand_in = users.cu
    given = (
        users.targets, users.position_table, users.time_table, users.edges, users.row_times, users.key_times, users.positions
    )  # fmt: skip
    return Launch(
        B, H, (total // block + B) * H, tuple((x.stride(0), x.stride(1)) for x in (q, k, v)),
        (users.cu, *(stand_in if x is None else x for x in given)), numbers_of(users.position_table, users.time_table, problem),
        _constants(D, Dv, tile, flags, q.dtype == torch.float32), tile,
    )  # fmt: skip


def flags_of(users: Users, problem: Problem) -> tuple[bool, ...]:
    """Returns the flags of a `Shape`, from LEFT to TIMES."""
    bounds = problem.mask.left, problem.mask.right, problem.mask.prefix
    return (
        *(n is not None for n in bounds), bool(problem.mask.chunks), problem.contextual > 0, users.targets is not None,
        users.position_table is not None, users.positions is not None, users.time_table is not None,
    )  # fmt: skip


def numbers_of(position_table: Tensor | None, time_table: Tensor | None, problem: Problem) -> tuple[Any, ...]:
    """Returns the `Numbers` of a call."""
    left, right, prefix = (n or 0 for n in (problem.mask.left, problem.mask.right, problem.mask.prefix))
    (chunk,) = problem.mask.chunks or (0,)
    columns, buckets = (0 if x is None else x.shape[1] for x in (position_table, time_table))
    steps = tuple(0 if x is None or x.shape[0] == 1 else x.shape[1] for x in (position_table, time_table))
    scale = 0.0 if problem.scale is None else problem.scale
    return (
        problem.alpha, scale, int(problem.scale is None), left, right, prefix, chunk, problem.contextual, problem.zero, columns,
        buckets, *steps,
    )  # fmt: skip


def tile_of(kernel: str, dim: int, wide: bool) -> Tiles:
    """The tile of a kernel for the larger head dim."""
    return (WIDE if wide else TILES[kernel])[(dim > 64) + (dim > 128)]


@cache
def _constants(D: int, Dv: int, tile: Tiles, flags: tuple[bool, ...], wide: bool) -> dict[str, Any]:
    """The compile-time arguments: one dictionary per kind, by which a launch is recognised."""
    padded = (max(16, 1 << (dim - 1).bit_length()) for dim in (D, Dv))
    spec = Shape(D, Dv, *padded, tile.rows, tile.keys, tile.stages, *flags, "ieee" if wide else "tf32")
    return {"SPEC": spec, "num_warps": tile.warps}
