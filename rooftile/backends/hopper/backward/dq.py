"""The backward for queries on Hopper: dq, without a sum that others add to.

    load     one warp: draws the next tile of queries, has them and the gradients of their outputs copied in, then keys and
             values block by block, from the last block down to the first
    compute  two warpgroups of 64 queries each: S = Q K^T, dP = dO V^T, dS = P (dP - D), dQ += dS K

Three accumulators at D = 256 leave no room for the next block's, so a warpgroup waits for its products, and its softmax runs
under the other one's.

Dao, FlashAttention-2, arXiv:2307.08691; Shah et al., FlashAttention-3, arXiv:2407.08608.
"""

from rooftile.backends.hopper.backward.parts import (
    BLOCK,
    Backward,
    load_rows,
    note_nan,
    products,
    score_gradients,
    store_rows,
    wait_for_store,
)
from rooftile.backends.hopper.device.config import WG_ROWS
from rooftile.backends.hopper.device.mma import pieces
from rooftile.backends.hopper.device.pipeline import Ring, opaque, ring
from rooftile.backends.hopper.device.scheduler import WORDS, Mask, make_plan, publish, publish_end, put_back, take
from rooftile.backends.hopper.device.softmax import Scoring, hidden, make_scoring
from rooftile.backends.hopper.gluon import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# warpgroups that compute, of 64 queries each
CREW = gl.constexpr(2)


@gluon.jit
def _load(
    plans: Ring, queries: Ring, grads: Ring, keys: Ring, values: Ring, mask: Mask, q_desc, k_desc, v_desc, do_desc,
    B, H, T, S, tiles, tail, cu_q_ptr, cu_k_ptr, counter_ptr, shape: Backward,
):  # fmt: skip
    """The role that draws tiles and has them copied in (see the forward's)."""
    total = tiles * (H if shape.PACKED else B * H)
    programs = gl.num_programs(0)
    n = gl.program_id(0)
    tile = 0
    turn = 0
    while n < total:
        plan = make_plan(n, B, H, T, S, tiles, tail, cu_q_ptr, cu_k_ptr, mask, CREW * WG_ROWS, BLOCK, shape.PACKED)
        if plan.live != 0:
            publish(plans, tile, plan)
            hk = plan.h // shape.GROUP
            keys_row = plan.key + plan.last * BLOCK
            load_rows(keys, turn, k_desc, plan.b, hk, keys_row)
            _load_rows_of_crew(queries, tile, q_desc, plan)
            load_rows(values, turn, v_desc, plan.b, hk, keys_row)
            _load_rows_of_crew(grads, tile, do_desc, plan)
            tile += 1
            turn += 1
            for i in range(1, plan.last - plan.first + 1):
                row = keys_row - i * BLOCK
                load_rows(keys, turn, k_desc, plan.b, hk, row)
                load_rows(values, turn, v_desc, plan.b, hk, row)
                turn += 1
        n = gl.atomic_add(counter_ptr, 1) + programs
    publish_end(plans, tile)
    put_back(counter_ptr)


@gluon.jit
def _load_rows_of_crew(rows: Ring, tile, desc, plan):
    """64 rows for each warpgroup, which gives its own back."""
    for i in gl.static_range(CREW):
        rows.wait_empty(tile * CREW + i)
        mbarrier.expect(rows.filled(tile * CREW + i), desc.block_type.nbytes)
        tma_load(
            desc, [plan.b, plan.h, plan.row + plan.t + i * WG_ROWS, 0],
            rows.filled(tile * CREW + i), rows.buffer(tile * CREW + i),
        )  # fmt: skip


@gluon.jit
def _mine(rows: Ring, WG: gl.constexpr, shape: Backward):
    """A warpgroup's 64 rows, whose place the assembler cannot tell: else it would keep the addresses of all of their
    columns over the loop, in more registers than there are."""
    return rows.buffers.index(opaque(WG)).reshape([64, shape.D])


@gluon.jit
def _weights(s, lse, row, column, plan, first_clear, last_clear, scoring: Scoring, shape: Backward):
    """A block's capped scores and its weights."""
    if shape.SOFTCAP:
        s = scoring.capped(s)
    if (column < first_clear) | (column > last_clear):
        s = hidden(s, row, column, plan, scoring.mask)
    return s, gl.exp2(s * scoring.factor - gl.expand_dims(lse, 1))


