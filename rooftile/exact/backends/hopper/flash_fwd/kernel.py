"""The forward on Hopper: o and lse.

A program consists of warp roles that pass tiles through shared memory and wait only for each other:

    load     one warp: draws the next tile of queries, tells the others, and has its queries copied in, then its keys and
             values block by block, from the last block down to the first
    compute  one to three warpgroups of 64 queries each: scores, softmax and output, all in registers

Copies are the chip's tensor memory accelerator's (TMA): one thread asks, a barrier counts the bytes. Matrix products are
asynchronous too (wgmma), and three overlaps keep the tensor cores busy while the exponentials run:

    in a warpgroup   the scores of the next block are issued before this block's product with the values, so the softmax
                     of the one runs while the other is multiplied
    across them      the warpgroups take turns to issue (ping-pong), so one's softmax runs under the other's products; not
                     where a tile says that they run as they come
    across tiles     the last product of a tile is issued together with the first scores of the next tile

Shah et al., FlashAttention-3, arXiv:2407.08608; Dao, FlashAttention-2, arXiv:2307.08691, Algorithm 1.
"""

from rooftile.exact.backends.hopper.device.config import LN2, LOG2E, WG_ROWS, KernelConfig, query_offset
from rooftile.exact.backends.hopper.device.lists import BlockLists, count_steps, load_listed, read_word
from rooftile.exact.backends.hopper.device.mma import mma_qk
from rooftile.exact.backends.hopper.device.nan_fallback import (
    TABLE_WORD,
    holds_nan,
    recompute_without_hidden_nan,
    spill_lists,
    spill_tensor,
    spill_word,
)
from rooftile.exact.backends.hopper.device.page_loads import PageTable, load_pages, load_values
from rooftile.exact.backends.hopper.device.scheduler import (
    WORK_TILE_WORDS,
    MaskBounds,
    consume,
    make_work_tile,
    publish,
    publish_end,
    reset_counter,
)
from rooftile.exact.backends.hopper.device.softmax import (
    ScoreNumbers,
    add_bias,
    cap_and_mask,
    cap_and_mask_listed,
    force_before_wait,
    make_scoring,
    pack_16bit,
    rescale,
    unpack_16bit,
    update_softmax,
)
from rooftile.exact.backends.hopper.flash_fwd.store import store
from rooftile.runtime.hopper.gluon import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from rooftile.runtime.hopper.pipeline import Ring, hide_from_ptxas, named_barrier, ring, wait_for_store

# the first of the warpgroups' named barriers, by which they take turns
PING_PONG_BARRIER = gl.constexpr(9)


@gluon.jit
def _load_block(
    keys: Ring, values: Ring, biases, k_desc, v_desc, bias_desc, table: PageTable, fill, work, block, config: KernelConfig
):  # fmt: skip
    """Has one block of keys, values and bias copied in; of those in pages the keys, `load_values` has the values copied."""
    if config.PAGE_SIZE > 0:
        load_pages(keys, k_desc, table, fill, work, block, config.D, config)
    else:
        h = work.h * config.HEADS_PER_TILE // config.GROUP
        row = work.k_start + block * config.KEYS
        keys.wait_empty(fill)
        mbarrier.expect(keys.full_barrier(fill), k_desc.block_type.nbytes)
        tma_load(k_desc, [work.b, h, row, 0], keys.full_barrier(fill), keys.buffer(fill))
        values.wait_empty(fill)
        mbarrier.expect(values.full_barrier(fill), v_desc.block_type.nbytes)
        tma_load(v_desc, [work.b, h, row, 0], values.full_barrier(fill), values.buffer(fill))
        if config.BIAS is not None:
            # its slot is given back as soon as it has been read, and the values need not wait for that
            biases.wait_empty(fill)
            if bias_desc.block_type.shape[2] == 1:
                mbarrier.expect(biases.full_barrier(fill), bias_desc.block_type.nbytes)
                place = [work.b, work.h, 0, block * config.KEYS]
                tma_load(bias_desc, place, biases.full_barrier(fill), biases.buffer(fill))
            else:
                mbarrier.expect(biases.full_barrier(fill), config.NUM_CONSUMERS * bias_desc.block_type.nbytes)
                for i in gl.static_range(config.NUM_CONSUMERS):
                    tma_load(
                        bias_desc, [work.b, work.h, work.t + i * config.ROWS, block * config.KEYS], biases.full_barrier(fill),
                        biases.buffers.index(fill % biases.stages * config.NUM_CONSUMERS + i),
                    )  # fmt: skip


