"""A chunk's gradients on Hopper, for heads of 64 numbers: what `gradients.py` computes in two kernels, in one.

A program goes through up to SPAN heads of a group in a chunk. Two warpgroups work on the same head side by side, so that x, G and
both states are read once:

    load     one warp: has B, C and C B^T copied in once, and x, G, S, Q, steps and sums of exponents of a head, some heads ahead
    pairs    dX, d(C B^T), and what pairs of tokens give steps and exponents
    maps     what S and Q give dB and dC, and the gradients of steps and exponents

Letters and formulas stand in `gradients.py`.
"""

from rooftile.recurrent.kernels.copies_hopper import accumulator
from rooftile.recurrent.kernels.state_space.outputs_hopper import CHUNK, Shape
from rooftile.runtime.hopper.gluon import (
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
from rooftile.runtime.hopper.pipeline import Ring, ring, wait_for_store

# columns of the states whose products are summed at once
PIECE = gl.constexpr(32)


@gluon.jit
def _load(
    of_group: Ring, columns, products, values: Ring, grads, states, backs, steps, totals,
    x_desc, g_desc, b_desc, c_desc, cb_desc, state_desc, back_desc, line_desc,
    sequence, g, h, heads, t, cell, place, head_stride, to_totals,
):  # fmt: skip
    """The role that has a chunk copied in, head by head."""
    mbarrier.expect(of_group.full_barrier(0), b_desc.block_type.nbytes + c_desc.block_type.nbytes + cb_desc.block_type.nbytes)
    tma_load(b_desc, [sequence, g, t, 0], of_group.full_barrier(0), of_group.buffer(0))
    tma_load(c_desc, [sequence, g, t, 0], of_group.full_barrier(0), columns)
    tma_load(cb_desc, [cell, g, 0, 0], of_group.full_barrier(0), products)
    both: gl.constexpr = x_desc.block_type.nbytes + state_desc.block_type.nbytes + line_desc.block_type.nbytes
    for i in range(heads):
        slot = i % values.stages
        full = values.full_barrier(i)
        values.wait_empty(i)
        mbarrier.expect(full, 2 * both)
        line = place + i * head_stride
        tma_load(line_desc, [line], full, steps.index(slot))
        tma_load(line_desc, [line + to_totals], full, totals.index(slot))
        tma_load(x_desc, [sequence, h + i, t, 0], full, values.buffer(i))
        tma_load(g_desc, [sequence, h + i, t, 0], full, grads.index(slot))
        tma_load(back_desc, [cell, h + i, 0, 0], full, backs.index(slot))
        tma_load(state_desc, [cell, h + i, 0, 0], full, states.index(slot))


@gluon.jit
def _pairs(
    of_group: Ring, products, values: Ring, grads, backs, steps, totals, passing, output, dx_desc, d_ptr, dd_ptr, d_cb_ptr,
    to_step_ptr, own_ptr, end_ptr, d_stride, sequence, h, heads, t, place, head_stride, shape: Shape,
):  # fmt: skip
    """The role of pairs of tokens (s, t)."""
    dtype: gl.constexpr = grads.dtype
    square: gl.constexpr = accumulator(CHUNK)
    factor: gl.constexpr = gl.DotOperandLayout(0, square, 2)
    down: gl.constexpr = gl.SliceLayout(1, square)
    across: gl.constexpr = gl.SliceLayout(0, square)
    n_s = gl.arange(0, CHUNK, down)
    row = gl.expand_dims(n_s, 1)
    column = gl.expand_dims(gl.arange(0, CHUNK, across), 0)
    none = gl.zeros([CHUNK, CHUNK], gl.float32, square)
    triangle = gl.convert_layout(gl.where(row > column, none + 1.0, none).to(dtype), factor)
    of_group.wait_full(0)
    b = of_group.buffer(0).reshape([CHUNK, shape.N])
    cb = products.reshape([CHUNK, CHUNK]).permute((1, 0)).load(square)
    d_cb = none
    for i in range(heads):
        slot = i % values.stages
        head = place + i * head_stride
        end = gl.load(end_ptr + head + (CHUNK - 1))
        values.wait_full(i)
        grad = grads.index(slot).reshape([CHUNK, CHUNK])
        x = values.buffer(i).reshape([CHUNK, CHUNK])
        m = warpgroup_mma(x, grad.permute((1, 0)), none, use_acc=False, is_async=True)
        back = backs.index(slot).reshape([CHUNK, shape.N]).permute((1, 0))
        dx = warpgroup_mma(b, back, none, use_acc=False, is_async=True)
        total = totals.index(slot).load(down)
        step = gl.expand_dims(steps.index(slot).load(down), 1)
        decay = gl.expand_dims(totals.index(slot).load(across), 0) - gl.expand_dims(total, 1)
        decay = gl.exp2(gl.where(row <= column, decay, float("-inf")))
        m = warpgroup_mma_wait(1, deps=(m,))
        if shape.SKIP:
            # the gradient of a head's D is the trace of X G^T; a sum over rows would make the warps meet
            gl.store(dd_ptr + i * CHUNK + n_s, gl.sum(gl.where(row == column, m, 0.0), 1))
        m = m * decay
        d_cb += m * step
        weights = cb.to(gl.float32)
        m = m * weights
        weights = (weights * decay).to(dtype)
        gl.store(to_step_ptr + head + n_s, gl.sum(m, 1))
        passing.store((m * step).to(dtype))
        fence_async_shared()
        barrier()
        passed = warpgroup_mma(triangle, passing, none, use_acc=False, is_async=True)
        dx = warpgroup_mma_wait(1, deps=(dx,))
        dx = dx * gl.expand_dims(gl.exp2(end - total), 1)
        dx = warpgroup_mma(gl.convert_layout(weights, factor), grad, dx, is_async=True)
        passed = warpgroup_mma_wait(1, deps=(passed,))
        gl.store(own_ptr + head + n_s, gl.sum(gl.where(row <= column, passed, 0.0), 1))
        dx = warpgroup_mma_wait(0, deps=(dx,))
        dx = dx * step
        if shape.SKIP:
            dx += gl.load(d_ptr + (h + i) * d_stride).to(gl.float32) * grad.load(square).to(gl.float32)
        values.release(i)
        wait_for_store()
        output.reshape([CHUNK, CHUNK]).store(dx.to(dtype))
        fence_async_shared()
        barrier()
        tma_store(dx_desc, [sequence, h + i, t, 0], output)
    gl.store(d_cb_ptr + column * CHUNK + row, d_cb)
    tma_store_wait(0)


@gluon.jit
def _added(sums, found, scale, weight, beside, layout: gl.constexpr):
    """Scales the rows of a product; returns the sums with its weighted rows, and each row's product with the row `beside` it."""
    found = found * gl.expand_dims(scale, 1)
    return sums + found * gl.expand_dims(weight, 1), gl.sum(found * beside.load(layout).to(gl.float32), 1)


@gluon.jit
def _maps(
    of_group: Ring, columns, values: Ring, grads, states, backs, steps, totals, db_ptr, dc_ptr, read_ptr, moved_ptr, through_ptr,
    end_ptr, heads, place, head_stride, shape: Shape,
):  # fmt: skip
    """The role of the states, 64 of their columns at a time: more do not fit the registers."""
    N: gl.constexpr = shape.N
    square: gl.constexpr = accumulator(CHUNK)
    piece: gl.constexpr = accumulator(PIECE)
    down: gl.constexpr = gl.SliceLayout(1, square)
    n = gl.arange(0, CHUNK, down)
    n_p = gl.arange(0, CHUNK, gl.SliceLayout(1, piece))
    none = gl.zeros([CHUNK, CHUNK], gl.float32, square)
    of_group.wait_full(0)
    b = of_group.buffer(0).reshape([CHUNK, N])
    c = columns.reshape([CHUNK, N])
    low_b = none
    low_c = none
    high_b = none
    high_c = none
    for i in range(heads):
        slot = i % values.stages
        head = place + i * head_stride
        end = gl.load(end_ptr + head + (CHUNK - 1))
        values.wait_full(i)
        grad = grads.index(slot).reshape([CHUNK, CHUNK])
        x = values.buffer(i).reshape([CHUNK, CHUNK])
        state = states.index(slot).reshape([CHUNK, N])
        back = backs.index(slot).reshape([CHUNK, N])
        found = warpgroup_mma(grad, _half(state, 0), none, use_acc=False, is_async=True)
        total = totals.index(slot).load(down)
        step = steps.index(slot).load(down)
        through = gl.zeros([CHUNK, PIECE], gl.float32, piece)
        for k in gl.static_range(N // PIECE):
            part = state.slice(k * PIECE, PIECE, 1).load(piece).to(gl.float32)
            through += part * back.slice(k * PIECE, PIECE, 1).load(piece).to(gl.float32)
        gl.store(through_ptr + head + n_p, gl.sum(through, 1) * gl.exp2(end))
        reading = gl.exp2(total)
        moving = gl.exp2(end - total)
        one = reading * 0.0 + 1.0
        found = warpgroup_mma_wait(0, deps=(found,))
        next_found = warpgroup_mma(x, _half(back, 0), none, use_acc=False, is_async=True)
        low_c, read = _added(low_c, found, reading, one, _half(c, 0), square)
        if N > CHUNK:
            found = warpgroup_mma(grad, _half(state, 1), none, use_acc=False, is_async=True)
        next_found = warpgroup_mma_wait(1 if N > CHUNK else 0, deps=(next_found,))
        low_b, moved = _added(low_b, next_found, moving, step, _half(b, 0), square)
        if N > CHUNK:
            next_found = warpgroup_mma(x, _half(back, 1), none, use_acc=False, is_async=True)
            found = warpgroup_mma_wait(1, deps=(found,))
            high_c, more = _added(high_c, found, reading, one, _half(c, 1), square)
            read += more
            next_found = warpgroup_mma_wait(0, deps=(next_found,))
            high_b, more = _added(high_b, next_found, moving, step, _half(b, 1), square)
            moved += more
        values.release(i)
        gl.store(read_ptr + head + n, read)
        gl.store(moved_ptr + head + n, moved)
    to = gl.expand_dims(n, 1) * N + gl.expand_dims(gl.arange(0, CHUNK, gl.SliceLayout(0, square)), 0)
    gl.store(db_ptr + to, low_b)
    gl.store(dc_ptr + to, low_c)
    if N > CHUNK:
        gl.store(db_ptr + CHUNK + to, high_b)
        gl.store(dc_ptr + CHUNK + to, high_c)


@gluon.jit
def _half(x, n: gl.constexpr):
    """The n-th 64 columns of x in shared memory."""
    # skip the full slice: the compiler cannot slice some layouts
    if x.shape[1] > CHUNK:
        x = x.slice(n * CHUNK, CHUNK, 1)
    return x


# fmt: off
@gluon.jit(do_not_specialize=["T", "size"])
def _chunk_gradients(
    x_desc, b_desc, c_desc, g_desc, dx_desc, state_desc, back_desc, cb_desc, line_desc,
    step_ptr, d_ptr, dd_ptr, d_cb_ptr, db_ptr, dc_ptr, to_step_ptr, own_ptr, read_ptr, moved_ptr, through_ptr,
    d_stride, T, size, slots,
    HEADS: gl.constexpr, SHARE: gl.constexpr, SPAN: gl.constexpr, N: gl.constexpr, SKIP: gl.constexpr, STAGES: gl.constexpr,
    COMPUTE_REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr,
):
    # fmt: on
    """Writes what `_input_gradients` and `_map_gradients` write, with one part of P and N.

    Of dD there is a number for each token, and of what goes through a chunk one for each row of the states: 64 of each.
    """
    dtype: gl.constexpr = x_desc.dtype
    groups: gl.constexpr = HEADS // SHARE
    of_group = ring(gl.allocate_shared_memory(dtype, [1, 1, 1, CHUNK, N], b_desc.layout), 1, 2)
    columns = gl.allocate_shared_memory(dtype, [1, 1, CHUNK, N], c_desc.layout)
    products = gl.allocate_shared_memory(dtype, [1, 1, CHUNK, CHUNK], cb_desc.layout)
    values = ring(gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, CHUNK], x_desc.layout), STAGES, 2)
    grads = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, CHUNK], g_desc.layout)
    states = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, N], state_desc.layout)
    backs = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, N], back_desc.layout)
    steps = gl.allocate_shared_memory(gl.float32, [STAGES, CHUNK], line_desc.layout)
    totals = gl.allocate_shared_memory(gl.float32, [STAGES, CHUNK], line_desc.layout)
    passing = gl.allocate_shared_memory(dtype, [CHUNK, CHUNK], gl.NVMMASharedLayout.get_default_for([CHUNK, CHUNK], dtype))
    output = gl.allocate_shared_memory(dtype, [1, 1, CHUNK, CHUNK], dx_desc.layout)
    fence_async_shared()
    cell = gl.program_id(0)
    g = gl.program_id(1)
    span = gl.program_id(2)
    chunks = size // CHUNK
    slot = cell // chunks
    segments = (T + size - 1) // size
    sequence = slot // segments
    t = slot % segments * size + cell % chunks * CHUNK
    # chunks past the end of a sequence have no heads
    heads = gl.where(t < T, gl.minimum(SPAN, SHARE - span * SPAN), 0)
    h = g * SHARE + span * SPAN
    head_stride = slots * size
    place = (h * slots + slot) * size + cell % chunks * CHUNK
    to_totals = HEADS * slots * size
    own = (span * (slots * chunks) + cell).to(gl.int64) * groups + g
    load = (
        of_group, columns, products, values, grads, states, backs, steps, totals, x_desc, g_desc, b_desc, c_desc, cb_desc,
        state_desc, back_desc, line_desc, sequence, g, h, heads, t, cell, place, head_stride, to_totals,
    )  # fmt: skip
    shape = Shape(N, SKIP)
    pairs = (
        of_group, products, values, grads, backs, steps, totals, passing, output, dx_desc, d_ptr, dd_ptr + (cell * HEADS + h) * CHUNK,
        d_cb_ptr + own * (CHUNK * CHUNK), to_step_ptr, own_ptr, step_ptr + to_totals, d_stride, sequence, h, heads, t, place,
        head_stride, shape,
    )  # fmt: skip
    maps = (
        of_group, columns, values, grads, states, backs, steps, totals, db_ptr + own * (CHUNK * N), dc_ptr + own * (CHUNK * N),
        read_ptr, moved_ptr, through_ptr, step_ptr + to_totals, heads, place, head_stride, shape,
    )  # fmt: skip
    gl.warp_specialize([(_maps, maps), (_pairs, pairs), (_load, load)], [4, 1], [COMPUTE_REGISTERS, LOAD_REGISTERS])
