"""What the backward needs of each row, in one 64-bit word: its lse in the unit of the scores (see `scores`), and

    D_i = sum_c dO_ic O_ic - dL_i             dL is the gradient that comes in through lse: dS = P (dP - D) then carries it

The walks read a word of every row of a tile in each of their threads. One load of two words for what would be four loads is
what lets the walk over queries keep up with its matrix products (tried on an H200 in 2026-11).

A row that sees nothing gets lse = +inf: exp(x - inf) is 0, so it weighs nothing. Dense heads are padded to whole tiles with
such rows, which spares the walks their bounds.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.backends.triton.call import Call, constants_of, strides_of
from rooftile.backends.triton.scores import LOG2E
from rooftile.launch import Kernel
from rooftile.spec import Spec

# of a program
ROWS = 32


@triton.jit
def pair(lse, delta):
    """Two fp32 numbers as one word."""
    low = delta.to(tl.uint32, bitcast=True).to(tl.uint64)
    high = lse.to(tl.uint32, bitcast=True).to(tl.uint64)
    return ((high << 32) | low).to(tl.int64, bitcast=True)


@triton.jit
def unpair(word):
    """lse and delta."""
    word = word.to(tl.uint64, bitcast=True)
    lse = (word >> 32).to(tl.uint32).to(tl.float32, bitcast=True)
    return lse, word.to(tl.uint32).to(tl.float32, bitcast=True)


# fmt: off
@triton.jit(do_not_specialize=["H", "T"])
def _row_stats(
    o_ptr, do_ptr, lse_ptr, dlse_ptr, delta_ptr, stats_ptr,
    o_stride_b, o_stride_t, o_stride_h,
    do_stride_b, do_stride_t, do_stride_h,
    H, T, padded_T,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_ROWS: tl.constexpr, DO: tl.constexpr, DLSE: tl.constexpr,
    UNIT: tl.constexpr,
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
    if DLSE:
        delta -= tl.load(dlse_ptr + row, mask=there, other=0.0)
    tl.store(delta_ptr + row, delta, mask=there)
    lse = tl.load(lse_ptr + row, mask=there, other=float("inf")) * UNIT
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    tl.store(stats_ptr + (b.to(tl.int64) * H + h) * padded_T + t, pair(lse, delta), mask=t < padded_T)


_start_row_stats = Kernel(_row_stats)


def launch(
    call: Call, o: Tensor, lse: Tensor, do: Tensor | None, dlse: Tensor | None, do_strides: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Returns delta, fp32 in the shape of lse, and the words, int64 (B, H, padded T) or packed (H, total_q)."""
    delta = torch.empty(call.rows_shape, dtype=torch.float32, device=o.device)
    padded_T = call.padded_T
    stats = torch.empty((*call.rows_shape[:-1], padded_T), dtype=torch.int64, device=o.device)
    sequences = 1 if call.packed else call.B
    if stats.numel():
        arguments = (
            o, o if do is None else do, lse, delta if dlse is None else dlse, delta, stats, *strides_of(o), *do_strides,
            call.H, call.T, padded_T,
        )  # fmt: skip
        _start_row_stats((-(-padded_T // ROWS), call.H, sequences), arguments, _constants(call.spec, do is not None, dlse is not None))
    return delta, stats


@cache
def _constants(spec: Spec, do: bool, dlse: bool) -> dict[str, Any]:
    known = constants_of(spec).spec
    unit = 1.0 if known.NATURAL else LOG2E.value
    return {
        "DV": spec.dim_v, "BLOCK_DV": known.BLOCK_DV, "BLOCK_ROWS": ROWS, "DO": do, "DLSE": dlse, "UNIT": unit, "num_warps": 4,
    }  # fmt: skip
