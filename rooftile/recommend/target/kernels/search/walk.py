"""The search of candidates that have more pairs than there was room for, as in histories whose columns hold several of the best.

A program walks the events of a tile of candidates and keeps the k best of each. A pair that is better than the k-th best so far
waits in a buffer. A full buffer is sorted and meets the best, which are sorted the other way: the larger of each two are the best of
both, and a merge sorts them again. From the latest event on, so that an equal one that comes later in the walk is not better.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooftile.recommend.target.kernels.search.choosing import UNFINISHED, merged, places_of
from rooftile.recommend.target.kernels.search.scores import HIDDEN, Sources, held, ordered, scores, tile_of
from rooftile.runtime.launch import Kernel


@triton.jit
def _with_buffer(best, buffer, count, KEPT: tl.constexpr):
    """The best pairs and those that wait in the buffer, `count` of each candidate: the best of both, falling."""
    s = tl.arange(0, KEPT)
    # other threads wrote the buffer, and write it again when all have read it
    tl.debug_barrier()
    waiting = tl.load(buffer + s[None, :], mask=s[None, :] < count[:, None], other=HIDDEN)
    tl.debug_barrier()
    return merged(best, waiting)


# fmt: off
@triton.jit(do_not_specialize=["B", "H", "heads", "k", "group"])
def _walk(
    q_ptr, keys_ptr, bias_ptr, cu_q_ptr, cu_ptr, found_ptr, buffer_ptr, q_strides, k_strides, bias_strides, B, H, heads, k, group,
    scale, ROWS: tl.constexpr, SPEC: tl.constexpr,
):
    # fmt: on
    # as many events per tile as are kept
    KEPT: tl.constexpr = SPEC.KEPT
    tile = tile_of(tl.program_id(0), cu_q_ptr, cu_ptr, heads, B, ROWS)
    if not tile.begins:
        return
    row = tile.rows * heads + tile.h
    unfinished = tile.there & (tl.load(found_ptr + row * k, mask=tile.there, other=0) == UNFINISHED)
    if tl.max(unfinished.to(tl.int32), 0) == 0:
        return
    sources = Sources(q_ptr, keys_ptr, bias_ptr, q_strides, k_strides, bias_strides, H, group, scale)
    q = held(sources, tile, SPEC)
    n = tile.user.keys
    s = tl.arange(0, KEPT)
    buffer = buffer_ptr + row[:, None] * (SPEC.PARTS * SPEC.ROOM)
    best = tl.full((ROWS, KEPT), HIDDEN, tl.int64)
    lowest = tl.full((ROWS,), HIDDEN, tl.int64)
    count = tl.zeros((ROWS,), tl.int32)
    tiles = tl.cdiv(n, KEPT)
    for t in range(0, tiles):
        j = (tiles - 1 - t) * KEPT + s
        x = scores(sources, tile, q, j, SPEC, True)
        seen = (j < n)[None, :] & unfinished[:, None]
        if SPEC.KIND == 0:
            high = ordered(x)
            seen = seen & (x != float("-inf"))
        else:
            high = x
            if SPEC.KIND == 2:
                seen = seen & (x > 0)
        ranks = tl.where(seen, (high.to(tl.int64) << 32) | j.to(tl.int64)[None, :], HIDDEN)
        better = ranks > lowest[:, None]
        more = tl.sum(better.to(tl.int32), 1)
        if tl.max(count + more, 0) > KEPT:
            best = _with_buffer(best, buffer, count, KEPT)
            # the k-th best, which is no more than kept
            lowest = tl.max(tl.where(s[None, :] == k - 1, best, HIDDEN), 1)
            better = ranks > lowest[:, None]
            more = tl.sum(better.to(tl.int32), 1)
            count = 0 * count
        place = count[:, None] + tl.cumsum(better.to(tl.int32), 1) - 1
        tl.store(buffer + place, ranks, mask=better)
        count += more
    best = _with_buffer(best, buffer, count, KEPT)
    tl.store(found_ptr + row[:, None] * k + s[None, :], places_of(best), mask=unfinished[:, None] & (s < k)[None, :])


walk = Kernel(_walk)
