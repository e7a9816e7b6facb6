"""A lower bound of each candidate's k-th best score, without a sort: the k-th largest of the maxima of many columns of its events.

The events of a part of a history are laid out in tiles, and a column has the events at one place of all its tiles. The maxima of C
columns are scores of C events, so at least k events have the k-th largest of them or more. Of N events in any order k + k^2 / 2C
or so have it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooftile.recommend.target.kernels.search.scores import INFINITY, LOWEST, NO_SCORE, Sources, held, ordered, scores, tile_of
from rooftile.runtime.launch import Kernel


# fmt: off
@triton.jit(do_not_specialize=["B", "H", "heads", "group"])
def _column_maxima(
    q_ptr, keys_ptr, bias_ptr, cu_q_ptr, cu_ptr, maxima_ptr, q_strides, k_strides, bias_strides, B, H, heads, group, scale,
    SPEC: tl.constexpr,
):
    # fmt: on
    ROWS: tl.constexpr = SPEC.ROWS
    KEYS: tl.constexpr = SPEC.KEYS
    tile = tile_of(tl.program_id(0), cu_q_ptr, cu_ptr, heads, B, ROWS)
    if not tile.begins:
        return
    sources = Sources(q_ptr, keys_ptr, bias_ptr, q_strides, k_strides, bias_strides, H, group, scale)
    q = held(sources, tile, SPEC)
    s = tl.arange(0, KEYS)
    if SPEC.KIND == 0:
        maxima = tl.full((ROWS, KEYS), float("-inf"), tl.float32)
    else:
        maxima = tl.full((ROWS, KEYS), NO_SCORE, tl.int32)
    # whole tiles alone: a bound need not know all events
    for t in tl.range(tl.program_id(1), tile.user.keys // KEYS, SPEC.PARTS, num_stages=SPEC.STAGES):
        x = scores(sources, tile, q, t * KEYS + s, SPEC, False)
        maxima = tl.maximum(maxima, x, propagate_nan=tl.PropagateNan.ALL)
    if SPEC.KIND == 0:
        maxima = ordered(maxima)
    row = ((tile.rows * heads + tile.h) * SPEC.PARTS + tl.program_id(1)) * KEYS
    tl.store(maxima_ptr + row[:, None] + s[None, :], maxima, mask=tile.there[:, None])


@triton.jit(do_not_specialize=["total", "k"])
def _bounds(maxima_ptr, bounds_ptr, total, k, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FLOATS: tl.constexpr):
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = i < total
    at = i.to(tl.int64)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    maxima = tl.load(maxima_ptr + at, mask=there[:, None], other=NO_SCORE)
    bound = tl.where(tl.sum((maxima >= 0).to(tl.int32), 1) >= k, 0, NO_SCORE)
    # bit by bit, the largest number that k columns reach; 11 bits of a fraction are enough, for a lower one is a bound too
    for n in range(19 if FLOATS else 31):
        higher = bound | (1 << (30 - n))
        bound = tl.where(tl.sum((maxima >= higher[:, None]).to(tl.int32), 1) >= k, higher, bound)
    # a score itself, so that equal ones are known as such
    bound = tl.min(tl.where(maxima >= bound[:, None], maxima, 0x7FFFFFFF), 1)
    if FLOATS:
        # all that is finite passes the lowest, and NaN passes each
        bound = tl.minimum(tl.maximum(bound, LOWEST), INFINITY)
    tl.store(bounds_ptr + i, bound, mask=there)


find_maxima = Kernel(_column_maxima)
find_bounds = Kernel(_bounds)
