"""Queries, keys and values in 8 bits: the integers of `rooftile.numerics.recipe`, bit for bit.

Each is read once, and keys once more for their mean. Two kernels, whose programs walk blocks of 128
positions of a head. The next is copied in as soon as one is in registers.

    sum_keys    the sum of each head's keys in fp64, which comes out the same in any order
    quantise    queries and keys: less the mean key, times signs, through the butterfly of the Hadamard transform, scaled and
                rounded; values: scaled, rounded, transposed, and the keys of each 16 in the order in which `flash_fwd_8bit` holds
                weights. Half of the programs begin with the values: rows are bound by instructions, values by memory

A row lies in one thread by 64 columns: the butterfly's first six steps stay there, and what is left goes from lane to lane.
"""

from triton.language import PropagateNan

from rooftile.backends.hopper.gluon import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_store,
    tma_store_wait,
)
from rooftile.backends.hopper.schedule import PADDED, packed_tile

BLOCK = gl.constexpr(128)
# columns of a row that a thread holds
OWN = gl.constexpr(64)
EVERY_NAN = gl.constexpr(PropagateNan.ALL)
# below it a scale has no inverse
LEAST = gl.constexpr(2.0**-126)
LARGEST_FP8 = gl.constexpr(448.0)
LARGEST_INT8 = gl.constexpr(127.0)


@gluon.jit
def _block_of(slot, cu_ptr, B, T, blocks, PACKED: gl.constexpr):
    """Of a slot: its batch, where its sequence begins, its first position there, the sequence's length, and its part."""
    if PACKED:
        # a sequence's slots are its parts, counted from its end
        i_b, i_tile = packed_tile(slot, cu_ptr, B, BLOCK)
        start = gl.load(cu_ptr + i_b).to(gl.int32)
        T = gl.load(cu_ptr + i_b + 1).to(gl.int32) - start
        b = slot * 0
        part = start // PADDED + i_b + i_tile
    else:
        b = slot // blocks
        i_tile = slot % blocks
        start = slot * 0
        i_b = b
        part = slot
    return b, i_b, start, i_tile * BLOCK, T, part


@gluon.jit
def _fetch(desc, tile, ready, b, h, row):
    """Has a block copied in; all have read what was there."""
    mbarrier.expect(ready, desc.block_type.nbytes)
    tma_load(desc, [b, h, row, 0], ready, tile)


@gluon.jit
def _finite(x):
    """16-bit numbers in fp32, with a NaN for everything that is not finite: 0 x + x is x otherwise. Two at a time."""
    kind: gl.constexpr = "bf16x2" if x.dtype == gl.bfloat16 else "f16x2"
    words: gl.constexpr = "{ .reg .b32 zero; mov.b32 zero, 0; fma.rn." + kind + " $0, $1, zero, $1; }"
    return gl.inline_asm_elementwise(words, "=r,r", [x], dtype=x.dtype, is_pure=True, pack=2).to(gl.float32)


