"""HSTU attention's forward on Hopper: one pass over keys, without a statistic of rows.

    load     one warp: draws the next tile of rows, has it copied in, then the keys and values that it meets, block by block
    compute  two warpgroups of 64 rows each: W = S gate(alpha S),  Y += W V, 0 where the pair is hidden

The scores of the next block are issued before this block's product with the values, and the warpgroups take turns to issue, as in
the softmax kernel (`rooftile/exact/backends/hopper/flash_fwd`). Nothing is rescaled: alpha and the division by a user's rows are
one factor at the end of a tile.

A weight of zero does not hide a NaN in the values of a hidden key, or of the next user. A tile whose sums hold one says so in
memory, and Triton's kernel computes everything again.
"""

from rooftile.exact.backends.hopper.device.config import WG_ROWS, KernelConfig
from rooftile.exact.backends.hopper.device.mma import mma_qk
from rooftile.exact.backends.hopper.device.nan_fallback import holds_nan
from rooftile.exact.backends.hopper.device.scheduler import (
    WORK_TILE_WORDS,
    MaskBounds,
    consume,
    publish,
    publish_end,
    reset_counter,
)
from rooftile.exact.backends.hopper.device.softmax import apply_mask, pack_16bit, unpack_16bit
from rooftile.exact.backends.hopper.flash_fwd.store import store
from rooftile.recommend.hstu.hopper.users import UserTensors, exponent_factor, factor_of, gates_of, tile_of_rows
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
NUM_CONSUMERS = gl.constexpr(2)


@gluon.jit
def _load(
    work_tiles: Ring, queries: Ring, keys: Ring, values: Ring, mask: MaskBounds, users: UserTensors, q_desc, k_desc, v_desc, B, H,
    tiles, balanced_heads, counter_ptr, config: KernelConfig,
):  # fmt: skip
    """The role that draws tiles and has them copied in; the counter is left at zero by whoever finishes last."""
    total = tiles * H
    programs = gl.num_programs(0)
    n = gl.program_id(0)
    tile = 0
    fill = 0
    while n < total:
        work = tile_of_rows(n, B, H, tiles, balanced_heads, users, mask, config.KEYS)
        if work.is_valid != 0:
            publish(work_tiles, tile, work)
            queries.wait_empty(tile)
            mbarrier.expect(queries.full_barrier(tile), q_desc.block_type.nbytes * NUM_CONSUMERS)
            for i in gl.static_range(NUM_CONSUMERS):
                tma_load(
                    q_desc, [0, work.h, work.q_start + work.t + i * WG_ROWS, 0], queries.full_barrier(tile),
                    queries.buffers.index(tile % queries.stages * NUM_CONSUMERS + i),
                )  # fmt: skip
            tile += 1
            for i in range(work.last_block - work.first_block):
                _load_block(keys, values, k_desc, v_desc, fill, work, work.last_block - i, config)
                fill += 1
            # late, so that no program holds a tile that an idle one could start
            n = gl.atomic_add(counter_ptr, 1, sem="relaxed") + programs
            _load_block(keys, values, k_desc, v_desc, fill, work, work.first_block, config)
            fill += 1
        else:
            n = gl.atomic_add(counter_ptr, 1, sem="relaxed") + programs
    publish_end(work_tiles, tile)
    reset_counter(counter_ptr)


@gluon.jit
def _load_block(keys: Ring, values: Ring, k_desc, v_desc, fill, work, block, config: KernelConfig):
    row = work.k_start + block * config.KEYS
    keys.wait_empty(fill)
    mbarrier.expect(keys.full_barrier(fill), k_desc.block_type.nbytes)
    tma_load(k_desc, [0, work.h, row, 0], keys.full_barrier(fill), keys.buffer(fill))
    values.wait_empty(fill)
    mbarrier.expect(values.full_barrier(fill), v_desc.block_type.nbytes)
    tma_load(v_desc, [0, work.h, row, 0], values.full_barrier(fill), values.buffer(fill))


@gluon.jit
def _issue(
    q, keys: Ring, values: Ring, p, acc, fill, has_next, MINE: gl.constexpr, OTHER: gl.constexpr, config: KernelConfig
):  # fmt: skip
    """Issues the scores of block `fill` and the product of the block before it with its values; waits for neither."""
    keys.wait_full(fill, has_next)
    if config.PING_PONG:
        named_barrier("sync", MINE)
    s = mma_qk(q, config.key_block(keys, fill), config.DIM, config.s_layout)
    values.wait_full(fill - 1)
    weights = unpack_16bit(p, values.buffers.dtype, config.p_layout)
    acc = warpgroup_mma(weights, config.value_block(values, fill - 1), acc, is_async=True)
    if config.PING_PONG:
        named_barrier("arrive", OTHER)
    return s, acc


