"""The forward on Hopper: o and lse.

A program is a crew of warp roles that pass tiles through shared memory and wait only for each other:

    load     one warp: draws the next tile of queries, tells the others, and has its queries copied in, then its keys and
             values block by block, from the last block down to the first
    compute  two or three warpgroups of 64 queries each: scores, softmax and output, all in registers

Copies are the chip's tensor memory accelerator's (TMA): one thread asks, a barrier counts the bytes. Matrix products are
asynchronous too (wgmma), and three overlaps keep the tensor cores busy while the exponentials run:

    in a warpgroup   the scores of the next block are issued before this block's product with the values, so the softmax
                     of the one runs while the other is multiplied
    across them      the warpgroups take turns to issue (ping-pong), so one's softmax runs under the other's products; not
                     where a tile says that they run as they come
    across tiles     the last product of a tile is issued together with the first scores of the next tile

Shah et al., FlashAttention-3, arXiv:2407.08608; Dao, FlashAttention-2, arXiv:2307.08691, Algorithm 1.
"""

from rooftile.backends.hopper.device.config import LN2, LOG2E, WG_ROWS, Shape, position
from rooftile.backends.hopper.device.mma import product_over_dim
from rooftile.backends.hopper.device.nan_fallback import TABLE, holds_nan, note, note_word, with_care
from rooftile.backends.hopper.device.page_loads import Table, load_pages, load_values
from rooftile.backends.hopper.device.pipeline import Ring, named_barrier, opaque, ring
from rooftile.backends.hopper.device.scheduler import WORDS, Mask, make_plan, publish, publish_end, put_back, take
from rooftile.backends.hopper.device.softmax import (
    Scoring,
    make_scoring,
    packed,
    rescaled,
    scores,
    settled,
    softmax,
    unpacked,
)
from rooftile.backends.hopper.gluon import (
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

# the first of the warpgroups' named barriers, by which they take turns
TURNS = gl.constexpr(9)


@gluon.jit
def _load_block(keys: Ring, values: Ring, k_desc, v_desc, table: Table, turn, plan, block, shape: Shape):
    """Has one block of keys and values copied in; of those in pages the keys, `load_values` has the values copied."""
    if shape.SIZE > 0:
        load_pages(keys, k_desc, table, turn, plan, block, shape.D, shape)
    else:
        h = plan.h * shape.TOGETHER // shape.GROUP
        row = plan.key + block * shape.KEYS
        keys.wait_empty(turn)
        mbarrier.expect(keys.filled(turn), k_desc.block_type.nbytes)
        tma_load(k_desc, [plan.b, h, row, 0], keys.filled(turn), keys.buffer(turn))
        values.wait_empty(turn)
        mbarrier.expect(values.filled(turn), v_desc.block_type.nbytes)
        tma_load(v_desc, [plan.b, h, row, 0], values.filled(turn), values.buffer(turn))


@gluon.jit
def _draw(counter_ptr):
    """How many tiles were drawn before. Nothing else is passed on with it, and a fence would empty the L1 that holds tables."""
    return gl.atomic_add(counter_ptr, 1, sem="relaxed")


@gluon.jit
def _load(
    plans: Ring, queries: Ring, keys: Ring, values: Ring, mask: Mask, q_desc, k_desc, v_desc,
    B, H, T, S, tiles, tail, cu_q_ptr, cu_k_ptr, table: Table, counter_ptr, shape: Shape,
):  # fmt: skip
    """The role that draws tiles and has them copied in.

    It runs as far ahead as the rings let it, which is two blocks; so the next tile is drawn when this one's last block is
    asked for: late, so that no program holds a tile that an idle one could start, and early enough to hide the wait.
    The counter is left at zero for the next launch by whoever finishes last.
    """
    heads = H // shape.TOGETHER
    total = tiles * (heads if shape.PACKED else B * heads)
    programs = gl.num_programs(0)
    n = gl.program_id(0)
    tile = 0
    turn = 0
    while n < total:
        plan = make_plan(
            n, B, heads, T, S, tiles, tail, cu_q_ptr, cu_k_ptr, mask, shape.CREW * shape.ROWS, shape.KEYS, shape.PACKED,
            shape.SIZE > 0,
        )  # fmt: skip
        if plan.live != 0:
            publish(plans, tile, plan)
            queries.wait_empty(tile)
            mbarrier.expect(queries.filled(tile), q_desc.block_type.nbytes * shape.CREW)
            for i in gl.static_range(shape.CREW):
                tma_load(
                    q_desc, [plan.b, plan.h * shape.TOGETHER, plan.row + plan.t + i * shape.ROWS, 0], queries.filled(tile),
                    queries.buffers.index(tile % queries.slots * shape.CREW + i),
                )  # fmt: skip
            tile += 1
            if shape.SIZE > 0:
                # all in one loop: what a loop's boxes and those of a block after it have in common, ptxas 12.8 would compute in
                # the loop alone (see `pipeline.opaque`)
                for i in range(plan.last - plan.first + 1):
                    if i == plan.last - plan.first:
                        n = _draw(counter_ptr) + programs
                    _load_block(keys, values, k_desc, v_desc, table, turn, plan, plan.last - i, shape)
                    turn += 1
            else:
                for i in range(plan.last - plan.first):
                    _load_block(keys, values, k_desc, v_desc, table, turn, plan, plan.last - i, shape)
                    turn += 1
                n = _draw(counter_ptr) + programs
                _load_block(keys, values, k_desc, v_desc, table, turn, plan, plan.first, shape)
                turn += 1
        else:
            n = _draw(counter_ptr) + programs
    publish_end(plans, tile)
    put_back(counter_ptr)


@gluon.jit
def _issue(
    q, held, keys: Ring, values: Ring, p, acc, turn, there,
    MINE: gl.constexpr, OTHER: gl.constexpr, shape: Shape, HELD: gl.constexpr,
):  # fmt: skip
    """Issues the scores of block `turn` and the product of the block before it with its values; waits for neither.

    `there` false: there is no such block, and the scores are of a buffer's old keys, for nobody to read.
    """
    keys.wait_full(turn, there)
    if shape.PING_PONG:
        named_barrier("sync", MINE)
    s = product_over_dim(q, shape.block_of_keys(keys, turn), shape.DIM, shape.s_layout, held, HELD)
    values.wait_full(turn - 1)
    weights = unpacked(p, values.buffers.dtype, shape.p_layout)
    acc = warpgroup_mma(weights, shape.block_of_values(values, turn - 1), acc, is_async=True)
    if shape.PING_PONG:
        named_barrier("arrive", OTHER)
    return s, acc


@gluon.jit
def _step(
    q, held, keys: Ring, values: Ring, p, acc, m, l, turn, row, column, plan, scoring: Scoring,
    MINE: gl.constexpr, OTHER: gl.constexpr, shape: Shape, CHECK: gl.constexpr,
):  # fmt: skip
    """One block: its scores and weights, and the block before it into the output."""
    s, acc = _issue(q, held, keys, values, p, acc, turn, True, MINE, OTHER, shape, shape.HELD)
    s = warpgroup_mma_wait(1, deps=(s,))
    keys.give_back(turn)
    s = scores(s, row, column, plan, scoring, shape, CHECK)
    weights, m, l, alpha = softmax(s, m, l, scoring.factor, shape, False)
    if shape.SOFTMAX_FIRST:
        l = settled(l)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    values.give_back(turn - 1)
    p = packed(weights, keys.buffers.dtype)
    acc = rescaled(acc, alpha, shape)
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

    if shape.PING_PONG and WG == shape.CREW - 1:
        named_barrier("arrive", TURNS)
    tile = 0
    turn = 0
    plan = take(plans, 0)
    # the first block of the first tile has nothing to overlap with
    queries.wait_full(0, plan.live != 0)
    keys.wait_full(0, plan.live != 0)
    if shape.PING_PONG:
        named_barrier("sync", MINE)
    q = queries.buffers.index(WG).reshape([WG_ROWS, shape.D])
    s = product_over_dim(q, shape.block_of_keys(keys, 0), shape.DIM, shape.s_layout)
    if shape.PING_PONG:
        named_barrier("arrive", OTHER)
    s = warpgroup_mma_wait(0, deps=(s,))
    keys.give_back(0)
    s = scores(s, plan.t + WG * shape.ROWS, plan.last * shape.KEYS, plan, scoring, shape, True)
    weights, m, l, _ = softmax(s, none, none, scoring.factor, shape, True)
    p = packed(weights, dtype)

    while plan.live != 0:
        acc = gl.zeros([WG_ROWS, shape.DV], gl.float32, shape.o_layout)
        held = 0
        if shape.HELD > 0:
            q = queries.buffers.index(opaque(tile) % queries.slots * shape.CREW + WG).reshape([WG_ROWS, shape.D])
            held = q.slice(0, shape.HELD, 1).load(gl.DotOperandLayout(0, shape.s_layout, 2))
        row = plan.t + WG * shape.ROWS
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
                    q, held, keys, values, p, acc, m, l, turn, row, column, plan, scoring, MINE, OTHER, shape, True
                )  # fmt: skip
        if mask.LEFT or mask.CHUNK:
            clear_first = gl.maximum(mask.first_key(i_0 + (shape.ROWS - 1)) + (shape.KEYS - 1), 0) // shape.KEYS
            left = gl.maximum(gl.minimum(plan.last + 1 - clear_first, blocks), right)
        q = queries.buffers.index(opaque(tile) % queries.slots * shape.CREW + WG).reshape([WG_ROWS, shape.D])
        for _ in range(right, left):
            turn += 1
            p, acc, m, l = _step(q, held, keys, values, p, acc, m, l, turn, row, 0, plan, scoring, MINE, OTHER, shape, False)
        if mask.LEFT or mask.CHUNK:
            q = queries.buffers.index(opaque(tile) % queries.slots * shape.CREW + WG).reshape([WG_ROWS, shape.D])
            for i in range(left, blocks):
                turn += 1
                column = (plan.last - i) * shape.KEYS
                p, acc, m, l = _step(
                    q, held, keys, values, p, acc, m, l, turn, row, column, plan, scoring, MINE, OTHER, shape, True
                )  # fmt: skip
        queries.give_back(tile)

        # the last product of this tile, together with the first scores of the next
        tile += 1
        turn += 1
        after = take(plans, tile)
        there = after.live != 0
        queries.wait_full(tile, there)
        q = queries.buffers.index(tile % queries.slots * shape.CREW + WG).reshape([WG_ROWS, shape.D])
        s, acc = _issue(q, 0, keys, values, p, acc, turn, there, MINE, OTHER, shape, 0)
        m = m * scoring.factor
        l = gl.convert_layout(gl.sum(l, 1), row_layout)
        rows = gl.arange(0, WG_ROWS, row_layout)
        share = 1.0
        if shape.SINKS:
            sink = gl.load(sinks_ptr + shape.head(rows, plan)).to(gl.float32) * LOG2E
            m_new = gl.maximum(m, sink)
            reference = gl.where(m_new == float("-inf"), 0.0, m_new)
            share = gl.exp2(m - reference)
            l = l * share + gl.exp2(sink - reference)
            m = m_new
        t = row + position(rows, shape.ROWS)
        line = plan.b * H + shape.head(rows, plan)
        gl.store(lse_ptr + line.to(gl.int64) * total + plan.row + t, (m + gl.log2(l)) * LN2, mask=t < plan.T)
        share = gl.where(l == 0.0, 0.0, share / l)
        s = warpgroup_mma_wait(1, deps=(s,))
        keys.give_back(turn)
        s = scores(s, after.t + WG * shape.ROWS, after.last * shape.KEYS, after, scoring, shape, True)
        weights, m, l, _ = softmax(s, none, none, scoring.factor, shape, True)
        _wait_for_store()
        acc = warpgroup_mma_wait(0, deps=(acc,))
        values.give_back(turn - 1)
        p = packed(weights, dtype)
        acc = acc * gl.expand_dims(gl.convert_layout(share, gl.SliceLayout(1, shape.o_layout)), 1)
        if shape.MASKED or shape.PACKED:
            # a weight of zero does not hide a NaN or an infinity among the values
            if holds_nan(acc):
                with_care(notes, o_ptr, lse_ptr, plan, row, H, total, scoring, shape)
            else:
                _store(output, acc.to(dtype), o_desc, o_ptr, plan, row, H, shape)
        else:
            _store(output, acc.to(dtype), o_desc, o_ptr, plan, row, H, shape)
        plan = after
    tma_store_wait(0)
    if shape.PING_PONG and WG == 0:
        named_barrier("sync", TURNS)


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
    """A packed sequence may end inside the tile, where the copy engine would not stop: its rows are stored one by one then."""
    columns: gl.constexpr = o.shape[1]
    staged = output.reshape([WG_ROWS, columns])
    staged.store(o)
    if shape.PACKED:
        if row + shape.ROWS <= plan.T:
            _copy_out(output, o_desc, plan, plan.row + row, column, shape)
        else:
            layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [4, 1], [1, 0])
            rows = gl.arange(0, WG_ROWS, gl.SliceLayout(1, layout))
            t = row + position(rows, shape.ROWS)
            e = column + gl.arange(0, columns, gl.SliceLayout(0, layout))
            lines = ((plan.row + t).to(gl.int64) * H + shape.head(rows, plan)) * shape.DIM_V
            there = gl.expand_dims(t < plan.T, 1) & gl.expand_dims(e < shape.DIM_V, 0)
            gl.store(o_ptr + gl.expand_dims(lines, 1) + gl.expand_dims(e, 0), staged.load(layout), mask=there)
    else:
        _copy_out(output, o_desc, plan, row, column, shape)


