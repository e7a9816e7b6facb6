"""The backward's kernels: through down and the activation, gradients of weights and biases, and the sum over a token's choices.

With e = dy down and the gate g, by rows,

    g a    dp = act'(p) (g e)    dg = <a, e>        `_through_down`, from p, which the forward kept
    dx = dp up                                      `products._product`
    d_up = dp^T x    d_down = dy^T (g a)            `_weight_gradient`, a block of one expert's weight for each program
    du = the sum over choices of dx                 `_sum_gradients`

Every sum has one owner and one order. Tokens and their gradients are read by index.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooftile.moe.kernels.activations import _activated, _gradient
from rooftile.moe.kernels.products import _place, _tile


@triton.jit
def _through_activation(e, g, rows, n, here, p_ptr, a_ptr, dp_ptr, H: tl.constexpr, ACTIVATION: tl.constexpr, KEEP: tl.constexpr):
    """Writes g a and dp = act'(p) (g e) of rows and columns n; returns <a, e> by rows."""
    TWO: tl.constexpr = ACTIVATION != "relu2"
    mask = here[:, None] & (n < H)[None, :]
    p = rows.to(tl.int64)[:, None] * ((2 if TWO else 1) * H) + n[None, :]
    gate = tl.load(p_ptr + p, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(p_ptr + p + H, mask=mask, other=0.0).to(tl.float32) if TWO else gate
    # rounded as the forward rounds it
    a = _activated(gate, up, ACTIVATION).to(dp_ptr.dtype.element_ty).to(tl.float32)
    if KEEP:
        target = a_ptr + rows.to(tl.int64)[:, None] * H + n[None, :]
        tl.store(target, (g[:, None] * a).to(a_ptr.dtype.element_ty), mask=mask)
    d_gate, d_up = _gradient(gate, up, g[:, None] * e, ACTIVATION)
    tl.store(dp_ptr + p, d_gate.to(dp_ptr.dtype.element_ty), mask=mask)
    if TWO:
        tl.store(dp_ptr + p + H, d_up.to(dp_ptr.dtype.element_ty), mask=mask)
    return tl.sum(a * e, 1)


# fmt: off
@triton.jit(do_not_specialize=["TILES"])
def _through_down(
    dy_ptr, w_ptr, bias_ptr, p_ptr, gates_ptr, a_ptr, dp_ptr, dg_ptr, tokens_ptr, order_ptr, bounds_ptr, TILES,
    E: tl.constexpr, BLOCK_E: tl.constexpr, D: tl.constexpr, H: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr,
    KEEP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):
    # fmt: on
    """From dy (N, D) and down (E, D, H): dp (rows, 2 H or H), g a (rows, H) if KEEP, and a part of dg for each block of columns.

    dg is (N K, blocks), by token and choice. The first block adds <dy, bias>.
    """
    COLUMNS: tl.constexpr = (H + BLOCK_N - 1) // BLOCK_N
    tile, column = _place(TILES, COLUMNS, GROUP)
    expert, start, end = _tile(bounds_ptr, tile, E, BLOCK_E, BLOCK_M)
    if expert >= E:
        return
    rows = start + tl.arange(0, BLOCK_M)
    here = rows < end
    token = tl.load(tokens_ptr + rows, mask=here, other=0)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    dy = dy_ptr + token[:, None] * D + k[None, :]
    w = w_ptr + expert.to(tl.int64) * (D * H) + k[:, None] * H + n[None, :]
    e = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for c in range(0, D, BLOCK_K):
        inside = k < D - c
        part = tl.load(dy + c, mask=inside[None, :], other=0.0)
        e = tl.dot(part, tl.load(w + c * H, mask=inside[:, None] & (n < H)[None, :], other=0.0), e, input_precision="ieee")
    place = tl.load(order_ptr + rows, mask=here, other=0)
    g = tl.load(gates_ptr + place, mask=here, other=0.0)
    # a quarter of the columns at a time: a whole tile of all that is read and written does not fit into registers
    halves = tl.split(e.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1))
    dg = tl.zeros((BLOCK_M,), tl.float32)
    for i in tl.static_range(2):
        quarters = tl.split(halves[i].reshape(BLOCK_M, 2, BLOCK_N // 4).permute(0, 2, 1))
        for j in tl.static_range(2):
            n = column * BLOCK_N + (2 * i + j) * (BLOCK_N // 4) + tl.arange(0, BLOCK_N // 4)
            dg += _through_activation(quarters[j], g, rows, n, here, p_ptr, a_ptr, dp_ptr, H, ACTIVATION, KEEP)
    if BIAS:
        if column == 0:
            for c in range(0, D, BLOCK_K):
                inside = k < D - c
                part = tl.load(dy + c, mask=inside[None, :], other=0.0).to(tl.float32)
                bias = tl.load(bias_ptr + expert * D + c + k, mask=inside, other=0.0).to(tl.float32)
                dg += tl.sum(part * bias[None, :], 1)
    tl.store(dg_ptr + place * COLUMNS + column, dg, mask=here)


# fmt: off
@triton.jit
def _weight_gradient(
    left_ptr, right_ptr, tokens_ptr, bounds_ptr, found_ptr,
    OUT: tl.constexpr, IN: tl.constexpr, LEFT_BY_TOKEN: tl.constexpr, RIGHT_BY_TOKEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    # fmt: on
    """left^T right over the rows of an expert: a block of (E, OUT, IN), 0 without rows. Rows are sorted, or those of tokens."""
    COLUMNS: tl.constexpr = (IN + BLOCK_N - 1) // BLOCK_N
    BLOCKS: tl.constexpr = (OUT + BLOCK_M - 1) // BLOCK_M * COLUMNS
    expert, place = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    begin, end = tl.load(bounds_ptr + expert), tl.load(bounds_ptr + expert + 1)
    m = place // COLUMNS * BLOCK_M + tl.arange(0, BLOCK_M)
    n = place % COLUMNS * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    found = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for c in range(begin, end, BLOCK_K):
        here = c + k < end
        # past the last row stands the expert's first one, times 0: NaN of another expert stays there
        row = tl.where(here, c + k, begin).to(tl.int64)
        token = tl.load(tokens_ptr + row)
        left = left_ptr + (token if LEFT_BY_TOKEN else row)[:, None] * OUT + m[None, :]
        right = right_ptr + (token if RIGHT_BY_TOKEN else row)[:, None] * IN + n[None, :]
        left = tl.load(left, mask=here[:, None] & (m < OUT)[None, :], other=0.0)
        right = tl.load(right, mask=(n < IN)[None, :], other=0.0)
        found = tl.dot(left.T, right, found, input_precision="ieee")
    target = found_ptr + expert.to(tl.int64) * (OUT * IN) + m[:, None] * IN + n[None, :]
    tl.store(target, found.to(found_ptr.dtype.element_ty), mask=(m < OUT)[:, None] & (n < IN)[None, :])


# fmt: off
@triton.jit
def _bias_gradient(
    x_ptr, gates_ptr, tokens_ptr, order_ptr, bounds_ptr, found_ptr,
    OUT: tl.constexpr, BY_TOKEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    # fmt: on
    """The sum (E, OUT) of each expert's rows; BY_TOKEN: of its tokens' rows, times their gates."""
    expert = tl.program_id(0)
    begin, end = tl.load(bounds_ptr + expert), tl.load(bounds_ptr + expert + 1)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    found = tl.zeros((BLOCK_N,), tl.float32)
    for c in range(begin, end, BLOCK_K):
        row = c + tl.arange(0, BLOCK_K)
        here = row < end
        source = tl.load(tokens_ptr + row, mask=here, other=0) if BY_TOKEN else row.to(tl.int64)
        x = tl.load(x_ptr + source[:, None] * OUT + n[None, :], mask=here[:, None] & (n < OUT)[None, :], other=0.0)
        x = x.to(tl.float32)
        if BY_TOKEN:
            place = tl.load(order_ptr + row, mask=here, other=0)
            x *= tl.load(gates_ptr + place, mask=here, other=0.0)[:, None]
        found += tl.sum(x, 0)
    tl.store(found_ptr + expert.to(tl.int64) * OUT + n, found.to(found_ptr.dtype.element_ty), mask=n < OUT)


# fmt: off
@triton.jit
def _sum_gradients(
    dx_ptr, dg_ptr, shared_ptr, chosen_ptr, du_ptr, dgates_ptr,
    E: tl.constexpr, K: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr, SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # fmt: on
    """du = the sum over choices of dx, one after the other, plus the shared network's; the parts of each gate's gradient summed.

    A choice that is no expert gives NaN, as in the forward.
    """
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    part = tl.arange(0, BLOCK_PARTS)
    du = tl.zeros((BLOCK,), tl.float32)
    for k in range(K):
        expert = tl.load(chosen_ptr + t * K + k)
        is_expert = (expert >= 0) & (expert < E)
        dx = tl.load(dx_ptr + (t * K + k) * D + n, mask=n < D, other=0.0)
        du += tl.where(is_expert, dx.to(tl.float32), float("nan"))
        if tl.program_id(1) == 0:
            dg = tl.sum(tl.load(dg_ptr + (t * K + k) * PARTS + part, mask=part < PARTS, other=0.0), 0)
            tl.store(dgates_ptr + t * K + k, tl.where(is_expert, dg, float("nan")))
    if SHARED:
        du += tl.load(shared_ptr + t * D + n, mask=n < D, other=0.0).to(tl.float32)
    tl.store(du_ptr + t * D + n, du.to(du_ptr.dtype.element_ty), mask=n < D)
