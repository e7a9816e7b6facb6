"""The forward on Hopper: o and lse.

A program is a crew of warp roles that pass tiles through shared memory and wait only for each other:

    load     one warp: draws the next tile of queries, tells the others, and has its queries copied in, then its keys and
             values block by block, from the last block down to the first
    compute  two or three warpgroups of 64 queries each: scores, softmax and output, all in registers

Copies are the chip's tensor memory accelerator's (TMA): one thread asks, a barrier counts the bytes. Matrix products are
asynchronous too (wgmma), and three overlaps keep the tensor cores busy while the exponentials run:

    in a warpgroup   the scores of the next block are issued before this block's product with the values, so the softmax
                     of the one runs while the other is multiplied
    across them      the warpgroups take turns to issue (ping-pong), so one's softmax runs under the other's products
    across tiles     the last product of a tile is issued together with the first scores of the next tile

Shah et al., FlashAttention-3, arXiv:2407.08608; Dao, FlashAttention-2, arXiv:2307.08691, Algorithm 1.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rooftile.backends.hopper.counters import counter
from rooftile.backends.hopper.descriptors import descriptor, is_readable, readable, template
from rooftile.backends.hopper.gluon import (
    aggregate,
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from rooftile.backends.hopper.pipeline import Ring, named_barrier, ring
from rooftile.backends.hopper.schedule import WORDS, Mask, make_plan, publish, publish_end, take
from rooftile.backends.hopper.tiles import WARPGROUP, Tile, forward_tile
from rooftile.backends.launch import repeated
from rooftile.masks import FULL
from rooftile.spec import Options, Sizes, Spec

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
# queries of a warpgroup: what one wgmma has
WG_ROWS = gl.constexpr(WARPGROUP)
# the first of the warpgroups' named barriers, by which they take turns
TURNS = gl.constexpr(9)


@gluon.jit
def _note(notes, i: gl.constexpr, pointer, desc):
    """Puts down where a tensor is, and its strides."""
    _note_word(notes, 4 * i, pointer.to(gl.int64, bitcast=True))
    _note_word(notes, 4 * i + 1, desc.strides[0])
    _note_word(notes, 4 * i + 2, desc.strides[1])
    _note_word(notes, 4 * i + 3, desc.strides[2])


@gluon.jit
def _note_word(notes, i: gl.constexpr, value):
    notes.index(i).store(gl.full([1], 0, gl.int64, gl.BlockedLayout([1], [32], [4], [0])) + value)


@gluon.jit
def _noted(notes, i: gl.constexpr):
    return gl.max(notes.index(i).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _noted_rows(notes, i: gl.constexpr, b, t, h, dtype: gl.constexpr):
    """The pointer to row t of a head, and the stride from row to row."""
    stride_t = _noted(notes, 4 * i + 3)
    offset = b * _noted(notes, 4 * i + 1) + h * _noted(notes, 4 * i + 2) + t * stride_t
    return _noted(notes, 4 * i).to(gl.pointer_type(dtype), bitcast=True) + offset, stride_t


@aggregate
class Shape:
    """What is known when the kernel is compiled."""

    GROUP: gl.constexpr
    D: gl.constexpr
    DV: gl.constexpr
    KEYS: gl.constexpr  # of a block
    CREW: gl.constexpr  # warpgroups that compute
    PACKED: gl.constexpr
    MASKED: gl.constexpr  # anything but a full mask
    SOFTCAP: gl.constexpr
    SINKS: gl.constexpr
    s_layout: gl.constexpr
    o_layout: gl.constexpr
    p_layout: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, GROUP, D, DV, KEYS, CREW, PACKED, MASKED, SOFTCAP, SINKS):
        self.GROUP = gl.constexpr(GROUP)
        self.D = gl.constexpr(D)
        self.DV = gl.constexpr(DV)
        self.KEYS = gl.constexpr(KEYS)
        self.CREW = gl.constexpr(CREW)
        self.PACKED = gl.constexpr(PACKED)
        self.MASKED = gl.constexpr(MASKED)
        self.SOFTCAP = gl.constexpr(SOFTCAP)
        self.SINKS = gl.constexpr(SINKS)
        o_layout = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
        self.s_layout = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16]))
        self.o_layout = gl.constexpr(o_layout)
        self.p_layout = gl.constexpr(gl.DotOperandLayout(0, o_layout, 2))


@gluon.jit
def _load_block(keys: Ring, values: Ring, k_desc, v_desc, turn, plan, block, shape: Shape):
    """Has one block of keys and values copied in."""
    h = plan.h // shape.GROUP
    row = plan.key + block * shape.KEYS
    keys.wait_empty(turn)
    mbarrier.expect(keys.filled(turn), k_desc.block_type.nbytes)
    tma_load(k_desc, [plan.b, h, row, 0], keys.filled(turn), keys.buffer(turn))
    values.wait_empty(turn)
    mbarrier.expect(values.filled(turn), v_desc.block_type.nbytes)
    tma_load(v_desc, [plan.b, h, row, 0], values.filled(turn), values.buffer(turn))


@gluon.jit
def _load(
    plans: Ring, queries: Ring, keys: Ring, values: Ring, mask: Mask, q_desc, k_desc, v_desc,
    B, H, T, S, tiles, tail, cu_q_ptr, cu_k_ptr, counter_ptr, shape: Shape,
):  # fmt: skip
    """The role that draws tiles and has them copied in.

    It runs as far ahead as the rings let it, which is two blocks; so the next tile is drawn when this one's last block is
    asked for: late, so that no program holds a tile that an idle one could start, and early enough to hide the wait.
    The counter is left at zero for the next launch by whoever finishes last.
    """
    total = tiles * (H if shape.PACKED else B * H)
    programs = gl.num_programs(0)
    n = gl.program_id(0)
    tile = 0
    turn = 0
    while n < total:
        plan = make_plan(n, B, H, T, S, tiles, tail, cu_q_ptr, cu_k_ptr, mask, shape.CREW * WG_ROWS, shape.KEYS, shape.PACKED)
        if plan.live != 0:
            publish(plans, tile, plan)
            queries.wait_empty(tile)
            mbarrier.expect(queries.filled(tile), q_desc.block_type.nbytes * shape.CREW)
            for i in gl.static_range(shape.CREW):
                tma_load(
                    q_desc, [plan.b, plan.h, plan.row + plan.t + i * WG_ROWS, 0], queries.filled(tile),
                    queries.buffers.index(tile % queries.slots * shape.CREW + i),
                )  # fmt: skip
            tile += 1
            for i in range(plan.last - plan.first):
                _load_block(keys, values, k_desc, v_desc, turn, plan, plan.last - i, shape)
                turn += 1
            n = gl.atomic_add(counter_ptr, 1) + programs
            _load_block(keys, values, k_desc, v_desc, turn, plan, plan.first, shape)
            turn += 1
        else:
            n = gl.atomic_add(counter_ptr, 1) + programs
    publish_end(plans, tile)
    finished = gl.atomic_add(counter_ptr + 1, 1)
    gl.store(counter_ptr, 0, mask=finished == programs - 1)
    gl.store(counter_ptr + 1, 0, mask=finished == programs - 1)


@aggregate
class Scoring:
    """From the products of queries and keys to the exponents of 2."""

    mask: Mask
    scale: gl.tensor
    softcap: gl.tensor
    factor: gl.tensor  # what a score is still to be multiplied with

    @gluon.constexpr_function
    def __init__(self, mask, scale, softcap, factor):
        self.mask = mask
        self.scale = scale
        self.softcap = softcap
        self.factor = factor

    @gluon.jit
    def capped(self, s):
        """softcap tanh(scale s / softcap) in units of log2: tanh by one exponential that saturates at both ends."""
        return self.softcap * LOG2E * (1 - 2 / (gl.exp2(s * (2 * LOG2E * self.scale / self.softcap)) + 1))


@gluon.jit
def _scores(s, row, column, plan, scoring: Scoring, shape: Shape, CHECK: gl.constexpr):
    """The products of queries and keys, capped, and -inf where the mask or the end of the keys hides one."""
    if shape.SOFTCAP:
        s = scoring.capped(s)
    if CHECK:
        if shape.MASKED:
            s = _hidden(s, row, column, plan, scoring.mask, shape)
        elif column + shape.KEYS > plan.S:
            s = _hidden(s, row, column, plan, scoring.mask, shape)
    return s


@gluon.jit
def _hidden(s, row, column, plan, mask: Mask, shape: Shape):
    """Scores with -inf for each key that its row does not see."""
    # columns as (eights, lane of four, pair): what a thread holds differs by constants, and a lane shifts its limits
    parts = s.reshape([WG_ROWS, shape.KEYS // 8, 4, 2])
    layout: gl.constexpr = parts.type.layout
    i = row + plan.S - plan.T + gl.arange(0, WG_ROWS, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    eights = gl.arange(0, shape.KEYS // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout))))
    pair = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))
    j = _column(eights * 8) + _pair(pair)
    start = column + _lane(lane * 2)
    sees = j <= _row(mask.last_key(i, plan.S)) - start
    if mask.LEFT or mask.CHUNK:
        sees = sees & (j >= _row(mask.first_key(i)) - start)
    return gl.convert_layout(gl.where(sees, parts, float("-inf")).reshape([WG_ROWS, shape.KEYS]), s.type.layout)


@gluon.jit
def _row(x):
    return gl.expand_dims(gl.expand_dims(gl.expand_dims(x, 1), 2), 3)


@gluon.jit
def _column(x):
    return gl.expand_dims(gl.expand_dims(gl.expand_dims(x, 0), 2), 3)


@gluon.jit
def _lane(x):
    return gl.expand_dims(gl.expand_dims(gl.expand_dims(x, 0), 1), 3)


@gluon.jit
def _pair(x):
    return gl.expand_dims(gl.expand_dims(gl.expand_dims(x, 0), 1), 2)


@gluon.jit
def _softmax(s, m, l, factor, shape: Shape, FIRST: gl.constexpr):
    """Online softmax: the block's weights, and the rows' maximum, sum and the factor for what was summed before.

    The sum is kept in four parts a row, one a thread, and added up once a tile.
    """
    m_new = gl.maximum(m, gl.max(s, 1))
    # a row that has seen no key yet: exp2(-inf - 0) is 0
    reference = gl.where(m_new == float("-inf"), 0.0, m_new * factor)
    alpha = gl.exp2(m * factor - reference)
    p = gl.exp2(s * factor - gl.expand_dims(reference, 1))
    parts = gl.sum(gl.sum(gl.reshape(p, [WG_ROWS, shape.KEYS // 8, 4, 2]), 3), 1)
    if FIRST:
        l = parts
    else:
        l = l * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, parts.type.layout)), 1) + parts
    return p, m_new, l, alpha


@gluon.jit
def _packed(p, dtype: gl.constexpr):
    """A block's weights in 16 bits, two to a register.

    They live from one turn of a loop to the next, and as tensors of 16 bits the compiler would take the pairs apart and
    put them together again each time around.
    """
    even, odd = p.reshape([p.shape[0], p.shape[1] // 2, 2]).split()
    kind: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    return gl.inline_asm_elementwise(
        "cvt.rn." + kind + ".f32 $0, $2, $1;", "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _unpacked(p, dtype: gl.constexpr, layout: gl.constexpr):
    """The weights of `_packed` as the left side of a product: no instruction, only another name for the registers."""
    twice = gl.join(p, p).reshape([p.shape[0], p.shape[1] * 2])
    if dtype == gl.bfloat16:
        weights = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [twice], dtype=gl.bfloat16, is_pure=True, pack=2)
    else:
        weights = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [twice], dtype=gl.float16, is_pure=True, pack=2)
    return gl.convert_layout(weights, layout)


@gluon.jit
def _issue(q, keys: Ring, values: Ring, p, acc, turn, there, MINE: gl.constexpr, OTHER: gl.constexpr, shape: Shape):
    """Issues the scores of block `turn` and the product of the block before it with its values; waits for neither.

    `there` false: there is no such block, and the scores are of a buffer's old keys, for nobody to read.
    """
    keys.wait_full(turn, there)
    named_barrier("sync", MINE)
    none = gl.zeros([WG_ROWS, shape.KEYS], gl.float32, shape.s_layout)
    s = warpgroup_mma(q, keys.buffer(turn).reshape([shape.KEYS, shape.D]).permute((1, 0)), none, use_acc=False, is_async=True)
    values.wait_full(turn - 1)
    weights = _unpacked(p, values.buffers.dtype, shape.p_layout)
    acc = warpgroup_mma(weights, values.buffer(turn - 1).reshape([shape.KEYS, shape.DV]), acc, is_async=True)
    named_barrier("arrive", OTHER)
    return s, acc


@gluon.jit
def _opaque(x):
    """x, in a way that the assembler cannot tell: what follows from it is computed anew.

    ptxas 12.8 keeps what two loops in a row have in common where it was computed for the first, and then runs the second
    with nothing there when the first made no turn.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _step(
    q, keys: Ring, values: Ring, p, acc, m, l, turn, row, column, plan, scoring: Scoring,
    MINE: gl.constexpr, OTHER: gl.constexpr, shape: Shape, CHECK: gl.constexpr,
):  # fmt: skip
    """One block: its scores and weights, and the block before it into the output."""
    s, acc = _issue(q, keys, values, p, acc, turn, True, MINE, OTHER, shape)
    s = warpgroup_mma_wait(1, deps=(s,))
    keys.give_back(turn)
    s = _scores(s, row, column, plan, scoring, shape, CHECK)
    weights, m, l, alpha = _softmax(s, m, l, scoring.factor, shape, False)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    values.give_back(turn - 1)
    p = _packed(weights, keys.buffers.dtype)
    acc = acc * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, shape.o_layout)), 1)
    return p, acc, m, l


