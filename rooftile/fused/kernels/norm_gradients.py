"""Gradients of norms. A program owns some rows, one after the other, and adds up its part of dw and db.

A second kernel adds the parts up, in one order, and writes both gradients in their dtypes. At few rows a launch takes as long as
the sums, and a sum and a cast for each would be four launches. Of rows that would leave the registers a first kernel writes the
sums, and programs own some columns of some rows.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.fused.kernels.tile import LONG_PIECE, warps_for
from rooftile.runtime.launch import Kernel

# programs that share the rows; each writes a part of dw
PROGRAMS = 264
# numbers of a row that a program holds: more of them leave the registers
WHOLE = 16384
# ... and columns of a program where rows are longer
LONG_COLUMNS = 4096
# a tile of the parts: number of parts, and number of columns
PARTS, COLUMNS = 128, 32
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


@triton.jit(do_not_specialize=["parts"])
def _add_parts(dw_ptr, db_ptr, dw_out_ptr, db_out_ptr, parts, SIZE: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums over the parts (parts, SIZE) of dw, or of db in programs (., 1)."""
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_bias = tl.program_id(1) == 1
    sums = tl.zeros((PARTS, COLUMNS), tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        at = part.to(tl.int64)[:, None] * SIZE + n[None, :]
        there = (part < parts)[:, None] & (n < SIZE)[None, :]
        sums += tl.load(db_ptr + at, mask=there & is_bias, other=0.0)
        sums += tl.load(dw_ptr + at, mask=there & (not is_bias), other=0.0)
    total = tl.sum(sums, 0)
    tl.store(dw_out_ptr + n, total.to(dw_out_ptr.dtype.element_ty), mask=(n < SIZE) & (not is_bias))
    tl.store(db_out_ptr + n, total.to(db_out_ptr.dtype.element_ty), mask=(n < SIZE) & is_bias)


@triton.jit
def _row(dy_ptr, x_ptr, weight_ptr, n, mean, SIZE: tl.constexpr, LAYER: tl.constexpr, PLUS_ONE: tl.constexpr):
    """A piece of a row: x less its mean, dy, and g = dy w."""
    there = n < SIZE
    x = tl.load(x_ptr + n, mask=there, other=0.0).to(tl.float32)
    if LAYER:
        x = tl.where(there, x - mean, 0.0)
    dy = tl.load(dy_ptr + n, mask=there, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + n, mask=there, other=0.0).to(tl.float32)
    return x, dy, dy * (weight + 1.0) if PLUS_ONE else dy * weight


@triton.jit
def _long_sums(
    dy_ptr, x_ptr, weight_ptr, sums_ptr, dy_stride, x_stride, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, LAYER: tl.constexpr,
    PLUS_ONE: tl.constexpr,
):  # fmt: skip
    """Writes for one row the mean of x, r = 1 / sqrt(mean x² + eps), the mean of g x̂, and for a layer norm the mean of g."""
    row = tl.program_id(0).to(tl.int64)
    dy_ptr += row * dy_stride
    x_ptr += row * x_stride
    lane = tl.arange(0, BLOCK)
    mean = 0.0
    if LAYER:
        sums = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, SIZE, BLOCK):
            sums += tl.load(x_ptr + start + lane, mask=start + lane < SIZE, other=0.0).to(tl.float32)
        mean = tl.sum(sums, 0) / SIZE
    squares, products, gs = (tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32))
    for start in range(0, SIZE, BLOCK):
        x, _, g = _row(dy_ptr, x_ptr, weight_ptr, start + lane, mean, SIZE, LAYER, PLUS_ONE)
        squares += x * x
        products += g * x
        gs += g
    inverse = tl.rsqrt(tl.sum(squares, 0) / SIZE + eps)
    sums_ptr += row * 4
    tl.store(sums_ptr, mean)
    tl.store(sums_ptr + 1, inverse)
    tl.store(sums_ptr + 2, tl.sum(products, 0) * inverse / SIZE)
    tl.store(sums_ptr + 3, tl.sum(gs, 0) / SIZE if LAYER else 0.0)


