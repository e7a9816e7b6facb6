"""The backward on Hopper for head dims up to 128: dk, dv, and dq added up in memory.

    load     one warp: draws the next tile of keys, has its keys and values copied in, then the queries and the gradients
             of the output that they meet, block by block
    compute  two warpgroups of 64 keys each, with dk and dv in registers. Scores are held transposed, keys by queries, so that
             the weights and the gradients of the scores are the left side of the products that dv and dk sum:
                 S^T = K Q^T,  P = exp(scale S - L),  dV += P^T dO
                 dP^T = V dO^T,  dS = P (dP - D),     dK += dS^T Q
             and hand on dS through shared memory
    dq       dQ = dS K. At D = 64 a warpgroup of its own. At D = 128 there are no registers for one: both compute warpgroups
             multiply half of the columns each, behind the next block's scores
    add      one warp: has each block's part of dq added to the sum in memory

The sum is in fp32 (see `work`), and its parts come in any order: dq differs in its last bits from run to run. Asked for an
order, the kernel leaves dq to `flash_bwd_q`, for two more products.

Dao, FlashAttention-2, arXiv:2307.08691, Algorithm 2; Shah et al., FlashAttention-3, arXiv:2407.08608.
"""

from rooftile.backends.hopper.backward.dq_accumulator import UNIT, UNIT_COLUMNS, UNIT_ROWS, in_order_of_threads
from rooftile.backends.hopper.backward.parts import (
    BLOCK,
    Backward,
    capped_again,
    clear_queries,
    hidden_queries,
    load_walks,
    next_block,
    note_nan,
    score_gradients,
    store_rows,
    wait_for_store,
)
from rooftile.backends.hopper.device.config import WG_ROWS
from rooftile.backends.hopper.device.mma import pieces, product_over_dim
from rooftile.backends.hopper.device.pipeline import Ring, named_barrier, opaque, ring
from rooftile.backends.hopper.device.scheduler import WORDS, Mask, take
from rooftile.backends.hopper.device.softmax import Scoring, make_scoring
from rooftile.backends.hopper.gluon import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_add,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# warpgroups that compute, of 64 keys each
CREW = gl.constexpr(2)
# the first of the warpgroups' named barriers, by which they take turns at D = 64
TURNS = gl.constexpr(9)


@gluon.jit
def _add(plans: Ring, staged: Ring, work_desc, H, padded_T, shape: Backward):
    """The role that has dq added up, unit by unit."""
    UNITS: gl.constexpr = shape.D // UNIT
    tile = 0
    turn = 0
    plan = take(plans, 0)
    while plan.live != 0:
        blocks = plan.last - plan.first + 1
        h = plan.h * shape.GROUP
        block = plan.first
        for _ in range(blocks * shape.GROUP):
            row = (plan.b * H + h) * padded_T + plan.padded
            unit = UNITS * (row // BLOCK + block)
            for c in gl.static_range(UNITS):
                staged.wait_full(turn)
                tma_add(work_desc, [(unit + c) * UNIT_ROWS, 0], staged.buffer(turn))
                # the one before has been read
                tma_store_wait(1)
                if turn > 0:
                    staged.give_back(turn - 1)
                turn += 1
            h, block = next_block(h, block, plan, shape)
        tile += 1
        plan = take(plans, tile)
    tma_store_wait(0)


@gluon.jit
def _issue_dq(keys: Ring, parts: Ring, turn, column: gl.constexpr, shape: Backward):
    """Issues 64 columns of dS K, half of it from each warpgroup's part."""
    parts.wait_full(turn)
    dq = gl.zeros([BLOCK, UNIT], gl.float32, shape.s_layout)
    for i in gl.static_range(CREW):
        ds = parts.buffers.index(turn % parts.slots * CREW + i)
        k = keys.buffers.index(i).reshape([WG_ROWS, shape.D]).slice(column, UNIT, 1)
        dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=i > 0, is_async=True)
    return dq


@gluon.jit
def _finish_dq(dq, staged: Ring, turn):
    """Waits for 64 columns of dq and hands them to the role that adds them."""
    staged.wait_empty(turn)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    staged.buffer(turn).store(in_order_of_threads(dq))
    fence_async_shared()
    mbarrier.arrive(staged.filled(turn), count=1)


