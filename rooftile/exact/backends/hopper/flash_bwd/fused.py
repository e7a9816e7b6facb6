"""The backward on Hopper for head dims up to 128: dk, dv, and dq added up in memory.

    load     one warp: draws the next tile of keys, has its keys and values copied in, then the queries and the gradients
             of the output that they meet, block by block
    compute  two warpgroups of 64 keys each, with dk and dv in registers. Scores are held transposed, keys by queries, so that
             the weights and the gradients of the scores are the left side of the products that dv and dk sum:
                 S^T = K Q^T,  P = exp(scale S - L),  dV += P^T dO
                 dP^T = V dO^T,  dS = P (dP - D),     dK += dS^T Q
             and hand on dS through shared memory
    dq       dQ = dS K. At D = 64 a warpgroup of its own. At D = 128 there are no registers for one: both compute warpgroups
             multiply half of the columns each, behind the next block's scores
    add      one warp: has each block's part of dq added to the sum in memory

The sum is in fp32 (see `dq_accumulator`), and its parts come in any order: dq differs in its last bits from run to run. Asked
for an order, the kernel leaves dq to `flash_bwd_q`, for two more products.

Dao, FlashAttention-2, arXiv:2307.08691, Algorithm 2; Shah et al., FlashAttention-3, arXiv:2407.08608.
"""

from rooftile.exact.backends.hopper.device.config import WG_ROWS
from rooftile.exact.backends.hopper.device.lists import BlockLists, read_word
from rooftile.exact.backends.hopper.device.mma import mma_qk, num_mmas
from rooftile.exact.backends.hopper.device.scheduler import WORK_TILE_WORDS, MaskBounds, consume
from rooftile.exact.backends.hopper.device.softmax import ScoreNumbers, add_bias, make_scoring
from rooftile.exact.backends.hopper.flash_bwd.dq_accumulator import UNIT, UNIT_COLUMNS, UNIT_ROWS
from rooftile.exact.backends.hopper.flash_bwd.dq_roles import NUM_CONSUMERS, add_dq, finish_block_of_dq, issue_dq, multiply_dq
from rooftile.exact.backends.hopper.flash_bwd.parts import (
    BLOCK,
    WORDS,
    BackwardConfig,
    advance_block,
    apply_mask_transposed,
    compute_ds,
    find_unmasked_queries,
    flag_nan,
    load_key_tiles,
    recompute_capped_scores,
    steps_of,
    store_rows,
)
from rooftile.runtime.hopper.gluon import fence_async_shared, gl, gluon, mbarrier, warpgroup_mma, warpgroup_mma_wait
from rooftile.runtime.hopper.pipeline import Ring, hide_from_ptxas, named_barrier, ring, wait_for_store

# the first of the warpgroups' named barriers, by which they take turns at D = 64
PING_PONG_BARRIER = gl.constexpr(9)


@gluon.jit
def _compute_weights(
    s, lses, biases, lists, words, fill, t, queries: Ring, work, low, high, scoring: ScoreNumbers, WG: gl.constexpr,
    config: BackwardConfig,
):  # fmt: skip
    """The weights of 64 keys and a block of queries. A listed block's words: where it is, if it weighs nothing, and its bits."""
    hidden = 0.0
    if config.LIST_T > 0:
        word = read_word(words, fill % WORDS * 2)
        t = word // 2 * BLOCK
        hidden = gl.where(word % 2 != 0, float("inf"), 0.0)
    if config.SOFTCAP:
        s = scoring.apply_softcap(s)
    if config.BIAS:
        biases.wait_full(fill)
        block = biases.buffers.index(fill % biases.stages * NUM_CONSUMERS + WG)
        if biases.buffers.shape[3] == 1:
            bias = gl.expand_dims(block.reshape([WG_ROWS]).load(gl.SliceLayout(1, config.s_layout)), 1)
        else:
            bias = block.reshape([BLOCK, WG_ROWS]).permute((1, 0)).load(config.s_layout)
        s = add_bias(s, bias, scoring)
        biases.release(fill)
    if (t < low) | (t + (BLOCK - 1) > high):
        s = apply_mask_transposed(s, work.t + WG * WG_ROWS, t, work, scoring.mask)
    if config.LIST_BITS:
        place = read_word(words, 2 * WORDS + fill % WORDS)
        if place >= 0:
            s = lists.hide_by_bits_transposed(s, place, t, work.t + WG * WG_ROWS)
    lse = lses.index(fill % queries.stages).load(gl.SliceLayout(0, config.s_layout))
    if config.LIST_T > 0:
        lse = lse + hidden
    return gl.exp2(s * scoring.scale_log2 - gl.expand_dims(lse, 0))


