"""The backward: nothing of the forward is kept but its inputs.

States before chunks are computed again, and their gradients on a walk back; both are kept in memory, in bf16 for bf16, and then
every chunk is computed by itself (`gradients.py`). What is summed over chunks or shares of heads is added in one fixed order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from rooftile.recurrent.kernels.copies import state_box, token_box
from rooftile.recurrent.kernels.state_space.call import STEPPED, Call, Tile, some
from rooftile.recurrent.kernels.state_space.forward_pass import forward
from rooftile.recurrent.kernels.state_space.gate import through_gate
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
    call = Call(tokens, constants, state, cu, options, dy)
    d_last = torch.zeros_like(state) if d_last is None else d_last
    # a sequence without tokens hands its gradient on
    d_state = d_last.to(state.dtype, copy=True, memory_format=torch.contiguous_format)
    if not call.x.numel() or not state.numel():
        return [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (*tokens, *constants) if x is not None] + [
            d_state
        ]
    call.prepare()
    assert call.dy is not None
    g, gates = call.dy, []
    if call.z is not None:
        # in fp32: what a small gate brings into the range of fp16 may be outside of it
        y, _ = forward((*tokens[:-1], None), constants, state, cu, options, torch.float32)
        g, dz = through_gate(dy, y, call.z)
        gates = [dz]
    states = _walk(call, call.x, state.contiguous(), d_state, back=False)
    d_states = _walk(call, g, d_last.contiguous(), d_state, back=True)
    dx, dB, dC, D, of_steps = _summed(call, g, states, d_states)
    dt, A, bias = _of_steps(call, *of_steps)
    return [dx, dt, dB, dC, *gates, A, *D, *([] if call.bias is None else [bias]), d_state]


def _walk(call: Call, v: Tensor, first: Tensor, d_state: Tensor, back: bool) -> Tensor:
    """Returns the state with which a walk enters each chunk, (slots chunks, H, P, N); `d_state` is written on the way back."""
    start = call.starts(first, v, back)
    dtype = torch.bfloat16 if v.dtype == torch.bfloat16 else torch.float32
    kept = torch.empty((call.slots * call.chunks, call.H, call.P, call.N), dtype=dtype, device=v.device)
    tensors, strides = call.walked(v, back)
    arguments = (*tensors[:2], kept, *tensors[2:], start, d_state, call.cu, *strides, call.T, call.count, call.size, call.slots)
    own = some(_start_chunk_states, call.key, BACK=back, WHOLE=call.whole)
    tiles = token_box(call.block, call.columns), token_box(call.block, call.numbers), state_box(call.columns, call.numbers)
    call.start(_start_chunk_states, (call.slots, call.H, call.parts), arguments, own, *tiles)
    return kept


class Sums(NamedTuple):
    """The gradient of x, and what the heads of a group or the tokens of a chunk give other gradients."""

    dx: Tensor
    of_skip: Tensor  # (chunks, H, P), or for one D a head (chunks, H, BLOCK)
    d_cb: Tensor  # (spans, chunks, G, BLOCK, BLOCK)
    of_pairs: Tensor  # (kinds, H parts, slots, size)
    maps: Tensor  # (2, spans, chunks, G, BLOCK, N)
    of_states: Tensor  # (2, H parts, slots, size)
    through: Tensor  # (H parts, slots, chunks), or BLOCK numbers of a chunk


def _summed(
    call: Call, g: Tensor, states: Tensor, d_states: Tensor
) -> tuple[Tensor, Tensor, Tensor, list[Tensor], tuple[Tensor, ...]]:
    """Returns the gradients of x, B, C and D (none, where there is no D), and what is to be summed for steps."""
    sums = constants_of_sums(call.tile, call.N, "_map_sums")
    made = _on_hopper(call, g, states, d_states) if call.suits_warpgroups(g) else _in_two_kernels(call, g, states, d_states)
    dB, dC = torch.empty((2, *call.B.shape), dtype=call.x.dtype, device=call.x.device)
    given = (
        call.B, call.C, made.d_cb, *made.maps, dB, dC, call.cu, call.strides(call.B), call.strides(call.C), call.T, call.count,
        call.size, call.slots,
    )  # fmt: skip
    grid = call.slots * call.chunks, call.G, triton.cdiv(call.N, sums["BLOCK_S"])
    _start_map_sums(grid, given, some(_start_map_sums, call.key, GROUPS=call.G, SPANS=len(made.d_cb), **sums))
    D = []
    if call.D is not None:
        summed = made.of_skip.sum(0)
        D = [(summed if call.D.ndim == 2 else summed.sum(1)).to(call.D.dtype)]
    return made.dx, dB, dC, D, (*made.of_pairs[:3], *made.of_states, made.through)


def _sums(call: Call, stripes: int, parts_n: int, skipped: int, through: int = 1) -> Sums:
    """Returns empty sums: pairs in `stripes`, states in `parts_n` of N, and of a head's chunk numbers of D and of what goes through."""
    x, heads, cells = call.x, call.H * call.parts, call.slots * call.chunks
    spans = triton.cdiv(call.H // call.G, SPAN)

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=x.device)

    # chunks that no sequence has add nothing
    of_skip = x if call.D is None else torch.zeros((cells * stripes, call.H, skipped), dtype=torch.float32, device=x.device)
    return Sums(
        torch.empty(x.shape, dtype=x.dtype, device=x.device), of_skip, floats(spans, cells, call.G, call.block, call.block),
        floats(2 + stripes, heads, call.slots, call.size), floats(2, spans, cells, call.G, call.block, call.N),
        floats(2, heads * parts_n, call.slots, call.size), floats(heads * parts_n, call.slots, call.chunks * through),
    )  # fmt: skip


