"""Computes the row statistics for the backward: lse in units of log2, NaN for a far row (see `device.row_stats`), and

    D_i = sum_c dO_ic O_ic - dL_i             dL is the gradient of lse: dS = P (dP - D) then includes it

A row that sees nothing gets lse = +inf: exp(x - inf) is 0, so its weights are 0. Each sequence, dense or packed, is padded to a
multiple of 128 with such rows, because a TMA copy can only begin at every fourth word. If dq is added up in memory, its sum is
set to zero here.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftile.exact.backends.device.row_stats import FAR_OF_HALF, pack
from rooftile.exact.backends.hopper.device.config import LOG2E
from rooftile.exact.backends.hopper.device.scheduler import PADDED, packed_tile
from rooftile.exact.backends.hopper.flash_bwd import dq_accumulator
from rooftile.exact.backends.hopper.plan import rows_shape
from rooftile.exact.backends.hopper.tiles import padded
from rooftile.exact.spec import Sizes, Spec
from rooftile.runtime.hopper.gluon import gl, gluon
from rooftile.runtime.launch import Kernel, empties

ROWS = gl.constexpr(32)


class RowStats(NamedTuple):
    """The numbers of (B, H, padded T) or packed (H, padded total) rows, and what is kept beside them."""

    lse: Tensor
    delta: Tensor
    rows: Tensor | None  # delta in the shape of lse, for the gradient of sinks
    words: Tensor  # both in one word, and
    rests: Tensor  # what far rows need besides (see `device.row_stats`): both for a repair, unless NaN is checked any tensors
    # three int32, 0: the kernels set the first where they meet a NaN; unless NaN is checked, any tensor
    nan_flag: Tensor
    dq_sum: Tensor | None  # zeros to add dq to (see `dq_accumulator`)


_pack_lse_delta = gluon.jit(pack)


# fmt: off
@gluon.jit(
    do_not_specialize=[
        "o_unit_b", "o_unit_t", "o_unit_h", "do_unit_b", "do_unit_t", "do_unit_h", "B", "H", "T", "padded_T",
    ],
    do_not_specialize_on_alignment=["lse_ptr", "dlse_ptr", "cu_ptr"],
)
def compute_row_stats(
    o_ptr, do_ptr, lse_ptr, dlse_ptr, words_ptr, delta_ptr, rows_ptr, stats_ptr, rests_ptr, nan_flag_ptr, sum_ptr, cu_ptr,
    o_unit_b, o_unit_t, o_unit_h,                       # strides, in units of 8 elements
    do_unit_b, do_unit_t, do_unit_h,
    B, H, T, padded_T,
    D: gl.constexpr, DIM: gl.constexpr,
    DO: gl.constexpr, DLSE: gl.constexpr, SINKS: gl.constexpr, CHECK_NAN: gl.constexpr, PACKED: gl.constexpr,
    BIAS: gl.constexpr,                                 # Triton's scores are natural then
    FAR: gl.constexpr,                                  # an lse beyond it is far (see `device.row_stats`)
    SUM: gl.constexpr,                                  # columns of the sum of dq, 0 if there is none
):
    # fmt: on
    tile: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    line: gl.constexpr = gl.SliceLayout(1, tile)
    h = gl.program_id(1)
    b = gl.program_id(2).to(gl.int64)
    first = gl.program_id(0) * ROWS
    place = first + gl.arange(0, ROWS, line)
    t = place
    there = t < T
    if PACKED:
        i_b, _ = packed_tile(first // PADDED, cu_ptr, B, PADDED)
        row_0 = gl.load(cu_ptr + i_b).to(gl.int32)
        t = row_0 + place - (row_0 // PADDED + i_b) * PADDED
        there = t < gl.load(cu_ptr + i_b + 1).to(gl.int32)
    delta = gl.zeros([ROWS], gl.float32, line)
    if DO:
        c = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, tile)), 0)
        o_rows = (b * o_unit_b + h.to(gl.int64) * o_unit_h + t.to(gl.int64) * o_unit_t) * 8
        do_rows = (b * do_unit_b + h.to(gl.int64) * do_unit_h + t.to(gl.int64) * do_unit_t) * 8
        mask = gl.expand_dims(there, 1) & (c < DIM)
        o = gl.load(o_ptr + gl.expand_dims(o_rows, 1) + c, mask=mask, other=0.0).to(gl.float32)
        do = gl.load(do_ptr + gl.expand_dims(do_rows, 1) + c, mask=mask, other=0.0).to(gl.float32)
        delta += gl.sum(o * do, 1)
        if SINKS:
            # a row that sees only its sink has o = 0, whatever do holds: 0 * NaN must not reach the sink's gradient
            delta = gl.where(gl.max(gl.where(o != 0.0, 1, 0), 1) > 0, delta, 0.0)
    row = (b * H + h) * T + t
    dlse = gl.zeros([ROWS], gl.float32, line)
    if DLSE:
        dlse = gl.load(dlse_ptr + row, mask=there, other=0.0)
        delta -= dlse
    natural = gl.load(lse_ptr + row, mask=there, other=float("inf"))
    natural = gl.where(natural == float("-inf"), float("inf"), natural)
    lse = natural * LOG2E
    size = gl.abs(natural if BIAS else lse)
    far = (size > FAR) & (size < float("inf"))
    # whatever sums it gets NaN, which the repair sets right
    lse = gl.where(far, float("nan"), lse)
    word = (b * H + h) * padded_T + place
    gl.store(words_ptr + word, lse)
    gl.store(delta_ptr + word, delta)
    if SINKS:
        gl.store(rows_ptr + row, delta, mask=there)
    if CHECK_NAN:
        stats = _pack_lse_delta(natural if BIAS else lse, delta)
        rests = _pack_lse_delta(natural if BIAS else natural * LOG2E, gl.where(far, -dlse, 0.0))
        if PACKED:
            gl.store(stats_ptr + row, stats, mask=there)
            gl.store(rests_ptr + row, rests, mask=there)
        else:
            gl.store(stats_ptr + word, stats)
            gl.store(rests_ptr + word, rests)
        is_first = (first == 0) & (h == 0) & (gl.program_id(2) == 0)
        for i in gl.static_range(3):
            gl.store(nan_flag_ptr + i, 0, mask=is_first)
    if SUM:
        flat: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
        start = ((b * H + h) * padded_T + first) * SUM
        for i in gl.static_range(ROWS * SUM // 512):
            gl.store(sum_ptr + start + i * 512 + gl.arange(0, 512, flat), gl.zeros([512], gl.float32, flat))


_kernel = Kernel(compute_row_stats)


def padded_length(sizes: Sizes, spec: Spec) -> int:
    """Rows of a head in the statistics: each sequence padded to a multiple of 128; packed, as many as all may need."""
    if spec.layout == "packed":
        return (sizes.T // PADDED.value + sizes.B) * PADDED.value
    return -(-sizes.T // PADDED.value) * PADDED.value


def plan(
    o: Tensor, do: Tensor | None, dlse: Tensor | None, sizes: Sizes, spec: Spec, *, check_nan: bool, columns: int
) -> Callable[..., RowStats]:
    """Prepares the kernel that computes row statistics for tensors with these shapes, strides and dtypes.

    The result holds no tensor. Call it with o, do, lse, dlse and cu_q; the kernel never reads a do or dlse that is None here.
    With `columns`, it also returns a zeroed buffer with this many columns for each row.
    """
    packed, padded_T, device = spec.layout == "packed", padded_length(sizes, spec), o.device
    outer = (sizes.H,) if packed else (sizes.B, sizes.H)
    new_row = empties((*outer, padded_T), torch.float32, device)
    new_rows = empties(rows_shape(sizes, spec), torch.float32, device) if spec.has_sinks else None
    new_words = empties((*outer, sizes.T if packed else padded_T), torch.int64, device) if check_nan else None
    new_flag = empties((3,), torch.int32, device) if check_nan else None
    new_sum = empties(dq_accumulator.shape(math.prod(outer) * padded_T, columns), torch.float32, device) if columns else None
    grid = (padded_T // ROWS.value, sizes.H, 1 if packed else sizes.B)
    numbers = (*_units(o), *_units(o if do is None else do), sizes.B, sizes.H, sizes.T, padded_T)
    flags = do is not None, dlse is not None, spec.has_sinks, check_nan, packed, spec.has_bias
    # the weights of a part of the keys do not add up to 1, so its lse is taken as it is
    constants = _constants(spec.dim_v, *flags, math.inf if spec.partial else FAR_OF_HALF, columns)
    launch = _kernel.bound(grid, numbers, constants)

    def run(o: Tensor, do: Tensor, lse: Tensor, dlse: Tensor, cu_q: Tensor) -> RowStats:
        lse_rows, delta = new_row(), new_row()
        rows = None if new_rows is None else new_rows()
        words, rests, flag = lse_rows, lse_rows, lse_rows
        if new_words is not None and new_flag is not None:
            words, rests, flag = new_words(), new_words(), new_flag()
        dq_sum = None if new_sum is None else new_sum()
        launch(
            o, do, lse, dlse, lse_rows, delta, lse if rows is None else rows, words, rests, flag,
            lse if dq_sum is None else dq_sum, cu_q,
        )  # fmt: skip
        return RowStats(lse_rows, delta, rows, words, rests, flag, dq_sum)

    return run


@cache
def _constants(
    dim: int, do: bool, dlse: bool, sinks: bool, check_nan: bool, packed: bool, bias: bool, far: float, columns: int
) -> dict[str, Any]:  # fmt: skip
    flags = {"D": padded(dim), "DIM": dim, "DO": do, "DLSE": dlse, "SINKS": sinks, "CHECK_NAN": check_nan, "PACKED": packed}
    return flags | {"BIAS": bias, "FAR": far, "SUM": columns, "num_warps": 4}


def _units(x: Tensor) -> tuple[int, ...]:
    """(batch, position, head) strides of what the copy engine can read, in units of 8 elements."""
    b, t, h = x.stride()[:3] if x.ndim == 4 else (0, *x.stride()[:2])
    return b // 8, t // 8, h // 8
