"""The second walk of a search: the pairs (score, place) of the events that reach a candidate's bound go to a buffer, in any order.

From the latest event on: when k events have reached the bound, an earlier one must pass it. So of equal scores no more than a tile's
are collected beyond k. A candidate's counter says how many pairs came, also of those that there was no room for.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooftile.recommend.target.kernels.search.scores import INFINITY, NO_SCORE, Sources, held, number, scores, tile_of
from rooftile.runtime.launch import Kernel

# Triton moves a tile to another layout for atomic operations and stores, and branches around each. In PTX a pair stays with the
# thread that has its score, and few instructions are left where it does not pass: its place is taken, and the pair put there
TAKE = tl.constexpr("""{
.reg .pred p;
setp.ne.s32 p, $2, 0;
mov.b32 $0, 0xffffffff;
@p atom.global.relaxed.gpu.add.u32 $0, [$1], 1;
}""")
PUT = tl.constexpr("""{
.reg .pred p;
.reg .b64 a;
setp.lt.u32 p, $2, $3;
mad.wide.u32 a, $2, 8, $1;
@p st.global.v2.b32 [a], {$4, $5};
mov.b32 $0, 0;
}""")


# fmt: off
@triton.jit
def _collect_tile(t, count, bound, q, sources, tile, row, counts_ptr, buffer_ptr, k, SPEC: tl.constexpr, MASKED: tl.constexpr):
    # fmt: on
    """Collects the events of tile t; returns how many each candidate has now."""
    j = t * SPEC.KEYS + tl.arange(0, SPEC.KEYS)
    x = scores(sources, tile, q, j, SPEC, MASKED)
    if SPEC.KIND == 0:
        # NaN is not below
        least = number(tl.where(count >= k, tl.minimum(bound + 1, INFINITY), bound))
        passed = ~(x < least[:, None])
        bits = x.to(tl.int32, bitcast=True)
    else:
        least = tl.where(count >= k, bound + 1, bound)
        passed = x >= least[:, None]
        bits = x
    passed = passed & tile.there[:, None]
    if MASKED:
        passed = passed & (j < tile.user.keys)[None, :]
    counter, room = counts_ptr + row[:, None], buffer_ptr + row[:, None] * SPEC.ROOM
    if SPEC.PTX:
        place = tl.inline_asm_elementwise(TAKE, "=&r,l,r", [counter.to(tl.int64), passed.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1)
        tl.inline_asm_elementwise(PUT, "=r,l,r,r,r,r", [room.to(tl.int64), place, SPEC.ROOM, j[None, :], bits], dtype=tl.int32, is_pure=False, pack=1)
    else:
        place = tl.atomic_add(counter + 0 * j[None, :], 1, mask=passed, sem="relaxed")
        pairs = (bits.to(tl.int64) << 32) | j.to(tl.int64)[None, :]
        tl.store(room + place, pairs, mask=passed & (place < SPEC.ROOM))
    return count + tl.sum(passed.to(tl.int32), 1)


# fmt: off
@triton.jit(do_not_specialize=["B", "H", "heads", "k", "group"])
def _collect(
    q_ptr, keys_ptr, bias_ptr, cu_q_ptr, cu_ptr, bounds_ptr, counts_ptr, buffer_ptr, q_strides, k_strides, bias_strides, B, H, heads,
    k, group, scale, SPEC: tl.constexpr,
):
    # fmt: on
    ROWS: tl.constexpr = SPEC.ROWS
    tile = tile_of(tl.program_id(0), cu_q_ptr, cu_ptr, heads, B, ROWS)
    if not tile.begins:
        return
    sources = Sources(q_ptr, keys_ptr, bias_ptr, q_strides, k_strides, bias_strides, H, group, scale)
    q = held(sources, tile, SPEC)
    row = tile.rows * heads + tile.h
    if SPEC.KIND == 2:
        # an event of the category
        bound = tl.full((ROWS,), 1, tl.int32)
    else:
        bound = tl.load(bounds_ptr + row, mask=tile.there, other=NO_SCORE)
    row = row * SPEC.PARTS + tl.program_id(1)
    count = tl.zeros((ROWS,), tl.int32)
    whole = tile.user.keys // SPEC.KEYS
    if whole % SPEC.PARTS == tl.program_id(1):
        count = _collect_tile(whole, count, bound, q, sources, tile, row, counts_ptr, buffer_ptr, k, SPEC, True)
    mine = tl.cdiv(whole - tl.program_id(1), SPEC.PARTS)
    for n in tl.range(0, mine, num_stages=SPEC.STAGES):
        t = (mine - 1 - n) * SPEC.PARTS + tl.program_id(1)
        count = _collect_tile(t, count, bound, q, sources, tile, row, counts_ptr, buffer_ptr, k, SPEC, False)


collect = Kernel(_collect)
