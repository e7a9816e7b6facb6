"""The backward for keys and values of wide heads on Hopper: dk and dv.

At D = 256 a warpgroup's registers hold one accumulator of 64 rows and no second one. So two warpgroups are twins: they share
a tile of 64 keys and walk the same blocks of queries, one sums dv, the other dk, and half of the work is each one's alone:

    load     one warp: draws the next tile of keys, has its keys and values copied in, then the queries and the gradients
             of the output that they meet, block by block
    values   S^T = K Q^T,  P = exp(scale S - L),  dV += P^T dO     and hands P^T to its twin
    keys     dP^T = V dO^T,  dS = P (dP - D),     dK += dS^T Q

A twin issues its next scores before its last product, so its softmax runs while that is multiplied, and under the products
of the other one besides. dq is left to `flash_bwd_q`: that costs two products more than adding it up here, but a tile's part
of dq in fp32 is as many bytes as all else that crosses shared memory, which is what such a tile is bound by. Every sum has
one owner and one order, so two runs agree bit for bit.
"""

from rooftile.exact.backends.hopper.device.scheduler import WORK_TILE_WORDS, MaskBounds, consume
from rooftile.exact.backends.hopper.device.softmax import ScoreNumbers, make_scoring, pack_16bit, unpack_16bit
from rooftile.exact.backends.hopper.flash_bwd.parts import (
    BLOCK,
    BackwardConfig,
    advance_block,
    apply_mask_transposed,
    compute_ds,
    find_unmasked_queries,
    flag_nan,
    issue_mma_qk,
    load_key_tiles,
    pack_for_twin,
    recompute_capped_scores,
    store_rows,
    unpack_from_twin,
)
from rooftile.runtime.hopper.gluon import fence_async_shared, gl, gluon, mbarrier, warpgroup_mma, warpgroup_mma_wait
from rooftile.runtime.hopper.pipeline import Ring, ring, wait_for_store


@gluon.jit
def _compute_weights(s, lses, fill, block, work, low, high, weights: Ring, scoring: ScoreNumbers, config: BackwardConfig):
    """A block's weights, for this warpgroup in 16 bits and for its twin."""
    if config.SOFTCAP:
        s = scoring.apply_softcap(s)
    t = block * BLOCK
    if (t < low) | (t + (BLOCK - 1) > high):
        s = apply_mask_transposed(s, work.t, t, work, scoring.mask)
    # the queries are given back by now, yet their words stay: the twin gives back only after it has these weights
    lse = lses.load(gl.SliceLayout(0, config.s_layout))
    p = gl.exp2(s * scoring.scale_log2 - gl.expand_dims(lse, 0))
    weights.wait_empty(fill)
    weights.buffer(fill).store(pack_for_twin(p))
    mbarrier.arrive(weights.full_barrier(fill), count=1)
    return p


@gluon.jit
def _columns(rows, config: BackwardConfig):
    """The columns of 64 rows of dO that are not padding."""
    rows = rows.reshape([64, config.D])
    if config.DV < config.D:
        rows = rows.slice(0, config.DV, 1)
    return rows


@gluon.jit
def _padded(dv, config: BackwardConfig):
    """Rows of dv as wide as those in shared memory; the padding is not stored."""
    if config.DV < config.D:
        dv = gl.join(dv, gl.zeros_like(dv)).permute((0, 2, 1)).reshape([64, config.D])
    return dv


