"""The backward: nothing of the forward is kept but its inputs.

States before chunks are computed again, and their gradients on a walk back; both are kept in memory, in bf16 for bf16, and then
every chunk is computed by itself (`gradients.py`). What is summed over chunks or shares of heads is added in one fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from rooftile.recurrent.kernels.parts import readable
from rooftile.recurrent.kernels.state_space.call import Call, some, tile_of
from rooftile.recurrent.kernels.state_space.gradients import _gradients, _step_gradients
from rooftile.recurrent.kernels.state_space.states import _chunk_states
from rooftile.recurrent.rule import Given, Tensors
from rooftile.runtime.launch import Kernel

_start_chunk_states, _start_gradients, _start_step_gradients = map(Kernel, (_chunk_states, _gradients, _step_gradients))
# heads that a program goes through at most: whatever the batch, so that no sequence depends on another
SPAN = 20


def backward(
    dy: Tensor, d_last: Tensor | None, tokens: Tensors, constants: Tensors, state: Tensor, cu: Tensor | None, options: Given
) -> list[Tensor]:
    """Returns the gradients of the tensors that are there, in order, and of the first state."""
    call = Call(tokens, constants, state, cu, options, back=True)
    d_last = torch.zeros_like(state) if d_last is None else d_last
    # a sequence without tokens hands its gradient on
    d_state = d_last.to(state.dtype, copy=True, memory_format=torch.contiguous_format)
    if not call.x.numel() or not state.numel():
        return [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (*tokens, *constants) if x is not None] + [
            d_state
        ]
    call.prepare()
    dy = readable(dy)
    kept = _walk(call, call.x, state.contiguous(), d_state, back=False)
    kept_back = _walk(call, dy, d_last.contiguous(), d_state, back=True)
    return [*_token_gradients(call, dy, kept, kept_back), d_state]


def _walk(call: Call, v: Tensor, first: Tensor, d_state: Tensor, back: bool) -> Tensor:
    """Returns the state with which a walk enters each chunk, (slots, chunks, H, P, N); `d_state` is written on the way back."""
    start = call.starts(first, v, back)
    dtype = torch.bfloat16 if v.dtype == torch.bfloat16 else torch.float32
    kept = torch.empty((call.slots, call.chunks, call.H, call.P, call.N), dtype=dtype, device=v.device)
    *tensors, strides = call.walked(v, back)
    arguments = (
        *tensors, start, kept, d_state, call.cu, *strides, call.T, call.count, call.size, call.slots,
    )  # fmt: skip
    own = {"GATED": back and call.z is not None, "BACK": back, "WHOLE": call.whole}
    _start_chunk_states((call.slots, call.H, call.parts), arguments, some(_start_chunk_states, call.key, **own))
    return kept


def _token_gradients(call: Call, dy: Tensor, kept: Tensor, kept_back: Tensor) -> list[Tensor]:
    """Returns the gradients of all tensors but the first state."""
    x, H, P, device = call.x, call.H, call.P, call.x.device
    dx = torch.empty(x.shape, dtype=x.dtype, device=device)
    dz = dx if call.z is None else torch.empty_like(dx)
    share = H // call.G
    spans = triton.cdiv(share, SPAN)
    d_bc = torch.empty((2, spans, *call.B.shape), dtype=torch.float32, device=device)
    # chunks that no sequence has add nothing
    d_skip = torch.zeros((call.slots * call.chunks, H, P), dtype=torch.float32, device=device) if call.D is not None else kept
    heads = H * call.parts
    per_token = torch.empty((3, heads, call.slots, call.size), dtype=torch.float32, device=device)
    through = torch.empty((heads, call.slots, call.chunks), dtype=torch.float32, device=device)
    skip, d_strides = call.skip
    tile = tile_of(call.N, x.dtype, call.key[3], back=True)
    own: dict[str, Any] = {"GATED": call.z is not None, "SKIP": call.D is not None, "SPAN": -(-share // spans)}
    own |= {"STAGES": tile.sum_stages, "num_warps": tile.sum_warps, "num_stages": tile.sum_stages}
    arguments: tuple[Any, ...] = (
        x, call.B, call.C, x if call.z is None else call.z, dy, skip, call.cb, call.steps[0], call.steps[1], kept, kept_back,
        dx, d_bc[0], d_bc[1], dz, d_skip, *per_token, through, call.cu,
        *map(call.strides, (x, call.B, call.C, call.z, dy)), d_strides, call.T, call.count, call.size, call.slots,
        call.B.numel() // (call.G * call.N),
    )  # fmt: skip
    grid = call.slots * call.chunks, call.G, spans
    _start_gradients(grid, arguments, some(_start_gradients, call.key, **own))
    dt, d_rate, d_bias = _of_steps(call, per_token, through)
    dB, dC = (one[0] if spans == 1 else one.sum(0) for one in d_bc)
    found: list[Tensor] = [dx, dt, dB.to(call.B.dtype), dC.to(call.C.dtype)]
    if call.z is not None:
        found.append(dz)
    found.append(d_rate)
    if call.D is not None:
        own_d = d_skip.sum(0)
        found.append((own_d if call.D.ndim == 2 else own_d.sum(1)).to(call.D.dtype))
    return [*found, *([] if call.bias is None else [d_bias])]


def _of_steps(call: Call, per_token: Tensor, through: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of dt, A and the bias."""
    softplus, low, high = call.options
    d_dt = torch.empty(call.dt.shape, dtype=call.dt.dtype, device=call.dt.device)
    sums = torch.zeros((2, call.slots, call.H), dtype=torch.float32, device=call.dt.device)
    bias = call.A if call.bias is None else call.bias
    arguments = (
        call.dt, bias, call.A, call.steps[0], *per_token, through, d_dt, sums[0], sums[1], call.cu, call.strides(call.dt), call.T,
        call.count, call.size, call.slots, float(low), float(high),
    )  # fmt: skip
    own = {"PARTS": call.parts, "SOFTPLUS": bool(softplus), "BIAS": call.bias is not None}
    _start_step_gradients((call.slots, call.H, 1), arguments, some(_start_step_gradients, call.key, **own))
    d_rate, d_bias = sums.sum(1)
    return d_dt, d_rate.to(call.A.dtype), d_bias.to(bias.dtype)
