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
from rooftile.recurrent.kernels.state_space.call import Call, some
from rooftile.recurrent.kernels.state_space.gradients import _input_gradients, _map_gradients, _map_sums
from rooftile.recurrent.kernels.state_space.states import _chunk_states
from rooftile.recurrent.kernels.state_space.step_gradients import _step_gradients
from rooftile.recurrent.rule import Given, Tensors
from rooftile.runtime.launch import Kernel

_start_chunk_states, _start_inputs, _start_maps, _start_map_sums, _start_step_gradients = map(
    Kernel, (_chunk_states, _input_gradients, _map_gradients, _map_sums, _step_gradients)
)
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
    x, z, H, device = call.x, call.z, call.H, call.x.device
    share, tile = H // call.G, call.tile
    spans = triton.cdiv(share, SPAN)
    columns = min(tile.of_state, max(triton.next_power_of_2(call.N), 16))
    parts_n = triton.cdiv(call.N, columns)
    cells, heads = call.slots * call.chunks, H * call.parts

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    dx = torch.empty(x.shape, dtype=x.dtype, device=device)
    dz = dx if z is None else torch.empty_like(dx)
    dB, dC = torch.empty((2, *call.B.shape), dtype=x.dtype, device=device)
    # chunks that no sequence has add nothing
    d_skip = x if call.D is None else torch.zeros((cells, H, call.P), dtype=torch.float32, device=device)
    d_cb = floats(spans, cells, call.G, call.block, call.block)
    of_pairs = floats(2, heads, call.slots, call.size)
    skip, d_strides = call.skip
    sizes = call.T, call.count, call.size, call.slots
    own: dict[str, Any] = {"GATED": z is not None, "SKIP": call.D is not None, "SPAN": -(-share // spans)}
    own |= {"STAGES": tile.pair_stages, "num_warps": tile.pair_warps, "num_stages": tile.pair_stages}
    given: tuple[Any, ...] = (
        x, call.B, call.C, x if z is None else z, dy, skip, call.cb, *call.steps, kept, kept_back, dx, dz, d_skip, d_cb,
        *of_pairs, call.cu, *map(call.strides, (x, call.B, call.C, z, dy)), d_strides, *sizes,
    )  # fmt: skip
    _start_inputs((cells, call.G, spans), given, some(_start_inputs, call.key, **own))
    parts = floats(2, spans, cells, call.G, call.block, call.N)
    of_states = floats(2, heads * parts_n, call.slots, call.size)
    through = floats(heads * parts_n, call.slots, call.chunks)
    own |= {"BLOCK_S": columns, "STAGES": tile.map_stages, "num_warps": tile.map_warps, "num_stages": tile.map_stages}
    given = (
        x, call.B, call.C, x if z is None else z, dy, *call.steps, kept, kept_back, *parts, *of_states, through, call.cu,
        *map(call.strides, (x, call.B, call.C, z, dy)), *sizes,
    )  # fmt: skip
    _start_maps((cells * parts_n, call.G, spans), given, some(_start_maps, call.key, **own))
    given = (call.B, call.C, d_cb, *parts, dB, dC, call.cu, call.strides(call.B), call.strides(call.C), *sizes)
    own = {"BLOCK_S": columns, "GROUPS": call.G, "SPANS": spans, "num_warps": tile.map_warps}
    _start_map_sums((cells, call.G, parts_n), given, some(_start_map_sums, call.key, **own))
    dt, d_rate, d_bias = _of_steps(call, (*of_pairs, *of_states, through), parts_n)
    found = [dx, dt, dB, dC, *([] if z is None else [dz]), d_rate]
    if call.D is not None:
        own_d = d_skip.sum(0)
        found.append((own_d if call.D.ndim == 2 else own_d.sum(1)).to(call.D.dtype))
    return [*found, *([] if call.bias is None else [d_bias])]


def _of_steps(call: Call, sums_of_tokens: tuple[Tensor, ...], parts_n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of dt, A and the bias."""
    softplus, low, high = call.options
    d_dt = torch.empty(call.dt.shape, dtype=call.dt.dtype, device=call.dt.device)
    sums = torch.zeros((2, call.slots, call.H), dtype=torch.float32, device=call.dt.device)
    bias = call.A if call.bias is None else call.bias
    arguments = (
        call.dt, bias, call.A, call.steps[0], *sums_of_tokens, d_dt, sums[0], sums[1], call.cu, call.strides(call.dt), call.T,
        call.count, call.size, call.slots, float(low), float(high),
    )  # fmt: skip
    own = {"PARTS": call.parts, "PARTS_N": parts_n, "SOFTPLUS": bool(softplus), "BIAS": call.bias is not None}
    _start_step_gradients((call.slots, call.H, 1), arguments, some(_start_step_gradients, call.key, **own))
    d_rate, d_bias = sums.sum(1)
    return d_dt, d_rate.to(call.A.dtype), d_bias.to(bias.dtype)