@gluon.jit
def _values(
    work_tiles: Ring, keys: Ring, queries: Ring, grads: Ring, weights: Ring, lses, dv_desc, dv_ptr, nan_flag_ptr,
    scoring: ScoreNumbers, config: BackwardConfig,
):  # fmt: skip
    """The role that sums dv."""
    dtype: gl.constexpr = keys.buffers.dtype
    tile = 0
    fill = 0
    work = consume(work_tiles, 0)
    Hk = dv_desc.shape[1].to(gl.int32)
    while work.is_valid != 0:
        blocks = work.last_block - work.first_block + 1
        steps = blocks * config.GROUP
        low, high = find_unmasked_queries(work, work.t, BLOCK, scoring.mask)
        keys.wait_full(tile)
        k = keys.buffer(tile).reshape([64, config.D])
        s = issue_mma_qk(k, queries, fill, config.DIM, config)
        s = warpgroup_mma_wait(0, deps=(s,))
        queries.release(fill)
        weight = _compute_weights(
            s, lses.index(fill % queries.stages), fill, work.first_block, work, low, high, weights, scoring, config
        )  # fmt: skip
        p = pack_16bit(weight, dtype)
        dv = gl.zeros([64, config.DV], gl.float32, config.dv_layout)
        h = work.h
        block = work.first_block
        for _ in range(1, steps):
            fill += 1
            h, block = advance_block(h, block, work, config)
            s = issue_mma_qk(k, queries, fill, config.DIM, config)
            grads.wait_full(fill - 1)
            dv = warpgroup_mma(
                unpack_16bit(p, dtype, config.p_layout), _columns(grads.buffer(fill - 1), config), dv, is_async=True
            )
            s = warpgroup_mma_wait(1, deps=(s,))
            queries.release(fill)
            weight = _compute_weights(
                s, lses.index(fill % queries.stages), fill, block, work, low, high, weights, scoring, config
            )  # fmt: skip
            dv = warpgroup_mma_wait(0, deps=(dv,))
            grads.release(fill - 1)
            p = pack_16bit(weight, dtype)
        grads.wait_full(fill)
        dv = warpgroup_mma(unpack_16bit(p, dtype, config.p_layout), _columns(grads.buffer(fill), config), dv, is_async=True)
        dv = warpgroup_mma_wait(0, deps=(dv,))
        grads.release(fill)
        flag_nan(nan_flag_ptr, dv, config)
        # no other warpgroup reads the keys
        dv = _padded(dv.to(dv_ptr.dtype.element_ty), config)
        store_rows(keys.buffer(tile), dv, dv_desc, dv_ptr, work, Hk, work.t, work.k_start, work.S, config.DIM_V, config)
        wait_for_store()
        keys.release(tile)
        tile += 1
        fill += 1
        work = consume(work_tiles, tile)


@gluon.jit
def _keys(
    work_tiles: Ring, values: Ring, queries: Ring, grads: Ring, weights: Ring, lses, deltas, dk_desc, dk_ptr, nan_flag_ptr,
    scoring: ScoreNumbers, config: BackwardConfig,
):  # fmt: skip
    """The role that sums dk."""
    dtype: gl.constexpr = values.buffers.dtype
    tile = 0
    fill = 0
    work = consume(work_tiles, 0)
    Hk = dk_desc.shape[1].to(gl.int32)
    while work.is_valid != 0:
        steps = (work.last_block - work.first_block + 1) * config.GROUP
        values.wait_full(tile)
        v = values.buffer(tile).reshape([64, config.D])
        dp = issue_mma_qk(v, grads, fill, config.DIM_V, config)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        ds = pack_16bit(_compute_ds(dp, lses, deltas, queries, grads, weights, fill, scoring, config), dtype)
        dk = gl.zeros([64, config.D], gl.float32, config.acc_layout)
        for _ in range(1, steps):
            fill += 1
            # first the product that gives queries back: they are the next to be filled, and their copy takes a while
            queries.wait_full(fill - 1)
            dk = warpgroup_mma(
                unpack_16bit(ds, dtype, config.a_layout), queries.buffer(fill - 1).reshape([64, config.D]), dk, is_async=True
            )
            dp = issue_mma_qk(v, grads, fill, config.DIM_V, config)
            dk = warpgroup_mma_wait(1, deps=(dk,))
            queries.release(fill - 1)
            dp = warpgroup_mma_wait(0, deps=(dp,))
            gradient = _compute_ds(dp, lses, deltas, queries, grads, weights, fill, scoring, config)
            ds = pack_16bit(gradient, dtype)
        queries.wait_full(fill)
        dk = warpgroup_mma(
            unpack_16bit(ds, dtype, config.a_layout), queries.buffer(fill).reshape([64, config.D]), dk, is_async=True
        )
        dk = warpgroup_mma_wait(0, deps=(dk,))
        queries.release(fill)
        if not config.FP16:
            dk = dk * scoring.scale
        flag_nan(nan_flag_ptr, dk, config)
        # no other warpgroup reads the values
        dk = dk.to(dk_ptr.dtype.element_ty)
        store_rows(values.buffer(tile), dk, dk_desc, dk_ptr, work, Hk, work.t, work.k_start, work.S, config.DIM, config)
        wait_for_store()
        values.release(tile)
        tile += 1
        fill += 1
        work = consume(work_tiles, tile)


