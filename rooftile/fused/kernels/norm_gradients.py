"""Gradients of norms. A program owns some rows, one after the other, and adds up its part of dw and db.

Parts are added in order.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.fused.kernels.tile import warps_for
from rooftile.launch import Kernel

# programs that share the rows; each writes a part of dw
PROGRAMS = 264
# shared memory for rows that are on their way, and rows in flight at most
BYTES, MOST_STAGES = 64 * 1024, 4


@triton.jit(do_not_specialize=["rows", "per_program"])
def _norm_gradients(
    dy_ptr, dtotal_ptr, x_ptr, weight_ptr, dx_ptr, dw_ptr, db_ptr, rows, per_program, dy_stride, dtotal_stride, x_stride, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, LAYER: tl.constexpr, PLUS_ONE: tl.constexpr, ADDED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    n = tl.arange(0, BLOCK)
    there = n < SIZE
    weight = tl.load(weight_ptr + n, mask=there, other=0.0).to(tl.float32)
    if PLUS_ONE:
        weight += 1.0
    weight = tl.where(there, weight, 0.0)
    dw, db = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    first = tl.program_id(0) * per_program
    # the next rows are on their way while one is summed up
    for row in tl.range(0, tl.minimum(per_program, rows - first), num_stages=STAGES):
        r = (first + row).to(tl.int64)
        x = tl.load(x_ptr + r * x_stride + n, mask=there, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + r * dy_stride + n, mask=there, other=0.0).to(tl.float32)
        if LAYER:
            x = tl.where(there, x - tl.sum(x, 0) / SIZE, 0.0)
        g = dy * weight
        # neither sum waits for the other
        squares, products = tl.sum(x * x, 0), tl.sum(g * x, 0)
        inverse = tl.rsqrt(squares / SIZE + eps)
        unit = x * inverse
        dx = g - unit * (products * inverse / SIZE)
        if LAYER:
            dx -= tl.sum(g, 0) / SIZE
            db += dy
        dx *= inverse
        if ADDED:
            dx += tl.load(dtotal_ptr + r * dtotal_stride + n, mask=there, other=0.0).to(tl.float32)
        tl.store(dx_ptr + r * SIZE + n, dx.to(dx_ptr.dtype.element_ty), mask=there)
        dw += dy * unit
    part = tl.program_id(0).to(tl.int64) * SIZE + n
    tl.store(dw_ptr + part, dw, mask=there)
    if LAYER:
        tl.store(db_ptr + part, db, mask=there)


_start = Kernel(_norm_gradients)


def gradients(
    dy: Tensor, dtotal: Tensor | None, x: Tensor, w: Tensor, b: Tensor | None, eps: float, plus_one: bool
) -> tuple[Tensor, ...]:  # fmt: skip
    """Returns dx (rows, size), to which dtotal is added, dw and db; db is empty without a bias."""
    dy, x = (each if each.stride(-1) == 1 else each.contiguous() for each in (dy, x))
    dtotal = None if dtotal is None else dtotal.contiguous()
    rows, size = x.shape
    dx = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    per_program = max(triton.cdiv(rows, PROGRAMS), 1)
    programs = triton.cdiv(rows, per_program)
    dw = torch.empty((programs, size), dtype=torch.float32, device=x.device)
    db = torch.empty((programs, size), dtype=torch.float32, device=x.device) if b is not None else dw.new_zeros(0)
    if rows:
        added = dx if dtotal is None else dtotal
        arguments = (
            dy, added, x, w.contiguous(), dx, dw, db if b is not None else dw, rows, per_program, dy.stride(0), added.stride(0),
            x.stride(0), eps,
        )  # fmt: skip
        constants = constants_of(size, x.element_size(), b is not None, plus_one, dtotal is not None)
        _start((programs, 1, 1), arguments, constants)
    return dx, dw.sum(0).to(w.dtype), db if b is None else db.sum(0).to(b.dtype)


@cache
def constants_of(size: int, itemsize: int, layer: bool, plus_one: bool, added: bool) -> dict[str, object]:
    """The compile-time arguments, for numbers of so many bytes."""
    block = triton.next_power_of_2(size)
    stages = min(max(BYTES // (block * itemsize * (2 + added)), 0) + 1, MOST_STAGES)
    return {
        "SIZE": size, "BLOCK": block, "LAYER": layer, "PLUS_ONE": plus_one, "ADDED": added, "STAGES": stages,
        "num_warps": warps_for(block),
    }  # fmt: skip
