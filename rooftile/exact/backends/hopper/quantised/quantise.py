"""Queries, keys and values in 8 bits: the integers of `rooftile.numerics.recipe`, bit for bit.

Each is read once, and some of the keys before, for their mean.

    mean_keys   the mean of each head's keys, or of some, summed in fp64, which comes out the same in any order
    quantise    queries and keys: less the mean key, times signs, through the butterfly of the Hadamard transform, scaled and
                rounded; values: scaled, rounded, transposed, and the keys of each 16 in the order in which `flash_fwd_8bit` holds
                weights

The programs of `quantise` walk blocks of 128 positions of a head; the next is copied in as soon as one is in registers. Half of
them begin with the values: rows are bound by instructions, values by memory. So they may begin while `mean_keys` runs, too.

A row lies in one thread by 64 columns: the butterfly's first six steps stay there, and what is left goes from lane to lane.
"""

from rooftile.exact.backends.hopper.device.scheduler import PADDED, packed_tile
from rooftile.exact.backends.hopper.quantised.row_arithmetic import (
    BLOCK,
    OWN,
    dot_with_mean,
    larger_or_nan,
    largest_size,
    load_row,
    rotate,
    round_to_int8,
)
from rooftile.numerics.recipe import MEAN_OF
from rooftile.runtime.hopper import ptx
from rooftile.runtime.hopper.gluon import barrier, fence_async_shared, gl, gluon, mbarrier, tma_load, tma_store, tma_store_wait

# keys in the sample for the mean, as in `rooftile.numerics.recipe`; a shorter sequence is averaged whole
SAMPLE = gl.constexpr(MEAN_OF)
# columns per program of `mean_keys`: a sector of memory
COLUMNS = gl.constexpr(16)
# layout of a row in shared memory: neighbours of a warp read different banks
LINE = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
# below it a scale has no inverse
LEAST = gl.constexpr(2.0**-126)
LARGEST_FP8 = gl.constexpr(448.0)
LARGEST_INT8 = gl.constexpr(127.0)