@gluon.jit
def _publish_ds(ds, ds_blocks: Ring, fill, WG: gl.constexpr, config: BackwardConfig):
    """Hands a warpgroup's gradients of the scores to whoever multiplies dq."""
    if config.ACCUMULATE_DQ:
        if config.DQ_WARPGROUP:
            ds_blocks.wait_empty(fill)
        ds_blocks.buffers.index(fill % ds_blocks.stages * NUM_CONSUMERS + WG).store(ds)
        fence_async_shared()
        mbarrier.arrive(ds_blocks.full_barrier(fill), count=1)


@gluon.jit
def _issue_scores(keys: Ring, queries: Ring, fill, WG: gl.constexpr, config: BackwardConfig):
    """Issues the scores of a block of queries, once it is there."""
    queries.wait_full(fill)
    # the assembler cannot tell where the keys are, else it would keep the addresses of all their columns in registers
    k = keys.buffers.index(hide_from_ptxas(WG)).reshape([WG_ROWS, config.D])
    return mma_qk(k, queries.buffer(fill).reshape([BLOCK, config.D]), config.DIM, config.s_layout)


@gluon.jit
def _step(
    dk, dv, keys: Ring, values: Ring, k, v, queries: Ring, grads: Ring, lses, deltas, biases, lists, words, ds_blocks: Ring,
    dq_staging: Ring, fill, t, work,
    low, high, scoring: ScoreNumbers, WG: gl.constexpr, FIRST: gl.constexpr, config: BackwardConfig,
):  # fmt: skip
    """One block of queries: its part of dk and dv, and at D = 128 dq of the block before it."""
    dtype: gl.constexpr = keys.buffers.dtype
    DQ: gl.constexpr = config.ACCUMULATE_DQ and not config.DQ_WARPGROUP and not FIRST
    none = gl.zeros([WG_ROWS, BLOCK], gl.float32, config.s_layout)
    q = queries.buffer(fill).reshape([BLOCK, config.D])
    do = grads.buffer(fill).reshape([BLOCK, config.D])

    if config.DQ_WARPGROUP:
        queries.wait_full(fill)
        named_barrier("sync", PING_PONG_BARRIER + WG)
        s = warpgroup_mma(k, q.permute((1, 0)), none, use_acc=False, is_async=True)
    else:
        s = _issue_scores(keys, queries, fill, WG, config)
    if DQ:
        dq = issue_dq(keys, ds_blocks, fill - 1, WG * UNIT, config)
        s = warpgroup_mma_wait(NUM_CONSUMERS, deps=(s,))
    else:
        s = warpgroup_mma_wait(0, deps=(s,))
    p = _compute_weights(s, lses, biases, lists, words, fill, t, queries, work, low, high, scoring, WG, config)
    if DQ:
        finish_block_of_dq(dq, dq_staging, (fill - 1) * NUM_CONSUMERS + WG)
    grads.wait_full(fill)
    if config.DQ_WARPGROUP:
        dp = warpgroup_mma(v, do.permute((1, 0)), none, use_acc=False, is_async=True)
    else:
        vb = values.buffers.index(hide_from_ptxas(WG)).reshape([WG_ROWS, config.D])
        dp = mma_qk(vb, do, config.DIM_V, config.s_layout)
    weights = gl.convert_layout(p.to(dtype), config.a_layout)
    delta = deltas.index(fill % grads.stages).load(gl.SliceLayout(0, config.s_layout))
    if config.DV_AFTER_DS:
        if config.DQ_WARPGROUP:
            named_barrier("arrive", PING_PONG_BARRIER + 1 - WG)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        s = recompute_capped_scores(p, lses, fill, queries.stages, config)
        ds = compute_ds(p, dp, gl.expand_dims(delta, 0), s, scoring, config).to(dtype)
        dv = warpgroup_mma(weights, do, dv, is_async=True)
        dk = warpgroup_mma(gl.convert_layout(ds, config.a_layout), q, dk, is_async=True)
        _publish_ds(ds, ds_blocks, fill, WG, config)
    else:
        dv = warpgroup_mma(weights, do, dv, is_async=True)
        if config.DQ_WARPGROUP:
            named_barrier("arrive", PING_PONG_BARRIER + 1 - WG)
        dp = warpgroup_mma_wait(1, deps=(dp,))
        s = recompute_capped_scores(p, lses, fill, queries.stages, config)
        ds = compute_ds(p, dp, gl.expand_dims(delta, 0), s, scoring, config).to(dtype)
        _publish_ds(ds, ds_blocks, fill, WG, config)
        dk = warpgroup_mma(gl.convert_layout(ds, config.a_layout), q, dk, is_async=True)
    dv = warpgroup_mma_wait(1, deps=(dv,))
    grads.release(fill)
    dk = warpgroup_mma_wait(0, deps=(dk,))
    queries.release(fill)
    return dk, dv


