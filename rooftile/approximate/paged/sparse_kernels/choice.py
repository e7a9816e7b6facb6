"""The choice of blocks: the sums of all steps put together, added over the heads of a group, and the best of them kept.

A block is a 64-bit word: its score's bits above, and below them a number that is larger for a lower block, so that ties go to the
lower one, as in `rooftile.approximate.selected.kernels.choice`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import triton
import triton.language as tl

from rooftile.approximate.paged.sparse_kernels.shape import MOST_SPLITS, Shape, parts_of
from rooftile.launch import Kernel

# a block's number is below this
FAR = tl.constexpr(2**31 - 1)
# sums of a step: its blocks times the heads of a group. On an H200 steps of 128 blocks, sorted by `tl.topk`, took 14.5 us each
SUMS, MOST_BLOCKS, LEAST_BLOCKS = 8192, 1024, 128
SPLITS = tl.constexpr(MOST_SPLITS)


@triton.jit
def _weights(sums_ptr, reference_ptr, row, j, there, lse, STEPS, SHAPE: tl.constexpr):
    """Sums of blocks j, as shares of the whole, over the heads of a group."""
    place = row[:, None] * STEPS + (j // SHAPE.NEW)[None, :]
    reference = tl.load(reference_ptr + place, mask=there, other=0.0)
    sums = tl.load(sums_ptr + place * (2 * SHAPE.NEW) + (j % SHAPE.NEW)[None, :], mask=there, other=0.0)
    return tl.sum(sums * tl.exp2(reference - lse[:, None]), 0)


@triton.jit
def _best(best, word, SHAPE: tl.constexpr):
    """The COUNT largest of two sets of words, falling; no word but -1 is there twice."""
    i = tl.arange(0, SHAPE.MOST)
    found = tl.full((SHAPE.MOST,), -1, tl.int64)
    for n in range(SHAPE.COUNT):
        top = tl.maximum(tl.max(best, 0), tl.max(word, 0))
        found = tl.where(i == n, top, found)
        best = tl.where(best == top, -1, best)
        word = tl.where(word == top, -1, word)
    return found


@triton.jit(do_not_specialize=["H", "STEPS", "PARTS"], do_not_specialize_on_alignment=["lengths_ptr"])
def _choose_by_sums(
    sums_ptr, reference_ptr, top_ptr, total_ptr, lengths_ptr, chosen_ptr, H, STEPS, PARTS, SHAPE: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """chosen (B, Hk, COUNT) int32, rising, then -1."""
    MOST: tl.constexpr = SHAPE.MOST
    hk, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = tl.load(lengths_ptr + b)
    g, s = tl.arange(0, SHAPE.ROWS), tl.arange(0, SPLITS)
    row = b * H + hk * SHAPE.GROUP + g
    here = (g < SHAPE.GROUP)[:, None]
    part = row[:, None] * PARTS + s[None, :]
    m = tl.load(top_ptr + part, mask=here & (s < SHAPE.SPLITS)[None, :], other=float("-inf"))
    l = tl.load(total_ptr + part, mask=here & (s < SHAPE.SPLITS)[None, :], other=0.0)
    top = tl.max(m, 1)
    pivot = tl.where(top == float("-inf"), 0.0, top)
    whole = tl.sum(l * tl.exp2(m - pivot[:, None]), 1)
    # a row without compressed keys has no weights
    lse = tl.where(whole == 0.0, float("inf"), pivot + tl.log2(whole))
    # a text that is empty has no block; division truncates towards zero
    own = tl.where(length > 0, (length - 1) // SHAPE.BLOCK, -1)
    best = tl.full((MOST,), -1, tl.int64)
    for start in range(0, own + 1, WIDTH):
        j = start + tl.arange(0, WIDTH)
        is_block = j <= own
        score = _weights(sums_ptr, reference_ptr, row, j, here & is_block[None, :], lse, STEPS, SHAPE)
        is_after = here & (is_block & (j > 0))[None, :]
        score += _weights(sums_ptr + SHAPE.NEW, reference_ptr, row, j - 1, is_after, lse, STEPS, SHAPE)
        score = tl.where((j < SHAPE.FIRST) | (j > own - SHAPE.LOCAL), float("inf"), score)
        word = (score.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (-j + FAR).to(tl.int64)
        best = _best(best, tl.where(is_block, word, -1), SHAPE)
    i = tl.arange(0, MOST)
    number = tl.where((best >= 0) & (i < SHAPE.COUNT), -(best & FAR).to(tl.int32) + FAR, FAR)
    number = tl.sort(number)
    out = chosen_ptr + (b * (H // SHAPE.GROUP) + hk) * SHAPE.COUNT + i
    tl.store(out, tl.where(number == FAR, -1, number), mask=i < SHAPE.COUNT)


_start = Kernel(_choose_by_sums)


def launch(sums, reference, top, total, lengths, chosen, shape) -> None:
    """Writes the chosen blocks (B, Hk, COUNT) int32, rising, then -1."""
    (B, H, STEPS), Hk = sums.shape[:3], chosen.shape[1]
    tensors = (sums, reference, top, total, lengths, chosen)
    _start((Hk, B, 1), (*tensors, H, STEPS, parts_of(shape)), constants_of(shape))


@cache
def constants_of(shape: Shape) -> dict[str, Any]:
    """Returns the compile-time constants of a launch."""
    return {"SHAPE": shape, "WIDTH": min(MOST_BLOCKS, max(LEAST_BLOCKS, SUMS // shape.ROWS)), "num_warps": 8}