@gluon.jit
def _dq(plans: Ring, keys: Ring, parts: Ring, staged: Ring, shape: Backward):
    """The role that multiplies dq at D = 64."""
    tile = 0
    turn = 0
    plan = take(plans, 0)
    while plan.live != 0:
        keys.wait_full(tile)
        for _ in range((plan.last - plan.first + 1) * shape.GROUP):
            dq = _issue_dq(keys, parts, turn, 0, shape)
            _finish_dq(dq, staged, turn)
            parts.give_back(turn)
            turn += 1
        keys.give_back(tile)
        tile += 1
        plan = take(plans, tile)


@gluon.jit
def _weights(s, lses, turn, t, queries: Ring, plan, low, high, scoring: Scoring, WG: gl.constexpr, shape: Backward):
    """The weights of 64 keys and a block of queries."""
    if shape.SOFTCAP:
        s = scoring.capped(s)
    if (t < low) | (t + (BLOCK - 1) > high):
        s = hidden_queries(s, plan.t + WG * WG_ROWS, t, plan, scoring.mask)
    lse = lses.index(turn % queries.slots).load(gl.SliceLayout(0, shape.s_layout))
    return gl.exp2(s * scoring.factor - gl.expand_dims(lse, 0))


@gluon.jit
def _give_part(ds, parts: Ring, turn, WG: gl.constexpr, shape: Backward):
    """Hands a warpgroup's gradients of the scores to whoever multiplies dq."""
    if shape.ADD:
        if shape.SPARE:
            parts.wait_empty(turn)
        parts.buffers.index(turn % parts.slots * CREW + WG).store(ds)
        fence_async_shared()
        mbarrier.arrive(parts.filled(turn), count=1)


@gluon.jit
def _issue_scores(keys: Ring, queries: Ring, turn, WG: gl.constexpr, shape: Backward):
    """Issues the scores of a block of queries, once it is there."""
    queries.wait_full(turn)
    # the assembler cannot tell where the keys are, else it would keep the addresses of all their columns in registers
    k = keys.buffers.index(opaque(WG)).reshape([WG_ROWS, shape.D])
    return product_over_dim(k, queries.buffer(turn).reshape([BLOCK, shape.D]), shape.DIM, shape.s_layout)


@gluon.jit
def _step(
    dk, dv, keys: Ring, values: Ring, k, v, queries: Ring, grads: Ring, lses, deltas, parts: Ring, staged: Ring, turn, t, plan,
    low, high, scoring: Scoring, WG: gl.constexpr, FIRST: gl.constexpr, shape: Backward,
):  # fmt: skip
    """One block of queries: its part of dk and dv, and at D = 128 dq of the block before it."""
    dtype: gl.constexpr = keys.buffers.dtype
    DQ: gl.constexpr = shape.ADD and not shape.SPARE and not FIRST
    none = gl.zeros([WG_ROWS, BLOCK], gl.float32, shape.s_layout)
    q = queries.buffer(turn).reshape([BLOCK, shape.D])
    do = grads.buffer(turn).reshape([BLOCK, shape.D])

    if shape.SPARE:
        queries.wait_full(turn)
        named_barrier("sync", TURNS + WG)
        s = warpgroup_mma(k, q.permute((1, 0)), none, use_acc=False, is_async=True)
    else:
        s = _issue_scores(keys, queries, turn, WG, shape)
    if DQ:
        dq = _issue_dq(keys, parts, turn - 1, WG * UNIT, shape)
        s = warpgroup_mma_wait(CREW, deps=(s,))
    else:
        s = warpgroup_mma_wait(0, deps=(s,))
    p = _weights(s, lses, turn, t, queries, plan, low, high, scoring, WG, shape)
    if DQ:
        _finish_dq(dq, staged, (turn - 1) * CREW + WG)
    grads.wait_full(turn)
    if shape.SPARE:
        dp = warpgroup_mma(v, do.permute((1, 0)), none, use_acc=False, is_async=True)
    else:
        vb = values.buffers.index(opaque(WG)).reshape([WG_ROWS, shape.D])
        dp = product_over_dim(vb, do, shape.DIM_V, shape.s_layout)
    weights = gl.convert_layout(p.to(dtype), shape.a_layout)
    delta = deltas.index(turn % grads.slots).load(gl.SliceLayout(0, shape.s_layout))
    if shape.LATE:
        if shape.SPARE:
            named_barrier("arrive", TURNS + 1 - WG)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        s = capped_again(p, lses, turn, queries.slots, shape)
        ds = score_gradients(p, dp, gl.expand_dims(delta, 0), s, scoring, shape).to(dtype)
        dv = warpgroup_mma(weights, do, dv, is_async=True)
        dk = warpgroup_mma(gl.convert_layout(ds, shape.a_layout), q, dk, is_async=True)
        _give_part(ds, parts, turn, WG, shape)
    else:
        dv = warpgroup_mma(weights, do, dv, is_async=True)
        if shape.SPARE:
            named_barrier("arrive", TURNS + 1 - WG)
        dp = warpgroup_mma_wait(1, deps=(dp,))
        s = capped_again(p, lses, turn, queries.slots, shape)
        ds = score_gradients(p, dp, gl.expand_dims(delta, 0), s, scoring, shape).to(dtype)
        _give_part(ds, parts, turn, WG, shape)
        dk = warpgroup_mma(gl.convert_layout(ds, shape.a_layout), q, dk, is_async=True)
    dv = warpgroup_mma_wait(1, deps=(dv,))
    grads.give_back(turn)
    dk = warpgroup_mma_wait(0, deps=(dk,))
    queries.give_back(turn)
    return dk, dv


