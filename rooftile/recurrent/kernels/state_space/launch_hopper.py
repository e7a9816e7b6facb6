"""Launches `outputs_hopper.py` and `gradients_hopper.py`. It is imported on Hopper alone."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor

from rooftile.recurrent.kernels.copies import state_box, token_box
from rooftile.recurrent.kernels.copies_hopper import described
from rooftile.recurrent.kernels.state_space.call import Call, Launch
from rooftile.recurrent.kernels.state_space.gradients_hopper import _chunk_gradients
from rooftile.recurrent.kernels.state_space.outputs_hopper import CHUNK, _outputs_of_pairs
from rooftile.runtime.launch import Kernel

STAGES = 3
# registers of a thread that computes, and of one that copies: with these the compiler spills least
OUTPUTS = {"COMPUTE_REGISTERS": 240, "LOAD_REGISTERS": 24}
GRADIENTS = {"COMPUTE_REGISTERS": 224, "LOAD_REGISTERS": 56}


def write_outputs(call: Call, start: Tensor, y: Tensor, last: Tensor) -> None:
    """Writes y, and the last states, from the states with which segments start."""
    tensors = (call.x, call.B, call.C, y, _cells(call), call.steps, start, last, call.skip, call.steps)
    call.start("outputs of pairs", tensors, lambda: _outputs(call))


def write_gradients(
    call: Call, g: Tensor, states: Tensor, d_states: Tensor, span: int, dx: Tensor, of_skip: Tensor, d_cb: Tensor, maps: Tensor,
    of_steps: tuple[Tensor, ...],
) -> None:  # fmt: skip
    """Writes dx and what a span of heads gives the other gradients; `of_steps` are what pairs, then states give them."""
    tensors = (
        call.x, call.B, call.C, g, dx, states, d_states, _cells(call), call.steps, call.steps, call.skip, of_skip, d_cb, *maps,
        *of_steps,
    )  # fmt: skip
    call.start("chunk gradients", tensors, lambda: _gradients(call, span, len(d_cb)))


def _outputs(call: Call) -> Launch:
    own = _constants(call.H, call.H // call.G, call.N, call.D is not None, WHOLE=call.whole, **OUTPUTS)
    numbers = (call.skip_strides, call.T, call.size, call.slots)
    return Launch(_outputs_kernel(call.N), (call.slots * call.H // 2, 1, 1), numbers, own)


def _gradients(call: Call, span: int, spans: int) -> Launch:
    own = _constants(call.H, call.H // call.G, call.N, call.D is not None, SPAN=span, **GRADIENTS)
    numbers = (call.skip_strides[0], call.T, call.size, call.slots)
    return Launch(_gradients_kernel(call.N), (call.slots * call.chunks, call.G, spans), numbers, own)


def _cells(call: Call) -> Tensor:
    return call.cb.view(-1, *call.cb.shape[2:])


@cache
def _outputs_kernel(N: int) -> Kernel:
    values, rows = token_box(CHUNK.value, CHUNK.value), token_box(CHUNK.value, N)
    return described(_outputs_of_pairs, values, rows, rows, values, state_box(CHUNK.value, CHUNK.value), line=CHUNK.value)


@cache
def _gradients_kernel(N: int) -> Kernel:
    values, rows, states = token_box(CHUNK.value, CHUNK.value), token_box(CHUNK.value, N), state_box(CHUNK.value, N)
    pairs = state_box(CHUNK.value, CHUNK.value)
    return described(_chunk_gradients, values, rows, rows, values, values, states, states, pairs, line=CHUNK.value)


@cache
def _constants(H: int, share: int, N: int, skip: bool, **own: Any) -> dict[str, Any]:
    """One dictionary for the same arguments: a launch is recognised by it."""
    return {
        "HEADS": H, "SHARE": share, "N": N, "SKIP": skip, "STAGES": STAGES, "num_warps": 4, **own,
    }  # fmt: skip