@gluon.jit
def _next_tile(counter_ptr):
    """How many tiles were drawn before. Nothing else is passed on with it, and a fence would empty the L1 that holds tables."""
    return gl.atomic_add(counter_ptr, 1, sem="relaxed")


@gluon.jit
def _load(
    work_tiles: Ring, queries: Ring, keys: Ring, values: Ring, biases, mask: MaskBounds, q_desc, k_desc, v_desc, bias_desc,
    B, H, T, S, tiles, balanced_heads, cu_q_ptr, cu_k_ptr, table: PageTable, lists, words, counter_ptr, config: KernelConfig,
):  # fmt: skip
    """The role that draws tiles and has them copied in.

    It runs as far ahead as the rings let it, which is two blocks; so the next tile is drawn when this one's last block is
    asked for: late, so that no program holds a tile that an idle one could start, and early enough to hide the wait.
    The counter is left at zero for the next launch by whoever finishes last.
    """
    heads = H // config.HEADS_PER_TILE
    total = tiles * (heads if config.PACKED else B * heads)
    programs = gl.num_programs(0)
    n = gl.program_id(0)
    tile = 0
    fill = 0
    while n < total:
        work = make_work_tile(
            n, B, heads, T, S, tiles, balanced_heads, cu_q_ptr, cu_k_ptr, mask, config.NUM_CONSUMERS * config.ROWS,
            config.KEYS, config.PACKED,
            config.PAGE_SIZE > 0,
        )  # fmt: skip
        first_block = work.first_block
        last_block = work.last_block
        steps = 0
        if config.LIST_S > 0:
            PER: gl.constexpr = config.LIST_S // config.KEYS
            if work.is_valid != 0:
                entries, count = lists.of_queries(work)
                steps = count * PER
                if config.MASKED:
                    steps = count_steps(entries, count, work.S, first_block, last_block, PER, config.LIST_S)
            work = work.with_steps(steps)
        if work.is_valid != 0:
            publish(work_tiles, tile, work)
            queries.wait_empty(tile)
            mbarrier.expect(queries.full_barrier(tile), q_desc.block_type.nbytes * config.NUM_CONSUMERS)
            for i in gl.static_range(config.NUM_CONSUMERS):
                tma_load(
                    q_desc, [work.b, work.h * config.HEADS_PER_TILE, work.q_start + work.t + i * config.ROWS, 0],
                    queries.full_barrier(tile),
                    queries.buffers.index(tile % queries.stages * config.NUM_CONSUMERS + i),
                )  # fmt: skip
            tile += 1
            if config.LIST_S > 0:
                fill, drawn = load_listed(
                    keys, values, words, k_desc, v_desc, fill, work, lists, mask, steps, first_block, last_block, counter_ptr,
                    config,
                )  # fmt: skip
                n = drawn + programs
            elif config.PAGE_SIZE > 0:
                # all in one loop: common parts of a loop's boxes and of a block's boxes after it, ptxas 12.8 would compute in
                # the loop alone (see `pipeline.hide_from_ptxas`)
                for i in range(work.last_block - work.first_block + 1):
                    if i == work.last_block - work.first_block:
                        n = _next_tile(counter_ptr) + programs
                    _load_block(keys, values, biases, k_desc, v_desc, bias_desc, table, fill, work, work.last_block - i, config)
                    fill += 1
            else:
                for i in range(work.last_block - work.first_block):
                    _load_block(keys, values, biases, k_desc, v_desc, bias_desc, table, fill, work, work.last_block - i, config)
                    fill += 1
                n = _next_tile(counter_ptr) + programs
                _load_block(keys, values, biases, k_desc, v_desc, bias_desc, table, fill, work, work.first_block, config)
                fill += 1
        else:
            n = _next_tile(counter_ptr) + programs
    publish_end(work_tiles, tile)
    reset_counter(counter_ptr)


