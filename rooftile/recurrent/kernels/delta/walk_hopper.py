"""The walk from chunk to chunk on Hopper, for heads whose values are cut into 64 columns.

    load    one warp: has Q, K, V, X, P and what multiplies the tokens of a chunk copied in, some chunks ahead
    walk    a warpgroup for each 64 columns: its state (columns, D) stays in registers, as an accumulator and as a factor

With the letters of `chunks.py`, all is transposed, so that neither the state nor V' goes through shared memory:

    R^T  = beta (V^T - exp(G) S^T K^T)
    V'^T = R^T X^T
    Y^T  = scale exp(G) S^T Q^T + V'^T P^T
    S^T <- exp(G_last) S^T + (exp(G_last - G) V'^T) K

The outputs' products run under what the walk waits for, and a chunk's outputs are written under the next one's first product. Where
a backward needs them, V' and the states take the place of Y. A walk may also leave the last state alone.

Yang, Kautz and Hatamizadeh, arXiv:2412.06464.
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

# tokens of a chunk, and columns of values of a warpgroup
CHUNK = gl.constexpr(64)
# lines of numbers of a chunk: beta, recall, left and reach lie behind two others
LINES = gl.constexpr(4)
FIRST_LINE = gl.constexpr(2)


@aggregate
class Shape:
    """Numbers of a key and of a value, and whether outputs are written, or V' and states (back: dR and their gradients)."""

    D: gl.constexpr
    DV: gl.constexpr
    OUTPUTS: gl.constexpr
    KEEPS: gl.constexpr
    WALKERS: gl.constexpr


@aggregate
class Tiles:
    """Tiles in shared memory beside the keys, which are the ring's own: of as many chunks as the ring has stages."""

    queries: gl.shared_memory_descriptor
    values: gl.shared_memory_descriptor
    systems: gl.shared_memory_descriptor
    pairs: gl.shared_memory_descriptor
    lines: gl.shared_memory_descriptor


@gluon.jit
def _load(
    keys: Ring, tiles: Tiles, q_desc, k_desc, v_desc, x_desc, p_desc, line_desc,
    sequence, h, g, column, slot, chunks, line, line_step, plane, shape: Shape, BACK: gl.constexpr = False,
):  # fmt: skip
    """The role that has chunks copied in; back from the last one with the outputs' gradients for values."""
    needed: gl.constexpr = (
        k_desc.block_type.nbytes + x_desc.block_type.nbytes + shape.WALKERS * v_desc.block_type.nbytes
        + LINES * line_desc.block_type.nbytes
    )  # fmt: skip
    of_outputs: gl.constexpr = q_desc.block_type.nbytes + p_desc.block_type.nbytes
    for i in range(chunks):
        stage = i % keys.stages
        chunk = chunks - 1 - i if BACK else i
        t = chunk * CHUNK
        full = keys.full_barrier(i)
        keys.wait_empty(i)
        mbarrier.expect(full, needed + of_outputs if shape.OUTPUTS else needed)
        tma_load(k_desc, [sequence, g, t, 0], full, keys.buffer(i))
        for n in gl.static_range(LINES):
            tma_load(line_desc, [line + chunk * line_step + n * plane], full, tiles.lines.index(LINES * stage + n))
        for n in gl.static_range(shape.WALKERS):
            tma_load(v_desc, [sequence, h, t, column + n * CHUNK], full, tiles.values.index(shape.WALKERS * stage + n))
        tma_load(x_desc, [slot + chunk, h, 0, 0], full, tiles.systems.index(stage))
        if shape.OUTPUTS:
            tma_load(q_desc, [sequence, g, t, 0], full, tiles.queries.index(stage))
            tma_load(p_desc, [slot + chunk, h, 0, 0], full, tiles.pairs.index(stage))


@gluon.jit
def _store(y, output, desc, sequence, h, t, column):
    """Has a tile, of which y is the transpose, copied out."""
    wait_for_store()
    output.reshape([CHUNK, CHUNK]).permute((1, 0)).store(y)
    fence_async_shared()
    barrier()
    tma_store(desc, [sequence, h, t, column], output)


