"""The end of a search: the pairs that were collected of each candidate are sorted, and the places of the k best stored.

A pair is one integer of 64 bits: the score as an integer of the same order above, the event's place below. All differ, so the
largest are the best scores and of equal ones the latest.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooftile.recommend.target.kernels.search.scores import HIDDEN, LOWEST, NO_SCORE, ordered
from rooftile.runtime.launch import Kernel

# instead of a place: a candidate with more pairs than there was room for
UNFINISHED = tl.constexpr(-2)


@triton.jit
def merged(best, more):
    """The best of pairs that fall and of others in any order, as many: they fall."""
    return tl.bitonic_merge(tl.maximum(best, tl.sort(more)), descending=True)


@triton.jit
def places_of(best):
    """The events of pairs, -1 where there is none."""
    return tl.where(best == HIDDEN, -1, best & 0xFFFFFFFF).to(tl.int32)


@triton.jit(do_not_specialize=["total", "k"])
def _choose(counts_ptr, bounds_ptr, buffer_ptr, found_ptr, total, k, ROWS: tl.constexpr, SPEC: tl.constexpr):
    KEPT: tl.constexpr = SPEC.KEPT
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = i < total
    i = i.to(tl.int64)
    counts_ptr += i * SPEC.PARTS
    buffer = buffer_ptr + i[:, None] * (SPEC.PARTS * SPEC.ROOM)
    s = tl.arange(0, KEPT)
    count = tl.zeros((ROWS,), tl.int32)
    unfinished = count > 0
    for p in range(SPEC.PARTS):
        came = tl.load(counts_ptr + p, mask=there, other=0)
        unfinished = unfinished | (came > SPEC.ROOM)
        count += came
    if SPEC.KIND != 2:
        # a bound is no choice's end: fewer than k above it would mean that it was none
        bound = tl.load(bounds_ptr + i, mask=there, other=NO_SCORE)
        unfinished = unfinished | ((count < k) & (bound > (LOWEST if SPEC.KIND == 0 else NO_SCORE)))
    best = tl.full((ROWS, KEPT), HIDDEN, tl.int64)
    for first in range(0, tl.max(tl.where(unfinished, 0, count), 0), KEPT):
        # the n-th pair of a candidate lies in the part that the counts of those before leave it to
        n = first + s[None, :] + tl.zeros((ROWS, KEPT), tl.int32)
        at = tl.zeros((ROWS, KEPT), tl.int32)
        taken = at > 0
        for p in range(SPEC.PARTS):
            came = tl.load(counts_ptr + p, mask=there, other=0)[:, None]
            inside = (n >= 0) & (n < came)
            at = tl.where(inside, p * SPEC.ROOM + n, at)
            taken = taken | inside
            n -= came
        taken = taken & (unfinished == 0)[:, None]
        pairs = tl.load(buffer + at, mask=taken, other=0)
        score = (pairs >> 32).to(tl.int32)
        if SPEC.KIND == 0:
            score = ordered(score.to(tl.float32, bitcast=True))
        pairs = (score.to(tl.int64) << 32) | (pairs & 0xFFFFFFFF)
        best = merged(best, tl.where(taken, pairs, HIDDEN))
    places = tl.where(unfinished[:, None], UNFINISHED, places_of(best))
    tl.store(found_ptr + i[:, None] * k + s[None, :], places, mask=there[:, None] & (s < k)[None, :])


choose = Kernel(_choose)
