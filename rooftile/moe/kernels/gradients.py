"""The backward's kernels: gradients of weights and biases, and the sum over a token's choices.

With the gate g, by rows,

    e = dy down                                     `products._product`, which reads dy by token
    g a    dp = act'(p) (g e)    dg = <a, e>        `activations._activate_backward`, from p, which the forward kept
    dx = dp up                                      `products._product`
    d_up = dp^T x    d_down = dy^T (g a)            `_weight_gradient`, a block of one expert's weight for each program
    du = the sum over choices of dx                 `_sum_gradients`

Every sum has one owner and one order. Tokens and their gradients are read by index.
"""

from __future__ import annotations

import triton
import triton.language as tl


# fmt: off
@triton.jit
def _weight_gradient(
    left_ptr, right_ptr, tokens_ptr, bounds_ptr, found_ptr,
    OUT: tl.constexpr, IN: tl.constexpr, LEFT_BY_TOKEN: tl.constexpr, RIGHT_BY_TOKEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    # fmt: on
    """left^T right over the rows of an expert: a block of (E, OUT, IN), 0 without rows. A factor is by rows, or by tokens."""
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
    dx_ptr, shared_ptr, chosen_ptr, du_ptr, dgates_ptr,
    E: tl.constexpr, K: tl.constexpr, D: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    """du = the sum over choices of dx, one after the other, plus the shared network's.

    A choice that is no expert gives NaN, as in the forward, and has NaN for its gate's gradient.
    """
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    du = tl.zeros((BLOCK,), tl.float32)
    for k in range(K):
        expert = tl.load(chosen_ptr + t * K + k)
        is_expert = (expert >= 0) & (expert < E)
        dx = tl.load(dx_ptr + (t * K + k) * D + n, mask=n < D, other=0.0)
        du += tl.where(is_expert, dx.to(tl.float32), float("nan"))
        if tl.program_id(1) == 0:
            tl.store(dgates_ptr + t * K + k, float("nan"), mask=(expert < 0) | (expert >= E))
    if SHARED:
        du += tl.load(shared_ptr + t * D + n, mask=n < D, other=0.0).to(tl.float32)
    tl.store(du_ptr + t * D + n, du.to(du_ptr.dtype.element_ty), mask=n < D)
