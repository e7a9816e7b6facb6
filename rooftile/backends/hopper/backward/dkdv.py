"""The backward for keys and values of wide heads on Hopper: dk and dv.

At D = 256 a warpgroup's registers hold one accumulator of 64 rows and no second one. So two warpgroups are twins: they share
a tile of 64 keys and walk the same blocks of queries, one sums dv, the other dk, and half of the work is each one's alone:

    load     one warp: draws the next tile of keys, has its keys and values copied in, then the queries and the gradients
             of the output that they meet, block by block
    values   S^T = K Q^T,  P = exp(scale S - L),  dV += P^T dO     and hands P^T to its twin
    keys     dP^T = V dO^T,  dS = P (dP - D),     dK += dS^T Q

A twin issues its next scores before its last product, so its softmax runs while that is multiplied, and under the products
of the other one besides. dq is left to `flash_bwd_q`: that costs two products more than adding it up here, but a tile's part
of dq in fp32 is as many bytes as all else that crosses shared memory, which is what such a tile is bound by. Every sum has
one owner and one order, so two runs agree bit for bit.
"""

from rooftile.backends.hopper.backward.parts import (
    BLOCK,
    Backward,
    capped_again,
    clear_queries,
    exchanged,
    hidden_queries,
    load_walks,
    next_block,
    note_nan,
    products,
    received,
    score_gradients,
    store_rows,
    wait_for_store,
)
from rooftile.backends.hopper.device.pipeline import Ring, ring
from rooftile.backends.hopper.device.scheduler import WORDS, Mask, take
from rooftile.backends.hopper.device.softmax import Scoring, make_scoring, packed, unpacked
from rooftile.backends.hopper.gluon import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def _weights(s, lses, turn, block, plan, low, high, weights: Ring, scoring: Scoring, shape: Backward):
    """A block's weights, for this warpgroup in 16 bits and for its twin."""
    if shape.SOFTCAP:
        s = scoring.capped(s)
    t = block * BLOCK
    if (t < low) | (t + (BLOCK - 1) > high):
        s = hidden_queries(s, plan.t, t, plan, scoring.mask)
    # the queries are given back by now, yet their words stay: the twin gives back only after it has these weights
    lse = lses.load(gl.SliceLayout(0, shape.s_layout))
    p = gl.exp2(s * scoring.factor - gl.expand_dims(lse, 0))
    weights.wait_empty(turn)
    weights.buffer(turn).store(exchanged(p))
    mbarrier.arrive(weights.filled(turn), count=1)
    return p


@gluon.jit
def _columns(rows, shape: Backward):
    """The columns of 64 rows of dO that are not padding."""
    rows = rows.reshape([64, shape.D])
    if shape.DV < shape.D:
        rows = rows.slice(0, shape.DV, 1)
    return rows


@gluon.jit
def _padded(dv, shape: Backward):
    """Rows of dv as wide as those in shared memory; the padding is not stored."""
    if shape.DV < shape.D:
        dv = gl.join(dv, gl.zeros_like(dv)).permute((0, 2, 1)).reshape([64, shape.D])
    return dv