@gluon.jit
def _walk(
    K: gl.constexpr, keys: Ring, tiles: Tiles, rows, states, row_desc, state_desc, state_ptr, last_ptr, end_ptr, end_step,
    sequence, h, column, slot, chunks, shape: Shape,
):  # fmt: skip
    """A warpgroup's role: columns from `column` + 64 K on."""
    D: gl.constexpr = shape.D
    dtype: gl.constexpr = keys.buffers.dtype
    square: gl.constexpr = accumulator(CHUNK)
    wide: gl.constexpr = accumulator(D)
    factor: gl.constexpr = gl.DotOperandLayout(0, square, 2)
    across: gl.constexpr = gl.SliceLayout(0, square)
    place = gl.expand_dims(gl.arange(0, CHUNK, gl.SliceLayout(1, wide)), 1)
    place += gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, wide)), 0) * shape.DV + K * CHUNK
    state = gl.load(state_ptr + place)
    none = gl.zeros([CHUNK, CHUNK], gl.float32, square)
    output = rows.index(K)
    late = none.to(dtype)
    for i in range(chunks):
        stage = i % keys.stages
        end = gl.load(end_ptr + i * end_step)
        before = state.to(dtype)
        held = gl.convert_layout(before, factor)
        keys.wait_full(i)
        key = keys.buffer(i).reshape([CHUNK, D])
        new = warpgroup_mma(held, key.permute((1, 0)), none, use_acc=False, is_async=True)
        if shape.OUTPUTS:
            # the outputs of the chunk before, under the product
            if i > 0:
                _store(late, output, row_desc, sequence, h, (i - 1) * CHUNK, column + K * CHUNK)
        elif shape.KEEPS:
            # waits for what the chunk before has written, too
            wait_for_store()
            states.index(K).reshape([D, CHUNK]).permute((1, 0)).store(before)
            fence_async_shared()
            barrier()
            tma_store(state_desc, [slot + i, h, 0, column + K * CHUNK], states.index(K))
        beta = gl.expand_dims(tiles.lines.index(LINES * stage).load(across), 0)
        recall = gl.expand_dims(tiles.lines.index(LINES * stage + 1).load(across), 0)
        v = tiles.values.index(shape.WALKERS * stage + K).reshape([CHUNK, CHUNK]).permute((1, 0)).load(square)
        new = warpgroup_mma_wait(0, deps=(new,))
        rest = ((v.to(gl.float32) - new * recall) * beta).to(dtype)
        system = tiles.systems.index(stage).reshape([CHUNK, CHUNK]).permute((1, 0))
        new = warpgroup_mma(gl.convert_layout(rest, factor), system, none, use_acc=False, is_async=True)
        y = none
        if shape.OUTPUTS:
            query = tiles.queries.index(stage).reshape([CHUNK, D])
            y = warpgroup_mma(held, query.permute((1, 0)), none, use_acc=False, is_async=True)
        left = gl.expand_dims(tiles.lines.index(LINES * stage + 2).load(across), 0)
        state = state * end
        new = warpgroup_mma_wait(1 if shape.OUTPUTS else 0, deps=(new,))
        moved = gl.convert_layout((new * left).to(dtype), gl.DotOperandLayout(0, wide, 2))
        state = warpgroup_mma(moved, key, state, is_async=True)
        if shape.OUTPUTS:
            y = warpgroup_mma_wait(1, deps=(y,))
            y = y * gl.expand_dims(tiles.lines.index(LINES * stage + 3).load(across), 0)
            pairs = tiles.pairs.index(stage).reshape([CHUNK, CHUNK]).permute((1, 0))
            y = warpgroup_mma(gl.convert_layout(new.to(dtype), factor), pairs, y, is_async=True)
            y = warpgroup_mma_wait(0, deps=(y,))
            late = y.to(dtype)
        elif shape.KEEPS:
            output.reshape([CHUNK, CHUNK]).permute((1, 0)).store(new.to(dtype))
            fence_async_shared()
            barrier()
            tma_store(row_desc, [sequence, h, i * CHUNK, column + K * CHUNK], output)
        state = warpgroup_mma_wait(0, deps=(state,))
        keys.release(i)
    if shape.OUTPUTS:
        _store(late, output, row_desc, sequence, h, (chunks - 1) * CHUNK, column + K * CHUNK)
    gl.store(last_ptr + place, state)
    tma_store_wait(0)


# fmt: off
@gluon.jit(do_not_specialize=["T", "slots"])
def _walk_columns(
    q_desc, k_desc, v_desc, x_desc, p_desc, row_desc, state_desc, line_desc, state_ptr, last_ptr, end_ptr, T, slots,
    HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, OUTPUTS: gl.constexpr, KEEPS: gl.constexpr,
    WALKERS: gl.constexpr, STAGES: gl.constexpr, COMPUTE_REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr,
):
    # fmt: on
    """Writes the last state, and outputs, or V' and the state before each chunk, for 64 columns a warpgroup."""
    dtype: gl.constexpr = k_desc.dtype
    keys = ring(gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, D], k_desc.layout), STAGES, WALKERS)
    values = gl.allocate_shared_memory(dtype, [WALKERS * STAGES, 1, 1, CHUNK, CHUNK], v_desc.layout)
    systems = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, CHUNK], x_desc.layout)
    lines = gl.allocate_shared_memory(gl.float32, [LINES * STAGES, CHUNK], line_desc.layout)
    rows = gl.allocate_shared_memory(dtype, [WALKERS, 1, 1, CHUNK, CHUNK], row_desc.layout)
    if OUTPUTS:
        queries = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, D], q_desc.layout)
        pairs = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, CHUNK], p_desc.layout)
    else:
        queries = keys.buffers
        pairs = systems
    states = rows
    if KEEPS:
        states = gl.allocate_shared_memory(dtype, [WALKERS, 1, 1, D, CHUNK], state_desc.layout)
    tiles = Tiles(queries, values, systems, pairs, lines)
    fence_async_shared()
    column = gl.program_id(0) * (WALKERS * CHUNK)
    h = gl.program_id(1)
    sequence = gl.program_id(2)
    chunks = (T + (CHUNK - 1)) // CHUNK
    slot = sequence * chunks
    cell = slot * HEADS + h
    own = (sequence.to(gl.int64) * HEADS + h) * (D * DV) + column
    plane = slots * (HEADS * CHUNK)
    shape = Shape(D, DV, OUTPUTS, KEEPS, WALKERS)
    load = (
        keys, tiles, q_desc, k_desc, v_desc, x_desc, p_desc, line_desc, sequence, h, h // GROUP, column, slot, chunks,
        cell * CHUNK + FIRST_LINE * plane, HEADS * CHUNK, plane, shape,
    )  # fmt: skip
    args = (
        keys, tiles, rows, states, row_desc, state_desc, state_ptr + own, last_ptr + own, end_ptr + cell, HEADS,
        sequence, h, column, slot, chunks, shape,
    )  # fmt: skip
    if WALKERS == 2:
        gl.warp_specialize(
            [(_walk, (0,) + args), (_walk, (1,) + args), (_load, load)], [4, 1], [COMPUTE_REGISTERS, LOAD_REGISTERS]
        )  # fmt: skip
    else:
        gl.warp_specialize([(_walk, (0,) + args), (_load, load)], [1], [LOAD_REGISTERS])
