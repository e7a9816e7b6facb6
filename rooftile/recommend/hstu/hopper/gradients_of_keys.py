"""The gradients of keys and values on Hopper: two warpgroups own 64 keys each and walk the rows that see them.

    load     one warp: draws the next tile of keys, has its keys and values copied in, then rows and their dY block by block
    compute  scores transposed, keys by rows:  S^T = K Q^T,     W^T = S^T gate(alpha S^T),   dV += W^T dY
                                               dP^T = V dY^T,   dS = dP slope(alpha S),      dK += dS^T Q

Every sum has one owner and one order, so two runs agree bit for bit. Alpha and the division by a user's rows are factors at the
end.
"""

from rooftile.exact.backends.hopper.device.config import WG_ROWS
from rooftile.exact.backends.hopper.device.mma import mma_qk
from rooftile.exact.backends.hopper.device.scheduler import (
    WORK_TILE_WORDS,
    MaskBounds,
    consume,
    publish,
    publish_end,
    reset_counter,
)
from rooftile.exact.backends.hopper.flash_bwd.parts import (
    BLOCK,
    BackwardConfig,
    apply_mask_transposed,
    flag_nan,
    load_rows,
    store_rows,
)
from rooftile.recommend.hstu.hopper.users import (
    UserTensors,
    exponent_factor,
    factor_of,
    gates_of,
    own_rows,
    slopes_of,
    tile_of_keys,
)
from rooftile.runtime.hopper.gluon import fence_async_shared, gl, gluon, mbarrier, tma_load, warpgroup_mma, warpgroup_mma_wait
from rooftile.runtime.hopper.pipeline import Ring, ring, wait_for_store

NUM_CONSUMERS = gl.constexpr(2)


@gluon.jit
def _load(
    work_tiles: Ring, keys: Ring, values: Ring, queries: Ring, grads: Ring, mask: MaskBounds, users: UserTensors,
    q_desc, k_desc, v_desc, dy_desc, B, H, tiles, balanced_heads, counter_ptr,
):  # fmt: skip
    """The role that draws tiles of keys and has them copied in, then the rows that they meet."""
    total = tiles * H
    programs = gl.num_programs(0)
    n = gl.program_id(0)
    tile = 0
    fill = 0
    while n < total:
        work = tile_of_keys(n, B, H, tiles, balanced_heads, users, mask, BLOCK)
        if work.is_valid != 0:
            publish(work_tiles, tile, work)
            _load_tile(keys, tile, k_desc, work)
            row = work.q_start + work.first_block * BLOCK
            load_rows(queries, fill, q_desc, 0, work.h, row)
            _load_tile(values, tile, v_desc, work)
            load_rows(grads, fill, dy_desc, 0, work.h, row)
            tile += 1
            fill += 1
            for i in range(1, work.last_block - work.first_block + 1):
                load_rows(queries, fill, q_desc, 0, work.h, row + i * BLOCK)
                load_rows(grads, fill, dy_desc, 0, work.h, row + i * BLOCK)
                fill += 1
        n = gl.atomic_add(counter_ptr, 1) + programs
    publish_end(work_tiles, tile)
    reset_counter(counter_ptr)


@gluon.jit
def _load_tile(rows: Ring, tile, desc, work):
    rows.wait_empty(tile)
    mbarrier.expect(rows.full_barrier(tile), NUM_CONSUMERS * desc.block_type.nbytes)
    for i in gl.static_range(NUM_CONSUMERS):
        tma_load(desc, [0, work.h, work.k_start + work.t + i * WG_ROWS, 0], rows.full_barrier(tile), rows.buffers.index(i))


@gluon.jit
def _hide(gates, s_0, t, work, mask: MaskBounds, config: BackwardConfig):
    """Gates of 64 keys from s_0 on by a block of rows from t on, 0 where a pair is hidden or a row is the next user's."""
    gates = apply_mask_transposed(gates, s_0, t - (work.S - work.T), work, mask, 0.0)
    columns = t + gl.arange(0, BLOCK, gl.SliceLayout(0, config.s_layout))
    return gl.where(gl.expand_dims(columns < work.T, 0), gates, 0.0)