@gluon.jit
def _values(
    plans: Ring, keys: Ring, queries: Ring, grads: Ring, weights: Ring, lses, dv_desc, dv_ptr, lost_ptr,
    scoring: Scoring, shape: Backward,
):  # fmt: skip
    """The role that sums dv."""
    dtype: gl.constexpr = keys.buffers.dtype
    tile = 0
    turn = 0
    plan = take(plans, 0)
    Hk = dv_desc.shape[1].to(gl.int32)
    while plan.live != 0:
        blocks = plan.last - plan.first + 1
        walk = blocks * shape.GROUP
        low, high = clear_queries(plan, plan.t, BLOCK, scoring.mask)
        keys.wait_full(tile)
        k = keys.buffer(tile).reshape([64, shape.D])
        s = products(k, queries, turn, shape.DIM, shape)
        s = warpgroup_mma_wait(0, deps=(s,))
        queries.give_back(turn)
        weight = _weights(s, lses.index(turn % queries.slots), turn, plan.first, plan, low, high, weights, scoring, shape)
        p = packed(weight, dtype)
        dv = gl.zeros([64, shape.DV], gl.float32, shape.dv_layout)
        h = plan.h
        block = plan.first
        for _ in range(1, walk):
            turn += 1
            h, block = next_block(h, block, plan, shape)
            s = products(k, queries, turn, shape.DIM, shape)
            grads.wait_full(turn - 1)
            dv = warpgroup_mma(
                unpacked(p, dtype, shape.p_layout), _columns(grads.buffer(turn - 1), shape), dv, is_async=True
            )
            s = warpgroup_mma_wait(1, deps=(s,))
            queries.give_back(turn)
            weight = _weights(s, lses.index(turn % queries.slots), turn, block, plan, low, high, weights, scoring, shape)
            dv = warpgroup_mma_wait(0, deps=(dv,))
            grads.give_back(turn - 1)
            p = packed(weight, dtype)
        grads.wait_full(turn)
        dv = warpgroup_mma(
            unpacked(p, dtype, shape.p_layout), _columns(grads.buffer(turn), shape), dv, is_async=True
        )
        dv = warpgroup_mma_wait(0, deps=(dv,))
        grads.give_back(turn)
        note_nan(lost_ptr, dv, shape)
        # nobody else reads the keys
        dv = _padded(dv.to(dtype), shape)
        store_rows(keys.buffer(tile), dv, dv_desc, dv_ptr, plan, Hk, plan.t, plan.key, plan.S, shape.DIM_V, shape)
        wait_for_store()
        keys.give_back(tile)
        tile += 1
        turn += 1
        plan = take(plans, tile)


@gluon.jit
def _keys(
    plans: Ring, values: Ring, queries: Ring, grads: Ring, weights: Ring, lses, deltas, dk_desc, dk_ptr, lost_ptr,
    scoring: Scoring, shape: Backward,
):  # fmt: skip
    """The role that sums dk."""
    dtype: gl.constexpr = values.buffers.dtype
    tile = 0
    turn = 0
    plan = take(plans, 0)
    Hk = dk_desc.shape[1].to(gl.int32)
    while plan.live != 0:
        walk = (plan.last - plan.first + 1) * shape.GROUP
        values.wait_full(tile)
        v = values.buffer(tile).reshape([64, shape.D])
        dp = products(v, grads, turn, shape.DIM_V, shape)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        ds = packed(_score_gradients(dp, lses, deltas, queries, grads, weights, turn, scoring, shape), dtype)
        dk = gl.zeros([64, shape.D], gl.float32, shape.acc_layout)
        for _ in range(1, walk):
            turn += 1
            # first the product that gives queries back: they are the next to be filled, and their copy takes a while
            queries.wait_full(turn - 1)
            dk = warpgroup_mma(
                unpacked(ds, dtype, shape.a_layout), queries.buffer(turn - 1).reshape([64, shape.D]), dk, is_async=True
            )
            dp = products(v, grads, turn, shape.DIM_V, shape)
            dk = warpgroup_mma_wait(1, deps=(dk,))
            queries.give_back(turn - 1)
            dp = warpgroup_mma_wait(0, deps=(dp,))
            gradient = _score_gradients(dp, lses, deltas, queries, grads, weights, turn, scoring, shape)
            ds = packed(gradient, dtype)
        queries.wait_full(turn)
        dk = warpgroup_mma(
            unpacked(ds, dtype, shape.a_layout), queries.buffer(turn).reshape([64, shape.D]), dk, is_async=True
        )
        dk = warpgroup_mma_wait(0, deps=(dk,))
        queries.give_back(turn)
        if not shape.HALF:
            dk = dk * scoring.scale
        note_nan(lost_ptr, dk, shape)
        # nobody else reads the values
        store_rows(values.buffer(tile), dk.to(dtype), dk_desc, dk_ptr, plan, Hk, plan.t, plan.key, plan.S, shape.DIM, shape)
        wait_for_store()
        values.give_back(tile)
        tile += 1
        turn += 1
        plan = take(plans, tile)


