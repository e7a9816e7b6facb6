"""Tile sizes: decisions with their reasons, as pure functions of the spec."""

from __future__ import annotations

from typing import Any, NamedTuple

from rooftile.backends.triton.arguments import padded
from rooftile.spec import Spec


class Tile(NamedTuple):
    """A kernel's tile of queries and keys, and how a program runs it."""

    BLOCK_T: int
    BLOCK_S: int
    num_warps: int
    num_stages: int

    @property
    def constants(self) -> dict[str, Any]:
        return {
            "BLOCK_T": self.BLOCK_T,
            "BLOCK_S": self.BLOCK_S,
            "STAGES": self.num_stages,
            "num_warps": self.num_warps,
        }


class Walk(NamedTuple):
    """One walk over the queries for a tile of keys, and which of the two gradients it sums."""

    tile: Tile
    wants_dk: bool = True
    wants_dv: bool = True


def forward_tile(spec: Spec) -> Tile:
    return Tile(128, 64, 8, 3) if padded(max(spec.dim, spec.dim_v)) > 64 else Tile(128, 128, 8, 3)


def backward_kv_walks(spec: Spec) -> tuple[Walk, ...]:
    if padded(max(spec.dim, spec.dim_v)) > 128:
        return Walk(Tile(32, 128, 8, 2), wants_dv=False), Walk(Tile(32, 128, 8, 2), wants_dk=False)
    return (Walk(Tile(64, 128, 8, 2)),)


def backward_q_tile(spec: Spec) -> Tile:
    return Tile(128, 64, 8, 2)


def backward_bias_tile(spec: Spec) -> Tile:
    return Tile(64, 64, 4, 1)
