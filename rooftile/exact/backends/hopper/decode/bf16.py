"""Decode from pages on Hopper: one query per sequence, with copies in flight from the first block to the last.

The blocks of KEYS keys of all sequences are cut into equal splits (`split_kv`); each program of a split has a key head.
Copies do not know where a sequence ends: two warps ask the copy engine for keys and for values, as
far ahead as there are slots, while the third role multiplies. In the portable kernel a sequence's first copies wait for the one
before it to be done with: some 4 us, in which a multiprocessor could read 80 kB.

A wgmma has 64 rows, and the heads of a group are the first few of them: tensor cores have the time, memory is what is short.

Dao et al., Flash-Decoding, 2023; Shah et al., FlashAttention-3, arXiv:2407.08608.
"""

from rooftile.exact.backends.hopper.device.config import LN2, LOG2E, WG_ROWS, KernelConfig
from rooftile.exact.backends.hopper.device.page_loads import PageTable, load_pages, load_values
from rooftile.exact.backends.hopper.device.scheduler import WORK_TILE_WORDS, MaskBounds, WorkTile, consume, publish, publish_end
from rooftile.exact.backends.hopper.device.softmax import ScoreNumbers, make_scoring
from rooftile.runtime.hopper.gluon import barrier, fence_async_shared, gl, gluon, warpgroup_mma, warpgroup_mma_wait
from rooftile.runtime.hopper.pipeline import Ring, let_next_begin, ring, wait_for_input


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def visible_blocks(S, mask: MaskBounds, KEYS: gl.constexpr):
    """The first block that the one query of a sequence reads, and how many it reads, at least one."""
    first = mask.first_key(S - 1) // KEYS
    return first, gl.maximum((S + KEYS - 1) // KEYS - first, 1)


@gluon.jit
def load_keys(
    work_tiles: Ring, keys: Ring, k_desc, table: PageTable, lengths_ptr, B, mask: MaskBounds, BATCH: gl.constexpr,
    config: KernelConfig,
):  # fmt: skip
    """The role that finds a program's sequences, tells the others, and has the keys copied in."""
    layout: gl.constexpr = gl.BlockedLayout([max(BATCH // 32, 1)], [32], [1], [0])
    lane = gl.arange(0, BATCH, layout)
    lengths = gl.load(lengths_ptr + lane, mask=lane < B, other=0)
    _, each = visible_blocks(lengths, mask, config.KEYS)
    ends = gl.associative_scan(gl.where(lane < B, each, 0), 0, _add)
    total = gl.max(ends, 0)
    share = (total + gl.num_programs(1) - 1) // gl.num_programs(1)
    position = gl.minimum(gl.program_id(1) * share, total)
    last = gl.minimum(position + share, total)
    head = gl.program_id(0) * config.GROUP
    tile = 0
    fill = 0
    while position < last:
        b = gl.sum((ends <= position).to(gl.int32), 0)
        before = gl.max(gl.where(ends <= position, ends, 0), 0)
        S = gl.sum(gl.where(lane == b, lengths, 0), 0)
        first, blocks = visible_blocks(S, mask, config.KEYS)
        count = gl.minimum(last - position, blocks - (position - before))
        first += position - before
        zero = b * 0
        work = WorkTile(zero + 1, b, zero + head, zero, zero + 1, S, b, b, zero, first, first + count - 1)
        publish(work_tiles, tile, work)
        for i in range(count):
            load_pages(keys, k_desc, table, fill, work, work.last_block - i, config.D, config)
            fill += 1
        tile += 1
        position += count
    publish_end(work_tiles, tile)


@gluon.jit
def close_softmax(m, l, sinks, in_group, SINKS: gl.constexpr):
    """Returns the factor of each row's output and its lse, from its largest score in units of log2 and its sum."""
    share = gl.full(m.shape, 1.0, gl.float32, m.type.layout)
    if SINKS:
        sink = gl.load(sinks, mask=in_group, other=0.0).to(gl.float32) * LOG2E
        top = gl.maximum(m, sink)
        reference = gl.where(top == float("-inf"), 0.0, top)
        share = gl.exp2(m - reference)
        l = l * share + gl.exp2(sink - reference)
        m = top
    return gl.where(l == 0.0, 0.0, share / l), (m + gl.log2(l)) * LN2


@gluon.jit
def zero_hidden_values(values, j_0, S, first_key):
    """Zeros in shared memory for hidden values: a weight of zero does not hide a NaN in a slot that was never written."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // values.shape[1], values.shape[1] // 8], [4, 1], [1, 0])
    j = j_0 + gl.arange(0, values.shape[0], gl.SliceLayout(1, layout))
    sees = (j < S) & (j >= first_key)
    v = values.load(layout)
    values.store(gl.where(gl.expand_dims(sees, 1), v, gl.zeros_like(v)))
    fence_async_shared()
    barrier()


@gluon.jit
def _compute(
    work_tiles: Ring, keys: Ring, values: Ring, q_ptr, o_ptr, lse_ptr, partials_ptr, sinks_ptr, q_stride_b, q_stride_h, H,
    mask: MaskBounds,
    scoring: ScoreNumbers, ROWS: gl.constexpr, config: KernelConfig,
):  # fmt: skip
    """The role that multiplies: a sequence's heads of a group with its blocks, from the last block down."""
    dtype: gl.constexpr = keys.buffers.dtype
    row_layout: gl.constexpr = gl.SliceLayout(1, config.s_layout)
    q_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // config.D, config.D // 8], [4, 1], [1, 0])
    head = gl.program_id(0) * config.GROUP
    fill = 0
    tile = 0
    work = consume(work_tiles, 0)
    while work.is_valid != 0:
        g = gl.arange(0, WG_ROWS, gl.SliceLayout(1, q_layout))
        d = gl.arange(0, config.D, gl.SliceLayout(0, q_layout))
        lines = work.b.to(gl.int64) * q_stride_b + (head + g) * q_stride_h
        q = gl.load(
            q_ptr + gl.expand_dims(lines, 1) + gl.expand_dims(d, 0), mask=gl.expand_dims(g < config.GROUP, 1), other=0.0
        )  # fmt: skip
        q = gl.convert_layout(q, gl.DotOperandLayout(0, config.s_layout, 2))
        # rows without a query have weights of 0, which cost the tensor cores less power than any others
        m = gl.where(gl.arange(0, WG_ROWS, row_layout) < config.GROUP, float("-inf"), 1e30)
        l = gl.zeros([WG_ROWS], gl.float32, row_layout)
        acc = gl.zeros([WG_ROWS, config.DV], gl.float32, config.o_layout)
        first_key = mask.first_key(work.S - 1)
        for i in range(work.last_block - work.first_block + 1):
            j_0 = (work.last_block - i) * config.KEYS
            cut = (j_0 + config.KEYS > work.S) | (j_0 < first_key)
            keys.wait_full(fill)
            k = config.key_block(keys, fill)
            none = gl.zeros([WG_ROWS, config.KEYS], gl.float32, config.s_layout)
            s = warpgroup_mma(q, k.permute((1, 0)), none, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=(s,))
            keys.release(fill)
            if config.SOFTCAP:
                s = scoring.apply_softcap(s)
            if cut:
                j = j_0 + gl.arange(0, config.KEYS, gl.SliceLayout(0, config.s_layout))
                s = gl.where(gl.expand_dims((j < work.S) & (j >= first_key), 0), s, float("-inf"))
            m_new = gl.maximum(m, gl.max(s, 1))
            reference = gl.where(m_new == float("-inf"), 0.0, m_new) * scoring.scale_log2
            alpha = gl.exp2(m * scoring.scale_log2 - reference)
            p = gl.exp2(s * scoring.scale_log2 - gl.expand_dims(reference, 1))
            l = l * alpha + gl.sum(p, 1)
            m = m_new
            acc = acc * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, config.o_layout)), 1)
            values.wait_full(fill)
            v = config.value_block(values, fill)
            if cut:
                zero_hidden_values(v, j_0, work.S, first_key)
            acc = warpgroup_mma(gl.convert_layout(p.to(dtype), config.p_layout), v, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            values.release(fill)
            fill += 1

        start, blocks = visible_blocks(work.S, mask, config.KEYS)
        m = m * scoring.scale_log2
        row = gl.arange(0, WG_ROWS, row_layout)
        in_group = row < config.GROUP
        o_row = gl.arange(0, WG_ROWS, gl.SliceLayout(1, config.o_layout))
        e = gl.arange(0, config.DV, gl.SliceLayout(0, config.o_layout))
        in_group_2d = gl.expand_dims(o_row < config.GROUP, 1)
        if work.last_block - work.first_block + 1 == blocks:
            line = work.b.to(gl.int64) * H + head
            share, lse = close_softmax(m, l, sinks_ptr + head + row, in_group, config.SINKS)
            gl.store(lse_ptr + line + row, lse, mask=in_group)
            o = acc * gl.expand_dims(gl.convert_layout(share, gl.SliceLayout(1, config.o_layout)), 1)
            o_tile = o_ptr + (gl.expand_dims((line + o_row) * config.DV, 1) + gl.expand_dims(e, 0))
            gl.store(o_tile, o.to(o_ptr.dtype.element_ty), mask=in_group_2d)
        else:
            # a program's partials: one for a sequence that began before it, and of one that goes on after it
            program = gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
            partial = partials_ptr + (
                (2 * program + (work.first_block == start).to(gl.int32)) * ROWS
            ).to(gl.int64) * (config.DV + 2)  # fmt: skip
            gl.store(partial + (gl.expand_dims(o_row * (config.DV + 2), 1) + gl.expand_dims(e, 0)), acc, mask=in_group_2d)
            gl.store(partial + row * (config.DV + 2) + config.DV, m, mask=in_group)
            gl.store(partial + row * (config.DV + 2) + (config.DV + 1), l, mask=in_group)
        tile += 1
        work = consume(work_tiles, tile)
    # the merge, which waits for all programs
    let_next_begin()


# fmt: off
@gluon.jit(
    do_not_specialize=[
        "table_stride", "k_page", "k_head", "v_page", "v_head", "q_stride_b", "q_stride_h", "B", "H", "left", "chunk",
    ],
    do_not_specialize_on_alignment=["sinks_ptr", "table_ptr", "lengths_ptr"],
)
def paged_decode(
    k_desc, v_desc, q_ptr, o_ptr, lse_ptr, partials_ptr, table_ptr, lengths_ptr, sinks_ptr,
    table_stride, k_page, k_head, v_page, v_head, q_stride_b, q_stride_h, B, H, scale, softcap, left, chunk,
    GROUP: gl.constexpr, D: gl.constexpr, PAGE_SIZE: gl.constexpr, BATCH: gl.constexpr, ROWS: gl.constexpr, LEFT: gl.constexpr,
    CHUNK: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
):
    # fmt: on
    dtype: gl.constexpr = k_desc.dtype
    LINES: gl.constexpr = k_desc.block_type.shape[1]
    config = KernelConfig(
        GROUP=GROUP, D=D, DV=D, DIM=D, DIM_V=D, KEYS=KEYS, PAGE_SIZE=PAGE_SIZE, MASKED=LEFT or CHUNK, SOFTCAP=SOFTCAP,
        SINKS=SINKS, K_TMA_LINES=LINES, V_TMA_LINES=LINES,
    )  # fmt: skip
    # a query is its sequence's last: what is to its right, and before a prefix, does not matter
    mask = MaskBounds(left, B * 0, B * 0, chunk, LEFT, False, False, CHUNK)
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, KEYS, D], dtype)
    keys = ring(gl.allocate_shared_memory(dtype, [STAGES, 1, 1, KEYS, D], tile_layout), STAGES, 1)
    values = ring(gl.allocate_shared_memory(dtype, [STAGES, 1, 1, KEYS, D], tile_layout), STAGES, 1)
    words: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    work_tiles = ring(gl.allocate_shared_memory(gl.int32, [2 * WORK_TILE_WORDS, 1], words), 2, 2)
    fence_async_shared()
    scoring = make_scoring(mask, scale, softcap, SOFTCAP)
    compute = (
        work_tiles, keys, values, q_ptr, o_ptr, lse_ptr, partials_ptr, sinks_ptr, q_stride_b, q_stride_h, H, mask, scoring,
        ROWS, config,
    )  # fmt: skip
    k_table = PageTable(table_ptr, table_stride, k_page, k_head)
    v_table = PageTable(table_ptr, table_stride, v_page, v_head)
    # before the roles part: none of them reads anything earlier
    wait_for_input()
    gl.warp_specialize(
        [
            (_compute, compute),
            (load_keys, (work_tiles, keys, k_desc, k_table, lengths_ptr, B, mask, BATCH, config)),
            (load_values, (work_tiles, values, v_desc, v_table, config)),
        ],
        [1, 1], [COPY_REGISTERS, COPY_REGISTERS],
    )