@gluon.jit
def _score_gradients(dp, lses, deltas, queries, grads: Ring, weights: Ring, turn, scoring: Scoring, shape: Backward):
    delta = deltas.index(turn % grads.slots).load(gl.SliceLayout(0, shape.s_layout))
    grads.give_back(turn)
    weights.wait_full(turn)
    p = received(weights.buffer(turn).load(gl.BlockedLayout([4], [32], [4], [0])), shape.s_layout)
    weights.give_back(turn)
    if shape.SOFTCAP:
        queries.wait_full(turn)
    s = capped_again(p, lses, turn, queries.slots, shape)
    return score_gradients(p, dp, gl.expand_dims(delta, 0), s, scoring, shape)


# fmt: off
@gluon.jit(
    do_not_specialize=["B", "T", "S", "padded_T", "tiles", "tail", "left", "right", "prefix", "chunk"],
    do_not_specialize_on_alignment=["cu_q_ptr", "cu_k_ptr"],
)
def flash_bwd_kv(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_desc, dv_desc,
    dk_ptr, dv_ptr, lost_ptr, cu_q_ptr, cu_k_ptr, counter_ptr,
    B, T, S, padded_T, tiles, tail, scale, softcap, left, right, prefix, chunk,
    GROUP: gl.constexpr, PARTS: gl.constexpr, D: gl.constexpr, DIM: gl.constexpr, DIM_V: gl.constexpr, PACKED: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, PREFIX: gl.constexpr, CHUNK: gl.constexpr,
    SOFTCAP: gl.constexpr, HALF: gl.constexpr,
    SLOTS: gl.constexpr, COMPUTE_REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    shape = Backward(GROUP, PARTS, 1, D, DIM, DIM_V, PACKED, LEFT or RIGHT or PREFIX or CHUNK, SOFTCAP, HALF)
    mask = Mask(left, right, prefix, chunk, LEFT, RIGHT, PREFIX, CHUNK)
    words: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    keys = ring(gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK, D], k_desc.layout), 1, 1)
    values = ring(gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK, D], v_desc.layout), 1, 1)
    queries = ring(gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, BLOCK, D], q_desc.layout), SLOTS, 2)
    grads = ring(gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, BLOCK, D], do_desc.layout), SLOTS, 2)
    weights = ring(gl.allocate_shared_memory(gl.int32, [2, 2048], words), 2, 1)
    lses = gl.allocate_shared_memory(gl.float32, [SLOTS, BLOCK], lse_desc.layout)
    deltas = gl.allocate_shared_memory(gl.float32, [SLOTS, BLOCK], delta_desc.layout)
    plans = ring(gl.allocate_shared_memory(gl.int32, [2 * WORDS, 1], words), 2, 2)
    fence_async_shared()
    scoring = make_scoring(mask, scale, softcap, SOFTCAP)
    gl.warp_specialize(
        [
            (_values, (plans, keys, queries, grads, weights, lses, dv_desc, dv_ptr, lost_ptr, scoring, shape)),
            (_keys, (plans, values, queries, grads, weights, lses, deltas, dk_desc, dk_ptr, lost_ptr, scoring, shape)),
            (load_walks, (
                plans, keys, values, queries, grads, lses, deltas, mask,
                q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc,
                B, T, S, padded_T, tiles, tail, cu_q_ptr, cu_k_ptr, counter_ptr, shape,
            )),
        ],
        [4, 1], [COMPUTE_REGISTERS, COPY_REGISTERS],
    )
