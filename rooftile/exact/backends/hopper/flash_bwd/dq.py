"""The backward for queries on Hopper: dq, without a sum that others add to.

    load     one warp: draws the next tile of queries, has them and the gradients of their outputs copied in, then keys and
             values block by block, from the last block down to the first
    compute  two warpgroups of 64 queries each: S = Q K^T, dP = dO V^T, dS = P (dP - D), dQ += dS K

Three accumulators at D = 256 leave no room for the next block's, so a warpgroup waits for its products, and its softmax runs
under the other one's.

Dao, FlashAttention-2, arXiv:2307.08691; Shah et al., FlashAttention-3, arXiv:2407.08608.
"""

from rooftile.exact.backends.hopper.device.config import WG_ROWS
from rooftile.exact.backends.hopper.device.mma import num_mmas
from rooftile.exact.backends.hopper.device.scheduler import (
    WORK_TILE_WORDS,
    MaskBounds,
    consume,
    make_work_tile,
    publish,
    publish_end,
    reset_counter,
)
from rooftile.exact.backends.hopper.device.softmax import ScoreNumbers, apply_mask, make_scoring
from rooftile.exact.backends.hopper.flash_bwd.parts import (
    BLOCK,
    BackwardConfig,
    compute_ds,
    flag_nan,
    issue_mma_qk,
    load_rows,
    store_rows,
)
from rooftile.runtime.hopper.gluon import fence_async_shared, gl, gluon, mbarrier, tma_load, warpgroup_mma, warpgroup_mma_wait
from rooftile.runtime.hopper.pipeline import Ring, hide_from_ptxas, ring, wait_for_store

# warpgroups that compute, of 64 queries each
NUM_CONSUMERS = gl.constexpr(2)


@gluon.jit
def _load(
    work_tiles: Ring, queries: Ring, grads: Ring, keys: Ring, values: Ring, mask: MaskBounds, q_desc, k_desc, v_desc, do_desc,
    B, H, T, S, tiles, balanced_heads, cu_q_ptr, cu_k_ptr, counter_ptr, config: BackwardConfig,
):  # fmt: skip
    """The role that draws tiles and has them copied in (see the forward's)."""
    total = tiles * (H if config.PACKED else B * H)
    programs = gl.num_programs(0)
    n = gl.program_id(0)
    tile = 0
    fill = 0
    while n < total:
        work = make_work_tile(
            n, B, H, T, S, tiles, balanced_heads, cu_q_ptr, cu_k_ptr, mask, NUM_CONSUMERS * WG_ROWS, BLOCK, config.PACKED
        )  # fmt: skip
        if work.is_valid != 0:
            publish(work_tiles, tile, work)
            hk = work.h // config.GROUP
            keys_row = work.k_start + work.last_block * BLOCK
            load_rows(keys, fill, k_desc, work.b, hk, keys_row)
            _load_tile_rows(queries, tile, q_desc, work)
            load_rows(values, fill, v_desc, work.b, hk, keys_row)
            _load_tile_rows(grads, tile, do_desc, work)
            tile += 1
            fill += 1
            for i in range(1, work.last_block - work.first_block + 1):
                row = keys_row - i * BLOCK
                load_rows(keys, fill, k_desc, work.b, hk, row)
                load_rows(values, fill, v_desc, work.b, hk, row)
                fill += 1
        n = gl.atomic_add(counter_ptr, 1) + programs
    publish_end(work_tiles, tile)
    reset_counter(counter_ptr)


@gluon.jit
def _load_tile_rows(rows: Ring, tile, desc, work):
    """64 rows for each warpgroup, which gives its own back."""
    for i in gl.static_range(NUM_CONSUMERS):
        rows.wait_empty(tile * NUM_CONSUMERS + i)
        mbarrier.expect(rows.full_barrier(tile * NUM_CONSUMERS + i), desc.block_type.nbytes)
        tma_load(
            desc, [work.b, work.h, work.q_start + work.t + i * WG_ROWS, 0],
            rows.full_barrier(tile * NUM_CONSUMERS + i), rows.buffer(tile * NUM_CONSUMERS + i),
        )  # fmt: skip


@gluon.jit
def _own_rows(rows: Ring, WG: gl.constexpr, config: BackwardConfig):
    """A warpgroup's 64 rows, whose place the assembler cannot tell: else it would keep the addresses of all of their
    columns over the loop, in more registers than there are."""
    return rows.buffers.index(hide_from_ptxas(WG)).reshape([64, config.D])


@gluon.jit
def _compute_weights(s, lse, row, column, work, first_clear, last_clear, scoring: ScoreNumbers, config: BackwardConfig):
    """A block's capped scores and its weights."""
    if config.SOFTCAP:
        s = scoring.apply_softcap(s)
    if (column < first_clear) | (column > last_clear):
        s = apply_mask(s, row, column, work, scoring.mask)
    return s, gl.exp2(s * scoring.scale_log2 - gl.expand_dims(lse, 1))