@gluon.jit
def _compute(
    WG: gl.constexpr, plans: Ring, queries: Ring, grads: Ring, keys: Ring, values: Ring, dq_desc, dq_ptr, lost_ptr,
    lse_ptr, delta_ptr, H, padded_T, scoring: Scoring, shape: Backward,
):  # fmt: skip
    """A warpgroup's role: 64 queries of every tile."""
    dtype: gl.constexpr = queries.buffers.dtype
    row_layout: gl.constexpr = gl.SliceLayout(1, shape.s_layout)
    mask = scoring.mask
    tile = 0
    turn = 0
    plan = take(plans, 0)
    while plan.live != 0:
        mine = tile * CREW + WG
        row = plan.t + WG * WG_ROWS
        t = row + gl.arange(0, WG_ROWS, row_layout)
        words = (plan.b * H + plan.h).to(gl.int64) * padded_T + plan.padded
        # only a second warpgroup's rows can lie past the padding
        lse = gl.load(lse_ptr + words + t, mask=t < plan.T, other=float("inf"))
        delta = gl.load(delta_ptr + words + t, mask=t < plan.T, other=0.0)
        # the first columns of the blocks that all of these rows see whole
        i_0 = row + plan.S - plan.T
        first_clear = mask.first_key(i_0 + (WG_ROWS - 1))
        last_clear = mask.last_key(i_0, plan.S) - (BLOCK - 1)
        column = plan.last * BLOCK

        queries.wait_full(mine)
        grads.wait_full(mine)
        dq = gl.zeros([64, shape.D], gl.float32, shape.acc_layout)
        for _ in range(plan.last - plan.first + 1):
            s = products(_mine(queries, WG, shape), keys, turn, shape.DIM, shape)
            dp = products(_mine(grads, WG, shape), values, turn, shape.DIM_V, shape)
            s = warpgroup_mma_wait(pieces(shape.DIM_V), deps=(s,))
            s, p = _weights(s, lse, row, column, plan, first_clear, last_clear, scoring, shape)
            dp = warpgroup_mma_wait(0, deps=(dp,))
            values.give_back(turn)
            ds = score_gradients(p, dp, gl.expand_dims(delta, 1), s, scoring, shape).to(dtype)
            ds = gl.convert_layout(ds, shape.a_layout)
            dq = warpgroup_mma(ds, keys.buffer(turn).reshape([64, shape.D]), dq, is_async=True)
            dq = warpgroup_mma_wait(0, deps=(dq,))
            keys.give_back(turn)
            column -= BLOCK
            turn += 1
        grads.give_back(mine)
        if not shape.HALF:
            dq = dq * scoring.scale
        note_nan(lost_ptr, dq, shape)
        # the queries have been read for the last time
        store_rows(queries.buffer(mine), dq.to(dtype), dq_desc, dq_ptr, plan, H, row, plan.row, plan.T, shape.DIM, shape)
        wait_for_store()
        queries.give_back(mine)
        tile += 1
        plan = take(plans, tile)


# fmt: off
@gluon.jit(
    do_not_specialize=["B", "S", "padded_T", "tiles", "tail", "left", "right", "prefix", "chunk"],
    do_not_specialize_on_alignment=["cu_q_ptr", "cu_k_ptr"],
)
def flash_bwd_q(
    q_desc, k_desc, v_desc, do_desc, dq_desc, dq_ptr, lost_ptr, lse_ptr, delta_ptr, cu_q_ptr, cu_k_ptr, counter_ptr,
    B, S, padded_T, tiles, tail, scale, softcap, left, right, prefix, chunk,
    GROUP: gl.constexpr, D: gl.constexpr, DIM: gl.constexpr, DIM_V: gl.constexpr, PACKED: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, PREFIX: gl.constexpr, CHUNK: gl.constexpr,
    SOFTCAP: gl.constexpr, HALF: gl.constexpr,
    K_SLOTS: gl.constexpr, V_SLOTS: gl.constexpr, COMPUTE_REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    shape = Backward(GROUP, 1, CREW, D, DIM, DIM_V, PACKED, LEFT or RIGHT or PREFIX or CHUNK, SOFTCAP, HALF)
    mask = Mask(left, right, prefix, chunk, LEFT, RIGHT, PREFIX, CHUNK)
    words: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    queries = ring(gl.allocate_shared_memory(dtype, [CREW, 1, 1, WG_ROWS, D], q_desc.layout), CREW, 1)
    grads = ring(gl.allocate_shared_memory(dtype, [CREW, 1, 1, WG_ROWS, D], do_desc.layout), CREW, 1)
    keys = ring(gl.allocate_shared_memory(dtype, [K_SLOTS, 1, 1, BLOCK, D], k_desc.layout), K_SLOTS, CREW)
    values = ring(gl.allocate_shared_memory(dtype, [V_SLOTS, 1, 1, BLOCK, D], v_desc.layout), V_SLOTS, CREW)
    plans = ring(gl.allocate_shared_memory(gl.int32, [2 * WORDS, 1], words), 2, CREW)
    # packed: one sequence, of all queries
    H = q_desc.shape[1].to(gl.int32)
    T = q_desc.shape[2].to(gl.int32)
    fence_async_shared()
    scoring = make_scoring(mask, scale, softcap, SOFTCAP)
    args = (plans, queries, grads, keys, values, dq_desc, dq_ptr, lost_ptr, lse_ptr, delta_ptr, H, padded_T, scoring, shape)
    gl.warp_specialize(
        [
            (_compute, (0,) + args),
            (_compute, (1,) + args),
            (_load, (
                plans, queries, grads, keys, values, mask, q_desc, k_desc, v_desc, do_desc,
                B, H, T, S, tiles, tail, cu_q_ptr, cu_k_ptr, counter_ptr, shape,
            )),
        ],
        [4, 1], [COMPUTE_REGISTERS, COPY_REGISTERS],
    )