@gluon.jit
def _step_ahead(
    dk, dv, p, keys: Ring, values: Ring, queries: Ring, grads: Ring, lses, deltas, biases, lists, words, ds_blocks: Ring,
    dq_staging: Ring, fill, t, work,
    low, high, scoring: ScoreNumbers, WG: gl.constexpr, MORE: gl.constexpr, config: BackwardConfig,
):  # fmt: skip
    """One block of queries at D = 128, from its weights on: its part of dk, dv and dq; and the weights of the next, at t.

    The next block's scores are issued right behind the product for dk, and dq behind both: the tensor cores always have a next
    product, but each warpgroup waits for the other's part of the same block. That pays where both have the same to do.
    """
    dtype: gl.constexpr = keys.buffers.dtype
    AFTER: gl.constexpr = (num_mmas(config.DIM) if MORE else 0) + (NUM_CONSUMERS if config.ACCUMULATE_DQ else 0)
    q = queries.buffer(fill).reshape([BLOCK, config.D])
    do = grads.buffer(fill).reshape([BLOCK, config.D])
    grads.wait_full(fill)
    v = values.buffers.index(hide_from_ptxas(WG)).reshape([WG_ROWS, config.D])
    dp = mma_qk(v, do, config.DIM_V, config.s_layout)
    weights = gl.convert_layout(p.to(dtype), config.a_layout)
    delta = deltas.index(fill % grads.stages).load(gl.SliceLayout(0, config.s_layout))
    if config.DV_AFTER_DS:
        dp = warpgroup_mma_wait(0, deps=(dp,))
        s = recompute_capped_scores(p, lses, fill, queries.stages, config)
        ds = compute_ds(p, dp, gl.expand_dims(delta, 0), s, scoring, config).to(dtype)
        dv = warpgroup_mma(weights, do, dv, is_async=True)
    else:
        dv = warpgroup_mma(weights, do, dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=(dp,))
        s = recompute_capped_scores(p, lses, fill, queries.stages, config)
        ds = compute_ds(p, dp, gl.expand_dims(delta, 0), s, scoring, config).to(dtype)
    dk = warpgroup_mma(gl.convert_layout(ds, config.a_layout), q, dk, is_async=True)
    _publish_ds(ds, ds_blocks, fill, WG, config)
    # what has been waited for needs no registers
    dv = warpgroup_mma_wait(1, deps=(dv,))
    grads.release(fill)
    if MORE:
        s = _issue_scores(keys, queries, fill + 1, WG, config)
    if config.ACCUMULATE_DQ:
        dq = issue_dq(keys, ds_blocks, fill, WG * UNIT, config)
    dk = warpgroup_mma_wait(AFTER, deps=(dk,))
    queries.release(fill)
    if MORE:
        s = warpgroup_mma_wait(NUM_CONSUMERS if config.ACCUMULATE_DQ else 0, deps=(s,))
        p = _compute_weights(s, lses, biases, lists, words, fill + 1, t, queries, work, low, high, scoring, WG, config)
    if config.ACCUMULATE_DQ:
        finish_block_of_dq(dq, dq_staging, fill * NUM_CONSUMERS + WG)
    return dk, dv, p


