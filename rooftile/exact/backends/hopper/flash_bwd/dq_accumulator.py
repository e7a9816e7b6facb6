"""The sum of dq in memory while its parts come in: fp32, in units of 64 x 64, each in the order of the threads that hold it.

A unit in that order goes through shared memory without a conflict between banks, four words at a time. `finalize` puts rows
and columns in their places, scales, and rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from rooftile.exact.backends.hopper.device.scheduler import PADDED, packed_tile
from rooftile.exact.backends.hopper.tiles import padded
from rooftile.exact.spec import Sizes, Spec
from rooftile.runtime.hopper.gluon import TensorDescriptor, gl, gluon
from rooftile.runtime.launch import Kernel

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


def shape(rows: int, D: int) -> tuple[int, int]:
    """The shape of the sum of dq of `rows` rows of D columns, fp32."""
    return rows * D // UNIT_COLUMNS.value, UNIT_COLUMNS.value


def descriptor(work: Tensor) -> TensorDescriptor:
    return TensorDescriptor(work, list(work.shape), [UNIT_COLUMNS.value, 1], [UNIT_ROWS.value, UNIT_COLUMNS.value], LAYOUT)


# fmt: off
@gluon.jit(do_not_specialize=["B", "H", "T", "padded_T"], do_not_specialize_on_alignment=["cu_ptr"])
def finalize_dq(
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


_kernel = Kernel(finalize_dq)


def finalize(spec: Spec, sizes: Sizes, padded_T: int, *, check_nan: bool) -> Callable[..., None]:
    """The launch that makes dq of its sum, given the sum, dq, the NaN flag and cu_q; sets the flag where it meets a NaN."""
    D, packed = padded(spec.dim), spec.layout == "packed"
    grid = (padded_T // UNIT.value * (D // UNIT.value), sizes.H, 1 if packed else sizes.B)
    # gradients of the scores are scaled already where they are rounded to fp16
    scale = 1.0 if spec.dtype == torch.float16 else spec.scale
    return _kernel.bound(grid, (sizes.B, sizes.H, sizes.T, padded_T, scale), _constants(spec.dim, packed, check_nan))


@cache
def _constants(dim: int, packed: bool, check_nan: bool) -> dict[str, int]:
    return {"D": padded(dim), "DIM": dim, "PACKED": packed, "CHECK_NAN": check_nan, "num_warps": 4}