@gluon.jit
def _step_ahead(
    dk, dv, p, keys: Ring, values: Ring, queries: Ring, grads: Ring, lses, deltas, parts: Ring, staged: Ring, turn, t, plan,
    low, high, scoring: Scoring, WG: gl.constexpr, MORE: gl.constexpr, shape: Backward,
):  # fmt: skip
    """One block of queries at D = 128, from its weights on: its part of dk, dv and dq; and the weights of the next, at t.

    The next block's scores are issued right behind the product for dk, and dq behind both: the tensor cores always have a next
    product, but each warpgroup waits for the other's part of the same block. That pays where both have the same to do.
    """
    dtype: gl.constexpr = keys.buffers.dtype
    AFTER: gl.constexpr = (pieces(shape.DIM) if MORE else 0) + (CREW if shape.ADD else 0)
    q = queries.buffer(turn).reshape([BLOCK, shape.D])
    do = grads.buffer(turn).reshape([BLOCK, shape.D])
    grads.wait_full(turn)
    v = values.buffers.index(opaque(WG)).reshape([WG_ROWS, shape.D])
    dp = product_over_dim(v, do, shape.DIM_V, shape.s_layout)
    weights = gl.convert_layout(p.to(dtype), shape.a_layout)
    delta = deltas.index(turn % grads.slots).load(gl.SliceLayout(0, shape.s_layout))
    if shape.LATE:
        dp = warpgroup_mma_wait(0, deps=(dp,))
        s = capped_again(p, lses, turn, queries.slots, shape)
        ds = score_gradients(p, dp, gl.expand_dims(delta, 0), s, scoring, shape).to(dtype)
        dv = warpgroup_mma(weights, do, dv, is_async=True)
    else:
        dv = warpgroup_mma(weights, do, dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=(dp,))
        s = capped_again(p, lses, turn, queries.slots, shape)
        ds = score_gradients(p, dp, gl.expand_dims(delta, 0), s, scoring, shape).to(dtype)
    dk = warpgroup_mma(gl.convert_layout(ds, shape.a_layout), q, dk, is_async=True)
    _give_part(ds, parts, turn, WG, shape)
    # what has been waited for needs no registers
    dv = warpgroup_mma_wait(1, deps=(dv,))
    grads.give_back(turn)
    if MORE:
        s = _issue_scores(keys, queries, turn + 1, WG, shape)
    if shape.ADD:
        dq = _issue_dq(keys, parts, turn, WG * UNIT, shape)
    dk = warpgroup_mma_wait(AFTER, deps=(dk,))
    queries.give_back(turn)
    if MORE:
        s = warpgroup_mma_wait(CREW if shape.ADD else 0, deps=(s,))
        p = _weights(s, lses, turn + 1, t, queries, plan, low, high, scoring, WG, shape)
    if shape.ADD:
        _finish_dq(dq, staged, turn * CREW + WG)
    return dk, dv, p