@gluon.jit
def _compute_ds(dp, lses, deltas, queries, grads: Ring, weights: Ring, fill, scoring: ScoreNumbers, config: BackwardConfig):
    delta = deltas.index(fill % grads.stages).load(gl.SliceLayout(0, config.s_layout))
    grads.release(fill)
    weights.wait_full(fill)
    p = unpack_from_twin(weights.buffer(fill).load(gl.BlockedLayout([4], [32], [4], [0])), config.s_layout)
    weights.release(fill)
    if config.SOFTCAP:
        queries.wait_full(fill)
    s = recompute_capped_scores(p, lses, fill, queries.stages, config)
    return compute_ds(p, dp, gl.expand_dims(delta, 0), s, scoring, config)


# fmt: off
@gluon.jit(
    do_not_specialize=["B", "T", "S", "padded_T", "tiles", "balanced_heads", "left", "right", "prefix", "chunk"],
    do_not_specialize_on_alignment=["cu_q_ptr", "cu_k_ptr"],
)
def flash_bwd_kv(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_desc, dv_desc,
    dk_ptr, dv_ptr, nan_flag_ptr, cu_q_ptr, cu_k_ptr, counter_ptr,
    B, T, S, padded_T, tiles, balanced_heads, scale, softcap, left, right, prefix, chunk,
    GROUP: gl.constexpr, GROUP_SPLITS: gl.constexpr, D: gl.constexpr,
    FP16: gl.constexpr,
    FLAGS: gl.constexpr, TILE: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    config = BackwardConfig(
        GROUP=GROUP, GROUP_SPLITS=GROUP_SPLITS, BLOCKS_PER_TILE=1, D=D, DIM=FLAGS.DIM, DIM_V=FLAGS.DIM_V, PACKED=FLAGS.PACKED,
        MASKED=FLAGS.LEFT or FLAGS.RIGHT or FLAGS.PREFIX or FLAGS.CHUNK, SOFTCAP=FLAGS.SOFTCAP, FP16=FP16,
    )  # fmt: skip
    mask = MaskBounds(left, right, prefix, chunk, FLAGS.LEFT, FLAGS.RIGHT, FLAGS.PREFIX, FLAGS.CHUNK)
    words: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    keys = ring(gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK, D], k_desc.layout), 1, 1)
    values = ring(gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK, D], v_desc.layout), 1, 1)
    queries = ring(gl.allocate_shared_memory(dtype, [TILE.STAGES, 1, 1, BLOCK, D], q_desc.layout), TILE.STAGES, 2)
    grads = ring(gl.allocate_shared_memory(dtype, [TILE.STAGES, 1, 1, BLOCK, D], do_desc.layout), TILE.STAGES, 2)
    weights = ring(gl.allocate_shared_memory(gl.int32, [2, 2048], words), 2, 1)
    lses = gl.allocate_shared_memory(gl.float32, [TILE.STAGES, BLOCK], lse_desc.layout)
    deltas = gl.allocate_shared_memory(gl.float32, [TILE.STAGES, BLOCK], delta_desc.layout)
    work_tiles = ring(gl.allocate_shared_memory(gl.int32, [2 * WORK_TILE_WORDS, 1], words), 2, 2)
    fence_async_shared()
    scoring = make_scoring(mask, scale, softcap, FLAGS.SOFTCAP)
    gl.warp_specialize(
        [
            (_values, (work_tiles, keys, queries, grads, weights, lses, dv_desc, dv_ptr, nan_flag_ptr, scoring, config)),
            (_keys, (work_tiles, values, queries, grads, weights, lses, deltas, dk_desc, dk_ptr, nan_flag_ptr, scoring, config)),
            (load_key_tiles, (
                work_tiles, keys, values, queries, grads, lses, deltas, mask,
                q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc,
                B, T, S, padded_T, tiles, balanced_heads, cu_q_ptr, cu_k_ptr, counter_ptr, config,
            )),
        ],
        [4, 1], [TILE.COMPUTE_REGISTERS, TILE.COPY_REGISTERS],
    )