# fmt: off
@gluon.jit(do_not_specialize=["B", "H", "S", "blocks", "slots"], do_not_specialize_on_alignment=["cu_ptr"])
def sum_keys(k_desc, sums_ptr, cu_ptr, B, H, S, blocks, slots, D: gl.constexpr, PACKED: gl.constexpr):
    # fmt: on
    """Adds each block's keys to the sum (B, H, D) of its sequence; what is not finite counts as zero."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16] if D == 64 else [1, 32], [4, 1], [1, 0])
    tile = gl.allocate_shared_memory(k_desc.dtype, [1, 1, BLOCK, D], k_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    fence_async_shared()
    n = gl.program_id(0)
    b, i_b, start, t, length, _ = _block_of(n // H, cu_ptr, B, S, blocks, PACKED)
    _fetch(k_desc, tile, ready, b, n % H, start + t)
    turn = 0
    while n < slots * H:
        line = (i_b * H + n % H).to(gl.int64) * D
        left = length - t
        mbarrier.wait(ready, turn & 1)
        x = _finite(tile.reshape([BLOCK, D]).load(layout))
        barrier()
        turn += 1
        n += gl.num_programs(0)
        if n < slots * H:
            b, i_b, start, t, length, _ = _block_of(n // H, cu_ptr, B, S, blocks, PACKED)
            _fetch(k_desc, tile, ready, b, n % H, start + t)
        x = gl.where(x == x, x, 0.0)
        if PACKED:
            # what is past the end of a dense head comes as zeros
            row = gl.arange(0, BLOCK, gl.SliceLayout(1, layout))
            x = gl.where(gl.expand_dims(row < left, 1), x, 0.0)
        sums = gl.sum(x.to(gl.float64), 0)
        column = gl.arange(0, D, gl.SliceLayout(0, layout))
        # in no order with anything: the kernel's end is soon enough
        gl.atomic_add(sums_ptr + line + column, sums, sem="relaxed")


@gluon.jit
def _in_thread(x, step: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr):
    """One step of the butterfly between columns `step` apart that one thread holds."""
    layout: gl.constexpr = x.type.layout
    a, b = x.reshape([ROWS, D // (2 * step), 2, step]).permute((0, 1, 3, 2)).split()
    y = gl.join(a + b, a - b).permute((0, 1, 3, 2)).reshape([ROWS, D])
    return gl.convert_layout(y, layout, assert_trivial=True)


@gluon.constexpr_function
def _exchange(lanes):
    return f"shfl.sync.bfly.b32 $0, $1, {lanes}, 0x1f, 0xffffffff;"


@gluon.jit
def _across_lanes(x, column, lanes: gl.constexpr):
    """One step between columns that lanes `lanes` apart hold."""
    other = gl.inline_asm_elementwise(_exchange(lanes), "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)
    # the first of two gets their sum, the second the first less the second
    sign = gl.where((column // (OWN * lanes)) % 2 == 0, 1.0, -1.0)
    signs, x = gl.broadcast(gl.expand_dims(sign, 0), x)
    # rounded once, as a sum is: the product is exact
    return gl.fma(signs, x, other)


@gluon.jit
def _rotated(x, column, signs_ptr, D: gl.constexpr):
    """Rows times the signed Hadamard matrix, in the order of `rooftile.numerics.hadamard`; signs have its norm in them."""
    x = x * gl.expand_dims(gl.load(signs_ptr + column), 0)
    x = _in_thread(x, 1, BLOCK, D)
    x = _in_thread(x, 2, BLOCK, D)
    x = _in_thread(x, 4, BLOCK, D)
    x = _in_thread(x, 8, BLOCK, D)
    x = _in_thread(x, 16, BLOCK, D)
    x = _in_thread(x, 32, BLOCK, D)
    if D >= 128:
        x = _across_lanes(x, column, 1)
    if D >= 256:
        x = _across_lanes(x, column, 2)
    return x


@gluon.jit
def _size(x):
    """The largest size of what is finite; NaNs lose against any number."""
    return gl.max(gl.max(gl.abs(x), 1), 0)


@gluon.jit
def _larger_or_nan(a, b):
    return gl.maximum(a, b, propagate_nan=EVERY_NAN)


@gluon.jit
def _rounded(x):
    """To the nearest integer, ties to even; -128 for a NaN."""
    near = gl.inline_asm_elementwise("cvt.rni.s32.f32 $0, $1;", "=r,f", [x], dtype=gl.int32, is_pure=True, pack=1)
    return gl.where(x == x, near, -128).to(gl.int8)


@gluon.jit
def _rows(
    x_desc, out_desc, out_ptr, scales_ptr, shift_ptr, mean_ptr, signs_ptr, cu_ptr, tile, staged, ready, turn,
    B, H, T, blocks, slots, GROUP: gl.constexpr, D: gl.constexpr, PACKED: gl.constexpr, INTEGER: gl.constexpr,
    ROTATE: gl.constexpr, SMOOTH: gl.constexpr, SHIFT: gl.constexpr,
):  # fmt: skip
    """The blocks of queries or keys. SMOOTH: keys less their mean. SHIFT: queries times the mean key, for lse."""
    LANES: gl.constexpr = D // OWN
    layout: gl.constexpr = gl.BlockedLayout([1, OWN], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0])
    n = gl.program_id(0)
    b_next = n * 0
    i_b = b_next
    start = b_next
    t = b_next
    length = b_next
    part = b_next
    if n < slots * H:
        b_next, i_b, start, t, length, part = _block_of(n // H, cu_ptr, B, T, blocks, PACKED)
        _fetch(x_desc, tile, ready, b_next, n % H, start + t)
    while n < slots * H:
        b = b_next
        h = n % H
        first = start + t
        left = length - t
        line = part * H + h
        mean_line = (i_b * (H // GROUP) + h // GROUP).to(gl.int64) * D
        mbarrier.wait(ready, turn & 1)
        x = _finite(tile.reshape([BLOCK, D]).load(layout))
        # all have read this block, and what they staged before is on its way
        tma_store_wait(0)
        barrier()
        turn += 1
        n += gl.num_programs(0)
        if n < slots * H:
            b_next, i_b, start, t, length, part = _block_of(n // H, cu_ptr, B, T, blocks, PACKED)
            _fetch(x_desc, tile, ready, b_next, n % H, start + t)
        row = gl.arange(0, BLOCK, gl.SliceLayout(1, layout))
        column = gl.arange(0, D, gl.SliceLayout(0, layout))
        there = row < left
        # packed: one sequence, of all rows
        place = (b.to(gl.int64) * T + first + row) * H + h
        if SMOOTH or SHIFT:
            mean = gl.expand_dims(gl.load(mean_ptr + mean_line + column), 0)
            if SHIFT:
                gl.store(shift_ptr + place, gl.sum(x * mean, 1), mask=there)
            else:
                x = x - mean
        if ROTATE:
            x = _rotated(x, column, signs_ptr, D)
        # a row with a NaN takes no part in the scale: whatever its numbers become, all that meets it is NaN
        largest = gl.reduce(gl.abs(x), 1, _larger_or_nan)
        is_lost = largest != largest
        size = gl.max(gl.where(is_lost | (row >= left), 0.0, largest), 0)
        LARGEST: gl.constexpr = LARGEST_INT8 if INTEGER else LARGEST_FP8
        size = gl.where(size > 0.0, gl.maximum(size, LARGEST * LEAST), LARGEST)
        scale = gl.div_rn(size, LARGEST)
        if INTEGER:
            # nothing is larger than the size, so nothing rounds to more than 127
            codes = _rounded(x * gl.div_rn(1.0, scale))
            # negative: some code stands for a NaN
            scale = gl.where(gl.max((is_lost & there).to(gl.int32), 0) != 0, -scale, scale)
        else:
            codes = (x * (gl.div_rn(1.0, size) * LARGEST)).to(gl.float8e4nv)
        if PACKED:
            # a sequence may end inside the block, where the copy engine would not stop
            lines = out_ptr + gl.expand_dims(place * D, 1) + gl.expand_dims(column, 0)
            gl.store(lines, codes, mask=gl.expand_dims(there, 1))
            gl.store(scales_ptr + line, scale, mask=left > 0)
        else:
            staged.reshape([BLOCK, D]).store(codes)
            fence_async_shared()
            barrier()
            tma_store(out_desc, [b, h, first, 0], staged)
            gl.store(scales_ptr + line, scale)
    return turn


@gluon.jit
def _values(
    v_desc, out_desc, scales_ptr, cu_ptr, tile, staged, ready, turn, B, H, S, blocks, slots,
    DV: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """The blocks of values, transposed: (DV, 128), their keys by 16 in the order of a matrix instruction's left side."""
    # of each 16 keys a lane gets 2l, 2l + 1, 2l + 8 and 2l + 9, as it holds weights
    layout: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1], [16, 8]), 2)
    n = gl.program_id(0)
    b_next = n * 0
    start = b_next
    t = b_next
    length = b_next
    part = b_next
    if n < slots * H:
        b_next, _, start, t, length, part = _block_of(n // H, cu_ptr, B, S, blocks, PACKED)
        _fetch(v_desc, tile, ready, b_next, n % H, start + t)
    while n < slots * H:
        b = b_next
        h = n % H
        left = length - t
        line = part * H + h
        # packed: each sequence is padded to whole blocks
        first = part * BLOCK if PACKED else t
        mbarrier.wait(ready, turn & 1)
        x = _finite(tile.reshape([BLOCK, DV]).permute((1, 0)).load(layout))
        # all have read this block, and what they staged before is on its way
        tma_store_wait(0)
        barrier()
        turn += 1
        n += gl.num_programs(0)
        if n < slots * H:
            b_next, _, start, t, length, part = _block_of(n // H, cu_ptr, B, S, blocks, PACKED)
            _fetch(v_desc, tile, ready, b_next, n % H, start + t)
        if PACKED:
            key = gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
            x = gl.where(gl.expand_dims(key < left, 0), x, 0.0)
        size = _size(x)
        size = gl.where(size > 0.0, gl.maximum(size, LARGEST_FP8 * LEAST), LARGEST_FP8)
        y = (x * (gl.div_rn(1.0, size) * LARGEST_FP8)).to(gl.float8e4nv)
        # neighbours of every eight become quads of every 16 (see `flash_fwd_8bit`)
        y = y.reshape([DV, BLOCK // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([DV, BLOCK])
        # a packed slot past its sequence's end is nobody's part
        if left > 0:
            staged.reshape([DV, BLOCK]).store(y)
            fence_async_shared()
            barrier()
            tma_store(out_desc, [b, h, 0, first], staged)
            gl.store(scales_ptr + line, gl.div_rn(size, LARGEST_FP8))
    return turn


# fmt: off
@gluon.jit(
    do_not_specialize=["B", "H", "Hk", "T", "S", "q_blocks", "k_blocks", "q_slots", "k_slots"],
    do_not_specialize_on_alignment=["cu_q_ptr", "cu_k_ptr", "q_scales_ptr", "k_scales_ptr", "v_scales_ptr", "shift_ptr"],
)
def quantise(
    q_desc, k_desc, v_desc, q_out_desc, k_out_desc, v_out_desc, q_out_ptr, k_out_ptr, q_scales_ptr, k_scales_ptr, v_scales_ptr,
    shift_ptr, mean_ptr, signs_ptr, cu_q_ptr, cu_k_ptr, B, H, Hk, T, S, q_blocks, k_blocks, q_slots, k_slots,
    GROUP: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, PACKED: gl.constexpr, INTEGER: gl.constexpr,
    ROTATE: gl.constexpr, SMOOTH: gl.constexpr,
):
    # fmt: on
    """Queries, keys and values in 8 bits, with their scales."""
    tile = gl.allocate_shared_memory(q_desc.dtype, [1, 1, BLOCK, D], q_desc.layout)
    staged = gl.allocate_shared_memory(q_out_desc.dtype, [1, 1, BLOCK, D], q_out_desc.layout)
    staged_values = gl.allocate_shared_memory(v_out_desc.dtype, [1, 1, DV, BLOCK], v_out_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    fence_async_shared()
    turn = 0
    values_first = gl.program_id(0) % 2
    for role in range(4):
        if role == (1 - values_first) * 3:
            turn = _values(
                v_desc, v_out_desc, v_scales_ptr, cu_k_ptr, tile, staged_values, ready, turn, B, Hk, S, k_blocks, k_slots,
                DV, PACKED,
            )  # fmt: skip
        elif role == 1:
            turn = _rows(
                q_desc, q_out_desc, q_out_ptr, q_scales_ptr, shift_ptr, mean_ptr, signs_ptr, cu_q_ptr, tile, staged, ready, turn,
                B, H, T, q_blocks, q_slots, GROUP, D, PACKED, INTEGER, ROTATE, False, SMOOTH,
            )  # fmt: skip
        elif role == 2:
            turn = _rows(
                k_desc, k_out_desc, k_out_ptr, k_scales_ptr, shift_ptr, mean_ptr, signs_ptr, cu_k_ptr, tile, staged, ready, turn,
                B, Hk, S, k_blocks, k_slots, 1, D, PACKED, INTEGER, ROTATE, SMOOTH, False,
            )  # fmt: skip
    tma_store_wait(0)