def _on_hopper(call: Call, g: Tensor, states: Tensor, d_states: Tensor) -> Sums:
    from rooftile.recurrent.kernels.state_space.launch_hopper import write_gradients

    made = _sums(call, 1, 1, call.block, call.block)
    spans = len(made.d_cb)
    write_gradients(
        call, g, states, d_states, -(-(call.H // call.G) // spans), made.dx, made.of_skip, made.d_cb, made.maps,
        (*made.of_pairs[:2], *made.of_states, made.through),
    )  # fmt: skip
    return made


def _in_two_kernels(call: Call, g: Tensor, states: Tensor, d_states: Tensor) -> Sums:
    x, tile = call.x, call.tile
    pairs, maps = (constants_of_sums(tile, call.N, name) for name in ("_input_gradients", "_map_gradients"))
    stripes, parts_n = call.block // tile.rows, triton.cdiv(call.N, maps["BLOCK_S"])
    made = _sums(call, stripes, parts_n, call.P)
    cells, spans = call.slots * call.chunks, len(made.d_cb)
    sizes = call.T, call.count, call.size, call.slots
    of_x, of_b, of_c, of_g = map(call.strides, (x, call.B, call.C, g))
    skip, d_strides = call.skip
    span = -(-(call.H // call.G) // spans)
    own = some(_start_inputs, call.key, SPAN=span, SKIP=call.D is not None, **pairs)
    given: tuple[Any, ...] = (
        x, call.B, g, d_states, skip, call.cb, *call.steps, made.dx, made.of_skip, made.d_cb, *made.of_pairs[:3], call.cu, of_x, of_b,
        of_g, d_strides, *sizes,
    )  # fmt: skip
    rows, columns = tile.rows, call.columns
    tiles = token_box(rows, columns), token_box(rows, call.numbers), token_box(call.block, columns)
    call.start(_start_inputs, (cells * stripes, call.G, spans), given, own, *tiles, state_box(columns, call.numbers))
    given = (
        x, call.B, call.C, g, states, d_states, *call.steps, *made.maps, *made.of_states, made.through, call.cu, of_x, of_b, of_c,
        of_g, *sizes,
    )  # fmt: skip
    of_values, of_rows = token_box(call.block, columns), token_box(call.block, maps["BLOCK_S"])
    tiles = of_values, of_rows, of_rows, of_values, *[state_box(columns, maps["BLOCK_S"])] * 2
    call.start(_start_maps, (cells * parts_n, call.G, spans), given, some(_start_maps, call.key, SPAN=span, **maps), *tiles)
    return made


def constants_of_sums(tile: Tile, N: int, name: str) -> dict[str, Any]:
    """Returns what the tile says of a kernel that sums over heads, or over their shares."""
    if name == "_input_gradients":
        return {"BLOCK_R": tile.rows, "STAGES": tile.pair_stages, "num_warps": tile.pair_warps, "num_stages": tile.pair_stages}
    columns = {"BLOCK_S": min(tile.of_state, max(triton.next_power_of_2(N), 16))}
    if name == "_map_sums":
        return columns | {"num_warps": 8}
    return columns | {"STAGES": tile.map_stages, "num_warps": tile.map_warps, "num_stages": tile.map_stages}


def _of_steps(call: Call, *given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of dt, A and the bias from what pairs and states gave."""
    softplus, low, high = call.options
    d_dt = torch.empty(call.dt.shape, dtype=call.dt.dtype, device=call.dt.device)
    cells = call.slots * call.chunks
    # chunks that no sequence has add nothing
    sums = torch.zeros((2, cells, call.H), dtype=torch.float32, device=call.dt.device)
    bias = call.A if call.bias is None else call.bias
    arguments = (
        call.dt, bias, call.A, call.steps[0], *given, d_dt, sums[0], sums[1], call.cu, call.strides(call.dt), call.T,
        call.count, call.size, call.slots, float(low), float(high),
    )  # fmt: skip
    own = {
        "PARTS": call.parts,
        "STRIPES": call.block // call.tile.rows,
        "PARTS_N": given[-1].shape[0] // (call.H * call.parts),
        "THROUGH_ROWS": given[-1].shape[2] == call.size,
        "SOFTPLUS": bool(softplus),
        "BIAS": call.bias is not None,
    }
    grid = cells, triton.cdiv(call.H, STEPPED), 1
    _start_step_gradients(grid, arguments, some(_start_step_gradients, call.key, **own))
    d_rate, d_bias = sums.sum(1)
    return d_dt, d_rate.to(call.A.dtype), d_bias.to(bias.dtype)
