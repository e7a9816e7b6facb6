"""The sizes of a call by chunks, and the states before its chunks, or their gradients behind them."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from rooftile.recurrent.kernels.parts import readable, token_strides
from rooftile.recurrent.kernels.selective.chunks import _chunk_states, _scan
from rooftile.recurrent.kernels.selective.gradients import _chunk_adjoints
from rooftile.recurrent.rule import Tensors
from rooftile.runtime.launch import Kernel

# tokens of a chunk
CHUNK = 256
# channels of a program, which is one warp: a thread walks tokens with all numbers of its channel; tokens at once in the backward
_CHANNELS, _TOKENS = 32, 4
# channels of a program that goes from chunk to chunk
_SCAN_CHANNELS = 128
_LOG2_E = 1.4426950408889634

_start_states, _start_scan, _start_adjoints = Kernel(_chunk_states), Kernel(_scan), Kernel(_chunk_adjoints)


@cache
def constants_of(W: int, N: int, block: int, warps: int, **own: int) -> dict[str, Any]:
    """Returns one dictionary for the same arguments: a launch is recognised by it."""
    return {"W": W, "N": N, "BLOCK_W": block, **own, "num_warps": warps}


def by_tokens(W: int, N: int, **own: int) -> dict[str, Any]:
    """Returns the constants of a kernel that walks the tokens of a chunk."""
    return constants_of(W, N, _CHANNELS, 1, BLOCK_N=triton.next_power_of_2(N), CHUNK=CHUNK, **own)


def tokens_of_gradients(N: int) -> int:
    """Returns the tokens of a tile: a thread holds the states around all of them."""
    return _TOKENS if N <= 16 else 1


class Chunks(NamedTuple):
    """A call by chunks: its tensors in a readable form, and what the kernels leave in memory."""

    # x, dt, B, C, z; any tensor stands for one that is not there
    tokens: list[Tensor]
    strides: list[tuple[int, int]]
    # A as exponents of 2 (N, W), D, dt_bias
    constants: list[Tensor]
    cu: Tensor
    flags: dict[str, bool]
    blocks: int
    slots: int
    # the states before all chunks, and the sums of their steps
    part: Tensor
    total: Tensor


def tiles_of(chunks: Chunks) -> int:
    """Returns the number of tiles of tokens before which a backward keeps the state."""
    return chunks.slots * (CHUNK // tokens_of_gradients(chunks.part.shape[1]))


def prepared(tokens: Tensors, constants: Tensors, state: Tensor, cu: Tensor | None, softplus: bool) -> Chunks:
    """Returns a call by chunks, without states."""
    x, dt, B, C, z = (None if x is None else readable(x) for x in tokens)
    A, D, bias = (None if x is None else x.contiguous() for x in constants)
    assert x is not None and dt is not None and B is not None and C is not None and A is not None
    (W, N), T, count, packed = A.shape, x.shape[-2], state.shape[0], cu is not None
    slots = T // CHUNK + count if packed else triton.cdiv(T, CHUNK) * count
    own = [x, dt, B.float(), C.float(), x if z is None else z]
    rates = (A.float() * _LOG2_E).t().contiguous()
    flags = {"SOFTPLUS": softplus, "HAS_BIAS": bias is not None, "PACKED": packed}
    return Chunks(
        own, [token_strides(given, packed) for given in own], [rates, A if D is None else D, A if bias is None else bias],
        x if cu is None else cu, flags, triton.cdiv(W, _CHANNELS), slots,
        torch.empty((slots, N, W), dtype=torch.float32, device=x.device),
        torch.empty((slots, W), dtype=torch.float32, device=x.device),
    )  # fmt: skip


def states_of(chunks: Chunks, state: Tensor) -> Tensor:
    """Writes the states before all chunks and the sums of their steps; returns the last states."""
    first = state.contiguous()
    last = torch.empty_like(first)
    (x, dt, B, *_), (rates, _, bias) = chunks.tokens, chunks.constants
    T, count = x.shape[-2], state.shape[0]
    if x.numel():
        arguments = (x, dt, B, rates, bias, chunks.part, chunks.total, chunks.cu, *chunks.strides[:3], T, count, 1)
        _start_states((chunks.slots, chunks.blocks, 1), arguments, by_tokens(*state.shape[1:], **chunks.flags))
    if last.numel():
        _between(chunks, chunks.part, first, last, T)
    return last


def adjoints_of(
    chunks: Chunks, dy: Tensor, d_last: Tensor | None, d_first: Tensor, has_z: bool, total: bool = False
) -> Tensor:  # fmt: skip
    """Writes the gradients of the first states; returns those behind all chunks, before their decay (chunks, N, W).

    total: whether the sums of steps are not there yet.
    """
    _, dt, _, C, z = chunks.tokens
    (count, W, N), T = d_first.shape, dt.shape[-2]
    adjoint = torch.empty_like(chunks.part)
    if dt.numel():
        tensors = (dy, dt, C, z, chunks.constants[0], chunks.constants[2], adjoint, chunks.total, chunks.cu)
        own = by_tokens(W, N, TOKENS=_TOKENS, TOTAL=total, HAS_Z=has_z, **chunks.flags)
        _start_adjoints(
            (chunks.slots, chunks.blocks, 1), (*tensors, chunks.strides[1], *chunks.strides[3:], T, count, 1), own
        )  # fmt: skip
    if d_first.numel():
        _between(chunks, adjoint, None if d_last is None else d_last.contiguous(), d_first, T, reverse=True)
    return adjoint


def _between(chunks: Chunks, part: Tensor, first: Tensor | None, last: Tensor, T: int, reverse: bool = False) -> None:
    """Goes from chunk to chunk."""
    count, W, N = last.shape
    own = constants_of(
        W, N, _SCAN_CHANNELS, 4, CHUNK=CHUNK, HAS_FIRST=first is not None, REVERSE=reverse, PACKED=chunks.flags["PACKED"]
    )  # fmt: skip
    arguments = (part, chunks.total, chunks.constants[0], last if first is None else first, last, chunks.cu, T)
    _start_scan((count, triton.cdiv(W, _SCAN_CHANNELS), N), arguments, own)
