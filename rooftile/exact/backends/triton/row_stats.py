"""Computes the row statistics that the backward kernels read (see `device.row_stats`).

Every thread of the backward reads the statistics of every row of a tile. One load of two packed numbers, in place of four loads,
lets the loop over queries keep up with its matrix products (tried on an H200 in 2026-11).
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.exact.backends.device.row_stats import pack_lse_delta
from rooftile.exact.backends.triton.call import TritonCall, constants_of
from rooftile.exact.backends.triton.scores import LOG2E
from rooftile.exact.spec import Spec
from rooftile.runtime.launch import Kernel, empties

# rows per program
ROWS = 32


# fmt: off
@triton.jit(do_not_specialize=["H", "T"])
def _row_stats(
    o_ptr, do_ptr, lse_ptr, dlse_ptr, delta_ptr, stats_ptr, rests_ptr,
    o_stride_b, o_stride_t, o_stride_h,
    do_stride_b, do_stride_t, do_stride_h,
    H, T, padded_T,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_ROWS: tl.constexpr, DO: tl.constexpr, DLSE: tl.constexpr,
    SINKS: tl.constexpr, UNIT: tl.constexpr, MARK: tl.constexpr, FAR: tl.constexpr,
):
    # fmt: on
    h = tl.program_id(1)
    b = tl.program_id(2)
    t = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    there = t < T
    c = tl.arange(0, BLOCK_DV)
    row = (b.to(tl.int64) * H + h) * T + t
    delta = tl.zeros((BLOCK_ROWS,), tl.float32)
    if DO:
        mask = there[:, None] & (c < DV)[None, :]
        o_head = o_ptr + b.to(tl.int64) * o_stride_b + h.to(tl.int64) * o_stride_h
        o_tile = o_head + t.to(tl.int64)[:, None] * o_stride_t + c[None, :]
        do_head = do_ptr + b.to(tl.int64) * do_stride_b + h.to(tl.int64) * do_stride_h
        do_tile = do_head + t.to(tl.int64)[:, None] * do_stride_t + c[None, :]
        o = tl.load(o_tile, mask=mask, other=0.0).to(tl.float32)
        delta += tl.sum(o * tl.load(do_tile, mask=mask, other=0.0).to(tl.float32), 1)
        if SINKS:
            # a row that sees only its sink has o = 0, whatever do holds: 0 * NaN must not reach the sink's gradient
            delta = tl.where(tl.max(tl.where(o != 0.0, 1, 0), 1) > 0, delta, 0.0)
    dlse = tl.zeros((BLOCK_ROWS,), tl.float32)
    if DLSE:
        dlse = tl.load(dlse_ptr + row, mask=there, other=0.0)
        delta -= dlse
    tl.store(delta_ptr + row, delta, mask=there)
    lse = tl.load(lse_ptr + row, mask=there, other=float("inf")) * UNIT
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    place = (b.to(tl.int64) * H + h) * padded_T + t
    far = (tl.abs(lse) > FAR) & (tl.abs(lse) < float("inf"))
    tl.store(rests_ptr + place, pack_lse_delta(lse, tl.where(far, -dlse, 0.0)), mask=t < padded_T)
    if MARK:
        lse = tl.where(far, float("nan"), lse)
    tl.store(stats_ptr + place, pack_lse_delta(lse, delta), mask=t < padded_T)


_kernel = Kernel(_row_stats)


def plan(
    call: TritonCall, o_strides: tuple[int, ...], do_strides: tuple[int, ...], *, has_dlse: bool
) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor]]:
    """Computes delta, fp32 in the shape of lse, words and rests from o, do, lse and dlse. The plan holds no tensor."""
    padded_T, device = call.padded_T, call.q.device
    new_delta = empties(call.rows_shape, torch.float32, device)
    new_words = empties((*call.rows_shape[:-1], padded_T), torch.int64, device)
    grid = (-(-padded_T // ROWS), call.H, 1 if call.packed else call.B)
    numbers = (*o_strides, *do_strides, call.H, call.T, padded_T)
    launch = _kernel.bound(grid, numbers, _constants(call.spec, has_dlse)) if 0 not in grid else None

    def run(o: Tensor, do: Tensor, lse: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        delta, words, rests = new_delta(), new_words(), new_words()
        if launch is not None:
            launch(o, do, lse, delta if dlse is None else dlse, delta, words, rests)
        return delta, words, rests

    return run


@cache
def _constants(spec: Spec, has_dlse: bool) -> dict[str, Any]:
    known = constants_of(spec).spec
    unit = 1.0 if known.NATURAL else LOG2E.value
    return {
        "DV": spec.dim_v, "BLOCK_DV": known.BLOCK_DV, "BLOCK_ROWS": ROWS, "DO": True, "DLSE": has_dlse, "SINKS": spec.has_sinks,
        "UNIT": unit, "MARK": not known.NATURAL, "FAR": known.FAR, "num_warps": 4,
    }  # fmt: skip
