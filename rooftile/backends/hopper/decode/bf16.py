"""Decoding from pages on Hopper: one query a sequence, and copies under way from the first block to the last.

The blocks of KEYS keys of all sequences are one row of work (`row_of_work`), each team has an equal part of it, and each of a
team's programs a key head. Copies do not know where a sequence ends: two warps ask the copy engine for keys and for values, as
far ahead as there are slots, while the third role multiplies. In the portable kernel a sequence's first copies wait for the one
before it to be done with: some 4 us, in which a multiprocessor could read 80 kB.

A wgmma has 64 rows, and the heads of a group are the first few of them: tensor cores have the time, memory is what is short.

Dao et al., Flash-Decoding, 2023; Shah et al., FlashAttention-3, arXiv:2407.08608.
"""

from rooftile.backends.hopper.device.config import LN2, LOG2E, WG_ROWS, Shape
from rooftile.backends.hopper.device.page_loads import Table, load_pages, load_values
from rooftile.backends.hopper.device.pipeline import Ring, ring
from rooftile.backends.hopper.device.scheduler import WORDS, Mask, Plan, publish, publish_end, take
from rooftile.backends.hopper.device.softmax import Scoring, make_scoring
from rooftile.backends.hopper.gluon import barrier, fence_async_shared, gl, gluon, warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def span(S, mask: Mask, KEYS: gl.constexpr):
    """The first block that the one query of a sequence reads, and how many it reads, at least one."""
    first = mask.first_key(S - 1) // KEYS
    return first, gl.maximum((S + KEYS - 1) // KEYS - first, 1)


@gluon.jit
def load_keys(
    plans: Ring, keys: Ring, k_desc, table: Table, lengths_ptr, B, mask: Mask, BATCH: gl.constexpr, shape: Shape
):  # fmt: skip
    """The role that finds a program's sequences, tells the others, and has the keys copied in."""
    layout: gl.constexpr = gl.BlockedLayout([max(BATCH // 32, 1)], [32], [1], [0])
    lane = gl.arange(0, BATCH, layout)
    lengths = gl.load(lengths_ptr + lane, mask=lane < B, other=0)
    _, each = span(lengths, mask, shape.KEYS)
    ends = gl.associative_scan(gl.where(lane < B, each, 0), 0, _add)
    total = gl.max(ends, 0)
    share = (total + gl.num_programs(1) - 1) // gl.num_programs(1)
    place = gl.minimum(gl.program_id(1) * share, total)
    last = gl.minimum(place + share, total)
    head = gl.program_id(0) * shape.GROUP
    tile = 0
    turn = 0
    while place < last:
        b = gl.sum((ends <= place).to(gl.int32), 0)
        before = gl.max(gl.where(ends <= place, ends, 0), 0)
        S = gl.sum(gl.where(lane == b, lengths, 0), 0)
        first, blocks = span(S, mask, shape.KEYS)
        count = gl.minimum(last - place, blocks - (place - before))
        first += place - before
        zero = b * 0
        plan = Plan(zero + 1, b, zero + head, zero, zero + 1, S, b, b, zero, first, first + count - 1)
        publish(plans, tile, plan)
        for i in range(count):
            load_pages(keys, k_desc, table, turn, plan, plan.last - i, shape.D, shape)
            turn += 1
        tile += 1
        place += count
    publish_end(plans, tile)


@gluon.jit
def merge_may_start():
    """Lets the merge start beside programs that are still at work: it waits for all of them."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def shares(m, l, sinks, there, SINKS: gl.constexpr):
    """What a softmax's outputs are to be multiplied with, and its lse: by its largest score, in units of log2, and its sum."""
    share = gl.full(m.shape, 1.0, gl.float32, m.type.layout)
    if SINKS:
        sink = gl.load(sinks, mask=there, other=0.0).to(gl.float32) * LOG2E
        top = gl.maximum(m, sink)
        reference = gl.where(top == float("-inf"), 0.0, top)
        share = gl.exp2(m - reference)
        l = l * share + gl.exp2(sink - reference)
        m = top
    return gl.where(l == 0.0, 0.0, share / l), (m + gl.log2(l)) * LN2


@gluon.jit
def without_hidden(values, j_0, S, first_key):
    """Zeros in shared memory for values that nobody sees: a weight of zero does not hide a NaN in a slot nobody has written."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // values.shape[1], values.shape[1] // 8], [4, 1], [1, 0])
    j = j_0 + gl.arange(0, values.shape[0], gl.SliceLayout(1, layout))
    sees = (j < S) & (j >= first_key)
    v = values.load(layout)
    values.store(gl.where(gl.expand_dims(sees, 1), v, gl.zeros_like(v)))
    fence_async_shared()
    barrier()


@gluon.jit
def _compute(
    plans: Ring, keys: Ring, values: Ring, q_ptr, o_ptr, lse_ptr, parts_ptr, sinks_ptr, q_stride_b, q_stride_h, H, mask: Mask,
    scoring: Scoring, ROWS: gl.constexpr, shape: Shape,
):  # fmt: skip
    """The role that multiplies: a sequence's heads of a group with its blocks, from the last block down."""
    dtype: gl.constexpr = keys.buffers.dtype
    row_layout: gl.constexpr = gl.SliceLayout(1, shape.s_layout)
    q_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // shape.D, shape.D // 8], [4, 1], [1, 0])
    head = gl.program_id(0) * shape.GROUP
    turn = 0
    tile = 0
    plan = take(plans, 0)
    while plan.live != 0:
        g = gl.arange(0, WG_ROWS, gl.SliceLayout(1, q_layout))
        d = gl.arange(0, shape.D, gl.SliceLayout(0, q_layout))
        lines = plan.b.to(gl.int64) * q_stride_b + (head + g) * q_stride_h
        q = gl.load(
            q_ptr + gl.expand_dims(lines, 1) + gl.expand_dims(d, 0), mask=gl.expand_dims(g < shape.GROUP, 1), other=0.0
        )  # fmt: skip
        q = gl.convert_layout(q, gl.DotOperandLayout(0, shape.s_layout, 2))
        # rows of nobody have weights of 0, which cost the tensor cores less power than any others
        m = gl.where(gl.arange(0, WG_ROWS, row_layout) < shape.GROUP, float("-inf"), 1e30)
        l = gl.zeros([WG_ROWS], gl.float32, row_layout)
        acc = gl.zeros([WG_ROWS, shape.DV], gl.float32, shape.o_layout)
        first_key = mask.first_key(plan.S - 1)
        for i in range(plan.last - plan.first + 1):
            j_0 = (plan.last - i) * shape.KEYS
            cut = (j_0 + shape.KEYS > plan.S) | (j_0 < first_key)
            keys.wait_full(turn)
            k = shape.block_of_keys(keys, turn)
            none = gl.zeros([WG_ROWS, shape.KEYS], gl.float32, shape.s_layout)
            s = warpgroup_mma(q, k.permute((1, 0)), none, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=(s,))
            keys.give_back(turn)
            if shape.SOFTCAP:
                s = scoring.capped(s)
            if cut:
                j = j_0 + gl.arange(0, shape.KEYS, gl.SliceLayout(0, shape.s_layout))
                s = gl.where(gl.expand_dims((j < plan.S) & (j >= first_key), 0), s, float("-inf"))
            m_new = gl.maximum(m, gl.max(s, 1))
            reference = gl.where(m_new == float("-inf"), 0.0, m_new) * scoring.factor
            alpha = gl.exp2(m * scoring.factor - reference)
            p = gl.exp2(s * scoring.factor - gl.expand_dims(reference, 1))
            l = l * alpha + gl.sum(p, 1)
            m = m_new
            acc = acc * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, shape.o_layout)), 1)
            values.wait_full(turn)
            v = shape.block_of_values(values, turn)
            if cut:
                without_hidden(v, j_0, plan.S, first_key)
            acc = warpgroup_mma(gl.convert_layout(p.to(dtype), shape.p_layout), v, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            values.give_back(turn)
            turn += 1

        start, blocks = span(plan.S, mask, shape.KEYS)
        m = m * scoring.factor
        row = gl.arange(0, WG_ROWS, row_layout)
        there = row < shape.GROUP
        o_row = gl.arange(0, WG_ROWS, gl.SliceLayout(1, shape.o_layout))
        e = gl.arange(0, shape.DV, gl.SliceLayout(0, shape.o_layout))
        mine = gl.expand_dims(o_row < shape.GROUP, 1)
        if plan.last - plan.first + 1 == blocks:
            line = plan.b.to(gl.int64) * H + head
            share, lse = shares(m, l, sinks_ptr + head + row, there, shape.SINKS)
            gl.store(lse_ptr + line + row, lse, mask=there)
            o = acc * gl.expand_dims(gl.convert_layout(share, gl.SliceLayout(1, shape.o_layout)), 1)
            gl.store(o_ptr + (gl.expand_dims((line + o_row) * shape.DV, 1) + gl.expand_dims(e, 0)), o.to(dtype), mask=mine)
        else:
            # a program's pieces: of a sequence that began before it, and of one that goes on after it
            program = gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
            piece = parts_ptr + ((2 * program + (plan.first == start).to(gl.int32)) * ROWS).to(gl.int64) * (shape.DV + 2)
            gl.store(piece + (gl.expand_dims(o_row * (shape.DV + 2), 1) + gl.expand_dims(e, 0)), acc, mask=mine)
            gl.store(piece + row * (shape.DV + 2) + shape.DV, m, mask=there)
            gl.store(piece + row * (shape.DV + 2) + (shape.DV + 1), l, mask=there)
        tile += 1
        plan = take(plans, tile)
    merge_may_start()


# fmt: off
@gluon.jit(
    do_not_specialize=[
        "table_stride", "k_page", "k_head", "v_page", "v_head", "q_stride_b", "q_stride_h", "B", "H", "left", "chunk",
    ],
    do_not_specialize_on_alignment=["sinks_ptr", "table_ptr", "lengths_ptr"],
)
def paged_decode(
    k_desc, v_desc, q_ptr, o_ptr, lse_ptr, parts_ptr, table_ptr, lengths_ptr, sinks_ptr,
    table_stride, k_page, k_head, v_page, v_head, q_stride_b, q_stride_h, B, H, scale, softcap, left, chunk,
    GROUP: gl.constexpr, D: gl.constexpr, SIZE: gl.constexpr, BATCH: gl.constexpr, ROWS: gl.constexpr, LEFT: gl.constexpr,
    CHUNK: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr, KEYS: gl.constexpr, SLOTS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
):
    # fmt: on
    dtype: gl.constexpr = k_desc.dtype
    LINES: gl.constexpr = k_desc.block_type.shape[1]
    shape = Shape(GROUP, D, D, D, D, KEYS, 1, 1, False, 0, False, False, False, SIZE, LEFT or CHUNK, SOFTCAP, SINKS, LINES, LINES)
    # a query is its sequence's last: what is to its right, and before a prefix, does not matter
    mask = Mask(left, B * 0, B * 0, chunk, LEFT, False, False, CHUNK)
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, KEYS, D], dtype)
    keys = ring(gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, KEYS, D], tile_layout), SLOTS, 1)
    values = ring(gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, KEYS, D], tile_layout), SLOTS, 1)
    words: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    plans = ring(gl.allocate_shared_memory(gl.int32, [2 * WORDS, 1], words), 2, 2)
    fence_async_shared()
    scoring = make_scoring(mask, scale, softcap, SOFTCAP)
    compute = (
        plans, keys, values, q_ptr, o_ptr, lse_ptr, parts_ptr, sinks_ptr, q_stride_b, q_stride_h, H, mask, scoring, ROWS, shape,
    )  # fmt: skip
    k_table = Table(table_ptr, table_stride, k_page, k_head)
    v_table = Table(table_ptr, table_stride, v_page, v_head)
    gl.warp_specialize(
        [
            (_compute, compute),
            (load_keys, (plans, keys, k_desc, k_table, lengths_ptr, B, mask, BATCH, shape)),
            (load_values, (plans, values, v_desc, v_table, shape)),
        ],
        [1, 1], [COPY_REGISTERS, COPY_REGISTERS],
    )
