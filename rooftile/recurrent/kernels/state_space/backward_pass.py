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
from rooftile.recurrent.kernels.state_space.call import STEPPED, Call, Launch, Tile, some
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
    walked = call.x.numel() and state.numel() and not call.packed
    # a sequence without tokens hands its gradient on
    d_state = (
        call.floats("d_state", *state.shape, dtype=state.dtype) if walked
        else d_last.to(state.dtype, copy=True, memory_format=torch.contiguous_format)
    )  # fmt: skip
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
    kept = call.floats("kept", call.slots * call.chunks, call.H, call.P, call.N, dtype=dtype)
    tensors = (*call.walked(v, back), kept, call.step, call.total, start, d_state, call.cu)
    call.start(("chunk states", back), tensors, lambda: _states(call, v, back))
    return kept


def _states(call: Call, v: Tensor, back: bool) -> Launch:
    numbers = (*call.walked_strides(v, back), *call.sizes, call.slots)
    own = some(_start_chunk_states, call.key, BACK=back, WHOLE=call.whole)
    tiles = token_box(call.block, call.columns), token_box(call.block, call.numbers), state_box(call.columns, call.numbers)
    return Launch(_start_chunk_states, (call.slots, call.H, call.parts), numbers, own, tiles)


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
    made = _on_hopper(call, g, states, d_states) if call.suits_warpgroups(g) else _in_two_kernels(call, g, states, d_states)
    dtype = call.x.dtype
    dB, dC = (call.floats("maps' gradients", *call.B.shape, dtype=dtype) for _ in range(2))
    call.start("map sums", (call.B, call.C, made.d_cb, *made.maps, dB, dC, call.cu), lambda: _map_sums_of(call, len(made.d_cb)))
    D = []
    if call.D is not None:
        D = [made.of_skip.sum(0 if call.D.ndim == 2 else (0, 2)).to(call.D.dtype)]
    return made.dx, dB, dC, D, (*made.of_pairs[:3], *made.of_states, made.through)


def _map_sums_of(call: Call, spans: int) -> Launch:
    sums = constants_of_sums(call.tile, call.N, "_map_sums")
    numbers = (call.strides(call.B), call.strides(call.C), *call.sizes, call.slots)
    grid = call.slots * call.chunks, call.G, triton.cdiv(call.N, sums["BLOCK_S"])
    return Launch(_start_map_sums, grid, numbers, some(_start_map_sums, call.key, GROUPS=call.G, SPANS=spans, **sums))


def _sums(call: Call, stripes: int, parts_n: int, skipped: int, through: int = 1) -> Sums:
    """Returns empty sums: pairs in `stripes`, states in `parts_n` of N, and of a head's chunk numbers of D and of what goes through."""
    x, heads, cells = call.x, call.H * call.parts, call.slots * call.chunks
    spans = triton.cdiv(call.H // call.G, SPAN)
    of_skip = x
    if call.D is not None:
        of_skip = call.floats("of skip", cells * stripes, call.H, skipped)
        _clear_chunks_without_tokens(call, of_skip)
    return Sums(
        call.floats("dx", *x.shape, dtype=x.dtype), of_skip, call.floats("d_cb", spans, cells, call.G, call.block, call.block),
        call.floats("of pairs", 2 + stripes, heads, call.slots, call.size),
        call.floats("maps", 2, spans, cells, call.G, call.block, call.N),
        call.floats("of states", 2, heads * parts_n, call.slots, call.size),
        call.floats("through", heads * parts_n, call.slots, call.chunks * through),
    )  # fmt: skip


def _clear_chunks_without_tokens(call: Call, sums: Tensor) -> None:
    """Sets sums over chunks to 0 if some chunk has no token: its program writes nothing."""
    if call.packed or call.slots * call.size > call.count * -(-call.T // call.block) * call.block:
        sums.zero_()


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
    maps = constants_of_sums(tile, call.N, "_map_gradients")
    stripes, parts_n = call.block // tile.rows, triton.cdiv(call.N, maps["BLOCK_S"])
    made = _sums(call, stripes, parts_n, call.P)
    tensors = (
        x, call.B, g, d_states, call.skip, call.cb, call.step, call.total, made.dx, made.of_skip, made.d_cb, *made.of_pairs[:3],
        call.cu,
    )  # fmt: skip
    call.start("inputs", tensors, lambda: _inputs(call, g, len(made.d_cb)))
    tensors = (
        x, call.B, call.C, g, states, d_states, call.step, call.total, *made.maps, *made.of_states, made.through, call.cu,
    )  # fmt: skip
    call.start("maps", tensors, lambda: _maps(call, g, len(made.d_cb)))
    return made


def _inputs(call: Call, g: Tensor, spans: int) -> Launch:
    pairs, columns = constants_of_sums(call.tile, call.N, "_input_gradients"), call.columns
    own = some(_start_inputs, call.key, SPAN=-(-(call.H // call.G) // spans), SKIP=call.D is not None, **pairs)
    numbers = (*map(call.strides, (call.x, call.B, g)), call.skip_strides, *call.sizes, call.slots)
    rows = call.tile.rows
    tiles = (
        token_box(rows, columns),
        token_box(rows, call.numbers),
        token_box(call.block, columns),
        state_box(columns, call.numbers),
    )
    grid = call.slots * call.chunks * (call.block // rows), call.G, spans
    return Launch(_start_inputs, grid, numbers, own, tiles)


def _maps(call: Call, g: Tensor, spans: int) -> Launch:
    maps, columns = constants_of_sums(call.tile, call.N, "_map_gradients"), call.columns
    own = some(_start_maps, call.key, SPAN=-(-(call.H // call.G) // spans), **maps)
    numbers = (*map(call.strides, (call.x, call.B, call.C, g)), *call.sizes, call.slots)
    of_values, of_rows = token_box(call.block, columns), token_box(call.block, maps["BLOCK_S"])
    tiles = of_values, of_rows, of_rows, of_values, *[state_box(columns, maps["BLOCK_S"])] * 2
    grid = call.slots * call.chunks * triton.cdiv(call.N, maps["BLOCK_S"]), call.G, spans
    return Launch(_start_maps, grid, numbers, own, tiles)


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
    d_dt = call.floats("d_dt", *call.dt.shape, dtype=call.dt.dtype)
    sums = call.floats("of steps", 2, call.slots * call.chunks, call.H)
    _clear_chunks_without_tokens(call, sums)
    bias = call.A if call.bias is None else call.bias
    tensors = (call.dt, bias, call.A, call.step, *given, d_dt, *sums, call.cu)
    call.start("step gradients", tensors, lambda: _step_gradients_of(call, given[-1]))
    d_rate, d_bias = sums.sum(1)
    return d_dt, d_rate.to(call.A.dtype), d_bias.to(bias.dtype)


def _step_gradients_of(call: Call, through: Tensor) -> Launch:
    softplus, low, high = call.options
    own = {
        "PARTS": call.parts,
        "STRIPES": call.block // call.tile.rows,
        "PARTS_N": through.shape[0] // (call.H * call.parts),
        "THROUGH_ROWS": through.shape[2] == call.size,
        "SOFTPLUS": bool(softplus),
        "BIAS": call.bias is not None,
    }
    numbers = (call.strides(call.dt), *call.sizes, call.slots, float(low), float(high))
    grid = call.slots * call.chunks, triton.cdiv(call.H, STEPPED), 1
    return Launch(_start_step_gradients, grid, numbers, some(_start_step_gradients, call.key, **own))