@triton.jit(do_not_specialize=["rows", "per_program"])
def _long_gradients(
    dy_ptr, dtotal_ptr, x_ptr, weight_ptr, dx_ptr, dw_ptr, db_ptr, sums_ptr, rows, per_program, dy_stride, dtotal_stride,
    x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, LAYER: tl.constexpr, PLUS_ONE: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """`_norm_gradients` of some columns, where a whole row would leave the registers: its sums are known."""
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = n < SIZE
    dw, db = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    first = tl.program_id(0) * per_program
    for i in range(tl.minimum(per_program, rows - first)):
        r = (first + i).to(tl.int64)
        mean, inverse = tl.load(sums_ptr + 4 * r), tl.load(sums_ptr + 4 * r + 1)
        x, dy, g = _row(dy_ptr + r * dy_stride, x_ptr + r * x_stride, weight_ptr, n, mean, SIZE, LAYER, PLUS_ONE)
        unit = x * inverse
        dx = (g - unit * tl.load(sums_ptr + 4 * r + 2) - tl.load(sums_ptr + 4 * r + 3)) * inverse
        if ADDED:
            dx += tl.load(dtotal_ptr + r * dtotal_stride + n, mask=there, other=0.0).to(tl.float32)
        tl.store(dx_ptr + r * SIZE + n, dx.to(dx_ptr.dtype.element_ty), mask=there)
        dw += dy * unit
        db += dy
    part = tl.program_id(0).to(tl.int64) * SIZE + n
    tl.store(dw_ptr + part, dw, mask=there)
    if LAYER:
        tl.store(db_ptr + part, db, mask=there)


_start, _start_adding = Kernel(_norm_gradients), Kernel(_add_parts)
_start_long_sums, _start_long = Kernel(_long_sums), Kernel(_long_gradients)


def gradients(
    dy: Tensor, dtotal: Tensor | None, x: Tensor, w: Tensor, b: Tensor | None, eps: float, plus_one: bool
) -> tuple[Tensor, ...]:  # fmt: skip
    """Returns dx (rows, size), to which dtotal is added, dw and db; db is empty without a bias."""
    dy, x = (each if each.stride(-1) == 1 else each.contiguous() for each in (dy, x))
    dtotal = None if dtotal is None else dtotal.contiguous()
    rows, size = x.shape
    dx = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    pieces = triton.cdiv(size, LONG_COLUMNS) if size > WHOLE else 1
    per_program = max(triton.cdiv(rows * pieces, 2 * PROGRAMS if pieces > 1 else PROGRAMS), 1)
    programs = triton.cdiv(rows, per_program)
    parts = torch.empty((1 if b is None else 2, programs, size), dtype=torch.float32, device=x.device)
    dw = torch.empty_like(w, memory_format=torch.contiguous_format)
    db = parts.new_zeros(0) if b is None else torch.empty_like(b, memory_format=torch.contiguous_format)
    if rows:
        added = dx if dtotal is None else dtotal
        w, strides, kind = w.contiguous(), (dy.stride(0), added.stride(0), x.stride(0)), (b is not None, plus_one)
        tensors = dy, added, x, w, dx, parts[0], parts[-1]
        if pieces == 1:
            constants = constants_of(size, x.element_size(), *kind, dtotal is not None)
            _start((programs, 1, 1), (*tensors, rows, per_program, *strides, eps), constants)
        else:
            sums = torch.empty((rows, 4), dtype=torch.float32, device=x.device)
            summing, constants = long_constants(size, *kind, dtotal is not None)
            _start_long_sums((rows, 1, 1), (dy, x, w, sums, dy.stride(0), x.stride(0), eps), summing)
            _start_long((programs, pieces, 1), (*tensors, sums, rows, per_program, *strides), constants)
    grid = triton.cdiv(size, COLUMNS), len(parts), 1
    _start_adding(grid, (parts[0], parts[-1], dw, dw if b is None else db, programs), constants_of_adding(size))
    return dx, dw, db


@cache
def constants_of_adding(size: int) -> dict[str, object]:
    """The compile-time arguments of the second kernel."""
    return {"SIZE": size, "PARTS": PARTS, "COLUMNS": COLUMNS, "num_warps": 4}


@cache
def long_constants(size: int, layer: bool, plus_one: bool, added: bool) -> tuple[dict[str, object], dict[str, object]]:
    """The compile-time arguments of the kernels for rows that are read in pieces."""
    own = {"SIZE": size, "LAYER": layer, "PLUS_ONE": plus_one}
    summing = own | {"BLOCK": LONG_PIECE, "num_warps": warps_for(LONG_PIECE)}
    return summing, own | {"ADDED": added, "BLOCK": LONG_COLUMNS, "num_warps": warps_for(LONG_COLUMNS)}


@cache
def constants_of(size: int, itemsize: int, layer: bool, plus_one: bool, added: bool) -> dict[str, object]:
    """The compile-time arguments, for numbers of this size in bytes."""
    block = triton.next_power_of_2(size)
    stages = min(max(BYTES // (block * itemsize * (2 + added)), 0) + 1, MOST_STAGES)
    return {
        "SIZE": size, "BLOCK": block, "LAYER": layer, "PLUS_ONE": plus_one, "ADDED": added, "STAGES": stages,
        "num_warps": warps_for(block),
    }  # fmt: skip