@gluon.jit
def _compute(
    WG: gl.constexpr, work_tiles: Ring, keys: Ring, values: Ring, queries: Ring, grads: Ring, dk_desc, dv_desc, dk_ptr, dv_ptr,
    nan_flag_ptr, H, alpha, scale, by_rows, mask: MaskBounds, config: BackwardConfig,
):  # fmt: skip
    """A warpgroup's role: 64 keys of every tile."""
    room = values.buffers.index(WG)
    to_exponent = exponent_factor(alpha)
    tile = 0
    fill = 0
    work = consume(work_tiles, 0)
    while work.is_valid != 0:
        s_0 = work.t + WG * WG_ROWS
        # rows between which every row sees each of these keys
        low = mask.first_position(s_0 + (WG_ROWS - 1))
        high = gl.minimum(gl.where(s_0 + WG_ROWS > work.S, -1, mask.last_position(s_0)), work.T - 1)
        dk = gl.zeros([WG_ROWS, config.D], gl.float32, config.acc_layout)
        dv = gl.zeros([WG_ROWS, config.D], gl.float32, config.acc_layout)
        keys.wait_full(tile)
        values.wait_full(tile)
        t = work.first_block * BLOCK
        for _ in range(work.last_block - work.first_block + 1):
            q = queries.buffer(fill).reshape([BLOCK, config.D])
            dy = grads.buffer(fill).reshape([BLOCK, config.D])
            queries.wait_full(fill)
            s = mma_qk(own_rows(keys, WG, config), q, config.DIM, config.s_layout)
            s = warpgroup_mma_wait(0, deps=(s,))
            grads.wait_full(fill)
            dp = mma_qk(own_rows(values, WG, config), dy, config.DIM_V, config.s_layout)
            gates = gates_of(s, to_exponent)
            if (t < low) | (t + (BLOCK - 1) > high):
                gates = _hide(gates, s_0, t, work, mask, config)
            weights = s * gates
            dv = warpgroup_mma(gl.convert_layout(weights.to(gl.bfloat16), config.a_layout), dy, dv, is_async=True)
            slopes = slopes_of(weights, gates, alpha)
            dp = warpgroup_mma_wait(1, deps=(dp,))
            ds = (dp * slopes).to(gl.bfloat16)
            dk = warpgroup_mma(gl.convert_layout(ds, config.a_layout), q, dk, is_async=True)
            dv = warpgroup_mma_wait(1, deps=(dv,))
            grads.release(fill)
            dk = warpgroup_mma_wait(0, deps=(dk,))
            queries.release(fill)
            fill += 1
            t += BLOCK
        keys.release(tile)
        factor = alpha * factor_of(work, scale, by_rows)
        dk = dk * factor
        dv = dv * factor
        flag_nan(nan_flag_ptr, dk, config, True)
        flag_nan(nan_flag_ptr, dv, config, True)
        # no other warpgroup reads these values
        store_rows(
            room, dv.to(dv_ptr.dtype.element_ty), dv_desc, dv_ptr, work, H, s_0, work.k_start, work.T, config.DIM_V, config
        )
        wait_for_store()
        store_rows(room, dk.to(dk_ptr.dtype.element_ty), dk_desc, dk_ptr, work, H, s_0, work.k_start, work.T, config.DIM, config)
        wait_for_store()
        values.release(tile)
        tile += 1
        work = consume(work_tiles, tile)


# fmt: off
@gluon.jit(
    do_not_specialize=["B", "tiles", "balanced_heads", "by_rows", "left", "right", "prefix", "chunk"],
    do_not_specialize_on_alignment=["cu_ptr", "targets_ptr"],
)
def hstu_gradients_of_keys(
    q_desc, k_desc, v_desc, dy_desc, dk_desc, dv_desc, dk_ptr, dv_ptr, cu_ptr, targets_ptr, nan_flag_ptr, counter_ptr,
    B, tiles, balanced_heads, alpha, scale, by_rows, left, right, prefix, chunk,
    D: gl.constexpr, FLAGS: gl.constexpr, TARGETS: gl.constexpr, TILE: gl.constexpr,
):
    # fmt: on
    dtype: gl.constexpr = q_desc.dtype
    config = BackwardConfig(
        GROUP=1, GROUP_SPLITS=1, BLOCKS_PER_TILE=NUM_CONSUMERS, D=D, DIM=FLAGS.DIM, DIM_V=FLAGS.DIM_V, PACKED=True, MASKED=True,
        SOFTCAP=False, FP16=False,
    )  # fmt: skip
    mask = MaskBounds(left, right, prefix, chunk, FLAGS.LEFT, FLAGS.RIGHT, FLAGS.PREFIX, FLAGS.CHUNK)
    users = UserTensors(cu_ptr, targets_ptr, TARGETS)
    keys = ring(gl.allocate_shared_memory(dtype, [NUM_CONSUMERS, 1, 1, WG_ROWS, D], k_desc.layout), 1, NUM_CONSUMERS)
    values = ring(gl.allocate_shared_memory(dtype, [NUM_CONSUMERS, 1, 1, WG_ROWS, D], v_desc.layout), 1, NUM_CONSUMERS)
    queries = ring(gl.allocate_shared_memory(dtype, [TILE.STAGES, 1, 1, BLOCK, D], q_desc.layout), TILE.STAGES, NUM_CONSUMERS)
    grads = ring(gl.allocate_shared_memory(dtype, [TILE.STAGES, 1, 1, BLOCK, D], dy_desc.layout), TILE.STAGES, NUM_CONSUMERS)
    words: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    work_tiles = ring(gl.allocate_shared_memory(gl.int32, [2 * WORK_TILE_WORDS, 1], words), 2, NUM_CONSUMERS)
    fence_async_shared()
    H = q_desc.shape[1].to(gl.int32)
    args = (
        work_tiles, keys, values, queries, grads, dk_desc, dv_desc, dk_ptr, dv_ptr, nan_flag_ptr, H, alpha, scale, by_rows, mask,
        config,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_compute, (0,) + args),
            (_compute, (1,) + args),
            (_load, (
                work_tiles, keys, values, queries, grads, mask, users, q_desc, k_desc, v_desc, dy_desc, B, H, tiles,
                balanced_heads, counter_ptr,
            )),
        ],
        [4, 1], [TILE.COMPUTE_REGISTERS, TILE.COPY_REGISTERS],
    )
