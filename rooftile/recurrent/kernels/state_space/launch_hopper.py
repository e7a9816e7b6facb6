"""Launches `outputs_hopper.py`. It is imported on Hopper alone."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from torch import Tensor

from rooftile.recurrent.kernels.state_space.call import Call
from rooftile.recurrent.kernels.state_space.copies import Box, axes_of, state_box, token_box
from rooftile.recurrent.kernels.state_space.outputs_hopper import CHUNK, _outputs_of_pairs
from rooftile.runtime.hopper.gluon import TensorDescriptor, gl
from rooftile.runtime.launch import Kernel

STAGES = 3


def write_outputs(call: Call, start: Tensor, y: Tensor, last: Tensor) -> None:
    """Writes y, and the last states, from the states with which segments start."""
    skip, d_strides = call.skip
    own = _constants(call.H, call.H // call.G, call.N, call.D is not None, call.whole)
    cells = call.cb.view(-1, *call.cb.shape[2:])
    given = (
        call.x, call.B, call.C, y, cells, call.steps, start, last, skip, call.steps, d_strides, call.T, call.size, call.slots,
    )  # fmt: skip
    _kernel(call.N)((call.slots * call.H // 2, 1, 1), given, own)


@cache
def _kernel(N: int) -> Kernel:
    chunk: int = CHUNK.value
    values, rows = token_box(chunk, chunk), token_box(chunk, N)
    boxes = values, rows, rows, values, state_box(chunk, chunk)
    return Kernel(_outputs_of_pairs, (*(partial(_tile, box=box) for box in boxes), partial(_line, count=chunk)))


@cache
def _constants(H: int, share: int, N: int, skip: bool, whole: bool) -> dict[str, Any]:
    return {
        "HEADS": H, "SHARE": share, "N": N, "SKIP": skip, "WHOLE": whole, "STAGES": STAGES, "WALK_REGISTERS": 240,
        "LOAD_REGISTERS": 24, "num_warps": 4,
    }  # fmt: skip


def _tile(x: Tensor, box: Box) -> TensorDescriptor:
    shape, strides, box = axes_of(x, box)
    return TensorDescriptor(x, shape, strides, box, layout(tuple(box)))


def _line(x: Tensor, count: int) -> TensorDescriptor:
    return TensorDescriptor(x, [x.numel()], [1], [count], LINE)


LINE = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)


@cache
def layout(box: tuple[int, ...]) -> gl.NVMMASharedLayout:
    """The layout of a tile of bf16 in shared memory."""
    return gl.NVMMASharedLayout.get_default_for(list(box), gl.bfloat16)