@gluon.jit
def _weights(s, to_exponent, row, column, work, mask: MaskBounds, config: KernelConfig, CHECK: gl.constexpr):
    """The block's weights over alpha."""
    gates = gates_of(s, to_exponent)
    if CHECK:
        # rows and keys begin at one place, however many keys are seen
        gates = apply_mask(gates, row - (work.S - work.T), column, work, mask, WG_ROWS, 0.0)
    return s * gates


@gluon.jit
def _step(
    q, keys: Ring, values: Ring, p, acc, fill, to_exponent, row, column, work, mask: MaskBounds, MINE: gl.constexpr,
    OTHER: gl.constexpr, config: KernelConfig, CHECK: gl.constexpr,
):  # fmt: skip
    """One block: its weights, and the block before it into the sums."""
    s, acc = _issue(q, keys, values, p, acc, fill, True, MINE, OTHER, config)
    s = warpgroup_mma_wait(1, deps=(s,))
    keys.release(fill)
    weights = _weights(s, to_exponent, row, column, work, mask, config, CHECK)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    values.release(fill - 1)
    # no sooner: the product in flight reads the weights before them from the same registers
    return pack_16bit(weights, gl.bfloat16), acc


@gluon.jit
def _own_rows(queries: Ring, tile, WG: gl.constexpr, config: KernelConfig):
    return queries.buffers.index(tile % queries.stages * NUM_CONSUMERS + WG).reshape([WG_ROWS, config.D])


@gluon.jit
def _compute(
    WG: gl.constexpr, work_tiles: Ring, queries: Ring, keys: Ring, values: Ring, outputs, y_desc, y_ptr, nan_flag_ptr, H, alpha,
    scale, by_rows, mask: MaskBounds, config: KernelConfig,
):  # fmt: skip
    """A warpgroup's role: 64 rows of every tile. A tile's last product is issued together with the first scores of the next."""
    MINE: gl.constexpr = PING_PONG_BARRIER + WG
    OTHER: gl.constexpr = PING_PONG_BARRIER + 1 - WG
    output = outputs.index(WG)
    to_exponent = exponent_factor(alpha)
    if config.PING_PONG and WG == 1:
        named_barrier("arrive", PING_PONG_BARRIER)
    tile = 0
    fill = 0
    work = consume(work_tiles, 0)
    # the first block of the first tile has nothing to overlap with
    queries.wait_full(0, work.is_valid != 0)
    keys.wait_full(0, work.is_valid != 0)
    if config.PING_PONG:
        named_barrier("sync", MINE)
    s = mma_qk(_own_rows(queries, 0, WG, config), config.key_block(keys, 0), config.DIM, config.s_layout)
    if config.PING_PONG:
        named_barrier("arrive", OTHER)
    s = warpgroup_mma_wait(0, deps=(s,))
    keys.release(0)
    weights = _weights(s, to_exponent, work.t + WG * WG_ROWS, work.last_block * config.KEYS, work, mask, config, True)
    p = pack_16bit(weights, gl.bfloat16)
    while work.is_valid != 0:
        acc = gl.zeros([WG_ROWS, config.DV], gl.float32, config.o_layout)
        row = work.t + WG * WG_ROWS
        # blocks from last down to first: some at the right end that the mask cuts, clear ones, some at the left end
        blocks = work.last_block - work.first_block + 1
        clear_stop = (mask.last_key(row, work.S) + 1) // config.KEYS
        right = gl.minimum(gl.maximum(work.last_block + 1 - clear_stop, 1), blocks)
        left = blocks
        q = _own_rows(queries, tile, WG, config)
        for i in range(1, right):
            fill += 1
            column = (work.last_block - i) * config.KEYS
            p, acc = _step(
                q, keys, values, p, acc, fill, to_exponent, row, column, work, mask, MINE, OTHER, config, True
            )  # fmt: skip
        if mask.LEFT or mask.CHUNK:
            clear_first = gl.maximum(mask.first_key(row + (WG_ROWS - 1)) + (config.KEYS - 1), 0) // config.KEYS
            left = gl.maximum(gl.minimum(work.last_block + 1 - clear_first, blocks), right)
        q = _own_rows(queries, hide_from_ptxas(tile), WG, config)
        for _ in range(right, left):
            fill += 1
            p, acc = _step(q, keys, values, p, acc, fill, to_exponent, row, 0, work, mask, MINE, OTHER, config, False)
        if mask.LEFT or mask.CHUNK:
            q = _own_rows(queries, hide_from_ptxas(tile), WG, config)
            for i in range(left, blocks):
                fill += 1
                column = (work.last_block - i) * config.KEYS
                p, acc = _step(
                    q, keys, values, p, acc, fill, to_exponent, row, column, work, mask, MINE, OTHER, config, True
                )  # fmt: skip
        queries.release(tile)

        tile += 1
        fill += 1
        next_work = consume(work_tiles, tile)
        has_next = next_work.is_valid != 0
        queries.wait_full(tile, has_next)
        s, acc = _issue(_own_rows(queries, tile, WG, config), keys, values, p, acc, fill, has_next, MINE, OTHER, config)
        s = warpgroup_mma_wait(1, deps=(s,))
        keys.release(fill)
        weights = _weights(
            s, to_exponent, next_work.t + WG * WG_ROWS, next_work.last_block * config.KEYS, next_work, mask, config, True
        )  # fmt: skip
        wait_for_store()
        acc = warpgroup_mma_wait(0, deps=(acc,))
        values.release(fill - 1)
        p = pack_16bit(weights, gl.bfloat16)
        y = acc * (alpha * factor_of(work, scale, by_rows))
        if holds_nan(y):
            gl.store(nan_flag_ptr, 1)
        store(output, y.to(y_ptr.dtype.element_ty), y_desc, y_ptr, work, row, H, config)
        work = next_work
    tma_store_wait(0)
    if config.PING_PONG and WG == 0:
        named_barrier("sync", PING_PONG_BARRIER)