@gluon.jit
def _issue_mmas(
    q, q_registers, keys: Ring, values: Ring, p, acc, fill, has_next,
    MINE: gl.constexpr, OTHER: gl.constexpr, config: KernelConfig, Q_IN_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Issues the scores of block `fill` and the product of the block before it with its values; waits for neither.

    Without a next block (`has_next` false) the scores are computed from a buffer's old keys, and are not read.
    """
    keys.wait_full(fill, has_next)
    if config.PING_PONG:
        named_barrier("sync", MINE)
    s = mma_qk(q, config.key_block(keys, fill), config.DIM, config.s_layout, q_registers, Q_IN_REGISTERS)
    values.wait_full(fill - 1)
    weights = unpack_16bit(p, values.buffers.dtype, config.p_layout)
    acc = warpgroup_mma(weights, config.value_block(values, fill - 1), acc, is_async=True)
    if config.PING_PONG:
        named_barrier("arrive", OTHER)
    return s, acc


@gluon.jit
def _finish_scores(
    s, biases, words, fill, row, column, work, scoring: ScoreNumbers, WG: gl.constexpr, config: KernelConfig, CHECK: gl.constexpr,
    HAS_BLOCK=True,
):  # fmt: skip
    """The products of queries and keys with bias, capped and masked. A listed block's words come from `_read_words`."""
    if config.BIAS is not None:
        biases.wait_full(fill, HAS_BLOCK)
        if biases.buffers.shape[3] == 1:
            bias = biases.buffer(fill).reshape([config.KEYS]).load(gl.SliceLayout(0, config.s_layout))
            bias = gl.expand_dims(bias, 0)
        else:
            block = biases.buffers.index(fill % biases.stages * config.NUM_CONSUMERS + WG).reshape([WG_ROWS, config.KEYS])
            bias = block.load(config.s_layout)
        s = add_bias(s, bias, scoring)
        biases.release(fill)
    if config.LIST_S > 0:
        word, place, bits = words
        s = cap_and_mask_listed(s, row, word, place, bits, work, scoring, config)
    else:
        s = cap_and_mask(s, row, column, work, scoring, config, CHECK)
    return s


@gluon.jit
def _read_words(words, lists, fill, row, keys: Ring, config: KernelConfig, is_there=True):
    """The words of a listed block and the bits of a warpgroup's rows, from `row` on; without lists there are none.

    is_there: whether a block was copied in. Otherwise the words may be anything, and no bits are read.
    """
    word = 0
    place = 0
    bits = 0
    if config.LIST_S > 0:
        word = read_word(words, fill % keys.stages)
    if config.LIST_BITS:
        place = gl.where(is_there, read_word(words, keys.stages + fill % keys.stages), -1)
        bits = lists.bits_of_step(word, place, row, config)
    return word, place, bits


@gluon.jit
def _step(
    q, q_registers, keys: Ring, values: Ring, biases, lists, words, p, acc, m, l, fill, row, column, work, scoring: ScoreNumbers,
    WG: gl.constexpr, MINE: gl.constexpr, OTHER: gl.constexpr, config: KernelConfig, CHECK: gl.constexpr,
):  # fmt: skip
    """One block: its scores and weights, and the block before it into the output."""
    s, acc = _issue_mmas(q, q_registers, keys, values, p, acc, fill, True, MINE, OTHER, config, config.Q_IN_REGISTERS)
    read = _read_words(words, lists, fill, row, keys, config)
    s = warpgroup_mma_wait(1, deps=(s,))
    keys.release(fill)
    s = _finish_scores(s, biases, read, fill, row, column, work, scoring, WG, config, CHECK)
    weights, m, l, alpha = update_softmax(s, m, l, scoring.scale_log2, config, False)
    if config.SOFTMAX_FIRST:
        l = force_before_wait(l)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    values.release(fill - 1)
    p = pack_16bit(weights, keys.buffers.dtype)
    acc = rescale(acc, alpha, config)
    return p, acc, m, l


@gluon.jit
def _own_queries(queries: Ring, tile, WG: gl.constexpr, config: KernelConfig):
    """Slices a warpgroup's queries out of a tile in shared memory."""
    return queries.buffers.index(tile % queries.stages * config.NUM_CONSUMERS + WG).reshape([WG_ROWS, config.D])


@gluon.jit
def _compute(
    WG: gl.constexpr, work_tiles: Ring, queries: Ring, keys: Ring, values: Ring, biases, lists, words, outputs, spilled, o_desc,
    o_ptr, lse_ptr, sinks_ptr, H, total, scoring: ScoreNumbers, config: KernelConfig,
):  # fmt: skip
    """A warpgroup's role: 64 queries of every tile.

    A tile's last product is issued together with the next one's first scores. So scores, weights and maxima cross from tile to
    tile, and there is no function of one tile. The address of the queries is computed anew before each loop over blocks, since
    ptxas would compute what two loops share in the first alone (see `pipeline.hide_from_ptxas`).
    """
    # the named barriers of the ping-pong, one a warpgroup
    MINE: gl.constexpr = PING_PONG_BARRIER + WG
    OTHER: gl.constexpr = PING_PONG_BARRIER + (WG + 1) % config.NUM_CONSUMERS
    dtype: gl.constexpr = queries.buffers.dtype
    row_layout: gl.constexpr = gl.SliceLayout(1, config.s_layout)
    mask = scoring.mask
    none = gl.full([WG_ROWS], float("-inf"), gl.float32, row_layout)
    output = 0
    if o_desc.dtype == dtype:
        output = outputs.index(WG)

    if config.PING_PONG and WG == config.NUM_CONSUMERS - 1:
        named_barrier("arrive", PING_PONG_BARRIER)
    tile = 0
    fill = 0
    work = consume(work_tiles, 0)
    # the first block of the first tile has nothing to overlap with
    queries.wait_full(0, work.is_valid != 0)
    keys.wait_full(0, work.is_valid != 0)
    if config.PING_PONG:
        named_barrier("sync", MINE)
    q = _own_queries(queries, 0, WG, config)
    s = mma_qk(q, config.key_block(keys, 0), config.DIM, config.s_layout)
    if config.PING_PONG:
        named_barrier("arrive", OTHER)
    read = _read_words(words, lists, 0, work.t + WG * config.ROWS, keys, config, work.is_valid != 0)
    s = warpgroup_mma_wait(0, deps=(s,))
    keys.release(0)
    s = _finish_scores(
        s, biases, read, 0, work.t + WG * config.ROWS, work.last_block * config.KEYS, work, scoring, WG, config, True,
        work.is_valid != 0,
    )  # fmt: skip
    weights, m, l, _ = update_softmax(s, none, none, scoring.scale_log2, config, True)
    p = pack_16bit(weights, dtype)

    while work.is_valid != 0:
        acc = gl.zeros([WG_ROWS, config.DV], gl.float32, config.o_layout)
        q_registers = 0
        if config.Q_IN_REGISTERS > 0:
            q = _own_queries(queries, hide_from_ptxas(tile), WG, config)
            q_registers = q.slice(0, config.Q_IN_REGISTERS, 1).load(gl.DotOperandLayout(0, config.s_layout, 2))
        row = work.t + WG * config.ROWS
        i_0 = row + work.S - work.T
        # blocks from last down to first: some at the right end that the mask cuts, clear ones, some at the left end
        blocks = work.last_block - work.first_block + 1
        right = 1
        left = blocks
        if config.MASKED and config.LIST_S == 0:
            clear_stop = (mask.last_key(i_0, work.S) + 1) // config.KEYS
            right = gl.minimum(gl.maximum(work.last_block + 1 - clear_stop, 1), blocks)
            q = _own_queries(queries, tile, WG, config)
            for i in range(1, right):
                fill += 1
                column = (work.last_block - i) * config.KEYS
                p, acc, m, l = _step(
                    q, q_registers, keys, values, biases, lists, words, p, acc, m, l, fill, row, column, work, scoring,
                    WG, MINE, OTHER, config, True,
                )  # fmt: skip
        if (mask.LEFT or mask.CHUNK) and config.LIST_S == 0:
            clear_first = gl.maximum(mask.first_key(i_0 + (config.ROWS - 1)) + (config.KEYS - 1), 0) // config.KEYS
            left = gl.maximum(gl.minimum(work.last_block + 1 - clear_first, blocks), right)
        q = _own_queries(queries, hide_from_ptxas(tile), WG, config)
        for _ in range(right, left):
            fill += 1
            p, acc, m, l = _step(
                q, q_registers, keys, values, biases, lists, words, p, acc, m, l, fill, row, 0, work, scoring,
                WG, MINE, OTHER, config, False,
            )  # fmt: skip
        if (mask.LEFT or mask.CHUNK) and config.LIST_S == 0:
            q = _own_queries(queries, hide_from_ptxas(tile), WG, config)
            for i in range(left, blocks):
                fill += 1
                column = (work.last_block - i) * config.KEYS
                p, acc, m, l = _step(
                    q, q_registers, keys, values, biases, lists, words, p, acc, m, l, fill, row, column, work, scoring,
                    WG, MINE, OTHER, config, True,
                )  # fmt: skip
        queries.release(tile)

        # the last product of this tile, together with the first scores of the next
        tile += 1
        fill += 1
        next_work = consume(work_tiles, tile)
        has_next = next_work.is_valid != 0
        queries.wait_full(tile, has_next)
        q = _own_queries(queries, tile, WG, config)
        s, acc = _issue_mmas(q, 0, keys, values, p, acc, fill, has_next, MINE, OTHER, config, 0)
        read = _read_words(words, lists, fill, next_work.t + WG * config.ROWS, keys, config, has_next)
        # scores with a bias stay natural: log2(e) times the smallest number of a dtype would be -inf
        UNIT: gl.constexpr = 1.0 if config.BIAS is not None else LOG2E
        TO_LOG2: gl.constexpr = LOG2E if config.BIAS is not None else 1.0
        if config.BIAS is None:
            m = m * scoring.scale_log2
        l = gl.convert_layout(gl.sum(l, 1), row_layout)
        rows = gl.arange(0, WG_ROWS, row_layout)
        output_scale = 1.0
        if config.SINKS:
            sink = gl.load(sinks_ptr + config.query_head(rows, work)).to(gl.float32) * UNIT
            m_new = gl.maximum(m, sink)
            reference = gl.where(m_new == float("-inf"), 0.0, m_new)
            output_scale = gl.exp2((m - reference) * TO_LOG2)
            l = l * output_scale + gl.exp2((sink - reference) * TO_LOG2)
            m = m_new
        t = row + query_offset(rows, config.ROWS)
        line = work.b * H + config.query_head(rows, work)
        if config.BIAS is not None:
            lse = m + gl.log2(l) * LN2
        else:
            lse = (m + gl.log2(l)) * LN2
        gl.store(lse_ptr + line.to(gl.int64) * total + work.q_start + t, lse, mask=t < work.T)
        output_scale = gl.where(l == 0.0, 0.0, output_scale / l)
        s = warpgroup_mma_wait(1, deps=(s,))
        keys.release(fill)
        s = _finish_scores(
            s, biases, read, fill, next_work.t + WG * config.ROWS, next_work.last_block * config.KEYS, next_work, scoring, WG,
            config, True, has_next,
        )  # fmt: skip
        weights, m, l, _ = update_softmax(s, none, none, scoring.scale_log2, config, True)
        wait_for_store()
        acc = warpgroup_mma_wait(0, deps=(acc,))
        values.release(fill - 1)
        p = pack_16bit(weights, dtype)
        acc = acc * gl.expand_dims(gl.convert_layout(output_scale, gl.SliceLayout(1, config.o_layout)), 1)
        if config.MASKED or config.PACKED or config.LIST_S > 0:
            # a weight of zero does not hide a NaN or an infinity among the values
            if holds_nan(acc):
                recompute_without_hidden_nan(spilled, o_ptr, lse_ptr, work, row, H, total, dtype, scoring, config)
            else:
                store(output, acc.to(o_ptr.dtype.element_ty), o_desc, o_ptr, work, row, H, config)
        else:
            store(output, acc.to(o_ptr.dtype.element_ty), o_desc, o_ptr, work, row, H, config)
        work = next_work
    tma_store_wait(0)
    if config.PING_PONG and WG == 0:
        named_barrier("sync", PING_PONG_BARRIER)


# fmt: off
@gluon.jit
def _program(
    q_desc, k_desc, v_desc, o_desc, bias_desc, q_ptr, k_ptr, v_ptr, o_ptr, bias_ptr, lse_ptr, sinks_ptr, cu_q_ptr, cu_k_ptr,
    table_ptr, lists, counter_ptr,
    table_stride, k_page, k_head, v_page, v_head, B, S, tiles, balanced_heads, scale, softcap, left, right, prefix, chunk,
    GROUP: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    SINKS: gl.constexpr,
    FLAGS: gl.constexpr, TILE: gl.constexpr,
):
    """The program; without a bias, bias_desc and bias_ptr are 0, and without lists of blocks `lists` is."""
    BIAS: gl.constexpr = TILE.BIAS_STAGES > 0
    dtype: gl.constexpr = q_desc.dtype
    masked: gl.constexpr = FLAGS.LEFT or FLAGS.RIGHT or FLAGS.PREFIX or FLAGS.CHUNK
    config = KernelConfig(
        GROUP=GROUP, D=D, DV=DV, DIM=FLAGS.DIM, DIM_V=FLAGS.DIM_V, KEYS=TILE.KEYS, NUM_CONSUMERS=TILE.NUM_CONSUMERS,
        HEADS_PER_TILE=TILE.HEADS_PER_TILE, PING_PONG=TILE.PING_PONG, Q_IN_REGISTERS=TILE.Q_IN_REGISTERS, LAZY=TILE.LAZY,
        SOFTMAX_FIRST=TILE.SOFTMAX_FIRST, PACKED=FLAGS.PACKED, PAGE_SIZE=PAGE_SIZE, MASKED=masked, SOFTCAP=FLAGS.SOFTCAP,
        SINKS=SINKS, K_TMA_LINES=k_desc.block_type.shape[1], V_TMA_LINES=v_desc.block_type.shape[1],
        BIAS=bias_desc.dtype if BIAS else None, LIST_S=TILE.LIST_S, LIST_BITS=TILE.LIST_BITS,
    )
    mask = MaskBounds(left, right, prefix, chunk, FLAGS.LEFT, FLAGS.RIGHT, FLAGS.PREFIX, FLAGS.CHUNK)
    queries = ring(
        gl.allocate_shared_memory(
            dtype, [TILE.Q_STAGES * TILE.NUM_CONSUMERS, 1, TILE.HEADS_PER_TILE, config.ROWS, D], q_desc.layout
        ),
        TILE.Q_STAGES, TILE.NUM_CONSUMERS,
    )
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, TILE.KEYS, D], dtype)
    v_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, TILE.KEYS, DV], dtype)
    keys = ring(
        gl.allocate_shared_memory(dtype, [TILE.KV_STAGES, 1, 1, TILE.KEYS, D], k_layout), TILE.KV_STAGES, TILE.NUM_CONSUMERS
    )  # fmt: skip
    values = ring(
        gl.allocate_shared_memory(dtype, [TILE.KV_STAGES, 1, 1, TILE.KEYS, DV], v_layout), TILE.KV_STAGES, TILE.NUM_CONSUMERS
    )  # fmt: skip
    biases = 0
    if BIAS:
        # one row for all queries, or as many as there are
        SLOTS: gl.constexpr = TILE.BIAS_STAGES * (1 if TILE.BIAS_ROWS == 1 else TILE.NUM_CONSUMERS)
        biases = ring(
            gl.allocate_shared_memory(bias_desc.dtype, [SLOTS, 1, 1, TILE.BIAS_ROWS, TILE.KEYS], bias_desc.layout),
            TILE.BIAS_STAGES, TILE.NUM_CONSUMERS,
        )
    outputs = 0
    if o_desc.dtype == dtype:
        outputs = gl.allocate_shared_memory(
            dtype, [TILE.NUM_CONSUMERS, 1, TILE.HEADS_PER_TILE, config.ROWS, min(DV, 128)], o_desc.layout
        )  # fmt: skip
    words: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    work_tiles = ring(
        gl.allocate_shared_memory(gl.int32, [2 * WORK_TILE_WORDS, 1], words), 2, TILE.NUM_CONSUMERS + (PAGE_SIZE > 0)
    )  # fmt: skip
    list_words = 0
    if TILE.LIST_S > 0:
        list_words = gl.allocate_shared_memory(gl.int32, [2 * TILE.KV_STAGES if TILE.LIST_BITS else TILE.KV_STAGES, 1], words)
    # a power of two: what is behind the words of tensors is of lists alone
    spilled = gl.allocate_shared_memory(gl.int64, [32 if TILE.LIST_S > 0 else 16, 1], words)
    spill_tensor(spilled, 0, q_ptr, q_desc)
    if PAGE_SIZE > 0:
        spill_tensor(spilled, 1, k_ptr, k_desc, k_page, k_head)
        spill_tensor(spilled, 2, v_ptr, v_desc, v_page, v_head)
        spill_word(spilled, TABLE_WORD, table_ptr.to(gl.int64, bitcast=True))
        spill_word(spilled, TABLE_WORD + 1, table_stride)
    else:
        spill_tensor(spilled, 1, k_ptr, k_desc)
        spill_tensor(spilled, 2, v_ptr, v_desc)
    if BIAS:
        spill_tensor(spilled, 3, bias_ptr, bias_desc)
    if TILE.LIST_S > 0:
        spill_lists(spilled, lists)
    fence_async_shared()
    # packed: one sequence, of all queries
    H = q_desc.shape[1].to(gl.int32)
    T = q_desc.shape[2].to(gl.int32)
    k_table = PageTable(table_ptr, table_stride, k_page, k_head)
    v_table = PageTable(table_ptr, table_stride, v_page, v_head)
    load = (
        work_tiles, queries, keys, values, biases, mask, q_desc, k_desc, v_desc, bias_desc,
        B, H, T, S, tiles, balanced_heads, cu_q_ptr, cu_k_ptr, k_table, lists, list_words, counter_ptr, config,
    )
    scoring = make_scoring(mask, scale, softcap, FLAGS.SOFTCAP, BIAS)
    args = (
        work_tiles, queries, keys, values, biases, lists, list_words, outputs, spilled, o_desc, o_ptr, lse_ptr, sinks_ptr, H, T,
        scoring, config,
    )
    if PAGE_SIZE > 0:
        gl.static_assert(TILE.NUM_CONSUMERS == 2)
        gl.warp_specialize(
            [
                (_compute, (0,) + args), (_compute, (1,) + args), (_load, load),
                (load_values, (work_tiles, values, v_desc, v_table, config)),
            ],
            [4, 1, 1], [TILE.COMPUTE_REGISTERS, TILE.COPY_REGISTERS, TILE.COPY_REGISTERS],
        )
    elif TILE.NUM_CONSUMERS == 1:
        gl.warp_specialize([(_compute, (0,) + args), (_load, load)], [1], [TILE.COPY_REGISTERS])
    elif TILE.NUM_CONSUMERS == 2:
        gl.warp_specialize(
            [(_compute, (0,) + args), (_compute, (1,) + args), (_load, load)],
            [4, 1], [TILE.COMPUTE_REGISTERS, TILE.COPY_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [(_compute, (0,) + args), (_compute, (1,) + args), (_compute, (2,) + args), (_load, load)],
            [4, 4, 1], [TILE.COMPUTE_REGISTERS, TILE.COMPUTE_REGISTERS, TILE.COPY_REGISTERS],
        )


@gluon.jit(
    do_not_specialize=[
        "table_stride", "k_page", "k_head", "v_page", "v_head", "B", "S", "tiles", "balanced_heads", "left", "right",
        "prefix", "chunk",
    ],
    do_not_specialize_on_alignment=["sinks_ptr", "cu_q_ptr", "cu_k_ptr", "table_ptr"],
)
def flash_fwd(
    q_desc, k_desc, v_desc, o_desc, q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, sinks_ptr, cu_q_ptr, cu_k_ptr, table_ptr, counter_ptr,
    table_stride, k_page, k_head, v_page, v_head, B, S, tiles, balanced_heads, scale, softcap, left, right, prefix, chunk,
    GROUP: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    SINKS: gl.constexpr,
    FLAGS: gl.constexpr, TILE: gl.constexpr,
):
    _program(
        q_desc, k_desc, v_desc, o_desc, 0, q_ptr, k_ptr, v_ptr, o_ptr, 0, lse_ptr, sinks_ptr, cu_q_ptr, cu_k_ptr,
        table_ptr, 0, counter_ptr,
        table_stride, k_page, k_head, v_page, v_head, B, S, tiles, balanced_heads, scale, softcap, left, right, prefix, chunk,
        GROUP, D, DV, PAGE_SIZE, SINKS, FLAGS, TILE,
    )


@gluon.jit(
    do_not_specialize=["B", "S", "tiles", "balanced_heads", "left", "right", "prefix", "chunk"],
    do_not_specialize_on_alignment=["sinks_ptr"],
)
def flash_fwd_bias(
    q_desc, k_desc, v_desc, o_desc, bias_desc, q_ptr, k_ptr, v_ptr, o_ptr, bias_ptr, lse_ptr, sinks_ptr, counter_ptr,
    B, S, tiles, balanced_heads, scale, softcap, left, right, prefix, chunk,
    GROUP: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    SINKS: gl.constexpr,
    FLAGS: gl.constexpr, TILE: gl.constexpr,
):
    """The same with a bias, for dense keys and values."""
    # nothing reads what stands for offsets and pages
    none = B * 0
    _program(
        q_desc, k_desc, v_desc, o_desc, bias_desc, q_ptr, k_ptr, v_ptr, o_ptr, bias_ptr, lse_ptr, sinks_ptr, counter_ptr,
        counter_ptr, counter_ptr, 0, counter_ptr,
        none, none, none, none, none, B, S, tiles, balanced_heads, scale, softcap, left, right, prefix, chunk,
        GROUP, D, DV, 0, SINKS, FLAGS, TILE,
    )


@gluon.jit(
    do_not_specialize=[
        "batch_stride", "head_stride", "per", "most", "part", "B", "S", "tiles", "balanced_heads", "left", "right", "prefix",
        "chunk",
    ],
    do_not_specialize_on_alignment=["sinks_ptr", "cu_q_ptr", "cu_k_ptr", "counts_ptr", "indices_ptr", "bits_ptr"],
)
def flash_fwd_listed(
    q_desc, k_desc, v_desc, o_desc, q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, sinks_ptr, cu_q_ptr, cu_k_ptr, counts_ptr, indices_ptr,
    bits_ptr, counter_ptr,
    batch_stride, head_stride, per, most, part, B, S, tiles, balanced_heads, scale, softcap, left, right, prefix, chunk,
    GROUP: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    SINKS: gl.constexpr,
    FLAGS: gl.constexpr, TILE: gl.constexpr,
):
    """The same over lists of blocks."""
    # nothing reads what stands for pages
    none = B * 0
    lists = BlockLists(
        counts_ptr, indices_ptr, bits_ptr, batch_stride, head_stride, per, most, part, batch_stride, head_stride,
        TILE.LIST_T, TILE.LIST_S, TILE.LIST_BITS,
    )
    _program(
        q_desc, k_desc, v_desc, o_desc, 0, q_ptr, k_ptr, v_ptr, o_ptr, 0, lse_ptr, sinks_ptr, cu_q_ptr, cu_k_ptr,
        counter_ptr, lists, counter_ptr,
        none, none, none, none, none, B, S, tiles, balanced_heads, scale, softcap, left, right, prefix, chunk,
        GROUP, D, DV, 0, SINKS, FLAGS, TILE,
    )