@gluon.jit
def _compute(
    WG: gl.constexpr, plans: Ring, queries: Ring, keys: Ring, values: Ring, outputs, notes, o_desc,
    o_ptr, lse_ptr, sinks_ptr, H, total, scoring: Scoring, shape: Shape,
):  # fmt: skip
    """A warpgroup's role: 64 queries of every tile."""
    # the named barriers of the ping-pong, one a warpgroup
    MINE: gl.constexpr = TURNS + WG
    OTHER: gl.constexpr = TURNS + (WG + 1) % shape.CREW
    dtype: gl.constexpr = queries.buffers.dtype
    row_layout: gl.constexpr = gl.SliceLayout(1, shape.s_layout)
    mask = scoring.mask
    none = gl.full([WG_ROWS], float("-inf"), gl.float32, row_layout)
    output = outputs.index(WG)

    if WG == shape.CREW - 1:
        named_barrier("arrive", TURNS)
    tile = 0
    turn = 0
    plan = take(plans, 0)
    # the first block of the first tile has nothing to overlap with
    queries.wait_full(0, plan.live != 0)
    keys.wait_full(0, plan.live != 0)
    named_barrier("sync", MINE)
    q = queries.buffers.index(WG).reshape([WG_ROWS, shape.D])
    zeros = gl.zeros([WG_ROWS, shape.KEYS], gl.float32, shape.s_layout)
    s = warpgroup_mma(q, keys.buffer(0).reshape([shape.KEYS, shape.D]).permute((1, 0)), zeros, use_acc=False, is_async=True)
    named_barrier("arrive", OTHER)
    s = warpgroup_mma_wait(0, deps=(s,))
    keys.give_back(0)
    s = _scores(s, plan.t + WG * WG_ROWS, plan.last * shape.KEYS, plan, scoring, shape, True)
    weights, m, l, _ = _softmax(s, none, none, scoring.factor, shape, True)
    p = _packed(weights, dtype)

    while plan.live != 0:
        acc = gl.zeros([WG_ROWS, shape.DV], gl.float32, shape.o_layout)
        row = plan.t + WG * WG_ROWS
        i_0 = row + plan.S - plan.T
        # blocks from last down to first: some at the right end that the mask cuts, clear ones, some at the left end
        blocks = plan.last - plan.first + 1
        right = 1
        left = blocks
        if shape.MASKED:
            clear_stop = (mask.last_key(i_0, plan.S) + 1) // shape.KEYS
            right = gl.minimum(gl.maximum(plan.last + 1 - clear_stop, 1), blocks)
            q = queries.buffers.index(tile % queries.slots * shape.CREW + WG).reshape([WG_ROWS, shape.D])
            for i in range(1, right):
                turn += 1
                column = (plan.last - i) * shape.KEYS
                p, acc, m, l = _step(
                    q, keys, values, p, acc, m, l, turn, row, column, plan, scoring, MINE, OTHER, shape, True
                )  # fmt: skip
        if mask.LEFT or mask.CHUNK:
            clear_first = gl.maximum(mask.first_key(i_0 + (WG_ROWS - 1)) + (shape.KEYS - 1), 0) // shape.KEYS
            left = gl.maximum(gl.minimum(plan.last + 1 - clear_first, blocks), right)
        q = queries.buffers.index(_opaque(tile) % queries.slots * shape.CREW + WG).reshape([WG_ROWS, shape.D])
        for _ in range(right, left):
            turn += 1
            p, acc, m, l = _step(q, keys, values, p, acc, m, l, turn, row, 0, plan, scoring, MINE, OTHER, shape, False)
        if mask.LEFT or mask.CHUNK:
            q = queries.buffers.index(_opaque(tile) % queries.slots * shape.CREW + WG).reshape([WG_ROWS, shape.D])
            for i in range(left, blocks):
                turn += 1
                column = (plan.last - i) * shape.KEYS
                p, acc, m, l = _step(
                    q, keys, values, p, acc, m, l, turn, row, column, plan, scoring, MINE, OTHER, shape, True
                )  # fmt: skip
        queries.give_back(tile)

        # the last product of this tile, together with the first scores of the next
        tile += 1
        turn += 1
        after = take(plans, tile)
        there = after.live != 0
        queries.wait_full(tile, there)
        q = queries.buffers.index(tile % queries.slots * shape.CREW + WG).reshape([WG_ROWS, shape.D])
        s, acc = _issue(q, keys, values, p, acc, turn, there, MINE, OTHER, shape)
        m = m * scoring.factor
        l = gl.convert_layout(gl.sum(l, 1), row_layout)
        share = 1.0
        if shape.SINKS:
            sink = gl.load(sinks_ptr + plan.h).to(gl.float32) * LOG2E
            m_new = gl.maximum(m, sink)
            reference = gl.where(m_new == float("-inf"), 0.0, m_new)
            share = gl.exp2(m - reference)
            l = l * share + gl.exp2(sink - reference)
            m = m_new
        t = row + gl.arange(0, WG_ROWS, row_layout)
        line = plan.b * H + plan.h
        gl.store(lse_ptr + line.to(gl.int64) * total + plan.row + t, (m + gl.log2(l)) * LN2, mask=t < plan.T)
        share = gl.where(l == 0.0, 0.0, share / l)
        s = warpgroup_mma_wait(1, deps=(s,))
        keys.give_back(turn)
        s = _scores(s, after.t + WG * WG_ROWS, after.last * shape.KEYS, after, scoring, shape, True)
        weights, m, l, _ = _softmax(s, none, none, scoring.factor, shape, True)
        _wait_for_store()
        acc = warpgroup_mma_wait(0, deps=(acc,))
        values.give_back(turn - 1)
        p = _packed(weights, dtype)
        acc = acc * gl.expand_dims(gl.convert_layout(share, gl.SliceLayout(1, shape.o_layout)), 1)
        if shape.MASKED or shape.PACKED:
            # a weight of zero does not hide a NaN or an infinity among the values
            if _holds_nan(acc):
                _with_care(notes, o_ptr, lse_ptr, plan, row, H, total, scoring, shape)
            else:
                _store(output, acc.to(dtype), o_desc, o_ptr, plan, row, H, shape)
        else:
            _store(output, acc.to(dtype), o_desc, o_ptr, plan, row, H, shape)
        plan = after
    tma_store_wait(0)
    if WG == 0:
        named_barrier("sync", TURNS)


