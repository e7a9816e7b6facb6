"""The choice of blocks: the sums of all steps put together, added over the heads of a group, and the best of them kept.

A block is a 64-bit word: its score's bits above, and below them a number that is larger for a lower block, so that ties go to the
lower one, as in `rooftile.approximate.native_sparse.selected.kernels.block_choice`. One kernel makes the words of many blocks at once. Another keeps
the best: as many times as there are blocks to choose it takes the largest word, in one warp, where that needs no barrier. On an
H200 sorting the words of 128 blocks with `tl.topk` took 14 us, and a largest of 512 words in eight warps 1.4 us.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from rooftile.approximate.native_sparse.decoding_kernels.shape import MOST_SPLITS, DecodingShape, parts_of
from rooftile.runtime.dependent_launch import wait_for_inputs
from rooftile.runtime.launch import Kernel

# a block's number is below this
FAR = tl.constexpr(2**31 - 1)
# blocks of a program that makes words, and of a step of the one that keeps the best
SCORED, COMPARED = 128, 512
SPLITS = tl.constexpr(MOST_SPLITS)


@triton.jit
def _own_block(lengths_ptr, b, SHAPE: tl.constexpr):
    """The block of a sequence's last token, -1 if the text is empty: division truncates towards zero."""
    length = tl.load(lengths_ptr + b)
    return tl.where(length > 0, (length - 1) // SHAPE.BLOCK, -1)


@triton.jit
def _weights(sums_ptr, reference_ptr, row, j, there, lse, STEPS, SHAPE: tl.constexpr):
    """Sums of blocks j, as shares of the whole, over the heads of a group."""
    place = row[:, None] * STEPS + (j // SHAPE.NEW)[None, :]
    reference = tl.load(reference_ptr + place, mask=there, other=0.0)
    sums = tl.load(sums_ptr + place * (2 * SHAPE.NEW) + (j % SHAPE.NEW)[None, :], mask=there, other=0.0)
    return tl.sum(sums * tl.exp2(reference - lse[:, None]), 0)


@triton.jit(do_not_specialize=["H", "STEPS", "PARTS", "BLOCKS"], do_not_specialize_on_alignment=["lengths_ptr"])
def _score_blocks(
    sums_ptr, reference_ptr, top_ptr, total_ptr, lengths_ptr, words_ptr, H, STEPS, PARTS, BLOCKS, SHAPE: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """words (B, Hk, BLOCKS) int64, of the blocks that a sequence has."""
    if SHAPE.PDL:
        wait_for_inputs()
    hk, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    own = _own_block(lengths_ptr, b, SHAPE)
    j = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    is_block = j <= own
    if tl.program_id(0) * WIDTH > own:
        return
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
    score = _weights(sums_ptr, reference_ptr, row, j, here & is_block[None, :], lse, STEPS, SHAPE)
    is_after = here & (is_block & (j > 0))[None, :]
    score += _weights(sums_ptr + SHAPE.NEW, reference_ptr, row, j - 1, is_after, lse, STEPS, SHAPE)
    score = tl.where((j < SHAPE.FIRST) | (j > own - SHAPE.LOCAL), float("inf"), score)
    word = (score.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (-j + FAR).to(tl.int64)
    tl.store(words_ptr + (b * (H // SHAPE.GROUP) + hk) * BLOCKS + j, word, mask=is_block)


@triton.jit(do_not_specialize=["HK", "BLOCKS"], do_not_specialize_on_alignment=["lengths_ptr"])
def _keep_best(words_ptr, lengths_ptr, chosen_ptr, HK, BLOCKS, SHAPE: tl.constexpr, WIDTH: tl.constexpr):
    """chosen (B, Hk, COUNT) int32, rising, then -1."""
    if SHAPE.PDL:
        wait_for_inputs()
    hk, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    own = _own_block(lengths_ptr, b, SHAPE)
    i = tl.arange(0, SHAPE.MOST)
    best = tl.full((SHAPE.MOST,), -1, tl.int64)
    for start in range(0, own + 1, WIDTH):
        j = start + tl.arange(0, WIDTH)
        word = tl.load(words_ptr + (b * HK + hk) * BLOCKS + j, mask=j <= own, other=-1)
        found = tl.full((SHAPE.MOST,), -1, tl.int64)
        for n in range(SHAPE.COUNT):
            # no word but -1 is there twice
            top = tl.maximum(tl.max(best, 0), tl.max(word, 0))
            found = tl.where(i == n, top, found)
            best = tl.where(best == top, -1, best)
            word = tl.where(word == top, -1, word)
        best = found
    number = tl.where((best >= 0) & (i < SHAPE.COUNT), -(best & FAR).to(tl.int32) + FAR, FAR)
    number = tl.sort(number)
    out = chosen_ptr + (b * HK + hk) * SHAPE.COUNT + i
    tl.store(out, tl.where(number == FAR, -1, number), mask=i < SHAPE.COUNT)


_start_scores, _start_best = Kernel(_score_blocks), Kernel(_keep_best)


def launch(sums, reference, top, total, lengths, chosen, shape) -> None:
    """Writes the chosen blocks (B, Hk, COUNT) int32, rising, then -1."""
    (B, H, STEPS), Hk = sums.shape[:3], chosen.shape[1]
    blocks = STEPS * shape.NEW
    words = torch.empty(B, Hk, blocks, dtype=torch.int64, device=sums.device)
    scored, compared = constants_of(shape)
    numbers = (H, STEPS, parts_of(shape), blocks)
    grid = (triton.cdiv(blocks, scored["WIDTH"]), Hk, B)
    _start_scores(grid, (sums, reference, top, total, lengths, words, *numbers), scored)
    _start_best((Hk, B, 1), (words, lengths, chosen, Hk, blocks), compared)


@cache
def constants_of(shape: DecodingShape) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the compile-time constants of both launches."""
    scored, compared = {"WIDTH": SCORED, "num_warps": 4}, {"WIDTH": COMPARED, "num_warps": 1}
    return {"SHAPE": shape} | scored | shape.options, {"SHAPE": shape} | compared | shape.options