@gluon.jit
def _compute(
    WG: gl.constexpr, work_tiles: Ring, keys: Ring, values: Ring, queries: Ring, grads: Ring, lses, deltas, biases, lists, words,
    ds_blocks: Ring, dq_staging: Ring,
    dk_desc, dv_desc, dk_ptr, dv_ptr, nan_flag_ptr, scoring: ScoreNumbers, config: BackwardConfig,
):  # fmt: skip
    """A warpgroup's role: 64 keys of every tile."""
    left: gl.constexpr = gl.DotOperandLayout(0, config.s_layout, 2)
    room = values.buffers.index(WG)
    if config.DQ_WARPGROUP and WG == 1:
        named_barrier("arrive", PING_PONG_BARRIER)
    tile = 0
    fill = 0
    work = consume(work_tiles, 0)
    Hk = dk_desc.shape[1].to(gl.int32)
    while work.is_valid != 0:
        steps = steps_of(work, config)
        s_0 = work.t + WG * WG_ROWS
        low, high = find_unmasked_queries(work, s_0, WG_ROWS, scoring.mask)
        dk = gl.zeros([WG_ROWS, config.D], gl.float32, config.acc_layout)
        dv = gl.zeros([WG_ROWS, config.D], gl.float32, config.acc_layout)
        keys.wait_full(tile)
        values.wait_full(tile)
        if config.SCORES_AHEAD:
            h = work.h
            block = work.first_block
            s = _issue_scores(keys, queries, fill, WG, config)
            s = warpgroup_mma_wait(0, deps=(s,))
            p = _compute_weights(
                s, lses, biases, lists, words, fill, block * BLOCK, queries, work, low, high, scoring, WG, config
            )
            for _ in range(1, steps):
                if config.LIST_T == 0:
                    h, block = advance_block(h, block, work, config)
                dk, dv, p = _step_ahead(
                    dk, dv, p, keys, values, queries, grads, lses, deltas, biases, lists, words, ds_blocks, dq_staging, fill,
                    block * BLOCK, work, low, high, scoring, WG, True, config,
                )  # fmt: skip
                fill += 1
            dk, dv, p = _step_ahead(
                dk, dv, p, keys, values, queries, grads, lses, deltas, biases, lists, words, ds_blocks, dq_staging, fill, 0, work,
                low, high, scoring, WG, False, config,
            )  # fmt: skip
            fill += 1
        else:
            k = 0
            v = 0
            if config.DQ_WARPGROUP:
                k = keys.buffers.index(WG).reshape([WG_ROWS, config.D]).load(left)
                v = room.reshape([WG_ROWS, config.D]).load(left)
            # the first on its own, also at D = 64: of one loop over all, ptxas makes code that loses the keys (see the tests'
            # `overwritten_operands`)
            dk, dv = _step(
                dk, dv, keys, values, k, v, queries, grads, lses, deltas, biases, lists, words, ds_blocks, dq_staging, fill,
                work.first_block * BLOCK, work,
                low, high, scoring, WG, True, config,
            )  # fmt: skip
            fill += 1
            h = work.h
            block = work.first_block
            if config.LIST_T == 0:
                h, block = advance_block(h, block, work, config)
            for _ in range(1, steps):
                dk, dv = _step(
                    dk, dv, keys, values, k, v, queries, grads, lses, deltas, biases, lists, words, ds_blocks, dq_staging, fill,
                    block * BLOCK, work, low, high, scoring, WG, False, config,
                )  # fmt: skip
                fill += 1
                if config.LIST_T == 0:
                    h, block = advance_block(h, block, work, config)
            if config.ACCUMULATE_DQ and not config.DQ_WARPGROUP:
                dq = issue_dq(keys, ds_blocks, fill - 1, WG * UNIT, config)
                finish_block_of_dq(dq, dq_staging, (fill - 1) * NUM_CONSUMERS + WG)
        keys.release(tile)
        if not config.FP16:
            dk = dk * scoring.scale
        flag_nan(nan_flag_ptr, dk, config)
        flag_nan(nan_flag_ptr, dv, config)
        # no other warpgroup reads these values
        store_rows(
            room, dv.to(dv_ptr.dtype.element_ty), dv_desc, dv_ptr, work, Hk, s_0, work.k_start, work.S, config.DIM_V, config
        )
        wait_for_store()
        store_rows(room, dk.to(dk_ptr.dtype.element_ty), dk_desc, dk_ptr, work, Hk, s_0, work.k_start, work.S, config.DIM, config)
        wait_for_store()
        values.release(tile)
        tile += 1
        work = consume(work_tiles, tile)
    if config.DQ_WARPGROUP and WG == 0:
        named_barrier("sync", PING_PONG_BARRIER)


