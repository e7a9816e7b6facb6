"""The product of sorted rows with the weight of each row's expert, and the sum over a token's choices.

A program owns a tile of rows of one expert and a block of columns. It finds the expert on the device, from the bounds of the
experts' rows: there are at most N K / BLOCK_M + min(E, N K) tiles, and programs past the last one leave. Rows are read and
written through an index, so no tensor is permuted for a product.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooftile.moe.kernels.activations import _activated
from rooftile.moe.problem import ELSEWHERE

_ELSEWHERE: tl.constexpr = tl.constexpr(ELSEWHERE)


@triton.jit
def _tile(bounds_ptr, tile, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """The expert of a tile (E past the last tile), its first row, and where the rows of its expert end."""
    e = tl.arange(0, BLOCK_E)
    begin = tl.load(bounds_ptr + e, mask=e < E, other=0)
    end = tl.load(bounds_ptr + e + 1, mask=e < E, other=0)
    count = (end - begin + BLOCK_M - 1) // BLOCK_M
    past = (tl.cumsum(count, 0) <= tile) & (e < E)
    expert = tl.sum(past.to(tl.int32), 0)
    before = tl.sum(tl.where(past, count, 0), 0)
    start = tl.sum(tl.where(e == expert, begin, 0), 0) + (tile - before) * BLOCK_M
    return expert, start, tl.sum(tl.where(e == expert, end, 0), 0)


@triton.jit
def _place(tiles, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """The tile and the block of columns of this program: a few tiles of rows share each block of a weight while it is in L2."""
    pid = tl.program_id(0)
    first = pid // (GROUP * COLUMNS) * GROUP
    size = tl.minimum(tiles - first, GROUP)
    place = pid % (GROUP * COLUMNS)
    return first + place % size, place // size


# fmt: off
@triton.jit(do_not_specialize=["TILES"])
def _product(
    x_ptr, w_ptr, bias_ptr, y_ptr, p_ptr, from_ptr, to_ptr, bounds_ptr, TILES,
    E: tl.constexpr, BLOCK_E: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, ACTIVATION: tl.constexpr,
    GATHER: tl.constexpr, SCATTER: tl.constexpr, TURNED: tl.constexpr, ALONE: tl.constexpr, BIAS: tl.constexpr,
    KEEP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):
    # fmt: on
    """y = act(x W^T + bias) by rows, (rows, OUT); p is what stands before the activation, kept if KEEP.

    W is (E, OUT, IN), or (E, 2 OUT, IN) with the rows of the gate first: a program then makes both halves of its columns. TURNED:
    it is (E, IN, OUT), and y = x W. ALONE: the rows are one token's, in the order of its choices, which stand in place of bounds.
    """
    TWO: tl.constexpr = (ACTIVATION == "silu") or (ACTIVATION == "clamped")
    HALVES: tl.constexpr = 2 if TWO else 1
    STEP_N: tl.constexpr = 1 if TURNED else IN
    STEP_K: tl.constexpr = OUT if TURNED else 1
    tile, column = _place(TILES, (OUT + BLOCK_N - 1) // BLOCK_N, GROUP)
    if ALONE:
        expert, start, end = tl.load(bounds_ptr + tile), tile, tile + 1
    else:
        expert, start, end = _tile(bounds_ptr, tile, E, BLOCK_E, BLOCK_M)
    if (expert < 0) | (expert >= E):
        return
    rows = start + tl.arange(0, BLOCK_M)
    here = rows < end
    # past the expert's rows stands some row, which is not written: so no load asks for the row
    source = tl.where(here, rows, start).to(tl.int64)
    if GATHER:
        source = source * 0 if ALONE else tl.load(from_ptr + rows, mask=here, other=0)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x = x_ptr + source[:, None] * IN + k[None, :]
    w = w_ptr + expert.to(tl.int64) * (HALVES * OUT * IN) + n[None, :] * STEP_N + k[:, None] * STEP_K
    a = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    b = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for c in range(0, IN, BLOCK_K):
        inside = k < IN - c
        part = tl.load(x + c, mask=inside[None, :], other=0.0)
        mask = inside[:, None] & (n < OUT)[None, :]
        a = tl.dot(part, tl.load(w + c * STEP_K, mask=mask, other=0.0), a, input_precision="ieee")
        if TWO:
            b = tl.dot(part, tl.load(w + OUT * IN + c * STEP_K, mask=mask, other=0.0), b, input_precision="ieee")
    if BIAS:
        bias = bias_ptr + expert * (HALVES * OUT) + n
        a += tl.load(bias, mask=n < OUT, other=0.0).to(tl.float32)[None, :]
        if TWO:
            b += tl.load(bias + OUT, mask=n < OUT, other=0.0).to(tl.float32)[None, :]
    mask = here[:, None] & (n < OUT)[None, :]
    # rounded before the activation: so the gradient makes the same activation from what is kept
    rounded, other = a.to(y_ptr.dtype.element_ty), b.to(y_ptr.dtype.element_ty)
    if KEEP:
        p = p_ptr + rows.to(tl.int64)[:, None] * (HALVES * OUT) + n[None, :]
        tl.store(p, rounded, mask=mask)
        if TWO:
            tl.store(p + OUT, other, mask=mask)
    if ACTIVATION != "none":
        rounded = _activated(rounded.to(tl.float32), other.to(tl.float32), ACTIVATION).to(y_ptr.dtype.element_ty)
    target = tl.load(to_ptr + rows, mask=here, other=0) if SCATTER and not ALONE else rows.to(tl.int64)
    tl.store(y_ptr + target[:, None] * OUT + n[None, :], rounded, mask=mask)


@triton.jit
def _sum_choices(
    z_ptr, gates_ptr, shared_ptr, chosen_ptr, y_ptr,
    E: tl.constexpr, K: tl.constexpr, D: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr,
):
    """y = the sum over choices of gate times z, one after the other, plus the shared network's output; rounded once.

    A choice that is no expert gives NaN: the host, which could raise an error, would wait for the choices. A choice that is
    ELSEWHERE adds nothing.
    """
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.zeros((BLOCK,), tl.float32)
    for k in range(K):
        z = tl.load(z_ptr + (t * K + k) * D + n, mask=n < D, other=0.0)
        expert = tl.load(chosen_ptr + t * K + k)
        without = tl.where(expert == _ELSEWHERE, 0.0, float("nan"))
        y += tl.where((expert >= 0) & (expert < E), tl.load(gates_ptr + t * K + k) * z.to(tl.float32), without)
    if SHARED:
        y += tl.load(shared_ptr + t * D + n, mask=n < D, other=0.0).to(tl.float32)
    tl.store(y_ptr + t * D + n, y.to(y_ptr.dtype.element_ty), mask=n < D)
