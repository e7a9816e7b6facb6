"""The inverse of the delta rule's systems: X = (1 + M)^-1 of the strictly lower triangular M of each chunk and value head.

A program is one warp, so that no step waits for other warps, and a processor holds as many systems as registers allow. Blocks of
16 rows are inverted by substitution: a lane holds two columns of a block, and all four blocks go at once. Two inverses and the
block between them give the inverse of twice the size:

    (1 + M)^-1 = [ X_1  0 ; -X_2 M_21 X_1  X_2 ]

in products of fp32. Powers of M would lose digits where keys are alike.
"""

from __future__ import annotations

import triton
import triton.language as tl

# tokens of a chunk, and rows that are inverted by substitution
CHUNK = tl.constexpr(64)
BLOCK = tl.constexpr(16)


@triton.jit
def product(a, b, HOW: tl.constexpr):
    """Multiplies matrices with sums in fp32: "bf16" and "tf32" round the factors to that, "fp32" does not.

    "fp32" makes three products of the factors' upper and lower halves: Triton's own "tf32x3" spills on Hopper.
    """
    if HOW == "bf16":
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    a, b = a.to(tl.float32), b.to(tl.float32)
    if HOW == "tf32":
        return tl.dot(a, b, input_precision="tf32")
    high_a = (a.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    high_b = (b.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    found = tl.dot(a - high_a, high_b, input_precision="tf32")
    found = tl.dot(high_a, b - high_b, found, input_precision="tf32")
    return tl.dot(high_a, high_b, found, input_precision="tf32")


@triton.jit
def _invert_blocks(m_ptr):
    """Inverts the four blocks of 16 rows on the diagonal, in place."""
    lane = tl.arange(0, 32)
    column = lane % 8 * 2
    block = m_ptr + lane // 8 * (BLOCK * CHUNK + BLOCK)
    # row i of the inverse is e_i - sum_j M_ij x_j: of each block a lane has two columns
    even, odd = (tl.where(column == 0, 1.0, 0.0),), (column * 0.0,)
    for i in tl.static_range(1, BLOCK):
        low, high = tl.where(column == i, 1.0, 0.0), tl.where(column + 1 == i, 1.0, 0.0)
        for j in tl.static_range(i):
            m = tl.load(block + i * CHUNK + j)
            low -= m * even[j]
            high -= m * odd[j]
        even, odd = even + (low,), odd + (high,)
    # all lanes have read before one writes, and have written before one reads
    tl.debug_barrier()
    for i in tl.static_range(BLOCK):
        tl.store(block + i * CHUNK + column, even[i])
        tl.store(block + i * CHUNK + column + 1, odd[i])
    tl.debug_barrier()


@triton.jit
def _merge(x_ptr, SIZE: tl.constexpr):
    """Goes from two inverses of SIZE rows on the diagonal, and M between them, to the inverse of twice as many rows, in place."""
    n = tl.arange(0, SIZE)
    square = n[:, None] * CHUNK + n[None, :]
    below = x_ptr + SIZE * CHUNK + square
    x = product(tl.load(below), tl.load(x_ptr + square), "fp32")
    x = product(tl.load(x_ptr + SIZE * (CHUNK + 1) + square), x, "fp32")
    tl.debug_barrier()
    tl.store(below, -x)


# fmt: off
@triton.jit
def _invert(m_ptr, x_ptr):
    # fmt: on
    """Writes X, by blocks in the place of M, which is 0 on and above the diagonal."""
    chunk = tl.program_id(0).to(tl.int64) * (CHUNK * CHUNK)
    m_ptr += chunk
    _invert_blocks(m_ptr)
    _merge(m_ptr, BLOCK)
    _merge(m_ptr + 2 * BLOCK * (CHUNK + 1), BLOCK)
    tl.debug_barrier()
    _merge(m_ptr, 2 * BLOCK)
    tl.debug_barrier()
    for row in tl.static_range(0, CHUNK, BLOCK):
        place = (row + tl.arange(0, BLOCK))[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        tl.store(x_ptr + chunk + place, tl.load(m_ptr + place))
