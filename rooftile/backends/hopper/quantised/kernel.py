"""The forward on quantised tensors: scores in FP8 or INT8, weights and values in FP8, o and lse.

The roles are those of `flash_fwd`: a warp that draws tiles and has them copied in, two warpgroups of 64 queries each. What is
different in 8 bits:

    scales    a tile is 128 queries and a block 128 keys, so each meets one scale: s_q s_k rides in the exponent's factor, and s_v
              comes where a block's product with the values is added to the sum
    values    matrix instructions of 8 bits read both sides along the summed axis, so values come transposed, (Dv, S); and within
              each 16 keys in the order in which a thread holds weights (`quantisation`), so that these are never exchanged
    sums      the tensor cores add 8-bit products in fewer bits than fp32 has. Each block's product begins at zero, and is added
              to the output in fp32
    weights   refer to a score that may lag behind the row's largest, so that they need not wait for it (`weights_8bit`)
    turns     the warpgroups take turns at the exponentials: one's run under the other's products

Shah et al., FlashAttention-3, arXiv:2407.08608, section 3.3; Zhang et al., SageAttention2, arXiv:2411.10958.
"""

from rooftile.backends.hopper.device.config import LN2, LOG2E, WG_ROWS
from rooftile.backends.hopper.device.nan_fallback import holds_nan, note, note_word
from rooftile.backends.hopper.device.pipeline import Ring, named_barrier, opaque, ring
from rooftile.backends.hopper.device.scheduler import (
    PADDED,
    WORDS,
    Mask,
    make_plan,
    publish,
    publish_end,
    put_back,
    take,
)
from rooftile.backends.hopper.device.softmax import hidden
from rooftile.backends.hopper.gluon import (
    aggregate,
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
from rooftile.backends.hopper.quantised.nan_fallback import with_care_8bit
from rooftile.backends.hopper.quantised.softmax import (
    RAISED,
    TURNS,
    by_thread,
    first_references,
    kept,
    rescaled,
    weights_of,
)

CREW = gl.constexpr(2)
# queries of a tile, and keys or values, that share a scale
BLOCK = gl.constexpr(128)


@aggregate
class Shape8:
    """What is known when the kernel is compiled."""

    GROUP: gl.constexpr
    D: gl.constexpr
    DV: gl.constexpr
    PACKED: gl.constexpr
    MASKED: gl.constexpr
    INTEGER: gl.constexpr  # scores in INT8
    SMOOTHED: gl.constexpr  # rows have a shift
    KEYS: gl.constexpr  # of a block: 128, or 64 of wide heads
    WIDE: gl.constexpr  # the output is added to by quarters
    PART: gl.constexpr  # columns of values that a product takes
    s_layout: gl.constexpr
    o_layout: gl.constexpr  # of a product with values
    acc_layout: gl.constexpr  # of the output
    p_layout: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, GROUP, D, DV, PACKED, MASKED, INTEGER, SMOOTHED, KEYS):
        self.GROUP = gl.constexpr(GROUP)
        self.D = gl.constexpr(D)
        self.DV = gl.constexpr(DV)
        self.PACKED = gl.constexpr(PACKED)
        self.MASKED = gl.constexpr(MASKED)
        self.INTEGER = gl.constexpr(INTEGER)
        self.SMOOTHED = gl.constexpr(SMOOTHED)
        self.KEYS = gl.constexpr(KEYS)
        part = DV if DV <= 128 else 64
        self.WIDE = gl.constexpr(part < DV)
        self.PART = gl.constexpr(part)
        o_layout = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, part, 32])
        self.s_layout = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 32]))
        self.acc_layout = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 32]))
        self.o_layout = gl.constexpr(o_layout)
        self.p_layout = gl.constexpr(gl.DotOperandLayout(0, o_layout, 4))


@aggregate
class Scales:
    """Where scales are: in memory, (parts, heads), and in shared memory a word a slot."""

    q_ptr: gl.tensor
    k_ptr: gl.tensor
    v_ptr: gl.tensor
    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q_ptr, k_ptr, v_ptr, q, k, v):
        self.q_ptr = q_ptr
        self.k_ptr = k_ptr
        self.v_ptr = v_ptr
        self.q = q
        self.k = k
        self.v = v


