"""The forward on quantised tensors: scores in FP8 or INT8, weights and values in FP8, o and lse.

The roles are as in `flash_fwd`: a warp that draws tiles and has them copied in, two warpgroups of 64 queries each. What is
different in 8 bits:

    scales    a tile is 128 queries and a block 128 keys, so each meets one scale: s_q s_k rides in the exponent's factor, and s_v
              comes where a block's product with the values is added to the sum
    values    matrix instructions of 8 bits read both sides along the summed axis, so values come transposed, (Dv, S); and within
              each 16 keys in the order in which a thread holds weights (`quantisation`), so that these are never exchanged
    sums      the tensor cores add 8-bit products in fewer bits than fp32 has. Each block's product begins at zero, and is added
              to the output in fp32
    weights   refer to a score that may lag behind the row's largest, so that they need not wait for it (`quantised.softmax`)
    turns     the warpgroups take turns at the exponentials: one's run under the other's products

Shah et al., FlashAttention-3, arXiv:2407.08608, section 3.3; Zhang et al., SageAttention2, arXiv:2411.10958.
"""

from rooftile.exact.backends.hopper.device.config import LN2, LOG2E, WG_ROWS
from rooftile.exact.backends.hopper.device.nan_fallback import holds_nan, spill_tensor, spill_word
from rooftile.exact.backends.hopper.device.scheduler import WORK_TILE_WORDS, MaskBounds, consume
from rooftile.exact.backends.hopper.device.softmax import apply_mask
from rooftile.exact.backends.hopper.quantised.load import (
    NUM_CONSUMERS,
    BlockScales,
    QuantisedConfig,
    load_scale,
    load_tiles,
    load_word,
)
from rooftile.exact.backends.hopper.quantised.nan_fallback import recompute_quantised_without_hidden_nan
from rooftile.exact.backends.hopper.quantised.softmax import (
    PING_PONG_BARRIER,
    RAISED,
    compute_here,
    compute_weights,
    initial_references,
    per_thread,
    rescale,
)
from rooftile.runtime.hopper import ptx
from rooftile.runtime.hopper.gluon import (
    aggregate,
    barrier,
    fence_async_shared,
    gl,
    gluon,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from rooftile.runtime.hopper.pipeline import Ring, hide_from_ptxas, named_barrier, ring


@gluon.jit
def _issue_scores(q, keys: Ring, fill, into, config: QuantisedConfig):
    """Issues the product of queries and a block's keys, into the registers of `into`."""
    k = keys.buffer(fill).reshape([config.KEYS, config.D])
    into = into.to(gl.int32 if config.INTEGER else gl.float32, bitcast=True)
    return warpgroup_mma(q, k.permute((1, 0)), into, use_acc=False, is_async=True)


@gluon.jit
def _issue_values(p, values: Ring, fill, part, FROM: gl.constexpr, config: QuantisedConfig):
    """Issues the product of a block's weights with its values, or some of their columns, into the registers of `part`."""
    v = values.buffer(fill).reshape([config.DV, config.KEYS]).slice(FROM, config.PART, 0)
    return warpgroup_mma(_as_left_operand(p, config), v.permute((1, 0)), part, use_acc=False, is_async=True)


@gluon.jit
def _halves(acc, COLUMNS: gl.constexpr):
    low, high = acc.reshape([WG_ROWS, 2, COLUMNS]).permute((0, 2, 1)).split()
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    return gl.convert_layout(low, layout, assert_trivial=True), gl.convert_layout(high, layout, assert_trivial=True)


@gluon.jit
def _joined(low, high, COLUMNS: gl.constexpr):
    joined = gl.join(low, high).permute((0, 2, 1)).reshape([WG_ROWS, COLUMNS])
    return gl.convert_layout(joined, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32]), assert_trivial=True)


@gluon.jit
def _added(acc, part, v_scale):
    """A part of the output with its product, the first of two in flight; and that product's registers."""
    part = warpgroup_mma_wait(1, deps=(part,))
    return compute_here(acc + part * v_scale), part


