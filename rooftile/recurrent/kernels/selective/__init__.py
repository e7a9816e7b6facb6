"""The selective scan in Triton kernels, for Ampere and newer: up to 32 numbers of a state, without groups of channels.

    chunks      the forward
    gradients   the backward, which finds the states of chunks again, and keeps none between the two
    steps       one token of each sequence, in place
    tiles       parts of them

Every sum has one owner and one order: results are the same bits from run to run, and no sequence knows its neighbours.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from rooftile.recurrent.kernels.parts import readable, token_strides, unknown_dtype
from rooftile.recurrent.kernels.selective.chunks import _chunk_states, _outputs, _scan
from rooftile.recurrent.kernels.selective.gradients import _chunk_adjoints, _gradients
from rooftile.recurrent.kernels.selective.steps import _scan_step
from rooftile.recurrent.rule import Given, Tensors
from rooftile.runtime.launch import Kernel

# tokens of a chunk
CHUNK = 256
LARGEST_N = 32
# channels of a program, which is one warp: a thread walks tokens with all numbers of its channel; tokens at once in the backward
_CHANNELS, _TOKENS = 32, 4
# channels of a program that goes from chunk to chunk, and of a step's
_SCAN_CHANNELS = _STEP_CHANNELS = 128
_LOG2_E = 1.4426950408889634

_start_states, _start_scan, _start_outputs = Kernel(_chunk_states), Kernel(_scan), Kernel(_outputs)
_start_adjoints, _start_gradients, _start_step = Kernel(_chunk_adjoints), Kernel(_gradients), Kernel(_scan_step)


@cache
def constants_of(W: int, N: int, block: int, warps: int, **own: int) -> dict[str, Any]:
    """Returns one dictionary for the same arguments: a launch is recognised by it."""
    return {"W": W, "N": N, "BLOCK_W": block, **own, "num_warps": warps}


def _by_tokens(W: int, N: int, **own: int) -> dict[str, Any]:
    return constants_of(W, N, _CHANNELS, 1, BLOCK_N=triton.next_power_of_2(N), CHUNK=CHUNK, **own)


def _tokens_of_gradients(N: int) -> int:
    # a thread holds the states around all tokens of a tile
    return _TOKENS if N <= 16 else 1


def refusal(tokens: Tensors, constants: Tensors, state: Tensor, options: Given) -> str | None:
    """Says why the kernels do not run such tensors, or None."""
    x, _, B, *_ = tokens
    assert x is not None and B is not None
    if B.ndim > x.ndim:
        return f"B {tuple(B.shape)} in groups; has B and C that serve all channels"
    if not 1 <= state.shape[-1] <= LARGEST_N:
        return f"states of {state.shape[-1]} numbers; has 1 to {LARGEST_N}"
    return unknown_dtype(x, state)


step_refusal = refusal


class _Chunks(NamedTuple):
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


def _chunks(tokens: Tensors, constants: Tensors, state: Tensor, cu: Tensor | None, softplus: bool) -> tuple[_Chunks, Tensor]:
    """Finds the states before all chunks; returns the last states, too."""
    x, dt, B, C, z = (None if x is None else readable(x) for x in tokens)
    A, D, bias = (None if x is None else x.contiguous() for x in constants)
    assert x is not None and dt is not None and B is not None and C is not None and A is not None
    (W, N), T, count, packed = A.shape, x.shape[-2], state.shape[0], cu is not None
    slots = T // CHUNK + count if packed else triton.cdiv(T, CHUNK) * count
    own = [x, dt, B.float(), C.float(), x if z is None else z]
    rates = (A.float() * _LOG2_E).t().contiguous()
    flags = {"SOFTPLUS": softplus, "HAS_BIAS": bias is not None, "PACKED": packed}
    chunks = _Chunks(
        own, [token_strides(given, packed) for given in own], [rates, A if D is None else D, A if bias is None else bias],
        x if cu is None else cu, flags, triton.cdiv(W, _CHANNELS), slots,
        torch.empty((slots, N, W), dtype=torch.float32, device=x.device),
        torch.empty((slots, W), dtype=torch.float32, device=x.device),
    )  # fmt: skip
    first = state.contiguous()
    last = torch.empty_like(first)
    if x.numel():
        arguments = (
            x,
            dt,
            own[2],
            rates,
            chunks.constants[2],
            chunks.part,
            chunks.total,
            chunks.cu,
            *chunks.strides[:3],
            T,
            count,
            1,
        )
        _start_states((slots, chunks.blocks, 1), arguments, _by_tokens(W, N, **flags))
    if last.numel():
        _between(chunks, chunks.part, first, last, T)
    return chunks, last


def _between(chunks: _Chunks, part: Tensor, first: Tensor | None, last: Tensor, T: int, reverse: bool = False) -> None:
    """Goes from chunk to chunk."""
    count, W, N = last.shape
    own = constants_of(
        W, N, _SCAN_CHANNELS, 4, CHUNK=CHUNK, HAS_FIRST=first is not None, REVERSE=reverse, PACKED=chunks.flags["PACKED"]
    )  # fmt: skip
    arguments = (part, chunks.total, chunks.constants[0], last if first is None else first, last, chunks.cu, T)
    _start_scan((count, triton.cdiv(W, _SCAN_CHANNELS), N), arguments, own)


def forward(
    tokens: Tensors, constants: Tensors, state: Tensor, cu: Tensor | None, options: Given
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns contiguous outputs in the dtype of x, and the last state of each sequence."""
    chunks, last = _chunks(tokens, constants, state, cu, bool(options[0]))
    x = chunks.tokens[0]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        own = _by_tokens(*state.shape[1:], HAS_D=constants[1] is not None, HAS_Z=tokens[4] is not None, **chunks.flags)
        tensors = (*chunks.tokens, *chunks.constants, chunks.part, y, chunks.cu)
        _start_outputs((chunks.slots, chunks.blocks, 1), (*tensors, *chunks.strides, x.shape[-2], state.shape[0], 1), own)
    return y, last


