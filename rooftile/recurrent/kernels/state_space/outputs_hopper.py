"""The outputs on Hopper, for heads of 64 numbers: two heads of a group in a program, and what they share copied in once.

    load    one warp: has x of both heads, B, C, C B^T, steps and sums of exponents of a chunk copied in, some chunks ahead
    walk    a warpgroup for each head: its state (P, N) stays in registers, as an accumulator and as a factor

With the names of `outputs.py`, all is transposed, so that the state need not go through shared memory:

    W^T  = (C B^T)^T exp(e_t - e_s) d_s        in shared memory
    Y^T  = exp(e_t) S C^T + D X^T + X^T W^T
    S   <- exp(e_last) S + (d_s exp(e_last - e_s) X)^T B

One head's exponentials run under the other one's products.

Dao and Gu, arXiv:2405.21060.
"""

from rooftile.recurrent.kernels.copies_hopper import accumulator
from rooftile.runtime.hopper.gluon import (
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
from rooftile.runtime.hopper.pipeline import Ring, ring, wait_for_store

# tokens of a chunk, and numbers of a head
CHUNK = gl.constexpr(64)


@aggregate
class Shape:
    """N numbers of a state, and whether there is D."""

    N: gl.constexpr
    SKIP: gl.constexpr


@gluon.jit
def _load(
    values: Ring, rows, columns, products, steps, totals, x_desc, b_desc, c_desc, cb_desc, line_desc,
    sequence, h, g, start, chunks, cell, place, head_stride, to_totals,
):  # fmt: skip
    """The role that has chunks copied in."""
    both: gl.constexpr = x_desc.block_type.nbytes + 2 * line_desc.block_type.nbytes
    of_group: gl.constexpr = b_desc.block_type.nbytes + c_desc.block_type.nbytes + cb_desc.block_type.nbytes
    for i in range(chunks):
        slot = i % values.stages
        t = start + i * CHUNK
        full = values.full_barrier(i)
        values.wait_empty(i)
        mbarrier.expect(full, 2 * both + of_group)
        tma_load(cb_desc, [cell + i, g, 0, 0], full, products.index(slot))
        for k in gl.static_range(2):
            line = place + k * head_stride + i * CHUNK
            tma_load(line_desc, [line], full, steps.index(2 * slot + k))
            tma_load(line_desc, [line + to_totals], full, totals.index(2 * slot + k))
            tma_load(x_desc, [sequence, h + k, t, 0], full, values.buffers.index(2 * slot + k))
        tma_load(c_desc, [sequence, g, t, 0], full, columns.index(slot))
        tma_load(b_desc, [sequence, g, t, 0], full, rows.index(slot))


@gluon.jit
def _walk(
    K: gl.constexpr, values: Ring, rows, columns, products, steps, totals, weights, outputs, y_desc, start_ptr, last_ptr, d_ptr,
    end_ptr, d_strides, first_state, last_state, sequence, h, start, chunks, place, head_stride, is_last, shape: Shape,
):  # fmt: skip
    """A warpgroup's role: head h + K."""
    N: gl.constexpr = shape.N
    dtype: gl.constexpr = values.buffers.dtype
    square: gl.constexpr = accumulator(CHUNK)
    wide: gl.constexpr = accumulator(N)
    down: gl.constexpr = gl.SliceLayout(1, square)
    across: gl.constexpr = gl.SliceLayout(0, square)
    n_s = gl.arange(0, CHUNK, down)
    n_t = gl.arange(0, CHUNK, across)
    seen = gl.expand_dims(n_s, 1) <= gl.expand_dims(n_t, 0)
    of_state = gl.expand_dims(gl.arange(0, CHUNK, gl.SliceLayout(1, wide)), 1) * N
    of_state += gl.expand_dims(gl.arange(0, N, gl.SliceLayout(0, wide)), 0)
    own = K * CHUNK * N
    state = gl.load(start_ptr + first_state + own + of_state)
    if shape.SKIP:
        skip = gl.expand_dims(gl.load(d_ptr + (h + K) * d_strides[0] + n_s * d_strides[1]).to(gl.float32), 1)
    weight = weights.index(K)
    output = outputs.index(K)
    end_ptr += place + K * head_stride + (CHUNK - 1)
    for i in range(chunks):
        slot = i % values.stages
        end = gl.load(end_ptr + i * CHUNK)
        values.wait_full(i)
        total = totals.index(2 * slot + K).load(across)
        step = steps.index(2 * slot + K).load(across)
        decay = gl.expand_dims(total, 0) - gl.expand_dims(totals.index(2 * slot + K).load(down), 1)
        decay = gl.exp2(gl.where(seen, decay, float("-inf")))
        w = products.index(slot).reshape([CHUNK, CHUNK]).permute((1, 0)).load(square).to(gl.float32)
        w = w * decay * gl.expand_dims(steps.index(2 * slot + K).load(down), 1)
        weight.store(w.to(dtype))
        fence_async_shared()
        barrier()
        factor = gl.convert_layout(state.to(dtype), gl.DotOperandLayout(0, square, 2))
        none = gl.zeros([CHUNK, CHUNK], gl.float32, square)
        c = columns.index(slot).reshape([CHUNK, N]).permute((1, 0))
        y = warpgroup_mma(factor, c, none, use_acc=False, is_async=True)
        x = values.buffers.index(2 * slot + K).reshape([CHUNK, CHUNK]).permute((1, 0)).load(square)
        moved = (x.to(gl.float32) * gl.expand_dims(step * gl.exp2(end - total), 0)).to(dtype)
        y = warpgroup_mma_wait(0, deps=(y,))
        y = y * gl.expand_dims(gl.exp2(total), 0)
        if shape.SKIP:
            y += skip * x.to(gl.float32)
        y = warpgroup_mma(gl.convert_layout(x, gl.DotOperandLayout(0, square, 2)), weight, y, is_async=True)
        state = state * gl.exp2(end)
        b = rows.index(slot).reshape([CHUNK, N])
        state = warpgroup_mma(gl.convert_layout(moved, gl.DotOperandLayout(0, wide, 2)), b, state, is_async=True)
        y = warpgroup_mma_wait(1, deps=(y,))
        wait_for_store()
        output.reshape([CHUNK, CHUNK]).permute((1, 0)).store(y.to(dtype))
        fence_async_shared()
        barrier()
        tma_store(y_desc, [sequence, h + K, start + i * CHUNK, 0], output)
        state = warpgroup_mma_wait(0, deps=(state,))
        values.release(i)
    if is_last:
        gl.store(last_ptr + last_state + own + of_state, state)
    tma_store_wait(0)


# fmt: off
@gluon.jit(do_not_specialize=["T", "size"])
def _outputs_of_pairs(
    x_desc, b_desc, c_desc, y_desc, cb_desc, line_desc, start_ptr, last_ptr, d_ptr, step_ptr, d_strides, T, size, slots,
    HEADS: gl.constexpr, SHARE: gl.constexpr, N: gl.constexpr, SKIP: gl.constexpr, WHOLE: gl.constexpr, STAGES: gl.constexpr,
    COMPUTE_REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr,
):
    # fmt: on
    """Writes y of a segment of two heads, and their last states where a sequence ends. WHOLE: a segment is a sequence."""
    dtype: gl.constexpr = x_desc.dtype
    values = ring(gl.allocate_shared_memory(dtype, [2 * STAGES, 1, 1, CHUNK, CHUNK], x_desc.layout), STAGES, 2)
    rows = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, N], b_desc.layout)
    columns = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, N], c_desc.layout)
    products = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, CHUNK], cb_desc.layout)
    steps = gl.allocate_shared_memory(gl.float32, [2 * STAGES, CHUNK], line_desc.layout)
    totals = gl.allocate_shared_memory(gl.float32, [2 * STAGES, CHUNK], line_desc.layout)
    weights = gl.allocate_shared_memory(dtype, [2, CHUNK, CHUNK], gl.NVMMASharedLayout.get_default_for([CHUNK, CHUNK], dtype))
    outputs = gl.allocate_shared_memory(dtype, [2, 1, 1, CHUNK, CHUNK], y_desc.layout)
    fence_async_shared()
    n = gl.program_id(0)
    h = n % (HEADS // 2) * 2
    slot = n // (HEADS // 2)
    segments = (T + size - 1) // size
    sequence = slot // segments
    start = slot % segments * size
    chunks = (gl.minimum(size, T - start) + (CHUNK - 1)) // CHUNK
    cell = slot * (size // CHUNK)
    head_stride = slots * size
    place = (h * slots + slot) * size
    origin = sequence if WHOLE else slot
    first_state = (origin.to(gl.int64) * HEADS + h) * (CHUNK * N)
    last_state = (sequence.to(gl.int64) * HEADS + h) * (CHUNK * N)
    to_totals = HEADS * slots * size
    load = (
        values, rows, columns, products, steps, totals, x_desc, b_desc, c_desc, cb_desc, line_desc, sequence, h, h // SHARE, start,
        chunks, cell, place, head_stride, to_totals,
    )  # fmt: skip
    args = (
        values, rows, columns, products, steps, totals, weights, outputs, y_desc, start_ptr, last_ptr, d_ptr,
        step_ptr + to_totals, d_strides, first_state, last_state, sequence, h, start, chunks, place, head_stride,
        start + size >= T, Shape(N, SKIP),
    )  # fmt: skip
    gl.warp_specialize(
        [(_walk, (0,) + args), (_walk, (1,) + args), (_load, load)], [4, 1], [COMPUTE_REGISTERS, LOAD_REGISTERS]
    )  # fmt: skip