@gluon.jit
def _with_values(acc, alpha, p, v_scale, q, keys: Ring, values: Ring, fill, has_next, config: QuantisedConfig):
    """A wide output with a block's product, by quarters, and the next block's scores.

    The five products take turns in the registers of two: while one runs, the one before it is added.
    """
    none = gl.zeros([WG_ROWS, config.PART], gl.float32, config.o_layout)
    x = _issue_values(p, values, fill, none, 0, config)
    y = _issue_values(p, values, fill, none, 64, config)
    low, high = _halves(rescale(acc, alpha, config.acc_layout), 128)
    a, b = _halves(low, 64)
    c, d = _halves(high, 64)
    keys.wait_full(fill + 1, has_next)
    a, x = _added(a, x, v_scale)
    x = _issue_values(p, values, fill, x, 128, config)
    b, y = _added(b, y, v_scale)
    y = _issue_values(p, values, fill, y, 192, config)
    c, x = _added(c, x, v_scale)
    s = _issue_scores(q, keys, fill + 1, x, config)
    d, y = _added(d, y, v_scale)
    s = warpgroup_mma_wait(0, deps=(s,))
    return _joined(_joined(a, b, 128), _joined(c, d, 128), 256), s


@gluon.jit
def _to_scores(s, row, column, work, mask: MaskBounds, CHECK: gl.constexpr, config: QuantisedConfig):
    """The products of queries and keys as numbers, -inf where the mask or the end of the keys hides one."""
    if config.INTEGER:
        s = s.to(gl.float32)
    if CHECK:
        if config.MASKED:
            s = apply_mask(s, row, column, work, mask)
        elif column + config.KEYS > work.S:
            s = apply_mask(s, row, column, work, mask)
    return s


@gluon.jit
def _as_left_operand(p, config: QuantisedConfig):
    """The words of `weights_of` as the left side of a product: no instruction, only another name for the registers."""
    twice = gl.join(p, p)
    # the four copies of a word must be a thread's neighbours before one is taken of them
    four = gl.convert_layout(gl.join(twice, twice).reshape([WG_ROWS, config.KEYS]), config.p_layout, assert_trivial=True)
    return gl.inline_asm_elementwise(ptx.COPY, "=r,r,r,r,r", [four], dtype=gl.float8e4nv, is_pure=True, pack=4)


@aggregate
class PendingBlock:
    """A block's scores: products of queries and keys, what they are multiplied by, and the block before it on its way out."""

    s: gl.tensor
    factor: gl.tensor
    part: gl.tensor  # the product of the block before with its values
    v_scale: gl.tensor


@gluon.jit
def _step(
    block: PendingBlock, q, keys: Ring, values: Ring, scales: BlockScales, acc, m, l, fill, has_next, row, column, work,
    mask: MaskBounds, q_factor,
    WG: gl.constexpr, config: QuantisedConfig, CHECK: gl.constexpr,
):  # fmt: skip
    """Computes block `fill`: its weights while the block before is added to the output, its product, the next block's scores."""
    if not config.WIDE:
        # in terms of the references that this block's weights begin with
        acc += block.part * block.v_scale
    p, sums, m_new = compute_weights(block.s, m, block.factor, WG)
    alpha = gl.exp2(m - gl.where(m_new == float("-inf"), 0.0, m_new))
    part = block.part
    values.wait_full(fill)
    if config.WIDE:
        v_scale = load_word(scales.v, fill % values.stages)
        l = l * alpha + sums
        acc, s = _with_values(acc, alpha, p, v_scale, q, keys, values, fill, has_next, config)
        factor = q_factor * load_scale(scales.k, (fill + 1) % keys.stages, config)
        keys.release(fill + 1)
        values.release(fill)
    else:
        part = gl.zeros([WG_ROWS, config.DV], gl.float32, config.o_layout)
        part = _issue_values(p, values, fill, part, 0, config)
        keys.wait_full(fill + 1, has_next)
        none = gl.zeros([WG_ROWS, config.KEYS], gl.float32, config.s_layout)
        s = _issue_scores(q, keys, fill + 1, none, config)
        acc = rescale(acc, alpha, config.acc_layout)
        l = l * alpha + sums
        factor = q_factor * load_scale(scales.k, (fill + 1) % keys.stages, config)
        v_scale = load_word(scales.v, fill % values.stages)
        s, part = warpgroup_mma_wait(0, deps=(s, part))
        keys.release(fill + 1)
        values.release(fill)
    s = _to_scores(s, row, column, work, mask, CHECK, config)
    return PendingBlock(s, factor, part, v_scale), acc, m_new, l