# fmt: off
@gluon.jit
def _program(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dq_sum_desc, dk_desc, dv_desc, bias_desc,
    dk_ptr, dv_ptr, nan_flag_ptr, cu_q_ptr, cu_k_ptr, lists, counter_ptr,
    B, T, S, padded_T, tiles, balanced_heads, scale, softcap, left, right, prefix, chunk,
    GROUP: gl.constexpr, GROUP_SPLITS: gl.constexpr, D: gl.constexpr,
    FP16: gl.constexpr, ACCUMULATE_DQ: gl.constexpr,
    FLAGS: gl.constexpr, TILE: gl.constexpr,
):
    """The program; without a bias, bias_desc is 0, and without lists of blocks `lists` is."""
    BIAS: gl.constexpr = TILE.BIAS_STAGES > 0
    dtype: gl.constexpr = q_desc.dtype
    config = BackwardConfig(
        GROUP=GROUP, GROUP_SPLITS=GROUP_SPLITS, BLOCKS_PER_TILE=NUM_CONSUMERS, D=D, DIM=FLAGS.DIM, DIM_V=FLAGS.DIM_V,
        PACKED=FLAGS.PACKED, MASKED=FLAGS.LEFT or FLAGS.RIGHT or FLAGS.PREFIX or FLAGS.CHUNK, SOFTCAP=FLAGS.SOFTCAP, FP16=FP16,
        ACCUMULATE_DQ=ACCUMULATE_DQ, DV_AFTER_DS=TILE.DV_AFTER_DS, SCORES_AHEAD=TILE.SCORES_AHEAD, BIAS=BIAS, LIST_T=TILE.LIST_T,
        LIST_S=TILE.LIST_S, LIST_BITS=TILE.LIST_BITS,
    )  # fmt: skip
    mask = MaskBounds(left, right, prefix, chunk, FLAGS.LEFT, FLAGS.RIGHT, FLAGS.PREFIX, FLAGS.CHUNK)
    words: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    HAS_DQ_ROLE: gl.constexpr = ACCUMULATE_DQ and config.DQ_WARPGROUP
    keys = ring(
        gl.allocate_shared_memory(dtype, [NUM_CONSUMERS, 1, 1, WG_ROWS, D], k_desc.layout), 1, NUM_CONSUMERS + HAS_DQ_ROLE
    )  # fmt: skip
    values = ring(gl.allocate_shared_memory(dtype, [NUM_CONSUMERS, 1, 1, WG_ROWS, D], v_desc.layout), 1, NUM_CONSUMERS)
    queries = ring(gl.allocate_shared_memory(dtype, [TILE.STAGES, 1, 1, BLOCK, D], q_desc.layout), TILE.STAGES, NUM_CONSUMERS)
    grads = ring(gl.allocate_shared_memory(dtype, [TILE.STAGES, 1, 1, BLOCK, D], do_desc.layout), TILE.STAGES, NUM_CONSUMERS)
    lses = gl.allocate_shared_memory(gl.float32, [TILE.STAGES, BLOCK], lse_desc.layout)
    deltas = gl.allocate_shared_memory(gl.float32, [TILE.STAGES, BLOCK], delta_desc.layout)
    biases = 0
    if BIAS:
        biases = ring(
            gl.allocate_shared_memory(
                bias_desc.dtype, [TILE.BIAS_STAGES * NUM_CONSUMERS, 1, 1, TILE.BIAS_ROWS, WG_ROWS],
                bias_desc.layout,
            ),
            TILE.BIAS_STAGES, NUM_CONSUMERS,
        )
    # two stages of dS from both warpgroups. Without a role for dq no stage is released: a warpgroup that has both parts of the
    # next stage knows that this one has been read
    part_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WG_ROWS, BLOCK], dtype)
    ds_blocks = ring(gl.allocate_shared_memory(dtype, [2 * NUM_CONSUMERS, WG_ROWS, BLOCK], part_layout), 2, 1, NUM_CONSUMERS)
    dq_staging = ring(gl.allocate_shared_memory(gl.float32, [2, UNIT_ROWS, UNIT_COLUMNS], dq_sum_desc.layout), 2, 1)
    work_tiles = ring(
        gl.allocate_shared_memory(gl.int32, [2 * WORK_TILE_WORDS, 1], words), 2, NUM_CONSUMERS + HAS_DQ_ROLE + ACCUMULATE_DQ
    )  # fmt: skip
    list_words = 0
    if TILE.LIST_T > 0:
        list_words = gl.allocate_shared_memory(gl.int32, [(3 if TILE.LIST_BITS else 2) * WORDS, 1], words)
    fence_async_shared()
    H = q_desc.shape[1].to(gl.int32)
    scoring = make_scoring(mask, scale, softcap, FLAGS.SOFTCAP, BIAS)
    args = (
        work_tiles, keys, values, queries, grads, lses, deltas, biases, lists, list_words, ds_blocks, dq_staging,
        dk_desc, dv_desc, dk_ptr, dv_ptr, nan_flag_ptr, scoring, config,
    )
    load = (
        work_tiles, keys, values, queries, grads, lses, deltas, mask, q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc,
        B, T, S, padded_T, tiles, balanced_heads, cu_q_ptr, cu_k_ptr, counter_ptr, config, biases, bias_desc,
        lists, list_words,
    )
    if HAS_DQ_ROLE:
        gl.warp_specialize(
            [
                (_compute, (0,) + args), (_compute, (1,) + args),
                (multiply_dq, (work_tiles, keys, ds_blocks, dq_staging, config)),
                (load_key_tiles, load), (add_dq, (work_tiles, dq_staging, list_words, dq_sum_desc, H, padded_T, config)),
            ],
            [4, 4, 1, 1], [TILE.COMPUTE_REGISTERS, TILE.DQ_REGISTERS, TILE.COPY_REGISTERS, TILE.COPY_REGISTERS],
        )
    elif ACCUMULATE_DQ:
        gl.warp_specialize(
            [
                (_compute, (0,) + args), (_compute, (1,) + args),
                (load_key_tiles, load), (add_dq, (work_tiles, dq_staging, list_words, dq_sum_desc, H, padded_T, config)),
            ],
            [4, 1, 1], [TILE.COMPUTE_REGISTERS, TILE.COPY_REGISTERS, TILE.COPY_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [(_compute, (0,) + args), (_compute, (1,) + args), (load_key_tiles, load)],
            [4, 1], [TILE.COMPUTE_REGISTERS, TILE.COPY_REGISTERS],
        )


@gluon.jit(
    do_not_specialize=["B", "T", "S", "padded_T", "tiles", "balanced_heads", "left", "right", "prefix", "chunk"],
    do_not_specialize_on_alignment=["cu_q_ptr", "cu_k_ptr"],
)
def flash_bwd(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dq_sum_desc, dk_desc, dv_desc,
    dk_ptr, dv_ptr, nan_flag_ptr, cu_q_ptr, cu_k_ptr, counter_ptr,
    B, T, S, padded_T, tiles, balanced_heads, scale, softcap, left, right, prefix, chunk,
    GROUP: gl.constexpr, GROUP_SPLITS: gl.constexpr, D: gl.constexpr,
    FP16: gl.constexpr, ACCUMULATE_DQ: gl.constexpr,
    FLAGS: gl.constexpr, TILE: gl.constexpr,
):
    _program(
        q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dq_sum_desc, dk_desc, dv_desc, 0,
        dk_ptr, dv_ptr, nan_flag_ptr, cu_q_ptr, cu_k_ptr, 0, counter_ptr,
        B, T, S, padded_T, tiles, balanced_heads, scale, softcap, left, right, prefix, chunk,
        GROUP, GROUP_SPLITS, D, FP16, ACCUMULATE_DQ, FLAGS, TILE,
    )


@gluon.jit(do_not_specialize=["B", "T", "S", "padded_T", "tiles", "balanced_heads", "left", "right", "prefix", "chunk"])
def flash_bwd_bias(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dq_sum_desc, dk_desc, dv_desc, bias_desc,
    dk_ptr, dv_ptr, nan_flag_ptr, counter_ptr,
    B, T, S, padded_T, tiles, balanced_heads, scale, softcap, left, right, prefix, chunk,
    GROUP: gl.constexpr, GROUP_SPLITS: gl.constexpr, D: gl.constexpr,
    FP16: gl.constexpr, ACCUMULATE_DQ: gl.constexpr,
    FLAGS: gl.constexpr, TILE: gl.constexpr,
):
    """The same with a bias, for dense keys and values."""
    # nothing reads what stands for offsets
    _program(
        q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dq_sum_desc, dk_desc, dv_desc, bias_desc,
        dk_ptr, dv_ptr, nan_flag_ptr, counter_ptr, counter_ptr, 0, counter_ptr,
        B, T, S, padded_T, tiles, balanced_heads, scale, softcap, left, right, prefix, chunk,
        GROUP, GROUP_SPLITS, D, FP16, ACCUMULATE_DQ, FLAGS, TILE,
    )


@gluon.jit(
    do_not_specialize=[
        "batch_stride", "head_stride", "per", "most", "bits_batch_stride", "bits_head_stride", "part", "B", "padded_T", "tiles",
        "balanced_heads", "left", "right", "prefix", "chunk",
    ],
    do_not_specialize_on_alignment=["cu_q_ptr", "cu_k_ptr", "counts_ptr", "entries_ptr", "bits_ptr"],
)
def flash_bwd_listed(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dq_sum_desc, dk_desc, dv_desc,
    dk_ptr, dv_ptr, nan_flag_ptr, cu_q_ptr, cu_k_ptr, counts_ptr, entries_ptr, bits_ptr, counter_ptr,
    batch_stride, head_stride, per, most, bits_batch_stride, bits_head_stride, part,
    B, padded_T, tiles, balanced_heads, scale, softcap, left, right, prefix, chunk,
    GROUP: gl.constexpr, GROUP_SPLITS: gl.constexpr, D: gl.constexpr,
    FLAGS: gl.constexpr, TILE: gl.constexpr,
):
    """The same over lists of blocks, by keys."""
    lists = BlockLists(
        counts_ptr, entries_ptr, bits_ptr, batch_stride, head_stride, per, most, part, bits_batch_stride, bits_head_stride,
        TILE.LIST_T, TILE.LIST_S, TILE.LIST_BITS,
    )
    T = q_desc.shape[2].to(gl.int32)
    S = k_desc.shape[2].to(gl.int32)
    _program(
        q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dq_sum_desc, dk_desc, dv_desc, 0,
        dk_ptr, dv_ptr, nan_flag_ptr, cu_q_ptr, cu_k_ptr, lists, counter_ptr,
        B, T, S, padded_T, tiles, balanced_heads, scale, softcap, left, right, prefix, chunk,
        GROUP, GROUP_SPLITS, D, q_desc.dtype == gl.float16, True, FLAGS, TILE,
    )