@gluon.jit
def _holds_nan(acc):
    """Whether an accumulator holds a NaN: its sum is one then. Each thread sums what it has before any two meet."""
    sums = gl.sum(gl.sum(gl.sum(acc.reshape([4, 2, 8, acc.shape[1] // 8, 4, 2]), 5), 3), 1).reshape([128])
    return gl.max((sums != sums).to(gl.int32), 0) != 0


@gluon.jit
def _with_care(
    notes, o_ptr, lse_ptr, plan, row, H, total, scoring: Scoring, shape: Shape,
):  # fmt: skip
    """The rows of a warpgroup once more, key by key, with nothing taken from a key that a row does not see.

    For tiles whose output holds a NaN: it may have come from behind the mask, or from the sequence next door. Their lse,
    which no value touches, is known by now. Where q, k and v are is read from shared memory: in registers it would weigh on
    the walk that everybody takes.
    """
    ROWS: gl.constexpr = 16
    layout: gl.constexpr = gl.BlockedLayout([1, shape.D // 32], [1, 32], [4, 1], [1, 0])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    e = gl.arange(0, shape.D, gl.SliceLayout(0, layout))
    dtype: gl.constexpr = o_ptr.dtype.element_ty
    q_head, q_stride = _noted_rows(notes, 0, plan.b, plan.row, plan.h, dtype)
    k_head, k_stride = _noted_rows(notes, 1, plan.b, plan.key, plan.h // shape.GROUP, dtype)
    v_head, v_stride = _noted_rows(notes, 2, plan.b, plan.key, plan.h // shape.GROUP, dtype)
    line = plan.b * H + plan.h
    barrier()
    for r in range(0, WG_ROWS, ROWS):
        t = row + r + gl.arange(0, ROWS, row_layout)
        there = t < plan.T
        lse = gl.load(lse_ptr + line.to(gl.int64) * total + plan.row + t, mask=there, other=0.0) * LOG2E
        lse = gl.where(lse == float("-inf"), 0.0, lse)
        lines = gl.expand_dims(t * q_stride, 1) + gl.expand_dims(e, 0)
        q = gl.load(q_head + lines, mask=gl.expand_dims(there, 1), other=0.0).to(gl.float32)
        i = t + plan.S - plan.T
        first = scoring.mask.first_key(i)
        last = scoring.mask.last_key(i, plan.S)
        o = gl.zeros([ROWS, shape.DV], gl.float32, layout)
        for j in range(plan.first * shape.KEYS, gl.minimum((plan.last + 1) * shape.KEYS, plan.S)):
            k = gl.load(k_head + j * k_stride + e).to(gl.float32)
            v = gl.load(v_head + j * v_stride + e).to(gl.float32)
            s = gl.sum(q * gl.expand_dims(k, 0), 1)
            if shape.SOFTCAP:
                s = scoring.capped(s)
            p = gl.exp2(s * scoring.factor - lse)
            sees = gl.expand_dims((first <= j) & (j <= last), 1)
            o += gl.where(sees, gl.expand_dims(p, 1) * gl.expand_dims(v, 0), 0.0)
        base = plan.row if shape.PACKED else plan.b.to(gl.int64) * total
        lines = ((base + t).to(gl.int64) * H + plan.h) * shape.DV
        gl.store(
            o_ptr + gl.expand_dims(lines, 1) + gl.expand_dims(e, 0), o.to(dtype), mask=gl.expand_dims(there, 1)
        )


@gluon.jit
def _store(output, o, o_desc, o_ptr, plan, row, H, shape: Shape):
    """The rows of a warpgroup, to memory, at most 128 columns at a time."""
    if shape.DV > 128:
        low, high = o.reshape([WG_ROWS, 2, shape.DV // 2]).permute((0, 2, 1)).split()
        _store_columns(output, low, 0, o_desc, o_ptr, plan, row, H, shape)
        _wait_for_store()
        _store_columns(output, high, shape.DV // 2, o_desc, o_ptr, plan, row, H, shape)
    else:
        _store_columns(output, o, 0, o_desc, o_ptr, plan, row, H, shape)


@gluon.jit
def _wait_for_store():
    """Until the staged rows are on their way: one thread asked for the copy, and all of them are to write there next."""
    tma_store_wait(0)
    barrier()


@gluon.jit
def _store_columns(output, o, column: gl.constexpr, o_desc, o_ptr, plan, row, H, shape: Shape):
    """A packed sequence may end inside the tile, where the copy engine would not stop: its rows are stored one by one."""
    columns: gl.constexpr = o.shape[1]
    staged = output.reshape([WG_ROWS, columns])
    staged.store(o)
    if shape.PACKED:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [4, 1], [1, 0])
        t = row + gl.arange(0, WG_ROWS, gl.SliceLayout(1, layout))
        e = column + gl.arange(0, columns, gl.SliceLayout(0, layout))
        lines = ((plan.row + t).to(gl.int64) * H + plan.h) * shape.DV
        there = gl.expand_dims(t < plan.T, 1)
        gl.store(o_ptr + gl.expand_dims(lines, 1) + gl.expand_dims(e, 0), staged.load(layout), mask=there)
    else:
        fence_async_shared()
        tma_store(o_desc, [plan.b, plan.h, row, column], output)


# fmt: off
@gluon.jit(do_not_specialize=["B", "S", "tiles", "tail", "left", "right", "prefix", "chunk"])
def _forward(
    q_desc, k_desc, v_desc, o_desc, q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, sinks_ptr, cu_q_ptr, cu_k_ptr, counter_ptr,
    B, S, tiles, tail, scale, softcap, left, right, prefix, chunk,
    GROUP: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, PACKED: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, PREFIX: gl.constexpr, CHUNK: gl.constexpr,
    SOFTCAP: gl.constexpr, SINKS: gl.constexpr,
    KEYS: gl.constexpr, CREW: gl.constexpr, Q_SLOTS: gl.constexpr, KV_SLOTS: gl.constexpr,
    COMPUTE_REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    shape = Shape(GROUP, D, DV, KEYS, CREW, PACKED, LEFT or RIGHT or PREFIX or CHUNK, SOFTCAP, SINKS)
    mask = Mask(left, right, prefix, chunk, LEFT, RIGHT, PREFIX, CHUNK)
    queries = ring(gl.allocate_shared_memory(dtype, [Q_SLOTS * CREW, 1, 1, WG_ROWS, D], q_desc.layout), Q_SLOTS, CREW)
    keys = ring(gl.allocate_shared_memory(dtype, [KV_SLOTS, 1, 1, KEYS, D], k_desc.layout), KV_SLOTS, CREW)
    values = ring(gl.allocate_shared_memory(dtype, [KV_SLOTS, 1, 1, KEYS, DV], v_desc.layout), KV_SLOTS, CREW)
    outputs = gl.allocate_shared_memory(dtype, [CREW, 1, 1, WG_ROWS, min(DV, 128)], o_desc.layout)
    words: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    plans = ring(gl.allocate_shared_memory(gl.int32, [2 * WORDS, 1], words), 2, CREW)
    notes = gl.allocate_shared_memory(gl.int64, [16, 1], words)
    _note(notes, 0, q_ptr, q_desc)
    _note(notes, 1, k_ptr, k_desc)
    _note(notes, 2, v_ptr, v_desc)
    fence_async_shared()
    # packed: one sequence, of all queries
    H = q_desc.shape[1].to(gl.int32)
    T = q_desc.shape[2].to(gl.int32)
    load = (
        plans, queries, keys, values, mask, q_desc, k_desc, v_desc,
        B, H, T, S, tiles, tail, cu_q_ptr, cu_k_ptr, counter_ptr, shape,
    )
    factor = scale * LOG2E
    if SOFTCAP:
        factor = scale * 0.0 + 1.0
    scoring = Scoring(mask, scale, softcap, factor)
    args = (
        plans, queries, keys, values, outputs, notes, o_desc, o_ptr, lse_ptr, sinks_ptr, H, T, scoring, shape,
    )
    if CREW == 2:
        gl.warp_specialize(
            [(_compute, (0,) + args), (_compute, (1,) + args), (_load, load)],
            [4, 1], [COMPUTE_REGISTERS, COPY_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [(_compute, (0,) + args), (_compute, (1,) + args), (_compute, (2,) + args), (_load, load)],
            [4, 4, 1], [COMPUTE_REGISTERS, COMPUTE_REGISTERS, COPY_REGISTERS],
        )


def forward(q: Tensor, k: Tensor, v: Tensor, options: Options, spec: Spec) -> tuple[Tensor, Tensor]:
    """Returns o (B, T, H, Dv) and lse (B, H, T), or packed (total_q, H, Dv) and (H, total_q)."""
    sizes = _sizes(q, k, options)
    o, lse = _outputs(q, v, sizes)
    if lse.numel() == 0:
        return o, lse
    if sizes.S == 0:
        # a descriptor needs an element; the kernel is told that there is none
        k, v = (x.new_zeros((*x.shape[:-3], 1, *x.shape[-2:])) for x in (k, v))
    q, k, v = readable(q), readable(k), readable(v)
    tile = forward_tile(spec, sizes.T)
    programs, numbers = _numbers(q.device, sizes, tile, spec)
    described = (descriptor(x, *box) for x, box in zip((q, k, v, o), _boxes(spec, tile), strict=True))
    sinks, cu_q, cu_k = (lse if x is None else x for x in (options.sinks, options.cu_q, options.cu_k))
    _forward[(programs,)](
        *described, q, k, v, o, lse, sinks, cu_q, cu_k, counter(q.device), *numbers, **_constants(spec, tile)
    )
    return o, lse


def prepare(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """The forward for tensors like these and no options, with all but the outputs and the launch done beforehand."""
    sizes = _sizes(q, k, Options())
    if not q.numel() or not k.numel() or not all(is_readable(x) for x in (q, k, v)):
        return None
    tile = forward_tile(spec, sizes.T)
    programs, numbers = _numbers(q.device, sizes, tile, spec)
    launch = repeated(_forward, programs, numbers, _constants(spec, tile))
    o, _ = _outputs(q, v, sizes)
    fill_q, fill_k, fill_v, fill_o = (template(x, *box) for x, box in zip((q, k, v, o), _boxes(spec, tile), strict=True))
    shape, rows, dtype, device = o.shape, (sizes.B, sizes.H, sizes.T), q.dtype, q.device

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        o = torch.empty(shape, dtype=dtype, device=device)
        lse = torch.empty(rows, dtype=torch.float32, device=device)
        launch(fill_q(q), fill_k(k), fill_v(v), fill_o(o), q, k, v, o, lse, lse, lse, lse, counter(device))
        return o, lse

    return run


def _sizes(q: Tensor, k: Tensor, options: Options) -> Sizes:
    if options.cu_q is not None:
        return Sizes(B=options.cu_q.shape[0] - 1, T=q.shape[0], S=k.shape[0], H=q.shape[1], Hk=k.shape[1])
    return Sizes(B=q.shape[0], T=q.shape[1], S=k.shape[1], H=q.shape[2], Hk=k.shape[2])


def _outputs(q: Tensor, v: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Empty o and lse."""
    rows = (sizes.H, sizes.T) if q.ndim == 3 else (sizes.B, sizes.H, sizes.T)
    o = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
    return o, torch.empty(rows, dtype=torch.float32, device=q.device)


def _boxes(spec: Spec, tile: Tile) -> tuple[tuple[int, int], ...]:
    """What one copy takes of q, k, v and o: positions and elements."""
    return (
        (WARPGROUP, spec.dim), (tile.KEYS, spec.dim), (tile.KEYS, spec.dim_v), (WARPGROUP, min(spec.dim_v, 128)),
    )  # fmt: skip


# tiles a program, on average, that the heads taken together at the end have
TAIL = 2


def _numbers(device: torch.device, sizes: Sizes, tile: Tile, spec: Spec) -> tuple[int, tuple[float, ...]]:
    """How many programs run, and the kernel's numbers."""
    packed = spec.layout == "packed"
    heads = sizes.H if packed else sizes.B * sizes.H
    tiles = sizes.T // tile.rows + sizes.B if packed else -(-sizes.T // tile.rows)
    programs = min(tiles * heads, processors(device))
    # with a full mask every tile has the same length, and there is nothing to even out
    tail = 0 if spec.mask == FULL else min(-(-TAIL * programs // tiles), heads)
    mask = spec.mask
    (chunk,) = mask.chunks or (0,)
    return programs, (
        sizes.B, sizes.S, tiles, tail,
        spec.scale, spec.softcap, mask.left or 0, mask.right or 0, mask.prefix or 0, chunk,
    )  # fmt: skip


@cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _constants(spec: Spec, tile: Tile) -> dict[str, Any]:
    """The compile-time arguments, put together once."""
    mask = spec.mask
    return {
        "GROUP": spec.group,
        "D": spec.dim,
        "DV": spec.dim_v,
        "PACKED": spec.layout == "packed",
        "LEFT": mask.left is not None,
        "RIGHT": mask.right is not None,
        "PREFIX": mask.prefix is not None,
        "CHUNK": bool(mask.chunks),
        "SOFTCAP": spec.softcap > 0,
        "SINKS": spec.has_sinks,
        **tile.constants,
        "num_warps": 4,
    }