@gluon.jit
def _block_of(slot, cu_ptr, B, T, blocks, PACKED: gl.constexpr):
    """Returns a slot's batch, sequence, first row, first position in the sequence, sequence length and block number."""
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
def _grid(verb: gl.constexpr):
    """`launch_dependents`: the next kernel may begin, as far as it needs nothing of this one; it does `wait` before it does."""
    gl.inline_asm_elementwise(ptx.dependent_launch_text(verb), "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _next(slot, h, H):
    """The slot and head that come after these for a program; programs take turns."""
    programs = gl.num_programs(0)
    h += programs % H
    return slot + programs // H + (h >= H).to(gl.int32), gl.where(h >= H, h - H, h)


@gluon.jit
def _fetch(desc, tile, ready, b, h, row):
    """Has a block copied in; all have read what was there."""
    mbarrier.expect(ready, desc.block_type.nbytes)
    tma_load(desc, [b, h, row, 0], ready, tile)


@gluon.jit
def _fetch_first(walk, tile, ready, B, PACKED: gl.constexpr):
    """Has the first block of a walk copied in, if it has any."""
    desc, cu_ptr, n, H, T, blocks, slots = walk
    if n // H < slots:
        b, _, start, t, _, _ = _block_of(n // H, cu_ptr, B, T, blocks, PACKED)
        _fetch(desc, tile, ready, b, n % H, start + t)


@gluon.constexpr_function
def _line(warps):
    """Returns the layout of a row that is spread over all threads."""
    return gl.BlockedLayout([1], [32], [warps], [0])


@gluon.jit
def _keep(line, x):
    """Puts a row (D,) into shared memory."""
    line.store(x.reshape([line.shape[0], line.shape[1]]))


@gluon.jit
def _finite(x):
    """16-bit numbers in fp32, with a NaN for everything that is not finite."""
    words: gl.constexpr = ptx.finite_text("bf16" if x.dtype == gl.bfloat16 else "f16")
    return gl.inline_asm_elementwise(words, "=f,=f,r", [x], dtype=gl.float32, is_pure=True, pack=2)


# fmt: off
@gluon.jit(do_not_specialize_on_alignment=["cu_ptr"])
def mean_keys(k_desc, k_ptr, mean_ptr, cu_ptr, D: gl.constexpr, PACKED: gl.constexpr):
    # fmt: on
    """The mean (B, H, D) of some of each sequence's keys (see `rooftile.numerics.recipe`); what is not finite counts as zero.

    A program takes a head's next COLUMNS columns.
    """
    _grid("launch_dependents")
    ROWS: gl.constexpr = 128 * gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [gl.num_warps(), 1], [1, 0])
    column = gl.program_id(0) % (D // COLUMNS) * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    H = k_desc.shape[1].to(gl.int32)
    line = gl.program_id(0) // (D // COLUMNS)
    b = line // H
    # the copy engine asks as much of strides, and so a load is of 16 bytes
    from_batch = k_desc.strides[0] // 8 * 8
    from_head = k_desc.strides[1] // 8 * 8
    from_key = k_desc.strides[2] // 8 * 8
    if PACKED:
        start = gl.load(cu_ptr + b)
        length = (gl.load(cu_ptr + b + 1) - start).to(gl.int32)
        first = start.to(gl.int64) * from_key
    else:
        length = k_desc.shape[2].to(gl.int32)
        first = b.to(gl.int64) * from_batch
    first += (line % H).to(gl.int64) * from_head
    step = gl.maximum(length // SAMPLE, 1)
    count = (length + step - 1) // step
    sums = gl.zeros([COLUMNS], gl.float64, gl.SliceLayout(0, layout))
    for n in range(0, count, ROWS):
        row = n + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        lines = gl.expand_dims((row * step).to(gl.int64) * from_key, 1) + gl.expand_dims(column, 0)
        x = _finite(gl.load(k_ptr + first + lines, mask=gl.expand_dims(row < count, 1), other=0.0))
        sums += gl.sum(gl.where(x == x, x, 0.0).to(gl.float64), 0)
    # divided as fp64, and rounded once
    mean = (sums / gl.maximum(count, 1).to(gl.float64)).to(gl.float32)
    gl.store(mean_ptr + line.to(gl.int64) * D + column, mean)


@gluon.jit
def _rows(
    x_desc, out_desc, out_ptr, scales_ptr, shift_ptr, mean_ptr, cu_ptr, tile, staged, signs, mean, ready, turn,
    n, fetched, more, after, B, H, T, blocks, slots, GROUP: gl.constexpr, D: gl.constexpr, PACKED: gl.constexpr,
    INTEGER: gl.constexpr, ROTATE: gl.constexpr, SMOOTH: gl.constexpr, SHIFT: gl.constexpr,
):  # fmt: skip
    """The blocks of queries or keys. SMOOTH: keys less their mean. SHIFT: queries times the mean key, for lse.

    The first is the program's n-th, and may be `fetched`. If there is `more` to do `after`, its first block is copied in early.
    """
    LANES: gl.constexpr = D // OWN
    layout: gl.constexpr = gl.BlockedLayout([1, OWN], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0])
    e = gl.arange(0, D, _line(gl.num_warps()))
    mean_next = gl.zeros([D], gl.float32, _line(gl.num_warps()))
    slot = n // H
    h_next = n % H
    b_next = slot * 0
    i_b = b_next
    start = b_next
    t = b_next
    length = b_next
    part = b_next
    if slot < slots:
        b_next, i_b, start, t, length, part = _block_of(slot, cu_ptr, B, T, blocks, PACKED)
        if not fetched:
            _fetch(x_desc, tile, ready, b_next, h_next, start + t)
        if SMOOTH or SHIFT:
            mean_next = gl.load(mean_ptr + (i_b * (H // GROUP) + h_next // GROUP).to(gl.int64) * D + e)
    elif more:
        _fetch_first(after, tile, ready, B, PACKED)
    while slot < slots:
        b = b_next
        h = h_next
        first = start + t
        left = length - t
        line = part * H + h
        mbarrier.wait(ready, turn & 1)
        x = _finite(tile.reshape([BLOCK, D]).load(layout))
        if SMOOTH or SHIFT:
            _keep(mean, mean_next)
        # all have read this block, and what they staged before is on its way
        tma_store_wait(0)
        barrier()
        turn += 1
        slot, h_next = _next(slot, h, H)
        if slot < slots:
            b_next, i_b, start, t, length, part = _block_of(slot, cu_ptr, B, T, blocks, PACKED)
            _fetch(x_desc, tile, ready, b_next, h_next, start + t)
            if SMOOTH or SHIFT:
                mean_next = gl.load(mean_ptr + (i_b * (H // GROUP) + h_next // GROUP).to(gl.int64) * D + e)
        elif more:
            _fetch_first(after, tile, ready, B, PACKED)
        row = gl.arange(0, BLOCK, gl.SliceLayout(1, layout))
        column = gl.arange(0, D, gl.SliceLayout(0, layout))
        there = row < left
        # packed: one sequence, of all rows
        place = (b.to(gl.int64) * T + first + row) * H + h
        if SMOOTH or SHIFT:
            mean_key = load_row(mean, layout)
            if SHIFT:
                gl.store(shift_ptr + place, dot_with_mean(x, mean_key), mask=there)
            else:
                x = x - mean_key
        if ROTATE:
            x = rotate(x, column, signs, D)
        # a row with a NaN takes no part in the scale: whatever its numbers become, all that meets it is NaN
        largest = gl.reduce(gl.abs(x), 1, larger_or_nan)
        is_lost = largest != largest
        size = gl.max(gl.where(is_lost | (row >= left), 0.0, largest), 0)
        LARGEST: gl.constexpr = LARGEST_INT8 if INTEGER else LARGEST_FP8
        size = gl.where(size > 0.0, gl.maximum(size, LARGEST * LEAST), LARGEST)
        scale = gl.div_rn(size, LARGEST)
        if INTEGER:
            # nothing is larger than the size, so nothing rounds to more than 127
            codes = round_to_int8(x * gl.div_rn(1.0, scale))
            # negative: some code stands for a NaN
            scale = gl.where(gl.max((is_lost & there).to(gl.int32), 0) != 0, -scale, scale)
        else:
            codes = (x * gl.div_rn(LARGEST, size)).to(gl.float8e4nv)
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
    v_desc, out_desc, scales_ptr, cu_ptr, tile, staged, ready, turn, n, fetched, more, after, B, H, S, blocks, slots,
    DV: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """The blocks of values, transposed: (DV, 128), their keys by 16 in the order of a matrix instruction's left side.

    n and what follows are as in `_rows`.
    """
    # from each 16 keys a lane gets 2l, 2l + 1, 2l + 8 and 2l + 9, as it holds weights
    layout: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1], [16, 8]), 2)
    slot = n // H
    h_next = n % H
    b_next = slot * 0
    start = b_next
    t = b_next
    length = b_next
    part = b_next
    if slot < slots:
        b_next, _, start, t, length, part = _block_of(slot, cu_ptr, B, S, blocks, PACKED)
        if not fetched:
            _fetch(v_desc, tile, ready, b_next, h_next, start + t)
    elif more:
        _fetch_first(after, tile, ready, B, PACKED)
    while slot < slots:
        b = b_next
        h = h_next
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
        slot, h_next = _next(slot, h, H)
        if slot < slots:
            b_next, _, start, t, length, part = _block_of(slot, cu_ptr, B, S, blocks, PACKED)
            _fetch(v_desc, tile, ready, b_next, h_next, start + t)
        elif more:
            _fetch_first(after, tile, ready, B, PACKED)
        if PACKED:
            key = gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
            x = gl.where(gl.expand_dims(key < left, 0), x, 0.0)
        size = largest_size(x)
        size = gl.where(size > 0.0, gl.maximum(size, LARGEST_FP8 * LEAST), LARGEST_FP8)
        y = x * gl.div_rn(LARGEST_FP8, size)
        # neighbours of every eight become quads of every 16 (see `flash_fwd_8bit`)
        y = y.reshape([DV, BLOCK // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([DV, BLOCK]).to(gl.float8e4nv)
        staged.reshape([DV, BLOCK]).store(y)
        fence_async_shared()
        barrier()
        scale = gl.div_rn(size, LARGEST_FP8)
        if PACKED:
            # a slot past its sequence's end belongs to no part
            if left > 0:
                tma_store(out_desc, [b, h, 0, first], staged)
            gl.store(scales_ptr + line, scale, mask=left > 0)
        else:
            tma_store(out_desc, [b, h, 0, first], staged)
            gl.store(scales_ptr + line, scale)
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
    signs = gl.allocate_shared_memory(gl.float32, [D // OWN, OWN], LINE)
    mean = gl.allocate_shared_memory(gl.float32, [D // OWN, OWN], LINE)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    fence_async_shared()
    if ROTATE:
        _keep(signs, gl.load(signs_ptr + gl.arange(0, D, _line(gl.num_warps()))))
    turn = 0
    values_first = gl.program_id(0) % 2 == 1
    # no program gets the longest of the three walks every time
    n_q = gl.program_id(0)
    n_k = (n_q + gl.num_programs(0) // 3) % gl.num_programs(0)
    n_v = (n_k + gl.num_programs(0) // 3) % gl.num_programs(0)
    for role in range(4):
        if role == gl.where(values_first, 0, 3):
            turn = _values(
                v_desc, v_out_desc, v_scales_ptr, cu_k_ptr, tile, staged_values, ready, turn,
                n_v, not values_first, values_first, (q_desc, cu_q_ptr, n_q, H, T, q_blocks, q_slots),
                B, Hk, S, k_blocks, k_slots, DV, PACKED,
            )  # fmt: skip
        elif role == 1:
            if SMOOTH:
                _grid("wait")
                barrier()
            turn = _rows(
                q_desc, q_out_desc, q_out_ptr, q_scales_ptr, shift_ptr, mean_ptr, cu_q_ptr, tile, staged, signs, mean, ready,
                turn, n_q, values_first, True, (k_desc, cu_k_ptr, n_k, Hk, S, k_blocks, k_slots),
                B, H, T, q_blocks, q_slots, GROUP, D, PACKED, INTEGER, ROTATE, False, SMOOTH,
            )  # fmt: skip
        elif role == 2:
            turn = _rows(
                k_desc, k_out_desc, k_out_ptr, k_scales_ptr, shift_ptr, mean_ptr, cu_k_ptr, tile, staged, signs, mean, ready,
                turn, n_k, True, not values_first, (v_desc, cu_k_ptr, n_v, Hk, S, k_blocks, k_slots),
                B, Hk, S, k_blocks, k_slots, 1, D, PACKED, INTEGER, ROTATE, SMOOTH, False,
            )  # fmt: skip
    tma_store_wait(0)