@gluon.jit
def _copy_out(output, o_desc, plan, row, column: gl.constexpr, shape: Shape):
    fence_async_shared()
    tma_store(o_desc, [plan.b, plan.h * shape.TOGETHER, row, column], output)


# fmt: off
@gluon.jit(
    do_not_specialize=[
        "table_stride", "k_page", "k_head", "v_page", "v_head", "B", "S", "tiles", "tail", "left", "right", "prefix", "chunk",
    ],
    do_not_specialize_on_alignment=["sinks_ptr", "cu_q_ptr", "cu_k_ptr", "table_ptr"],
)
def flash_fwd(
    q_desc, k_desc, v_desc, o_desc, q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, sinks_ptr, cu_q_ptr, cu_k_ptr, table_ptr, counter_ptr,
    table_stride, k_page, k_head, v_page, v_head, B, S, tiles, tail, scale, softcap, left, right, prefix, chunk,
    GROUP: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, DIM: gl.constexpr, DIM_V: gl.constexpr, PACKED: gl.constexpr,
    SIZE: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, PREFIX: gl.constexpr, CHUNK: gl.constexpr,
    SOFTCAP: gl.constexpr, SINKS: gl.constexpr,
    KEYS: gl.constexpr, CREW: gl.constexpr, TOGETHER: gl.constexpr, Q_SLOTS: gl.constexpr, KV_SLOTS: gl.constexpr,
    PING_PONG: gl.constexpr, HELD: gl.constexpr, LAZY: gl.constexpr, SOFTMAX_FIRST: gl.constexpr,
    COMPUTE_REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    masked: gl.constexpr = LEFT or RIGHT or PREFIX or CHUNK
    shape = Shape(
        GROUP, D, DV, DIM, DIM_V, KEYS, CREW, TOGETHER, PING_PONG, HELD, LAZY, SOFTMAX_FIRST, PACKED, SIZE, masked, SOFTCAP,
        SINKS, k_desc.block_type.shape[1], v_desc.block_type.shape[1],
    )
    mask = Mask(left, right, prefix, chunk, LEFT, RIGHT, PREFIX, CHUNK)
    queries = ring(gl.allocate_shared_memory(dtype, [Q_SLOTS * CREW, 1, TOGETHER, shape.ROWS, D], q_desc.layout), Q_SLOTS, CREW)
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, KEYS, D], dtype)
    v_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, KEYS, DV], dtype)
    keys = ring(gl.allocate_shared_memory(dtype, [KV_SLOTS, 1, 1, KEYS, D], k_layout), KV_SLOTS, CREW)
    values = ring(gl.allocate_shared_memory(dtype, [KV_SLOTS, 1, 1, KEYS, DV], v_layout), KV_SLOTS, CREW)
    outputs = gl.allocate_shared_memory(dtype, [CREW, 1, TOGETHER, shape.ROWS, min(DV, 128)], o_desc.layout)
    words: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    plans = ring(gl.allocate_shared_memory(gl.int32, [2 * WORDS, 1], words), 2, CREW + (SIZE > 0))
    notes = gl.allocate_shared_memory(gl.int64, [16, 1], words)
    note(notes, 0, q_ptr, q_desc)
    if SIZE > 0:
        note(notes, 1, k_ptr, k_desc, k_page, k_head)
        note(notes, 2, v_ptr, v_desc, v_page, v_head)
        note_word(notes, TABLE, table_ptr.to(gl.int64, bitcast=True))
        note_word(notes, TABLE + 1, table_stride)
    else:
        note(notes, 1, k_ptr, k_desc)
        note(notes, 2, v_ptr, v_desc)
    fence_async_shared()
    # packed: one sequence, of all queries
    H = q_desc.shape[1].to(gl.int32)
    T = q_desc.shape[2].to(gl.int32)
    k_table = Table(table_ptr, table_stride, k_page, k_head)
    v_table = Table(table_ptr, table_stride, v_page, v_head)
    load = (
        plans, queries, keys, values, mask, q_desc, k_desc, v_desc,
        B, H, T, S, tiles, tail, cu_q_ptr, cu_k_ptr, k_table, counter_ptr, shape,
    )
    scoring = make_scoring(mask, scale, softcap, SOFTCAP)
    args = (
        plans, queries, keys, values, outputs, notes, o_desc, o_ptr, lse_ptr, sinks_ptr, H, T, scoring, shape,
    )
    if SIZE > 0:
        gl.static_assert(CREW == 2)
        gl.warp_specialize(
            [
                (_compute, (0,) + args), (_compute, (1,) + args), (_load, load),
                (load_values, (plans, values, v_desc, v_table, shape)),
            ],
            [4, 1, 1], [COMPUTE_REGISTERS, COPY_REGISTERS, COPY_REGISTERS],
        )
    elif CREW == 2:
        gl.warp_specialize(
            [(_compute, (0,) + args), (_compute, (1,) + args), (_load, load)],
            [4, 1], [COMPUTE_REGISTERS, COPY_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [(_compute, (0,) + args), (_compute, (1,) + args), (_compute, (2,) + args), (_load, load)],
            [4, 4, 1], [COMPUTE_REGISTERS, COMPUTE_REGISTERS, COPY_REGISTERS],
        )