@gluon.jit
def _compute(
    WG: gl.constexpr, work_tiles: Ring, queries: Ring, keys: Ring, values: Ring, scales: BlockScales, outputs, spilled, o_desc,
    o_ptr, lse_ptr, shift_ptr, H, total, scale, mask: MaskBounds, config: QuantisedConfig,
):  # fmt: skip
    """A warpgroup's role: 64 queries of every tile."""
    dtype: gl.constexpr = o_desc.dtype
    row_layout: gl.constexpr = gl.SliceLayout(1, config.s_layout)
    output = outputs.index(WG)
    if WG == NUM_CONSUMERS - 1:
        named_barrier("arrive", PING_PONG_BARRIER)
    tile = 0
    fill = 0
    work = consume(work_tiles, 0)
    queries.wait_full(0, work.is_valid != 0)
    keys.wait_full(0, work.is_valid != 0)
    none = gl.zeros([WG_ROWS, config.KEYS], gl.float32, config.s_layout)
    s = _issue_scores(queries.buffers.index(WG).reshape([WG_ROWS, config.D]), keys, 0, none, config)
    q_factor = scale * LOG2E * load_scale(scales.q, 0, config)
    factor = q_factor * load_scale(scales.k, 0, config)
    s = warpgroup_mma_wait(0, deps=(s,))
    keys.release(0)
    s = _to_scores(s, work.t + WG * WG_ROWS, work.last_block * config.KEYS, work, mask, True, config)
    nothing = scale * 0.0
    if not config.WIDE:
        nothing = gl.zeros([WG_ROWS, config.DV], gl.float32, config.o_layout)
    block = PendingBlock(s, factor, nothing, scale * 0.0)
    m = initial_references(s, factor)

    while work.is_valid != 0:
        acc = gl.zeros([WG_ROWS, config.DV], gl.float32, config.acc_layout)
        l = per_thread(0.0, config.KEYS, config.s_layout)
        row = work.t + WG * WG_ROWS
        i_0 = row + work.S - work.T
        blocks = work.last_block - work.first_block + 1
        right = 1
        left = blocks
        if config.MASKED:
            clear_stop = (mask.last_key(i_0, work.S) + 1) // config.KEYS
            right = gl.minimum(gl.maximum(work.last_block + 1 - clear_stop, 1), blocks)
            q = queries.buffers.index(tile % queries.stages * NUM_CONSUMERS + WG).reshape([WG_ROWS, config.D])
            for i in range(1, right):
                block, acc, m, l = _step(
                    block, q, keys, values, scales, acc, m, l, fill, True, row, (work.last_block - i) * config.KEYS, work, mask,
                    q_factor, WG, config, True,
                )  # fmt: skip
                fill += 1
        if mask.LEFT or mask.CHUNK:
            clear_first = gl.maximum(mask.first_key(i_0 + (WG_ROWS - 1)) + (config.KEYS - 1), 0) // config.KEYS
            left = gl.maximum(gl.minimum(work.last_block + 1 - clear_first, blocks), right)
        q = queries.buffers.index(hide_from_ptxas(tile) % queries.stages * NUM_CONSUMERS + WG).reshape([WG_ROWS, config.D])
        for _ in range(right, left):
            block, acc, m, l = _step(
                block, q, keys, values, scales, acc, m, l, fill, True, row, 0, work, mask, q_factor, WG, config, False
            )
            fill += 1
        if mask.LEFT or mask.CHUNK:
            q = queries.buffers.index(hide_from_ptxas(tile) % queries.stages * NUM_CONSUMERS + WG).reshape([WG_ROWS, config.D])
            for i in range(left, blocks):
                block, acc, m, l = _step(
                    block, q, keys, values, scales, acc, m, l, fill, True, row, (work.last_block - i) * config.KEYS, work, mask,
                    q_factor, WG, config, True,
                )  # fmt: skip
                fill += 1
        queries.release(tile)

        # the last block of this tile, together with the first scores of the next
        tile += 1
        next_work = consume(work_tiles, tile)
        has_next = next_work.is_valid != 0
        queries.wait_full(tile, has_next)
        q = queries.buffers.index(tile % queries.stages * NUM_CONSUMERS + WG).reshape([WG_ROWS, config.D])
        q_factor = scale * LOG2E * load_scale(scales.q, tile % queries.stages, config)
        block, acc, m, l = _step(
            block, q, keys, values, scales, acc, m, l, fill, has_next, next_work.t + WG * WG_ROWS,
            next_work.last_block * config.KEYS, next_work, mask,
            q_factor, WG, config, True,
        )  # fmt: skip
        fill += 1
        if not config.WIDE:
            acc += block.part * block.v_scale
        block = PendingBlock(block.s, block.factor, nothing, scale * 0.0)
        l = gl.convert_layout(gl.sum(l, 1), row_layout)
        m_row = gl.convert_layout(gl.max(m, 1), row_layout)
        m = initial_references(block.s, block.factor)
        t = row + gl.arange(0, WG_ROWS, row_layout)
        line = (work.b * H + work.h).to(gl.int64) * total + work.q_start + t
        lse = (m_row + gl.log2(l) - RAISED) * LN2
        if config.SMOOTHED:
            # (rows, H), as queries lie in memory
            place = ((work.b.to(gl.int64) * total + work.q_start) + t) * H + work.h
            lse += gl.load(shift_ptr + place, mask=t < work.T, other=0.0) * scale
        gl.store(lse_ptr + line, lse, mask=t < work.T)
        output_scale = gl.where(l == 0.0, 0.0, 1.0 / l)
        acc *= gl.expand_dims(gl.convert_layout(output_scale, gl.SliceLayout(1, config.acc_layout)), 1)
        tma_store_wait(0)
        barrier()
        if config.MASKED or config.PACKED or config.INTEGER:
            if holds_nan(acc):
                recompute_quantised_without_hidden_nan(spilled, scales, o_ptr, lse_ptr, work, row, H, total, scale, mask, config)
            else:
                _store(output, acc.to(dtype), o_desc, o_ptr, work, row, H, config)
        else:
            _store(output, acc.to(dtype), o_desc, o_ptr, work, row, H, config)
        work = next_work
    tma_store_wait(0)
    if WG == 0:
        named_barrier("sync", PING_PONG_BARRIER)