def backward(
    dy: Tensor, d_last: Tensor | None, tokens: Tensors, constants: Tensors, state: Tensor, cu: Tensor | None, options: Given
) -> list[Tensor]:  # fmt: skip
    """Returns the gradients of x, dt, B, C, z, A, D and dt_bias, of those that are there, and of the first states."""
    chunks, _ = _chunks(tokens, constants, state, cu, bool(options[0]))
    x, dt, B, C, z = chunks.tokens
    (count, W, N), T, wide = state.shape, x.shape[-2], {"dtype": torch.float32, "device": x.device}
    dy, slots, rows = dy.contiguous(), chunks.slots, x.numel() // W if W else 0
    has = {"HAS_Z": tokens[4] is not None, **chunks.flags}
    adjoint, dx, d_dt, dz, d_first = (
        torch.empty(like.shape, dtype=like.dtype, device=x.device) for like in (chunks.part, x, dt, z, state)
    )
    # not every slot of a packed batch has tokens
    dA, dD, d_bias = torch.zeros((slots, N, W), **wide), torch.zeros((slots, W), **wide), torch.zeros((slots, W), **wide)
    sums = torch.empty((chunks.blocks, rows, 2, triton.next_power_of_2(N)), **wide)
    rates, D, bias = chunks.constants
    if x.numel():
        arguments = (dy, dt, C, z, rates, bias, adjoint, chunks.cu, chunks.strides[1], *chunks.strides[3:], T, count, 1)
        _start_adjoints((slots, chunks.blocks, 1), arguments, _by_tokens(W, N, TOKENS=_TOKENS, **has))
    if state.numel():
        _between(chunks, adjoint, None if d_last is None else d_last.contiguous(), d_first, T, reverse=True)
    if x.numel():
        starts = torch.empty((slots * (CHUNK // _tokens_of_gradients(N)), N, W), **wide)
        found = (dx, d_dt, sums, dz, dA, dD, d_bias)
        tensors = (dy, x, dt, B, C, z, rates, D, bias, chunks.part, adjoint, starts, *found, chunks.cu)
        own = _by_tokens(W, N, TOKENS=_tokens_of_gradients(N), HAS_D=constants[1] is not None, **has)
        _start_gradients((slots, chunks.blocks, 1), (*tensors, *chunks.strides, T, count, 1), own)
    dB, dC = (d[:, :N].reshape(B.shape) for d in sums.sum(0).unbind(1))
    found = (dx, d_dt, dB, dC, dz, dA.sum(0).t(), dD.sum(0), d_bias.sum(0))
    pairs = zip((*tokens, *constants), found, strict=True)
    return [*(d.to(like.dtype).contiguous() for like, d in pairs if like is not None), d_first]


def step(state: Tensor, tokens: Tensors, constants: Tensors, slots: Tensor | None, options: Given) -> Tensor:
    """Reads one token of each sequence, changes the states in place, and returns contiguous outputs."""
    x, dt, B, C, z = tokens
    A, D, bias = (None if x is None else x.contiguous() for x in constants)
    assert x is not None and dt is not None and B is not None and C is not None and A is not None
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        own = constants_of(
            *A.shape, _STEP_CHANNELS, 4, BLOCK_N=triton.next_power_of_2(A.shape[1]), SOFTPLUS=bool(options[0]), HAS_BIAS=bias is not None, HAS_D=D is not None,
            HAS_Z=z is not None, HAS_SLOTS=slots is not None,
        )  # fmt: skip
        arguments = (
            state, x, dt, B, C, x if z is None else z, A, A if D is None else D, A if bias is None else bias,
            x if slots is None else slots, y,
            state.stride(), x.stride(), dt.stride(), B.stride(), C.stride(), x.stride() if z is None else z.stride(),
            0 if slots is None else slots.stride(0),
        )  # fmt: skip
        _start_step((x.shape[0], triton.cdiv(A.shape[0], _STEP_CHANNELS), 1), arguments, own)
    return y