@gluon.jit
def _compute(
    WG: gl.constexpr, plans: Ring, keys: Ring, values: Ring, queries: Ring, grads: Ring, lses, deltas, parts: Ring, staged: Ring,
    dk_desc, dv_desc, dk_ptr, dv_ptr, lost_ptr, scoring: Scoring, shape: Backward,
):  # fmt: skip
    """A warpgroup's role: 64 keys of every tile."""
    dtype: gl.constexpr = keys.buffers.dtype
    left: gl.constexpr = gl.DotOperandLayout(0, shape.s_layout, 2)
    room = values.buffers.index(WG)
    if shape.SPARE and WG == 1:
        named_barrier("arrive", TURNS)
    tile = 0
    turn = 0
    plan = take(plans, 0)
    Hk = dk_desc.shape[1].to(gl.int32)
    while plan.live != 0:
        blocks = plan.last - plan.first + 1
        s_0 = plan.t + WG * WG_ROWS
        low, high = clear_queries(plan, s_0, WG_ROWS, scoring.mask)
        dk = gl.zeros([WG_ROWS, shape.D], gl.float32, shape.acc_layout)
        dv = gl.zeros([WG_ROWS, shape.D], gl.float32, shape.acc_layout)
        keys.wait_full(tile)
        values.wait_full(tile)
        if shape.AHEAD:
            h = plan.h
            block = plan.first
            s = _issue_scores(keys, queries, turn, WG, shape)
            s = warpgroup_mma_wait(0, deps=(s,))
            p = _weights(s, lses, turn, block * BLOCK, queries, plan, low, high, scoring, WG, shape)
            for _ in range(1, blocks * shape.GROUP):
                h, block = next_block(h, block, plan, shape)
                dk, dv, p = _step_ahead(
                    dk, dv, p, keys, values, queries, grads, lses, deltas, parts, staged, turn, block * BLOCK, plan,
                    low, high, scoring, WG, True, shape,
                )  # fmt: skip
                turn += 1
            dk, dv, p = _step_ahead(
                dk, dv, p, keys, values, queries, grads, lses, deltas, parts, staged, turn, 0, plan,
                low, high, scoring, WG, False, shape,
            )  # fmt: skip
            turn += 1
        else:
            k = 0
            v = 0
            if shape.SPARE:
                k = keys.buffers.index(WG).reshape([WG_ROWS, shape.D]).load(left)
                v = room.reshape([WG_ROWS, shape.D]).load(left)
            # the first on its own, also at D = 64: of one loop over all, ptxas makes code that loses the keys (see the tests'
            # `overwritten_operands`)
            dk, dv = _step(
                dk, dv, keys, values, k, v, queries, grads, lses, deltas, parts, staged, turn, plan.first * BLOCK, plan,
                low, high, scoring, WG, True, shape,
            )  # fmt: skip
            turn += 1
            h, block = next_block(plan.h, plan.first, plan, shape)
            for _ in range(1, blocks * shape.GROUP):
                dk, dv = _step(
                    dk, dv, keys, values, k, v, queries, grads, lses, deltas, parts, staged, turn, block * BLOCK, plan,
                    low, high, scoring, WG, False, shape,
                )  # fmt: skip
                turn += 1
                h, block = next_block(h, block, plan, shape)
            if shape.ADD and not shape.SPARE:
                dq = _issue_dq(keys, parts, turn - 1, WG * UNIT, shape)
                _finish_dq(dq, staged, (turn - 1) * CREW + WG)
        keys.give_back(tile)
        if not shape.HALF:
            dk = dk * scoring.scale
        note_nan(lost_ptr, dk, shape)
        note_nan(lost_ptr, dv, shape)
        # nobody else reads these values
        store_rows(room, dv.to(dtype), dv_desc, dv_ptr, plan, Hk, s_0, plan.key, plan.S, shape.DIM_V, shape)
        wait_for_store()
        store_rows(room, dk.to(dtype), dk_desc, dk_ptr, plan, Hk, s_0, plan.key, plan.S, shape.DIM, shape)
        wait_for_store()
        values.give_back(tile)
        tile += 1
        plan = take(plans, tile)
    if shape.SPARE and WG == 0:
        named_barrier("sync", TURNS)


