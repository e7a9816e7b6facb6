"""The walk back from the last chunk to the first one on Hopper, with the roles of `walk_hopper.py` and the letters of `gradients.py`.

All is transposed, so that neither dS nor dR goes through shared memory:

    dV'^T = dY^T P + (exp(G_last - G) dS'^T K^T)
    dR^T  = dV'^T X
    dS^T  = exp(G_last) dS'^T + scale (exp(G) dY)^T Q - (beta exp(G) dR)^T K
"""

from rooftile.recurrent.kernels.copies_hopper import accumulator
from rooftile.recurrent.kernels.delta.walk_hopper import CHUNK, FIRST_LINE, LINES, Shape, Tiles, _load
from rooftile.runtime.hopper.gluon import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from rooftile.runtime.hopper.pipeline import Ring, ring, wait_for_store


@gluon.jit
def _walk_back(
    K: gl.constexpr, keys: Ring, tiles: Tiles, rows, states, row_desc, state_desc, d_last_ptr, d_first_ptr, end_ptr, end_step,
    sequence, h, column, slot, chunks, shape: Shape, HAS_LAST: gl.constexpr,
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
    if HAS_LAST:
        state = gl.load(d_last_ptr + place).to(gl.float32)
    else:
        state = gl.zeros([CHUNK, D], gl.float32, wide)
    none = gl.zeros([CHUNK, CHUNK], gl.float32, square)
    output = rows.index(K)
    for i in range(chunks):
        stage = i % keys.stages
        chunk = chunks - 1 - i
        end = gl.load(end_ptr + chunk * end_step)
        before = state.to(dtype)
        held = gl.convert_layout(before, factor)
        keys.wait_full(i)
        key = keys.buffer(i).reshape([CHUNK, D])
        query = tiles.queries.index(stage).reshape([CHUNK, D])
        dr = warpgroup_mma(held, key.permute((1, 0)), none, use_acc=False, is_async=True)
        dy = tiles.values.index(shape.WALKERS * stage + K).reshape([CHUNK, CHUNK]).permute((1, 0)).load(square)
        pairs = tiles.pairs.index(stage).reshape([CHUNK, CHUNK])
        left = gl.expand_dims(tiles.lines.index(LINES * stage + 2).load(across), 0)
        reach = gl.expand_dims(tiles.lines.index(LINES * stage + 3).load(across), 0)
        if shape.KEEPS:
            # waits for what the chunk before has written, too
            wait_for_store()
            states.index(K).reshape([D, CHUNK]).permute((1, 0)).store(before)
            fence_async_shared()
            barrier()
            tma_store(state_desc, [slot + chunk, h, 0, column + K * CHUNK], states.index(K))
        dr = warpgroup_mma_wait(0, deps=(dr,))
        dr = warpgroup_mma(gl.convert_layout(dy, factor), pairs, dr * left, is_async=True)
        moved = gl.convert_layout((dy.to(gl.float32) * reach).to(dtype), gl.DotOperandLayout(0, wide, 2))
        state = warpgroup_mma(moved, query, state * end, is_async=True)
        dr = warpgroup_mma_wait(1, deps=(dr,))
        system = tiles.systems.index(stage).reshape([CHUNK, CHUNK])
        rest = gl.convert_layout(dr.to(dtype), factor)
        dr = warpgroup_mma(rest, system, none, use_acc=False, is_async=True)
        written = tiles.lines.index(LINES * stage).load(across) * tiles.lines.index(LINES * stage + 1).load(across)
        state = warpgroup_mma_wait(1, deps=(state,))
        dr = warpgroup_mma_wait(0, deps=(dr,))
        moved = gl.convert_layout((-dr * gl.expand_dims(written, 0)).to(dtype), gl.DotOperandLayout(0, wide, 2))
        state = warpgroup_mma(moved, key, state, is_async=True)
        if shape.KEEPS:
            output.reshape([CHUNK, CHUNK]).permute((1, 0)).store(dr.to(dtype))
            fence_async_shared()
            barrier()
            tma_store(row_desc, [sequence, h, chunk * CHUNK, column + K * CHUNK], output)
        state = warpgroup_mma_wait(0, deps=(state,))
        keys.release(i)
    gl.store(d_first_ptr + place, state)
    tma_store_wait(0)


# fmt: off
@gluon.jit(do_not_specialize=["T", "slots"])
def _walk_columns_back(
    q_desc, k_desc, dy_desc, x_desc, p_desc, row_desc, state_desc, line_desc, d_last_ptr, d_first_ptr, end_ptr, T, slots,
    HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, HAS_LAST: gl.constexpr, KEEPS: gl.constexpr,
    WALKERS: gl.constexpr, STAGES: gl.constexpr, COMPUTE_REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr,
):
    # fmt: on
    """Writes the gradient of the first state, and with KEEPS dR and the gradients of states after chunks, for 64 columns a warpgroup."""
    dtype: gl.constexpr = k_desc.dtype
    keys = ring(gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, D], k_desc.layout), STAGES, WALKERS)
    values = gl.allocate_shared_memory(dtype, [WALKERS * STAGES, 1, 1, CHUNK, CHUNK], dy_desc.layout)
    systems = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, CHUNK], x_desc.layout)
    lines = gl.allocate_shared_memory(gl.float32, [LINES * STAGES, CHUNK], line_desc.layout)
    rows = gl.allocate_shared_memory(dtype, [WALKERS, 1, 1, CHUNK, CHUNK], row_desc.layout)
    queries = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, D], q_desc.layout)
    pairs = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, CHUNK], p_desc.layout)
    states = rows
    if KEEPS:
        states = gl.allocate_shared_memory(dtype, [WALKERS, 1, 1, D, CHUNK], state_desc.layout)
    fence_async_shared()
    tiles = Tiles(queries, values, systems, pairs, lines)
    column = gl.program_id(0) * (WALKERS * CHUNK)
    h = gl.program_id(1)
    sequence = gl.program_id(2)
    chunks = (T + (CHUNK - 1)) // CHUNK
    slot = sequence * chunks
    cell = slot * HEADS + h
    own = (sequence.to(gl.int64) * HEADS + h) * (D * DV) + column
    plane = slots * (HEADS * CHUNK)
    shape = Shape(D, DV, True, KEEPS, WALKERS)
    load = (
        keys, tiles, q_desc, k_desc, dy_desc, x_desc, p_desc, line_desc, sequence, h, h // GROUP, column, slot, chunks,
        cell * CHUNK + FIRST_LINE * plane, HEADS * CHUNK, plane, shape, True,
    )  # fmt: skip
    args = (
        keys, tiles, rows, states, row_desc, state_desc, d_last_ptr + own, d_first_ptr + own, end_ptr + cell, HEADS,
        sequence, h, column, slot, chunks, shape, HAS_LAST,
    )  # fmt: skip
    if WALKERS == 2:
        gl.warp_specialize(
            [(_walk_back, (0,) + args), (_walk_back, (1,) + args), (_load, load)], [4, 1], [COMPUTE_REGISTERS, LOAD_REGISTERS]
        )  # fmt: skip
    else:
        gl.warp_specialize([(_walk_back, (0,) + args), (_load, load)], [1], [LOAD_REGISTERS])
