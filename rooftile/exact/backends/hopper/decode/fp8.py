"""Decoding on Hopper from pages in FP8: `paged_decode` with half the bytes, whose numbers become 16 bits on the chip.

Half the bytes leave half the time, and a wgmma's 64 rows are too many for the few heads of a group: the products are turned over.
Scores are KEYS rows by the heads of a group, and outputs D rows by those heads, of which 8 are enough. Keys become 16 bits on
their way into registers, from where a wgmma takes its left side; values, which it needs columns first, on their way into another
place of shared memory. Scales come beside the values, 4 bytes per token.

The sum over a key's numbers does not depend on which thread holds which of them: keys and queries have theirs in the order that
lets a thread read 16 bytes at once.

Micikevicius et al., FP8 formats for deep learning, arXiv:2209.05433; Shah et al., FlashAttention-3, arXiv:2407.08608.
"""

from rooftile.exact.backends.hopper.decode.bf16 import close_softmax, load_keys, visible_blocks, zero_hidden_values
from rooftile.exact.backends.hopper.device.config import KernelConfig
from rooftile.exact.backends.hopper.device.page_loads import PageTable, load_pages
from rooftile.exact.backends.hopper.device.scheduler import WORK_TILE_WORDS, MaskBounds, consume
from rooftile.exact.backends.hopper.device.softmax import ScoreNumbers, make_scoring
from rooftile.runtime.hopper.gluon import (
    aggregate,
    barrier,
    copy_arrived,
    copy_words,
    fence_async_shared,
    gl,
    gluon,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from rooftile.runtime.hopper.pipeline import Ring, let_next_begin, ring, wait_for_input


@aggregate
class PageScales:
    """Pointers to the scales of keys and values: fp32 (pages, size, heads), one per token and head."""

    k: gl.tensor
    v: gl.tensor
    page: gl.tensor
    token: gl.tensor


@gluon.constexpr_function
def _layout_of_keys(KEYS, D):
    """A quarter of a key per thread; the rows are the rows of a wgmma's left operand. No two of eight threads share a bank."""
    registers = [[0, 1 << i] for i in range((D // 4).bit_length() - 1)] + [[8, 0]]
    registers += [[64 << i, 0] for i in range((KEYS // 64).bit_length() - 1)]
    lanes = [[0, D // 4], [0, D // 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [KEYS, D])


@gluon.constexpr_function
def _layout_of_values(KEYS, D):
    """Sixteen numbers of a value a thread. No two of eight meet in a bank, neither as they are read nor as they are written."""
    registers = [[0, 1], [0, 2], [0, 4], [0, 8]] + [[0, 64 << i] for i in range((D // 64).bit_length() - 1)]
    registers += [[32 << i, 0] for i in range((KEYS // 32).bit_length() - 1)]
    rows = [[5, 0], [1, 0], [2, 0]] if D == 128 else [[1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, [[0, 16], [0, 32]] + rows, [[8, 0], [16, 0]], [], [KEYS, D])


@gluon.jit
def _in_order_of_keys(x, D: gl.constexpr):
    """Rows (N, D) in the order in which `_layout_of_keys` gives the numbers of a key to a wgmma."""
    return x.reshape([x.shape[0], 4, D // 8, 2]).permute((0, 2, 1, 3)).reshape([x.shape[0], D])


@gluon.jit
def _powers_of_two(sizes):
    """Returns the power of two that brings numbers of these sizes to about 2^7, and its inverse."""
    exponent = gl.maximum(gl.minimum((sizes.to(gl.int32, bitcast=True) >> 23) & 255, 254), 8)
    return ((261 - exponent) << 23).to(gl.float32, bitcast=True), ((exponent - 7) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _scales_of(scales: Ring, fill, which: gl.constexpr):
    """The scales of a block's keys (0) or values (1)."""
    return scales.buffers.index(fill % scales.stages * 2 + which)


@gluon.jit
def _load_values(work_tiles: Ring, values: Ring, scales: Ring, v_desc, table: PageTable, at: PageScales, config: KernelConfig):
    """The role that has values copied in, and the scales of keys and values."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lane = gl.arange(0, config.KEYS, layout)
    tile = 0
    fill = 0
    work = consume(work_tiles, 0)
    while work.is_valid != 0:
        row = table.pointer + work.k_start.to(gl.int64) * table.stride
        head = work.h // config.GROUP
        for i in range(work.last_block - work.first_block + 1):
            j = (work.last_block - i) * config.KEYS + lane
            in_group = j < work.S
            page = gl.load(row + j // config.PAGE_SIZE, mask=in_group, other=0).to(gl.int64)
            place = page * at.page + j % config.PAGE_SIZE * at.token + head
            scales.wait_empty(fill)
            copy_words(_scales_of(scales, fill, 0), at.k + place, in_group)
            copy_words(_scales_of(scales, fill, 1), at.v + place, in_group)
            copy_arrived(scales.full_barrier(fill), increment_count=False)
            load_pages(values, v_desc, table, fill, work, work.last_block - i, config.DV, config)
            fill += 1
        tile += 1
        work = consume(work_tiles, tile)


@gluon.jit
def _compute(
    work_tiles: Ring, keys: Ring, values: Ring, scales: Ring, q_smem, p_smem, v_smem, q_ptr, o_ptr, lse_ptr, partials_ptr,
    sinks_ptr,
    q_stride_b, q_stride_h, H, mask: MaskBounds, scoring: ScoreNumbers, ROWS: gl.constexpr, config: KernelConfig,
):  # fmt: skip
    """The role that multiplies: the blocks of a sequence with a group's heads, from the last block down."""
    HEADS: gl.constexpr = q_smem.shape[0]
    KEYS: gl.constexpr = config.KEYS
    D: gl.constexpr = config.D
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, product, 2)
    of_keys: gl.constexpr = gl.SliceLayout(1, product)
    of_heads: gl.constexpr = gl.SliceLayout(0, product)
    k_layout: gl.constexpr = _layout_of_keys(KEYS, D)
    v_layout: gl.constexpr = _layout_of_values(KEYS, D)
    q_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    head = gl.program_id(0) * config.GROUP
    fill = 0
    tile = 0
    work = consume(work_tiles, 0)
    while work.is_valid != 0:
        g = gl.arange(0, HEADS, gl.SliceLayout(1, q_layout))
        d = gl.arange(0, D, gl.SliceLayout(0, q_layout))
        lines = work.b.to(gl.int64) * q_stride_b + (head + g) * q_stride_h
        q = gl.load(
            q_ptr + gl.expand_dims(lines, 1) + gl.expand_dims(d, 0), mask=gl.expand_dims(g < config.GROUP, 1), other=0.0
        )  # fmt: skip
        # keys are multiplied in fp16, which has all of FP8 and is had from it by one instruction for two. A power of two brings
        # queries to where fp16 has all the digits of bf16, down to 2^-24 of a query's largest number
        larger, unit = _powers_of_two(gl.max(gl.abs(q.to(gl.float32)), 1))
        q_smem.store(_in_order_of_keys((q.to(gl.float32) * gl.expand_dims(larger, 1)).to(gl.float16), D))
        unit = gl.convert_layout(unit, of_heads)
        fence_async_shared()
        barrier()
        column = gl.arange(0, HEADS, of_heads)
        # columns without a query have weights of 0
        m = gl.where(column < config.GROUP, float("-inf"), 1e30)
        l = gl.zeros([KEYS, HEADS], gl.float32, product)
        acc = warpgroup_mma_init(gl.zeros([D, HEADS], gl.float32, product))
        first_key = mask.first_key(work.S - 1)
        for i in range(work.last_block - work.first_block + 1):
            j_0 = (work.last_block - i) * KEYS
            cut = (j_0 + KEYS > work.S) | (j_0 < first_key)
            keys.wait_full(fill)
            k = _in_order_of_keys(config.key_block(keys, fill).load(k_layout).to(gl.float16), D)
            none = gl.zeros([KEYS, HEADS], gl.float32, product)
            s = warpgroup_mma(gl.convert_layout(k, left), q_smem.permute((1, 0)), none, use_acc=False, is_async=True)
            values.wait_full(fill)
            v = config.value_block(values, fill).load(v_layout)
            scales.wait_full(fill)
            k_scale = _scales_of(scales, fill, 0).load(of_keys)
            v_scale = _scales_of(scales, fill, 1).load(of_keys)
            # by way of fp32: straight to bf16 Triton has an F2F for each number, a slow instruction on Hopper
            v = v.to(gl.float32).to(gl.bfloat16)
            # the values of the block before have been multiplied too: their place is free
            s, acc = warpgroup_mma_wait(0, deps=(s, acc))
            v_smem.store(v)
            if cut:
                zero_hidden_values(v_smem, j_0, work.S, first_key)
            s = s * gl.expand_dims(k_scale, 1) * gl.expand_dims(unit, 0)
            if config.SOFTCAP:
                s = scoring.apply_softcap(s)
            if cut:
                j = j_0 + gl.arange(0, KEYS, of_keys)
                sees = (j < work.S) & (j >= first_key)
                s = gl.where(gl.expand_dims(sees, 1), s, float("-inf"))
                v_scale = gl.where(sees, v_scale, 0.0)
            m_new = gl.maximum(m, gl.max(s, 0))
            reference = gl.where(m_new == float("-inf"), 0.0, m_new) * scoring.scale_log2
            alpha = gl.exp2(m * scoring.scale_log2 - reference)
            p = gl.exp2(s * scoring.scale_log2 - gl.expand_dims(reference, 0))
            l = l * gl.expand_dims(alpha, 0) + p
            m = m_new
            p_smem.permute((1, 0)).store((p * gl.expand_dims(v_scale, 1)).to(gl.bfloat16))
            acc = acc * gl.expand_dims(alpha, 0)
            fence_async_shared()
            # all have read what was copied in, and written what is multiplied next
            barrier()
            keys.release(fill)
            values.release(fill)
            scales.release(fill)
            acc = warpgroup_mma(v_smem.permute((1, 0)), p_smem.permute((1, 0)), acc, is_async=True)
            fill += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))

        start, blocks = visible_blocks(work.S, mask, KEYS)
        m = m * scoring.scale_log2
        l = gl.sum(l, 0)
        in_group = column < config.GROUP
        e = gl.expand_dims(gl.arange(0, D, of_keys), 1)
        in_group_2d = gl.expand_dims(in_group, 0)
        if work.last_block - work.first_block + 1 == blocks:
            line = work.b.to(gl.int64) * H + head
            share, lse = close_softmax(m, l, sinks_ptr + head + column, in_group, config.SINKS)
            gl.store(lse_ptr + line + column, lse, mask=in_group)
            o = (acc * gl.expand_dims(share, 0)).to(o_ptr.dtype.element_ty)
            gl.store(o_ptr + (gl.expand_dims((line + column) * D, 0) + e), o, mask=in_group_2d)
        else:
            # a program's partials: one for a sequence that began before it, and of one that goes on after it
            program = gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
            partial = partials_ptr + ((2 * program + (work.first_block == start).to(gl.int32)) * ROWS).to(gl.int64) * (D + 2)
            gl.store(partial + (gl.expand_dims(column * (D + 2), 0) + e), acc, mask=in_group_2d)
            gl.store(partial + column * (D + 2) + D, m, mask=in_group)
            gl.store(partial + column * (D + 2) + (D + 1), l, mask=in_group)
        tile += 1
        work = consume(work_tiles, tile)
    let_next_begin()


@gluon.jit
def _matrix(dtype: gl.constexpr, rows: gl.constexpr, columns: gl.constexpr):
    """Shared memory that a wgmma reads."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
    return gl.allocate_shared_memory(dtype, [rows, columns], layout)


# fmt: off
@gluon.jit(
    do_not_specialize=[
        "table_stride", "k_page", "k_head", "v_page", "v_head", "scale_page", "scale_token", "q_stride_b", "q_stride_h", "B", "H",
        "left", "chunk",
    ],
    do_not_specialize_on_alignment=["sinks_ptr", "table_ptr", "lengths_ptr", "k_scale_ptr", "v_scale_ptr"],
)
def paged_decode_8bit(
    k_desc, v_desc, q_ptr, o_ptr, lse_ptr, partials_ptr, table_ptr, lengths_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr,
    table_stride, k_page, k_head, v_page, v_head, scale_page, scale_token, q_stride_b, q_stride_h, B, H, scale, softcap,
    left, chunk,
    GROUP: gl.constexpr, D: gl.constexpr, PAGE_SIZE: gl.constexpr, BATCH: gl.constexpr, ROWS: gl.constexpr, LEFT: gl.constexpr,
    CHUNK: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    HEADS: gl.constexpr, COPY_REGISTERS: gl.constexpr,
):
    # fmt: on
    codes: gl.constexpr = k_desc.dtype
    config = KernelConfig(
        GROUP=GROUP, D=D, DV=D, DIM=D, DIM_V=D, KEYS=KEYS, PAGE_SIZE=PAGE_SIZE, MASKED=LEFT or CHUNK, SOFTCAP=SOFTCAP,
        SINKS=SINKS, K_TMA_LINES=1, V_TMA_LINES=1,
    )  # fmt: skip
    # a query is its sequence's last: what is to its right, and before a prefix, does not matter
    mask = MaskBounds(left, B * 0, B * 0, chunk, LEFT, False, False, CHUNK)
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, KEYS, D], codes)
    keys = ring(gl.allocate_shared_memory(codes, [STAGES, 1, 1, KEYS, D], tile_layout), STAGES, 1)
    values = ring(gl.allocate_shared_memory(codes, [STAGES, 1, 1, KEYS, D], tile_layout), STAGES, 1)
    words: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # each thread of the warp that copies them says when its own have come
    scales = ring(gl.allocate_shared_memory(gl.float32, [2 * STAGES, KEYS], words), STAGES, 1, 32)
    work_tiles = ring(gl.allocate_shared_memory(gl.int32, [2 * WORK_TILE_WORDS, 1], words), 2, 2)
    q_smem = _matrix(gl.float16, HEADS, D)
    # weights are times a value's scale, which in fp16 could be too much or too little
    p_smem = _matrix(gl.bfloat16, HEADS, KEYS)
    v_smem = _matrix(gl.bfloat16, KEYS, D)
    fence_async_shared()
    scoring = make_scoring(mask, scale, softcap, SOFTCAP)
    compute = (
        work_tiles, keys, values, scales, q_smem, p_smem, v_smem, q_ptr, o_ptr, lse_ptr, partials_ptr, sinks_ptr, q_stride_b,
        q_stride_h,
        H, mask, scoring, ROWS, config,
    )  # fmt: skip
    k_table = PageTable(table_ptr, table_stride, k_page, k_head)
    v_table = PageTable(table_ptr, table_stride, v_page, v_head)
    at = PageScales(k_scale_ptr, v_scale_ptr, scale_page, scale_token)
    wait_for_input()
    gl.warp_specialize(
        [
            (_compute, compute),
            (load_keys, (work_tiles, keys, k_desc, k_table, lengths_ptr, B, mask, BATCH, config)),
            (_load_values, (work_tiles, values, scales, v_desc, v_table, at, config)),
        ],
        [1, 1], [COPY_REGISTERS, COPY_REGISTERS],
    )
