"""The gradients of queries on Hopper: two warpgroups own 64 rows each and walk the keys that they see.

    load     one warp: draws the next tile of rows, has it and its dY copied in, then keys and values block by block
    compute  S = Q K^T,  dP = dY V^T,  dS = dP slope(alpha S),  dQ += dS K

Alpha and the division by a user's rows are factors at the end.
"""

from rooftile.exact.backends.hopper.device.config import WG_ROWS
from rooftile.exact.backends.hopper.device.mma import num_mmas
from rooftile.exact.backends.hopper.device.scheduler import (
    WORK_TILE_WORDS,
    MaskBounds,
    consume,
    publish,
    publish_end,
    reset_counter,
)
from rooftile.exact.backends.hopper.device.softmax import apply_mask
from rooftile.exact.backends.hopper.flash_bwd.parts import BLOCK, BackwardConfig, flag_nan, issue_mma_qk, load_rows, store_rows
from rooftile.recommend.hstu.hopper.users import (
    UserTensors,
    exponent_factor,
    factor_of,
    gates_of,
    own_rows,
    slopes_of,
    tile_of_rows,
)
from rooftile.runtime.hopper.gluon import fence_async_shared, gl, gluon, mbarrier, tma_load, warpgroup_mma, warpgroup_mma_wait
from rooftile.runtime.hopper.pipeline import Ring, ring, wait_for_store

NUM_CONSUMERS = gl.constexpr(2)


@gluon.jit
def _load(
    work_tiles: Ring, queries: Ring, grads: Ring, keys: Ring, values: Ring, mask: MaskBounds, users: UserTensors,
    q_desc, k_desc, v_desc, dy_desc, B, H, tiles, balanced_heads, counter_ptr,
):  # fmt: skip
    """The role that draws tiles of rows and has them copied in, then the keys that they meet, from the last block down."""
    total = tiles * H
    programs = gl.num_programs(0)
    n = gl.program_id(0)
    tile = 0
    fill = 0
    while n < total:
        work = tile_of_rows(n, B, H, tiles, balanced_heads, users, mask, BLOCK)
        if work.is_valid != 0:
            publish(work_tiles, tile, work)
            row = work.k_start + work.last_block * BLOCK
            load_rows(keys, fill, k_desc, 0, work.h, row)
            _load_tile(queries, tile, q_desc, work)
            load_rows(values, fill, v_desc, 0, work.h, row)
            _load_tile(grads, tile, dy_desc, work)
            tile += 1
            fill += 1
            for i in range(1, work.last_block - work.first_block + 1):
                load_rows(keys, fill, k_desc, 0, work.h, row - i * BLOCK)
                load_rows(values, fill, v_desc, 0, work.h, row - i * BLOCK)
                fill += 1
        n = gl.atomic_add(counter_ptr, 1) + programs
    publish_end(work_tiles, tile)
    reset_counter(counter_ptr)


@gluon.jit
def _load_tile(rows: Ring, tile, desc, work):
    """64 rows for each warpgroup, which gives its own back."""
    for i in gl.static_range(NUM_CONSUMERS):
        fill = tile * NUM_CONSUMERS + i
        rows.wait_empty(fill)
        mbarrier.expect(rows.full_barrier(fill), desc.block_type.nbytes)
        tma_load(desc, [0, work.h, work.q_start + work.t + i * WG_ROWS, 0], rows.full_barrier(fill), rows.buffer(fill))


@gluon.jit
def _compute(
    WG: gl.constexpr, work_tiles: Ring, queries: Ring, grads: Ring, keys: Ring, values: Ring, dq_desc, dq_ptr, nan_flag_ptr, H,
    alpha, scale, by_rows, mask: MaskBounds, config: BackwardConfig,
):  # fmt: skip
    """A warpgroup's role: 64 rows of every tile."""
    to_exponent = exponent_factor(alpha)
    tile = 0
    fill = 0
    work = consume(work_tiles, 0)
    while work.is_valid != 0:
        own_fill = tile * NUM_CONSUMERS + WG
        row = work.t + WG * WG_ROWS
        # the first columns of the blocks that all of these rows see whole
        first_clear = mask.first_key(row + (WG_ROWS - 1))
        last_clear = mask.last_key(row, work.S) - (BLOCK - 1)
        column = work.last_block * BLOCK
        queries.wait_full(own_fill)
        grads.wait_full(own_fill)
        dq = gl.zeros([64, config.D], gl.float32, config.acc_layout)
        for _ in range(work.last_block - work.first_block + 1):
            s = issue_mma_qk(own_rows(queries, WG, config), keys, fill, config.DIM, config)
            dp = issue_mma_qk(own_rows(grads, WG, config), values, fill, config.DIM_V, config)
            s = warpgroup_mma_wait(num_mmas(config.DIM_V), deps=(s,))
            gates = gates_of(s, to_exponent)
            if (column < first_clear) | (column > last_clear):
                gates = apply_mask(gates, row - (work.S - work.T), column, work, mask, WG_ROWS, 0.0)
            slopes = slopes_of(s * gates, gates, alpha)
            dp = warpgroup_mma_wait(0, deps=(dp,))
            values.release(fill)
            ds = gl.convert_layout((dp * slopes).to(gl.bfloat16), config.a_layout)
            dq = warpgroup_mma(ds, keys.buffer(fill).reshape([64, config.D]), dq, is_async=True)
            dq = warpgroup_mma_wait(0, deps=(dq,))
            keys.release(fill)
            column -= BLOCK
            fill += 1
        grads.release(own_fill)
        dq = dq * (alpha * factor_of(work, scale, by_rows))
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
    do_not_specialize=["B", "tiles", "balanced_heads", "by_rows", "left", "right", "prefix", "chunk"],
    do_not_specialize_on_alignment=["cu_ptr", "targets_ptr"],
)
def hstu_gradients_of_rows(
    q_desc, k_desc, v_desc, dy_desc, dq_desc, dq_ptr, cu_ptr, targets_ptr, nan_flag_ptr, counter_ptr,
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
    queries = ring(gl.allocate_shared_memory(dtype, [NUM_CONSUMERS, 1, 1, WG_ROWS, D], q_desc.layout), NUM_CONSUMERS, 1)
    grads = ring(gl.allocate_shared_memory(dtype, [NUM_CONSUMERS, 1, 1, WG_ROWS, D], dy_desc.layout), NUM_CONSUMERS, 1)
    keys = ring(gl.allocate_shared_memory(dtype, [TILE.STAGES, 1, 1, BLOCK, D], k_desc.layout), TILE.STAGES, NUM_CONSUMERS)
    values = ring(gl.allocate_shared_memory(dtype, [TILE.STAGES, 1, 1, BLOCK, D], v_desc.layout), TILE.STAGES, NUM_CONSUMERS)
    words: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    work_tiles = ring(gl.allocate_shared_memory(gl.int32, [2 * WORK_TILE_WORDS, 1], words), 2, NUM_CONSUMERS)
    fence_async_shared()
    H = q_desc.shape[1].to(gl.int32)
    args = (work_tiles, queries, grads, keys, values, dq_desc, dq_ptr, nan_flag_ptr, H, alpha, scale, by_rows, mask, config)
    gl.warp_specialize(
        [
            (_compute, (0,) + args),
            (_compute, (1,) + args),
            (_load, (
                work_tiles, queries, grads, keys, values, mask, users, q_desc, k_desc, v_desc, dy_desc, B, H, tiles,
                balanced_heads, counter_ptr,
            )),
        ],
        [4, 1], [TILE.COMPUTE_REGISTERS, TILE.COPY_REGISTERS],
    )
