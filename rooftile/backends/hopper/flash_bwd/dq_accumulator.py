"""The sum of dq in memory while its parts come in: fp32, in units of 64 x 64, each in the order of the threads that hold it.

A unit in that order goes through shared memory without a conflict between banks, four words at a time. `finish` puts rows
and columns in their places, scales, and rounds.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from rooftile.backends.hopper.device.scheduler import PADDED, packed_tile
from rooftile.backends.hopper.gluon import TensorDescriptor, gl, gluon
from rooftile.backends.hopper.tiles import padded
from rooftile.launch import Kernel

# queries, and columns, of a unit; then its words as the copy engine sees them
UNIT = gl.constexpr(64)
UNIT_ROWS = gl.constexpr(16)
UNIT_COLUMNS = gl.constexpr(256)
LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


@gluon.jit
def to_thread_order(x):
    """An accumulator (64, 64) as a unit: four words of one thread, thread by thread, then the next four."""
    words = x.reshape([4, 2, 8, 4, 2, 4, 2]).permute((3, 1, 0, 2, 5, 4, 6)).reshape([4096])
    words = gl.convert_layout(words, gl.BlockedLayout([4], [32], [4], [0]), assert_trivial=True)
    return words.reshape([UNIT_ROWS, UNIT_COLUMNS])


def empty(rows: int, D: int, device: torch.device) -> Tensor:
    return torch.empty((rows * D // UNIT_COLUMNS.value, UNIT_COLUMNS.value), dtype=torch.float32, device=device)


def descriptor(work: Tensor) -> TensorDescriptor:
    return TensorDescriptor(work, list(work.shape), [UNIT_COLUMNS.value, 1], [UNIT_ROWS.value, UNIT_COLUMNS.value], LAYOUT)


# fmt: off
@gluon.jit(do_not_specialize=["B", "H", "T", "padded_T"], do_not_specialize_on_alignment=["cu_ptr"])
def finish_dq(
    dq_sum_ptr, dq_ptr, nan_flag_ptr, cu_ptr, B, H, T, padded_T, scale,
    D: gl.constexpr, DIM: gl.constexpr, PACKED: gl.constexpr, CHECK_NAN: gl.constexpr,
):
    # fmt: on
    tile: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    unit = gl.program_id(0)
    h = gl.program_id(1)
    b = gl.program_id(2).to(gl.int64)
    first = unit // (D // UNIT) * UNIT
    t = first + gl.arange(0, UNIT, gl.SliceLayout(1, tile))
    there = t < T
    if PACKED:
        i_b, _ = packed_tile(first // PADDED, cu_ptr, B, PADDED)
        row_0 = gl.load(cu_ptr + i_b).to(gl.int32)
        t = row_0 + t - (row_0 // PADDED + i_b) * PADDED
        there = t < gl.load(cu_ptr + i_b + 1).to(gl.int32)
    words = (b * H + h) * padded_T * D + unit * (UNIT * UNIT)
    x = gl.load(dq_sum_ptr + words + gl.arange(0, UNIT * UNIT, gl.BlockedLayout([4], [32], [4], [0]))) * scale
    if CHECK_NAN:
        lost = gl.max((x != x).to(gl.int32), 0)
        gl.store(nan_flag_ptr, 1, mask=lost != 0)
    x = x.reshape([4, 2, 4, 8, 4, 2, 2]).permute((2, 1, 3, 0, 5, 4, 6)).reshape([UNIT, UNIT])
    x = gl.convert_layout(x.to(dq_ptr.dtype.element_ty), tile)
    column = unit % (D // UNIT) * UNIT + gl.arange(0, UNIT, gl.SliceLayout(0, tile))
    line = ((b * T + t) * H + h) * DIM
    mask = gl.expand_dims(there, 1) & gl.expand_dims(column < DIM, 0)
    gl.store(dq_ptr + gl.expand_dims(line, 1) + gl.expand_dims(column, 0), x, mask=mask)


_start_finish = Kernel(finish_dq)


def finish(work: Tensor, dq: Tensor, lost: Tensor | None, cu_q: Tensor | None, padded_T: int, scale: float) -> None:
    """dq from its sum; notes a NaN in `lost`."""
    T, H, dim = dq.shape[-3:]
    B = dq.shape[0] if cu_q is None else cu_q.shape[0] - 1
    grid = (padded_T // UNIT.value * (padded(dim) // UNIT.value), H, B if cu_q is None else 1)
    tensors = (work, dq, dq if lost is None else lost, dq if cu_q is None else cu_q)
    _start_finish(grid, (*tensors, B, H, T, padded_T, scale), _constants(dim, cu_q is not None, lost is not None))


@cache
def _constants(dim: int, packed: bool, care: bool) -> dict[str, int]:
    return {"D": padded(dim), "DIM": dim, "PACKED": packed, "CHECK_NAN": care, "num_warps": 4}
