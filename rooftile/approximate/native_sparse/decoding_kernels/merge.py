"""The parts of each branch merged by their largest scores and sums, and the branches added by their gates."""

from __future__ import annotations

from functools import cache
from typing import Any

import triton
import triton.language as tl

from rooftile.approximate.native_sparse.decoding_kernels.shape import DecodingShape, parts_of
from rooftile.runtime.dependent_launch import wait_for_inputs
from rooftile.runtime.launch import Kernel


@triton.jit
def _merged(acc_ptr, top_ptr, total_ptr, first, COUNT: tl.constexpr, SHAPE: tl.constexpr):
    """The output of COUNT parts from `first` on: (BLOCK_DV,), 0 where they have no key."""
    PADDED: tl.constexpr = triton.next_power_of_2(COUNT)
    n, dv = tl.arange(0, PADDED), tl.arange(0, SHAPE.BLOCK_DV)
    there = n < COUNT
    m = tl.load(top_ptr + first + n, mask=there, other=float("-inf"))
    l = tl.load(total_ptr + first + n, mask=there, other=0.0)
    top = tl.max(m, 0)
    weight = tl.exp2(m - tl.where(top == float("-inf"), 0.0, top))
    whole = tl.sum(l * weight, 0)
    acc_tile = acc_ptr + (first + n)[:, None] * SHAPE.DV + dv[None, :]
    acc = tl.load(acc_tile, mask=there[:, None] & (dv < SHAPE.DV)[None, :], other=0.0)
    return tl.sum(acc * weight[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)


@triton.jit(do_not_specialize=["PARTS"])
def _merge_branches(acc_ptr, top_ptr, total_ptr, gates_ptr, o_ptr, PARTS, SHAPE: tl.constexpr):
    """o (B, H, Dv); a program has one row."""
    if SHAPE.PDL:
        wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    dv = tl.arange(0, SHAPE.BLOCK_DV)
    first = row * PARTS
    o = _merged(acc_ptr, top_ptr, total_ptr, first, SHAPE.SPLITS, SHAPE) * tl.load(gates_ptr + row * 3).to(tl.float32)
    first += SHAPE.SPLITS
    o += _merged(acc_ptr, top_ptr, total_ptr, first, SHAPE.CHOSEN, SHAPE) * tl.load(gates_ptr + row * 3 + 1).to(tl.float32)
    first += SHAPE.CHOSEN
    o += _merged(acc_ptr, top_ptr, total_ptr, first, SHAPE.NEAR, SHAPE) * tl.load(gates_ptr + row * 3 + 2).to(tl.float32)
    tl.store(o_ptr + row * SHAPE.DV + dv, o.to(o_ptr.dtype.element_ty), mask=dv < SHAPE.DV)


_start = Kernel(_merge_branches)


def launch(parts, gates, o, shape) -> None:
    """Writes o (B, H, Dv), contiguous, from the parts of all branches and contiguous gates (B, H, 3)."""
    _start((o.shape[0] * o.shape[1], 1, 1), (*parts, gates, o, parts_of(shape)), constants_of(shape))


@cache
def constants_of(shape: DecodingShape) -> dict[str, Any]:
    """Returns the compile-time constants of a launch."""
    # a row is small, and more warps would wait for each other at every sum
    return {"SHAPE": shape, "num_warps": 1} | shape.options