@gluon.jit
def _put_word(words, slot, value):
    words.index(slot).store(gl.full([1], 0, gl.float32, gl.BlockedLayout([1], [32], [1], [0])) + value)


@gluon.jit
def _word(words, slot):
    return gl.max(words.index(slot).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def _scale(words, slot, shape: Shape8):
    """A block's scale; of INT8 with a NaN among them a NaN, as their codes are numbers (see `with_care_8bit`)."""
    scale = _word(words, slot)
    if shape.INTEGER:
        scale = gl.where(scale < 0.0, float("nan"), scale)
    return scale


@gluon.jit
def _load_block(keys: Ring, values: Ring, scales: Scales, k_desc, v_desc, turn, plan, block, part, Hk, shape: Shape8):
    """Has one block of keys and values copied in, and puts its scales beside them."""
    h = plan.h // shape.GROUP
    # asked for before the waits, known after them
    line = (part + block * shape.KEYS // BLOCK) * Hk + h
    k_scale = gl.load(scales.k_ptr + line)
    v_scale = gl.load(scales.v_ptr + line)
    keys.wait_empty(turn)
    _put_word(scales.k, turn % keys.slots, k_scale)
    mbarrier.expect(keys.filled(turn), k_desc.block_type.nbytes)
    tma_load(k_desc, [plan.b, h, plan.key + block * shape.KEYS, 0], keys.filled(turn), keys.buffer(turn))
    values.wait_empty(turn)
    _put_word(scales.v, turn % values.slots, v_scale)
    mbarrier.expect(values.filled(turn), v_desc.block_type.nbytes)
    # packed sequences' values are padded to whole blocks each, dense ones' all alike
    column = part * BLOCK if shape.PACKED else 0
    tma_load(v_desc, [plan.b, h, 0, column + block * shape.KEYS], values.filled(turn), values.buffer(turn))


@gluon.jit
def _load(
    plans: Ring, queries: Ring, keys: Ring, values: Ring, scales: Scales, mask: Mask, q_desc, k_desc, v_desc,
    B, H, T, S, tiles, tail, cu_q_ptr, cu_k_ptr, counter_ptr, shape: Shape8,
):  # fmt: skip
    """The role that draws tiles and has them copied in (see `flash_fwd`)."""
    total = tiles * (H if shape.PACKED else B * H)
    Hk = H // shape.GROUP
    programs = gl.num_programs(0)
    n = gl.program_id(0)
    tile = 0
    turn = 0
    while n < total:
        plan = make_plan(n, B, H, T, S, tiles, tail, cu_q_ptr, cu_k_ptr, mask, BLOCK, shape.KEYS, shape.PACKED)
        if plan.live != 0:
            if shape.PACKED:
                # of its sequence's queries, and of its keys
                part_q = plan.padded // PADDED
                part_k = plan.key // PADDED + (part_q - plan.row // PADDED)
            else:
                part_q = plan.b * tiles
                part_k = plan.b * ((S + BLOCK - 1) // BLOCK)
            q_scale = gl.load(scales.q_ptr + (part_q + plan.t // BLOCK) * H + plan.h)
            publish(plans, tile, plan)
            queries.wait_empty(tile)
            _put_word(scales.q, tile % queries.slots, q_scale)
            mbarrier.expect(queries.filled(tile), q_desc.block_type.nbytes * CREW)
            for i in gl.static_range(CREW):
                tma_load(
                    q_desc, [plan.b, plan.h, plan.row + plan.t + i * WG_ROWS, 0], queries.filled(tile),
                    queries.buffers.index(tile % queries.slots * CREW + i),
                )  # fmt: skip
            tile += 1
            for i in range(plan.last - plan.first):
                _load_block(keys, values, scales, k_desc, v_desc, turn, plan, plan.last - i, part_k, Hk, shape)
                turn += 1
            n = gl.atomic_add(counter_ptr, 1) + programs
            _load_block(keys, values, scales, k_desc, v_desc, turn, plan, plan.first, part_k, Hk, shape)
            turn += 1
        else:
            n = gl.atomic_add(counter_ptr, 1) + programs
    publish_end(plans, tile)
    put_back(counter_ptr)


@gluon.jit
def _issue_scores(q, keys: Ring, turn, into, shape: Shape8):
    """Issues the product of queries and a block's keys, into the registers of `into`."""
    k = keys.buffer(turn).reshape([shape.KEYS, shape.D])
    into = into.to(gl.int32 if shape.INTEGER else gl.float32, bitcast=True)
    return warpgroup_mma(q, k.permute((1, 0)), into, use_acc=False, is_async=True)


@gluon.jit
def _issue_values(p, values: Ring, turn, part, FROM: gl.constexpr, shape: Shape8):
    """Issues the product of a block's weights with its values, or some of their columns, into the registers of `part`."""
    v = values.buffer(turn).reshape([shape.DV, shape.KEYS]).slice(FROM, shape.PART, 0)
    return warpgroup_mma(_weights(p, shape), v.permute((1, 0)), part, use_acc=False, is_async=True)


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
    return kept(acc + part * v_scale), part


@gluon.jit
def _with_values(acc, alpha, p, v_scale, q, keys: Ring, values: Ring, turn, there, shape: Shape8):
    """A wide output with a block's product, by quarters, and the next block's scores.

    The five products take turns in the registers of two: while one runs, the one before it is added.
    """
    none = gl.zeros([WG_ROWS, shape.PART], gl.float32, shape.o_layout)
    x = _issue_values(p, values, turn, none, 0, shape)
    y = _issue_values(p, values, turn, none, 64, shape)
    low, high = _halves(rescaled(acc, alpha, shape.acc_layout), 128)
    a, b = _halves(low, 64)
    c, d = _halves(high, 64)
    keys.wait_full(turn + 1, there)
    a, x = _added(a, x, v_scale)
    x = _issue_values(p, values, turn, x, 128, shape)
    b, y = _added(b, y, v_scale)
    y = _issue_values(p, values, turn, y, 192, shape)
    c, x = _added(c, x, v_scale)
    s = _issue_scores(q, keys, turn + 1, x, shape)
    d, y = _added(d, y, v_scale)
    s = warpgroup_mma_wait(0, deps=(s,))
    return _joined(_joined(a, b, 128), _joined(c, d, 128), 256), s


@gluon.jit
def _numbers(s, row, column, plan, mask: Mask, CHECK: gl.constexpr, shape: Shape8):
    """The products of queries and keys as numbers, -inf where the mask or the end of the keys hides one."""
    if shape.INTEGER:
        s = s.to(gl.float32)
    if CHECK:
        if shape.MASKED:
            s = hidden(s, row, column, plan, mask)
        elif column + shape.KEYS > plan.S:
            s = hidden(s, row, column, plan, mask)
    return s


@gluon.jit
def _weights(p, shape: Shape8):
    """The words of `weights_of` as the left side of a product: no instruction, only another name for the registers."""
    twice = gl.join(p, p)
    # the four copies of a word must be a thread's neighbours before one is taken of them
    four = gl.convert_layout(gl.join(twice, twice).reshape([WG_ROWS, shape.KEYS]), shape.p_layout, assert_trivial=True)
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [four], dtype=gl.float8e4nv, is_pure=True, pack=4)


@aggregate
class Scores:
    """A block's scores: products of queries and keys, what they are multiplied by, and the block before it on its way out."""

    s: gl.tensor
    factor: gl.tensor
    part: gl.tensor  # the product of the block before with its values
    v_scale: gl.tensor

    @gluon.constexpr_function
    def __init__(self, s, factor, part, v_scale):
        self.s = s
        self.factor = factor
        self.part = part
        self.v_scale = v_scale


@gluon.jit
def _step(
    block: Scores, q, keys: Ring, values: Ring, scales: Scales, acc, m, l, turn, there, row, column, plan, mask: Mask, q_factor,
    WG: gl.constexpr, shape: Shape8, CHECK: gl.constexpr,
):  # fmt: skip
    """The weights of block `turn` while the block before it is added to the output; its product, and the next one's scores."""
    if not shape.WIDE:
        # in terms of the references that this block's weights begin with
        acc += block.part * block.v_scale
    p, sums, m_new = weights_of(block.s, m, block.factor, WG)
    alpha = gl.exp2(m - gl.where(m_new == float("-inf"), 0.0, m_new))
    part = block.part
    values.wait_full(turn)
    if shape.WIDE:
        v_scale = _word(scales.v, turn % values.slots)
        l = l * alpha + sums
        acc, s = _with_values(acc, alpha, p, v_scale, q, keys, values, turn, there, shape)
        factor = q_factor * _scale(scales.k, (turn + 1) % keys.slots, shape)
        keys.give_back(turn + 1)
        values.give_back(turn)
    else:
        part = gl.zeros([WG_ROWS, shape.DV], gl.float32, shape.o_layout)
        part = _issue_values(p, values, turn, part, 0, shape)
        keys.wait_full(turn + 1, there)
        none = gl.zeros([WG_ROWS, shape.KEYS], gl.float32, shape.s_layout)
        s = _issue_scores(q, keys, turn + 1, none, shape)
        acc = rescaled(acc, alpha, shape.acc_layout)
        l = l * alpha + sums
        factor = q_factor * _scale(scales.k, (turn + 1) % keys.slots, shape)
        v_scale = _word(scales.v, turn % values.slots)
        s, part = warpgroup_mma_wait(0, deps=(s, part))
        keys.give_back(turn + 1)
        values.give_back(turn)
    s = _numbers(s, row, column, plan, mask, CHECK, shape)
    return Scores(s, factor, part, v_scale), acc, m_new, l


@gluon.jit
def _compute(
    WG: gl.constexpr, plans: Ring, queries: Ring, keys: Ring, values: Ring, scales: Scales, outputs, notes, o_desc,
    o_ptr, lse_ptr, shift_ptr, H, total, scale, mask: Mask, shape: Shape8,
):  # fmt: skip
    """A warpgroup's role: 64 queries of every tile."""
    dtype: gl.constexpr = o_desc.dtype
    row_layout: gl.constexpr = gl.SliceLayout(1, shape.s_layout)
    output = outputs.index(WG)
    if WG == CREW - 1:
        named_barrier("arrive", TURNS)
    tile = 0
    turn = 0
    plan = take(plans, 0)
    queries.wait_full(0, plan.live != 0)
    keys.wait_full(0, plan.live != 0)
    none = gl.zeros([WG_ROWS, shape.KEYS], gl.float32, shape.s_layout)
    s = _issue_scores(queries.buffers.index(WG).reshape([WG_ROWS, shape.D]), keys, 0, none, shape)
    q_factor = scale * LOG2E * _scale(scales.q, 0, shape)
    factor = q_factor * _scale(scales.k, 0, shape)
    s = warpgroup_mma_wait(0, deps=(s,))
    keys.give_back(0)
    s = _numbers(s, plan.t + WG * WG_ROWS, plan.last * shape.KEYS, plan, mask, True, shape)
    nothing = scale * 0.0
    if not shape.WIDE:
        nothing = gl.zeros([WG_ROWS, shape.DV], gl.float32, shape.o_layout)
    block = Scores(s, factor, nothing, scale * 0.0)
    m = first_references(s, factor)

    while plan.live != 0:
        acc = gl.zeros([WG_ROWS, shape.DV], gl.float32, shape.acc_layout)
        l = by_thread(0.0, shape.KEYS, shape.s_layout)
        row = plan.t + WG * WG_ROWS
        i_0 = row + plan.S - plan.T
        blocks = plan.last - plan.first + 1
        right = 1
        left = blocks
        if shape.MASKED:
            clear_stop = (mask.last_key(i_0, plan.S) + 1) // shape.KEYS
            right = gl.minimum(gl.maximum(plan.last + 1 - clear_stop, 1), blocks)
            q = queries.buffers.index(tile % queries.slots * CREW + WG).reshape([WG_ROWS, shape.D])
            for i in range(1, right):
                block, acc, m, l = _step(
                    block, q, keys, values, scales, acc, m, l, turn, True, row, (plan.last - i) * shape.KEYS, plan, mask,
                    q_factor, WG, shape, True,
                )  # fmt: skip
                turn += 1
        if mask.LEFT or mask.CHUNK:
            clear_first = gl.maximum(mask.first_key(i_0 + (WG_ROWS - 1)) + (shape.KEYS - 1), 0) // shape.KEYS
            left = gl.maximum(gl.minimum(plan.last + 1 - clear_first, blocks), right)
        q = queries.buffers.index(opaque(tile) % queries.slots * CREW + WG).reshape([WG_ROWS, shape.D])
        for _ in range(right, left):
            block, acc, m, l = _step(
                block, q, keys, values, scales, acc, m, l, turn, True, row, 0, plan, mask, q_factor, WG, shape, False
            )
            turn += 1
        if mask.LEFT or mask.CHUNK:
            q = queries.buffers.index(opaque(tile) % queries.slots * CREW + WG).reshape([WG_ROWS, shape.D])
            for i in range(left, blocks):
                block, acc, m, l = _step(
                    block, q, keys, values, scales, acc, m, l, turn, True, row, (plan.last - i) * shape.KEYS, plan, mask,
                    q_factor, WG, shape, True,
                )  # fmt: skip
                turn += 1
        queries.give_back(tile)

        # the last block of this tile, together with the first scores of the next
        tile += 1
        after = take(plans, tile)
        there = after.live != 0
        queries.wait_full(tile, there)
        q = queries.buffers.index(tile % queries.slots * CREW + WG).reshape([WG_ROWS, shape.D])
        q_factor = scale * LOG2E * _scale(scales.q, tile % queries.slots, shape)
        block, acc, m, l = _step(
            block, q, keys, values, scales, acc, m, l, turn, there, after.t + WG * WG_ROWS, after.last * shape.KEYS, after, mask,
            q_factor, WG, shape, True,
        )  # fmt: skip
        turn += 1
        if not shape.WIDE:
            acc += block.part * block.v_scale
        block = Scores(block.s, block.factor, nothing, scale * 0.0)
        l = gl.convert_layout(gl.sum(l, 1), row_layout)
        m_row = gl.convert_layout(gl.max(m, 1), row_layout)
        m = first_references(block.s, block.factor)
        t = row + gl.arange(0, WG_ROWS, row_layout)
        line = (plan.b * H + plan.h).to(gl.int64) * total + plan.row + t
        lse = (m_row + gl.log2(l) - RAISED) * LN2
        if shape.SMOOTHED:
            # (rows, H), as queries lie in memory
            place = ((plan.b.to(gl.int64) * total + plan.row) + t) * H + plan.h
            lse += gl.load(shift_ptr + place, mask=t < plan.T, other=0.0) * scale
        gl.store(lse_ptr + line, lse, mask=t < plan.T)
        share = gl.where(l == 0.0, 0.0, 1.0 / l)
        acc *= gl.expand_dims(gl.convert_layout(share, gl.SliceLayout(1, shape.acc_layout)), 1)
        tma_store_wait(0)
        barrier()
        if shape.MASKED or shape.PACKED or shape.INTEGER:
            if holds_nan(acc):
                with_care_8bit(notes, scales, o_ptr, lse_ptr, plan, row, H, total, scale, mask, shape)
            else:
                _store(output, acc.to(dtype), o_desc, o_ptr, plan, row, H, shape)
        else:
            _store(output, acc.to(dtype), o_desc, o_ptr, plan, row, H, shape)
        plan = after
    tma_store_wait(0)
    if WG == 0:
        named_barrier("sync", TURNS)


@gluon.jit
def _store(output, o, o_desc, o_ptr, plan, row, H, shape: Shape8):
    """The rows of a warpgroup, to memory; of a packed sequence, which may end inside the tile, one by one."""
    staged = output.reshape([WG_ROWS, shape.DV])
    staged.store(o)
    if shape.PACKED:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // shape.DV, shape.DV // 8], [4, 1], [1, 0])
        t = row + gl.arange(0, WG_ROWS, gl.SliceLayout(1, layout))
        e = gl.arange(0, shape.DV, gl.SliceLayout(0, layout))
        lines = ((plan.row + t).to(gl.int64) * H + plan.h) * shape.DV
        gl.store(
            o_ptr + gl.expand_dims(lines, 1) + gl.expand_dims(e, 0), staged.load(layout), mask=gl.expand_dims(t < plan.T, 1)
        )
    else:
        fence_async_shared()
        tma_store(o_desc, [plan.b, plan.h, row, 0], output)


# fmt: off
@gluon.jit(
    do_not_specialize=["B", "S", "tiles", "tail", "left", "right", "prefix", "chunk"],
    do_not_specialize_on_alignment=["cu_q_ptr", "cu_k_ptr", "q_scales_ptr", "k_scales_ptr", "v_scales_ptr", "shift_ptr"],
)
def flash_fwd_8bit(
    q_desc, k_desc, v_desc, o_desc, q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, q_scales_ptr, k_scales_ptr, v_scales_ptr, shift_ptr,
    cu_q_ptr, cu_k_ptr, counter_ptr,
    B, S, tiles, tail, scale, left, right, prefix, chunk,
    GROUP: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, PACKED: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, PREFIX: gl.constexpr, CHUNK: gl.constexpr,
    SMOOTHED: gl.constexpr, KEYS: gl.constexpr, Q_SLOTS: gl.constexpr, KV_SLOTS: gl.constexpr,
    COMPUTE_REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    shape = Shape8(
        GROUP, D, DV, PACKED, LEFT or RIGHT or PREFIX or CHUNK, dtype == gl.int8, SMOOTHED, KEYS,
    )
    mask = Mask(left, right, prefix, chunk, LEFT, RIGHT, PREFIX, CHUNK)
    queries = ring(gl.allocate_shared_memory(dtype, [Q_SLOTS * CREW, 1, 1, WG_ROWS, D], q_desc.layout), Q_SLOTS, CREW)
    keys = ring(gl.allocate_shared_memory(dtype, [KV_SLOTS, 1, 1, KEYS, D], k_desc.layout), KV_SLOTS, CREW)
    values = ring(gl.allocate_shared_memory(v_desc.dtype, [KV_SLOTS, 1, 1, DV, KEYS], v_desc.layout), KV_SLOTS, CREW)
    outputs = gl.allocate_shared_memory(o_desc.dtype, [CREW, 1, 1, WG_ROWS, DV], o_desc.layout)
    words: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    plans = ring(gl.allocate_shared_memory(gl.int32, [2 * WORDS, 1], words), 2, CREW)
    scales = Scales(
        q_scales_ptr, k_scales_ptr, v_scales_ptr,
        gl.allocate_shared_memory(gl.float32, [Q_SLOTS, 1], words), gl.allocate_shared_memory(gl.float32, [KV_SLOTS, 1], words),
        gl.allocate_shared_memory(gl.float32, [KV_SLOTS, 1], words),
    )
    notes = gl.allocate_shared_memory(gl.int64, [16, 1], words)
    note(notes, 0, q_ptr, q_desc)
    note(notes, 1, k_ptr, k_desc)
    note(notes, 2, v_ptr, v_desc)
    note_word(notes, 12, shift_ptr.to(gl.int64, bitcast=True))
    note_word(notes, 13, tiles)
    fence_async_shared()
    # packed: one sequence, of all queries
    H = q_desc.shape[1].to(gl.int32)
    T = q_desc.shape[2].to(gl.int32)
    load = (
        plans, queries, keys, values, scales, mask, q_desc, k_desc, v_desc,
        B, H, T, S, tiles, tail, cu_q_ptr, cu_k_ptr, counter_ptr, shape,
    )
    args = (
        plans, queries, keys, values, scales, outputs, notes, o_desc, o_ptr, lse_ptr, shift_ptr, H, T, scale, mask, shape,
    )
    gl.warp_specialize(
        [(_compute, (0,) + args), (_compute, (1,) + args), (_load, load)],
        [4, 1], [COMPUTE_REGISTERS, COPY_REGISTERS],
    )