@gluon.jit
def _compute(
    WG: gl.constexpr, work_tiles: Ring, queries: Ring, grads: Ring, keys: Ring, values: Ring, dq_desc, dq_ptr, nan_flag_ptr,
    lse_ptr, delta_ptr, H, padded_T, scoring: ScoreNumbers, config: BackwardConfig,
):  # fmt: skip
    """A warpgroup's role: 64 queries of every tile."""
    dtype: gl.constexpr = queries.buffers.dtype
    row_layout: gl.constexpr = gl.SliceLayout(1, config.s_layout)
    mask = scoring.mask
    tile = 0
    fill = 0
    work = consume(work_tiles, 0)
    while work.is_valid != 0:
        own_fill = tile * NUM_CONSUMERS + WG
        row = work.t + WG * WG_ROWS
        t = row + gl.arange(0, WG_ROWS, row_layout)
        words = (work.b * H + work.h).to(gl.int64) * padded_T + work.padded_start
        # only a second warpgroup's rows can lie past the padding
        lse = gl.load(lse_ptr + words + t, mask=t < work.T, other=float("inf"))
        delta = gl.load(delta_ptr + words + t, mask=t < work.T, other=0.0)
        # the first columns of the blocks that all of these rows see whole
        i_0 = row + work.S - work.T
        first_clear = mask.first_key(i_0 + (WG_ROWS - 1))
        last_clear = mask.last_key(i_0, work.S) - (BLOCK - 1)
        column = work.last_block * BLOCK

        queries.wait_full(own_fill)
        grads.wait_full(own_fill)
        dq = gl.zeros([64, config.D], gl.float32, config.acc_layout)
        for _ in range(work.last_block - work.first_block + 1):
            s = issue_mma_qk(_own_rows(queries, WG, config), keys, fill, config.DIM, config)
            dp = issue_mma_qk(_own_rows(grads, WG, config), values, fill, config.DIM_V, config)
            s = warpgroup_mma_wait(num_mmas(config.DIM_V), deps=(s,))
            s, p = _compute_weights(s, lse, row, column, work, first_clear, last_clear, scoring, config)
            dp = warpgroup_mma_wait(0, deps=(dp,))
            values.release(fill)
            ds = compute_ds(p, dp, gl.expand_dims(delta, 1), s, scoring, config).to(dtype)
            ds = gl.convert_layout(ds, config.a_layout)
            dq = warpgroup_mma(ds, keys.buffer(fill).reshape([64, config.D]), dq, is_async=True)
            dq = warpgroup_mma_wait(0, deps=(dq,))
            keys.release(fill)
            column -= BLOCK
            fill += 1
        grads.release(own_fill)
        if not config.FP16:
            dq = dq * scoring.scale
        flag_nan(nan_flag_ptr, dq, config, True)
        # the queries have been read for the last time
        dq = dq.to(dq_ptr.dtype.element_ty)
        store_rows(
            queries.buffer(own_fill), dq, dq_desc, dq_ptr, work, H, row, work.q_start, work.T, config.DIM, config
        )  # fmt: skip
        wait_for_store()
        queries.release(own_fill)
        tile += 1
        work = consume(work_tiles, tile)


# fmt: off
@gluon.jit(
    do_not_specialize=["B", "S", "padded_T", "tiles", "balanced_heads", "left", "right", "prefix", "chunk"],
    do_not_specialize_on_alignment=["cu_q_ptr", "cu_k_ptr"],
)
def flash_bwd_q(
    q_desc, k_desc, v_desc, do_desc, dq_desc, dq_ptr, nan_flag_ptr, lse_ptr, delta_ptr, cu_q_ptr, cu_k_ptr, counter_ptr,
    B, S, padded_T, tiles, balanced_heads, scale, softcap, left, right, prefix, chunk,
    GROUP: gl.constexpr, D: gl.constexpr,
    FP16: gl.constexpr,
    FLAGS: gl.constexpr, TILE: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    config = BackwardConfig(
        GROUP=GROUP, GROUP_SPLITS=1, BLOCKS_PER_TILE=NUM_CONSUMERS, D=D, DIM=FLAGS.DIM, DIM_V=FLAGS.DIM_V, PACKED=FLAGS.PACKED,
        MASKED=FLAGS.LEFT or FLAGS.RIGHT or FLAGS.PREFIX or FLAGS.CHUNK, SOFTCAP=FLAGS.SOFTCAP, FP16=FP16,
    )  # fmt: skip
    mask = MaskBounds(left, right, prefix, chunk, FLAGS.LEFT, FLAGS.RIGHT, FLAGS.PREFIX, FLAGS.CHUNK)
    words: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    queries = ring(gl.allocate_shared_memory(dtype, [NUM_CONSUMERS, 1, 1, WG_ROWS, D], q_desc.layout), NUM_CONSUMERS, 1)
    grads = ring(gl.allocate_shared_memory(dtype, [NUM_CONSUMERS, 1, 1, WG_ROWS, D], do_desc.layout), NUM_CONSUMERS, 1)
    keys = ring(gl.allocate_shared_memory(dtype, [TILE.K_STAGES, 1, 1, BLOCK, D], k_desc.layout), TILE.K_STAGES, NUM_CONSUMERS)
    values = ring(gl.allocate_shared_memory(dtype, [TILE.V_STAGES, 1, 1, BLOCK, D], v_desc.layout), TILE.V_STAGES, NUM_CONSUMERS)
    work_tiles = ring(gl.allocate_shared_memory(gl.int32, [2 * WORK_TILE_WORDS, 1], words), 2, NUM_CONSUMERS)
    # packed: one sequence, of all queries
    H = q_desc.shape[1].to(gl.int32)
    T = q_desc.shape[2].to(gl.int32)
    fence_async_shared()
    scoring = make_scoring(mask, scale, softcap, FLAGS.SOFTCAP)
    args = (
        work_tiles, queries, grads, keys, values, dq_desc, dq_ptr, nan_flag_ptr, lse_ptr, delta_ptr, H, padded_T, scoring,
        config,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_compute, (0,) + args),
            (_compute, (1,) + args),
            (_load, (
                work_tiles, queries, grads, keys, values, mask, q_desc, k_desc, v_desc, do_desc,
                B, H, T, S, tiles, balanced_heads, cu_q_ptr, cu_k_ptr, counter_ptr, config,
            )),
        ],
        [4, 1], [TILE.COMPUTE_REGISTERS, TILE.COPY_REGISTERS],
    )