@gluon.jit
def _store(output, o, o_desc, o_ptr, work, row, H, config: QuantisedConfig):
    """The rows of a warpgroup, to memory; of a packed sequence, which may end inside the tile, one by one."""
    staged = output.reshape([WG_ROWS, config.DV])
    staged.store(o)
    if config.PACKED:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // config.DV, config.DV // 8], [4, 1], [1, 0])
        t = row + gl.arange(0, WG_ROWS, gl.SliceLayout(1, layout))
        e = gl.arange(0, config.DV, gl.SliceLayout(0, layout))
        lines = ((work.q_start + t).to(gl.int64) * H + work.h) * config.DV
        gl.store(o_ptr + gl.expand_dims(lines, 1) + gl.expand_dims(e, 0), staged.load(layout), mask=gl.expand_dims(t < work.T, 1))
    else:
        fence_async_shared()
        tma_store(o_desc, [work.b, work.h, row, 0], output)


# fmt: off
@gluon.jit(
    do_not_specialize=["B", "S", "tiles", "balanced_heads", "left", "right", "prefix", "chunk"],
    do_not_specialize_on_alignment=["cu_q_ptr", "cu_k_ptr", "q_scales_ptr", "k_scales_ptr", "v_scales_ptr", "shift_ptr"],
)
def flash_fwd_8bit(
    q_desc, k_desc, v_desc, o_desc, q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, q_scales_ptr, k_scales_ptr, v_scales_ptr, shift_ptr,
    cu_q_ptr, cu_k_ptr, counter_ptr,
    B, S, tiles, balanced_heads, scale, left, right, prefix, chunk,
    GROUP: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, PACKED: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, PREFIX: gl.constexpr, CHUNK: gl.constexpr,
    SMOOTHED: gl.constexpr, KEYS: gl.constexpr, Q_STAGES: gl.constexpr, KV_STAGES: gl.constexpr,
    COMPUTE_REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    config = QuantisedConfig(
        GROUP=GROUP, D=D, DV=DV, PACKED=PACKED, MASKED=LEFT or RIGHT or PREFIX or CHUNK, INTEGER=dtype == gl.int8,
        SMOOTHED=SMOOTHED, KEYS=KEYS,
    )
    mask = MaskBounds(left, right, prefix, chunk, LEFT, RIGHT, PREFIX, CHUNK)
    queries = ring(
        gl.allocate_shared_memory(dtype, [Q_STAGES * NUM_CONSUMERS, 1, 1, WG_ROWS, D], q_desc.layout), Q_STAGES, NUM_CONSUMERS
    )  # fmt: skip
    keys = ring(gl.allocate_shared_memory(dtype, [KV_STAGES, 1, 1, KEYS, D], k_desc.layout), KV_STAGES, NUM_CONSUMERS)
    values = ring(gl.allocate_shared_memory(v_desc.dtype, [KV_STAGES, 1, 1, DV, KEYS], v_desc.layout), KV_STAGES, NUM_CONSUMERS)
    outputs = gl.allocate_shared_memory(o_desc.dtype, [NUM_CONSUMERS, 1, 1, WG_ROWS, DV], o_desc.layout)
    words: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    work_tiles = ring(gl.allocate_shared_memory(gl.int32, [2 * WORK_TILE_WORDS, 1], words), 2, NUM_CONSUMERS)
    scales = BlockScales(
        q_scales_ptr, k_scales_ptr, v_scales_ptr,
        gl.allocate_shared_memory(gl.float32, [Q_STAGES, 1], words), gl.allocate_shared_memory(gl.float32, [KV_STAGES, 1], words),
        gl.allocate_shared_memory(gl.float32, [KV_STAGES, 1], words),
    )
    spilled = gl.allocate_shared_memory(gl.int64, [16, 1], words)
    spill_tensor(spilled, 0, q_ptr, q_desc)
    spill_tensor(spilled, 1, k_ptr, k_desc)
    spill_tensor(spilled, 2, v_ptr, v_desc)
    spill_word(spilled, 12, shift_ptr.to(gl.int64, bitcast=True))
    spill_word(spilled, 13, tiles)
    fence_async_shared()
    # packed: one sequence, of all queries
    H = q_desc.shape[1].to(gl.int32)
    T = q_desc.shape[2].to(gl.int32)
    load = (
        work_tiles, queries, keys, values, scales, mask, q_desc, k_desc, v_desc,
        B, H, T, S, tiles, balanced_heads, cu_q_ptr, cu_k_ptr, counter_ptr, config,
    )
    args = (
        work_tiles, queries, keys, values, scales, outputs, spilled, o_desc, o_ptr, lse_ptr, shift_ptr, H, T, scale, mask, config,
    )
    gl.warp_specialize(
        [(_compute, (0,) + args), (_compute, (1,) + args), (load_tiles, load)],
        [4, 1], [COMPUTE_REGISTERS, COPY_REGISTERS],
    )