# fmt: off
@gluon.jit(
    do_not_specialize=["B", "tiles", "balanced_heads", "by_rows", "left", "right", "prefix", "chunk"],
    do_not_specialize_on_alignment=["cu_ptr", "targets_ptr"],
)
def hstu_forward(
    q_desc, k_desc, v_desc, y_desc, y_ptr, cu_ptr, targets_ptr, nan_flag_ptr, counter_ptr,
    B, tiles, balanced_heads, alpha, scale, by_rows, left, right, prefix, chunk,
    D: gl.constexpr, FLAGS: gl.constexpr, TARGETS: gl.constexpr, TILE: gl.constexpr,
):
    # fmt: on
    dtype: gl.constexpr = q_desc.dtype
    config = KernelConfig(
        GROUP=1, D=D, DV=D, DIM=FLAGS.DIM, DIM_V=FLAGS.DIM_V, KEYS=TILE.KEYS, NUM_CONSUMERS=2, PING_PONG=TILE.PING_PONG,
        PACKED=True, PAGE_SIZE=0, MASKED=True, SOFTCAP=False, SINKS=False, K_TMA_LINES=1, V_TMA_LINES=1,
    )
    mask = MaskBounds(left, right, prefix, chunk, FLAGS.LEFT, FLAGS.RIGHT, FLAGS.PREFIX, FLAGS.CHUNK)
    users = UserTensors(cu_ptr, targets_ptr, TARGETS)
    queries = ring(
        gl.allocate_shared_memory(dtype, [TILE.Q_STAGES * NUM_CONSUMERS, 1, 1, WG_ROWS, D], q_desc.layout), TILE.Q_STAGES,
        NUM_CONSUMERS,
    )
    keys = ring(
        gl.allocate_shared_memory(dtype, [TILE.KV_STAGES, 1, 1, TILE.KEYS, D], k_desc.layout), TILE.KV_STAGES, NUM_CONSUMERS
    )
    values = ring(
        gl.allocate_shared_memory(dtype, [TILE.KV_STAGES, 1, 1, TILE.KEYS, D], v_desc.layout), TILE.KV_STAGES, NUM_CONSUMERS
    )
    outputs = gl.allocate_shared_memory(dtype, [NUM_CONSUMERS, 1, 1, WG_ROWS, D], y_desc.layout)
    words: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    work_tiles = ring(gl.allocate_shared_memory(gl.int32, [2 * WORK_TILE_WORDS, 1], words), 2, NUM_CONSUMERS)
    fence_async_shared()
    H = q_desc.shape[1].to(gl.int32)
    args = (
        work_tiles, queries, keys, values, outputs, y_desc, y_ptr, nan_flag_ptr, H, alpha, scale, by_rows, mask, config
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_compute, (0,) + args),
            (_compute, (1,) + args),
            (_load, (
                work_tiles, queries, keys, values, mask, users, q_desc, k_desc, v_desc, B, H, tiles, balanced_heads, counter_ptr,
                config,
            )),
        ],
        [4, 1], [TILE.COMPUTE_REGISTERS, TILE.COPY_REGISTERS],
    )