# fmt: off
@gluon.jit(
    do_not_specialize=["B", "T", "S", "padded_T", "tiles", "tail", "left", "right", "prefix", "chunk"],
    do_not_specialize_on_alignment=["cu_q_ptr", "cu_k_ptr"],
)
def flash_bwd(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, work_desc, dk_desc, dv_desc,
    dk_ptr, dv_ptr, lost_ptr, cu_q_ptr, cu_k_ptr, counter_ptr,
    B, T, S, padded_T, tiles, tail, scale, softcap, left, right, prefix, chunk,
    GROUP: gl.constexpr, PARTS: gl.constexpr, D: gl.constexpr, DIM: gl.constexpr, DIM_V: gl.constexpr, PACKED: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, PREFIX: gl.constexpr, CHUNK: gl.constexpr,
    SOFTCAP: gl.constexpr, HALF: gl.constexpr, ADD: gl.constexpr,
    SLOTS: gl.constexpr, LATE: gl.constexpr, AHEAD: gl.constexpr,
    COMPUTE_REGISTERS: gl.constexpr, DQ_REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    shape = Backward(GROUP, PARTS, CREW, D, DIM, DIM_V, PACKED, LEFT or RIGHT or PREFIX or CHUNK, SOFTCAP, HALF, ADD, LATE, AHEAD)
    mask = Mask(left, right, prefix, chunk, LEFT, RIGHT, PREFIX, CHUNK)
    words: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ROLE: gl.constexpr = ADD and shape.SPARE
    keys = ring(gl.allocate_shared_memory(dtype, [CREW, 1, 1, WG_ROWS, D], k_desc.layout), 1, CREW + ROLE)
    values = ring(gl.allocate_shared_memory(dtype, [CREW, 1, 1, WG_ROWS, D], v_desc.layout), 1, CREW)
    queries = ring(gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, BLOCK, D], q_desc.layout), SLOTS, CREW)
    grads = ring(gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, BLOCK, D], do_desc.layout), SLOTS, CREW)
    lses = gl.allocate_shared_memory(gl.float32, [SLOTS, BLOCK], lse_desc.layout)
    deltas = gl.allocate_shared_memory(gl.float32, [SLOTS, BLOCK], delta_desc.layout)
    # two turns of dS, of both warpgroups. Without a role for dq nobody gives a turn back: who has both parts of the next one
    # knows that it has been read
    part_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WG_ROWS, BLOCK], dtype)
    parts = ring(gl.allocate_shared_memory(dtype, [2 * CREW, WG_ROWS, BLOCK], part_layout), 2, 1, CREW)
    staged = ring(gl.allocate_shared_memory(gl.float32, [2, UNIT_ROWS, UNIT_COLUMNS], work_desc.layout), 2, 1)
    plans = ring(gl.allocate_shared_memory(gl.int32, [2 * WORDS, 1], words), 2, CREW + ROLE + ADD)
    fence_async_shared()
    H = q_desc.shape[1].to(gl.int32)
    scoring = make_scoring(mask, scale, softcap, SOFTCAP)
    args = (
        plans, keys, values, queries, grads, lses, deltas, parts, staged, dk_desc, dv_desc, dk_ptr, dv_ptr, lost_ptr,
        scoring, shape,
    )
    load = (
        plans, keys, values, queries, grads, lses, deltas, mask, q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc,
        B, T, S, padded_T, tiles, tail, cu_q_ptr, cu_k_ptr, counter_ptr, shape,
    )
    if ROLE:
        gl.warp_specialize(
            [
                (_compute, (0,) + args), (_compute, (1,) + args), (_dq, (plans, keys, parts, staged, shape)),
                (load_walks, load), (_add, (plans, staged, work_desc, H, padded_T, shape)),
            ],
            [4, 4, 1, 1], [COMPUTE_REGISTERS, DQ_REGISTERS, COPY_REGISTERS, COPY_REGISTERS],
        )
    elif ADD:
        gl.warp_specialize(
            [
                (_compute, (0,) + args), (_compute, (1,) + args),
                (load_walks, load), (_add, (plans, staged, work_desc, H, padded_T, shape)),
            ],
            [4, 1, 1], [COMPUTE_REGISTERS, COPY_REGISTERS, COPY_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [(_compute, (0,) + args), (_compute, (1,) + args), (load_walks, load)],
            [4, 1], [COMPUTE_REGISTERS, COPY_REGISTERS],
        )
