"""The product of sorted rows with the weight of each row's expert, and the sum over a token's choices.

A program owns a tile of rows of one expert and a block of columns. It finds the expert on the device, from where the experts'
rows end: there are at most N K / BLOCK_M + min(E, N K) tiles, and programs past the last one leave. Rows are read and written
through an index, so no tensor is permuted for a product.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(ends_ptr, tile, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """The expert of a tile (E past the last tile), its first row, and where the rows of its expert end."""
    e = tl.arange(0, BLOCK_E)
    end = tl.load(ends_ptr + e, mask=e < E, other=0)
    begin = tl.load(ends_ptr + e - 1, mask=(e > 0) & (e < E), other=0)
    count = tl.where(e < E, (end - begin + BLOCK_M - 1) // BLOCK_M, 0)
    past = (tl.cumsum(count, 0) <= tile) & (e < E)
    expert = tl.sum(past.to(tl.int32), 0)
    before = tl.sum(tl.where(past, count, 0), 0)
    start = tl.sum(tl.where(e == expert, begin, 0), 0) + (tile - before) * BLOCK_M
    return expert, start, tl.sum(tl.where(e == expert, end, 0), 0)


@triton.jit
def _activated(gate, up, ACTIVATION: tl.constexpr):
    """Applies the activation, like `activations`; gate is up for relu2."""
    if ACTIVATION == "silu":
        return gate * tl.sigmoid(gate) * up
    if ACTIVATION == "clamped":
        # a comparison keeps NaN, which a minimum would drop
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        return (up + 1) * (gate * tl.sigmoid(1.702 * gate))
    gate = tl.where(gate < 0.0, 0.0, gate)
    return gate * gate


# fmt: off
@triton.jit(do_not_specialize=["TILES"])
def _product(
    x_ptr, w_ptr, bias_ptr, y_ptr, p_ptr, from_ptr, to_ptr, ends_ptr, TILES,
    E: tl.constexpr, BLOCK_E: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, ACTIVATION: tl.constexpr,
    GATHER: tl.constexpr, SCATTER: tl.constexpr, BIAS: tl.constexpr, KEEP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):
    # fmt: on
    """y = act(x W^T + bias) by rows, (rows, OUT); p is what stands before the activation, kept if KEEP.

    W is (E, OUT, IN), or (E, 2 OUT, IN) with the rows of the gate first: a program then makes both halves of its columns.
    """
    TWO: tl.constexpr = (ACTIVATION == "silu") or (ACTIVATION == "clamped")
    HALVES: tl.constexpr = 2 if TWO else 1
    # a few tiles of rows share each block of a weight while it is in L2
    COLUMNS: tl.constexpr = (OUT + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    first = pid // (GROUP * COLUMNS) * GROUP
    size = tl.minimum(TILES - first, GROUP)
    place = pid % (GROUP * COLUMNS)
    expert, start, end = _tile(ends_ptr, first + place % size, E, BLOCK_E, BLOCK_M)
    if expert >= E:
        return
    rows = start + tl.arange(0, BLOCK_M)
    here = rows < end
    source = tl.load(from_ptr + rows, mask=here, other=0) if GATHER else rows.to(tl.int64)
    n = place // size * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x = x_ptr + source[:, None] * IN + k[None, :]
    w = w_ptr + expert.to(tl.int64) * (HALVES * OUT * IN) + n[None, :] * IN + k[:, None]
    a = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    b = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for c in range(0, IN, BLOCK_K):
        inside = k < IN - c
        part = tl.load(x + c, mask=here[:, None] & inside[None, :], other=0.0)
        a = tl.dot(part, tl.load(w + c, mask=inside[:, None] & (n < OUT)[None, :], other=0.0), a, input_precision="ieee")
        if TWO:
            half = tl.load(w + OUT * IN + c, mask=inside[:, None] & (n < OUT)[None, :], other=0.0)
            b = tl.dot(part, half, b, input_precision="ieee")
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
    target = tl.load(to_ptr + rows, mask=here, other=0) if SCATTER else rows.to(tl.int64)
    tl.store(y_ptr + target[:, None] * OUT + n[None, :], rounded, mask=mask)


@triton.jit
def _sum_choices(
    z_ptr, gates_ptr, shared_ptr, chosen_ptr, y_ptr,
    E: tl.constexpr, K: tl.constexpr, D: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr,
):
    """y = the sum over choices of gate times z, one after the other, plus the shared network's output; rounded once.

    A choice that is no expert gives NaN: the host, which could raise an error, would wait for the choices.
    """
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.zeros((BLOCK,), tl.float32)
    for k in range(K):
        z = tl.load(z_ptr + (t * K + k) * D + n, mask=n < D, other=0.0)
        expert = tl.load(chosen_ptr + t * K + k)
        y += tl.where((expert >= 0) & (expert < E), tl.load(gates_ptr + t * K + k) * z.to(tl.float32), float("nan"))
    if SHARED:
        y += tl.load(shared_ptr + t * D + n, mask=n < D, other=0.0).to(tl.float32)
    tl.store(y_ptr + t * D + n, y.to(y_ptr.dtype.element_ty), mask=n < D)
