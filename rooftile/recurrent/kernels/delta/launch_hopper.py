"""Launches `walk_hopper.py` and `walk_back_hopper.py`. It is imported on Hopper alone."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor

from rooftile.recurrent.kernels.copies import state_box, token_box
from rooftile.recurrent.kernels.copies_hopper import described
from rooftile.recurrent.kernels.delta.call import Chunks, given_or
from rooftile.recurrent.kernels.delta.walk_back_hopper import _walk_columns_back
from rooftile.recurrent.kernels.delta.walk_hopper import CHUNK, _walk_columns
from rooftile.runtime.launch import Kernel

STAGES = 3
# registers of a thread that computes beside another warpgroup, and of one that copies
REGISTERS = {"COMPUTE_REGISTERS": 240, "LOAD_REGISTERS": 24}
# tokens of a chunk, and columns of values of a warpgroup
SIZE = CHUNK.value


def walk(chunks: Chunks, y: Tensor | None, states: Tensor | None, new: Tensor | None, last: Tensor) -> None:
    """Writes the last states, and y, or V' and the states before all chunks, where they are given."""
    heads, group, dim, dim_v, *_ = chunks.shape
    own = _constants(heads, group, dim, dim_v, chunks.walkers, STAGES, OUTPUTS=y is not None, KEEPS=states is not None)
    q, k, v, *_ = chunks.tokens
    given = (
        q, k, v, chunks.x, chunks.pairs, given_or(v, y, new), given_or(chunks.x, states), chunks.vectors, chunks.state, last,
        chunks.end, chunks.length, chunks.slots,
    )  # fmt: skip
    _kernel(dim, states is not None)((dim_v // (SIZE * chunks.walkers), heads, chunks.sequences), given, own)


def walk_back(
    chunks: Chunks, dy: Tensor, dr: Tensor | None, d_states: Tensor | None, d_last: Tensor | None, d_first: Tensor
) -> None:  # fmt: skip
    """Writes the gradients of the first states, and dR and the gradients of states after all chunks, where they are given."""
    heads, group, dim, dim_v, *_ = chunks.shape
    # two warpgroups' tiles and states leave room for no third stage
    stages = STAGES if chunks.walkers == 1 else 2
    own = _constants(heads, group, dim, dim_v, chunks.walkers, stages, HAS_LAST=d_last is not None, KEEPS=d_states is not None)
    q, k, *_ = chunks.tokens
    given = (
        q, k, dy, chunks.x, chunks.pairs, given_or(dy, dr), given_or(chunks.x, d_states), chunks.vectors,
        given_or(chunks.state, d_last), d_first, chunks.end, chunks.length, chunks.slots,
    )  # fmt: skip
    _kernel_back(dim, d_states is not None)((dim_v // (SIZE * chunks.walkers), heads, chunks.sequences), given, own)


@cache
def _kernel(dim: int, keeps: bool) -> Kernel:
    keys, rows, pairs = token_box(SIZE, dim), token_box(SIZE, SIZE), state_box(SIZE, SIZE)
    return described(
        _walk_columns, keys, keys, rows, pairs, pairs, rows, state_box(dim, SIZE) if keeps else pairs, line=SIZE
    )  # fmt: skip


@cache
def _kernel_back(dim: int, keeps: bool) -> Kernel:
    keys, rows, pairs = token_box(SIZE, dim), token_box(SIZE, SIZE), state_box(SIZE, SIZE)
    return described(
        _walk_columns_back, keys, keys, rows, pairs, pairs, rows, state_box(dim, SIZE) if keeps else pairs, line=SIZE
    )  # fmt: skip


@cache
def _constants(heads: int, group: int, dim: int, dim_v: int, walkers: int, stages: int, **own: bool) -> dict[str, Any]:
    """One dictionary for the same arguments: a launch is recognised by it."""
    return {
        "HEADS": heads, "GROUP": group, "D": dim, "DV": dim_v, "WALKERS": walkers, "STAGES": stages, "num_warps": 4, **REGISTERS,
        **own,
    }  # fmt: skip
