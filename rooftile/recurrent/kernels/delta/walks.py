"""The launches of the walks from chunk to chunk: in Hopper's warpgroups where they suit, else in Triton."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from rooftile.recurrent.kernels.copies import is_aligned
from rooftile.recurrent.kernels.delta.call import Chunks, given_or
from rooftile.recurrent.kernels.delta.chunks import _walk
from rooftile.recurrent.kernels.delta.gradients import _walk_back
from rooftile.runtime.launch import Kernel

_start_walk, _start_walk_back = Kernel(_walk), Kernel(_walk_back)


def walk(chunks: Chunks, y: Tensor | None = None, states: Tensor | None = None, new: Tensor | None = None) -> Tensor:
    """Writes y, or V' and the states before all chunks, where they are given; returns the last states."""
    (q, k, v, *_), last = chunks.tokens, torch.empty(chunks.state.shape, dtype=torch.float32, device=chunks.x.device)
    if last.numel() and chunks.suits_warpgroups:
        from rooftile.recurrent.kernels.delta import launch_hopper

        launch_hopper.walk(chunks, y, states, new, last)
    elif last.numel():
        own = chunks.constants("walk", OUTPUTS=y is not None, KEEPS=states is not None)
        _, _, beta, recall, left, reach = chunks.vectors
        read = (q, k, v, beta, chunks.x, chunks.pairs, recall, left, reach, chunks.end)
        written = (given_or(chunks.x, states), given_or(v, new), given_or(v, y), chunks.state, last, chunks.cu)
        grid = (triton.cdiv(chunks.shape[3], own["BLOCK_V"]), chunks.sequences, chunks.shape[0])
        _start_walk(grid, (*read, *written, *chunks.strides[:3], chunks.length, chunks.sequences), own)
    return last


def walk_back(
    chunks: Chunks, dy: Tensor, dr: Tensor | None, d_states: Tensor | None, d_last: Tensor | None, d_first: Tensor
) -> None:  # fmt: skip
    """Writes the gradients of the first states, and dR and the gradients of states after all chunks, where they are given."""
    if not d_first.numel():
        return
    last = None if d_last is None else d_last.contiguous()
    if chunks.suits_warpgroups and is_aligned(dy):
        from rooftile.recurrent.kernels.delta import launch_hopper

        launch_hopper.walk_back(chunks, dy, dr, d_states, last, d_first)
        return
    own, (q, k, *_) = chunks.constants("walk_back", HAS_LAST=last is not None, KEEPS=d_states is not None), chunks.tokens
    _, _, beta, recall, left, reach = chunks.vectors
    read = (q, k, beta, dy, chunks.x, chunks.pairs, recall, left, reach, chunks.end)
    written = (given_or(dy, dr), given_or(chunks.x, d_states), given_or(chunks.state, last), d_first, chunks.cu)
    grid = (triton.cdiv(chunks.shape[3], own["BLOCK_V"]), chunks.sequences, chunks.shape[0])
    _start_walk_back(grid, (*read, *written, *chunks.strides[:2], chunks.length, chunks.sequences), own)
