"""Starts the Hopper kernels: their descriptors, numbers and tiles."""

from __future__ import annotations

from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftile.exact.backends.hopper.counters import counter
from rooftile.exact.backends.hopper.plan import PACKED_TAIL, processors
from rooftile.exact.backends.hopper.tiles import WARPGROUP, Flags, padded
from rooftile.exact.backends.hopper.tma import descriptor, readable
from rooftile.recommend.hstu.hopper.gradients_of_keys import hstu_gradients_of_keys
from rooftile.recommend.hstu.hopper.gradients_of_rows import hstu_gradients_of_rows
from rooftile.recommend.hstu.hopper.outputs import hstu_forward
from rooftile.recommend.hstu.problem import Problem, Users
from rooftile.runtime.launch import Kernel

# rows, or keys, of a program's tile
ROWS = 2 * WARPGROUP


class ForwardTile(NamedTuple):
    """The shared memory and registers of a program of the forward."""

    KEYS: int  # keys per block
    Q_STAGES: int
    KV_STAGES: int
    PING_PONG: bool  # whether the warpgroups take turns to issue
    COMPUTE_REGISTERS: int = 240
    COPY_REGISTERS: int = 24


class BackwardTile(NamedTuple):
    """The shared memory and registers of a program of a backward kernel."""

    STAGES: int  # blocks of 64
    COMPUTE_REGISTERS: int = 240
    COPY_REGISTERS: int = 24


# for head dims up to 64 and 128
FORWARD = (ForwardTile(128, 2, 3, True), ForwardTile(128, 1, 2, True))
KEYS = (BackwardTile(4), BackwardTile(3))
QUERIES = (BackwardTile(4), BackwardTile(3))


def forward(q: Tensor, k: Tensor, v: Tensor, users: Users, problem: Problem, nan_flag: Tensor) -> Tensor:
    """Returns y (total, H, D) without the targets' own pairs; sets the flag if it holds a NaN."""
    q, k, v = readable(q), readable(k), readable(v)
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    D = padded(q.shape[2])
    tile = FORWARD[D > 64]
    kernel = _kernel(hstu_forward, ((1, WARPGROUP, D), (1, tile.KEYS, D), (1, tile.KEYS, D), (1, WARPGROUP, D)))
    tensors = (q, k, v, y, y, users.cu, _targets(users), nan_flag, counter(q.device))
    _start(kernel, tensors, q, users, problem, tile)
    return y


def backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, users: Users, problem: Problem, nan_flag: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dq, dk and dv without the targets' own pairs; sets the flag if one of them holds a NaN."""
    dy, q, k, v = (readable(x) for x in (dy, q, k, v))
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    D = padded(q.shape[2])
    rows = (1, WARPGROUP, D)
    rest = (users.cu, _targets(users), nan_flag, counter(q.device))
    keys = _kernel(hstu_gradients_of_keys, (rows,) * 6)
    _start(keys, (q, k, v, dy, dk, dv, dk, dv, *rest), q, users, problem, KEYS[D > 64])
    queries = _kernel(hstu_gradients_of_rows, (rows,) * 5)
    _start(queries, (q, k, v, dy, dq, dq, *rest), q, users, problem, QUERIES[D > 64])
    return dq, dk, dv


def _start(kernel: Kernel, tensors: tuple[Tensor, ...], q: Tensor, users: Users, problem: Problem, tile: Any) -> None:
    total, H, D = q.shape
    B = users.cu.shape[0] - 1
    tiles = total // ROWS + B
    programs = min(tiles * H, processors(q.device))
    tail = min(-(-PACKED_TAIL * programs // tiles), H)
    mask = problem.mask
    (chunk,) = mask.chunks or (0,)
    scale = 0.0 if problem.scale is None else problem.scale
    numbers = (
        B, tiles, tail, problem.alpha, scale, int(problem.scale is None), mask.left or 0, mask.right or 0, mask.prefix or 0, chunk
    )  # fmt: skip
    bounds = (mask.left is not None, mask.right is not None, mask.prefix is not None, bool(mask.chunks))
    kernel((programs, 1, 1), (*tensors, *numbers), _constants(D, bounds, users.targets is not None, tile))


def _targets(users: Users) -> Tensor:
    # no kernel reads what stands for an absent tensor
    return users.cu if users.targets is None else users.targets


@cache
def _kernel(function: Any, boxes: tuple[tuple[int, int, int], ...]) -> Kernel:
    return Kernel(function, tuple(partial(descriptor, box=box) for box in boxes))


@cache
def _constants(D: int, bounds: tuple[bool, ...], has_targets: bool, tile: Any) -> dict[str, Any]:
    """The compile-time arguments: one dictionary per kind, by which a launch is recognised."""
    flags = Flags(D, D, True, *bounds, False)
    return {"D": padded(D), "FLAGS": flags, "TARGETS": has_targets, "TILE": tile, "num_warps": 4}
