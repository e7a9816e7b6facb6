"""The rungs between FlashAttention-2's schedule and the shipped Hopper kernel, one technique at a time.

One forward for 16-bit dense heads whose lengths are multiples of 128, full or causal, with a switch for each technique:

    plain        all warps do everything in turn; copies go through the copy engine (TMA), a block ahead
    specialised  one warp asks for the copies, two warpgroups compute
    overlapped   a warpgroup issues the next block's scores before this block's product with the values
    ping-pong    the two warpgroups take turns to issue

They are here to be compared, not to be used: the shipped kernel has all of this, and persistent programs that draw their tiles.
Dao, FlashAttention-2, arXiv:2307.08691; Shah et al., FlashAttention-3, arXiv:2407.08608.
"""

import torch
from torch import Tensor

from rooftile.exact.backends.hopper.device.config import LN2, LOG2E
from rooftile.exact.backends.hopper.tma import descriptor
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
from rooftile.runtime.hopper.pipeline import Ring, named_barrier, ring

ROWS = gl.constexpr(128)  # queries of a program
KEYS = gl.constexpr(128)  # in a block
SLOTS = gl.constexpr(2)
TURNS = gl.constexpr(9)


@gluon.jit
def _ask(rows: Ring, turn, desc, b, h, row):
    """Has a block copied into its slot."""
    mbarrier.expect(rows.full_barrier(turn), desc.block_type.nbytes)
    tma_load(desc, [b, h, row, 0], rows.full_barrier(turn), rows.buffer(turn))


@gluon.jit
def _scores(q, keys: Ring, turn, rows: gl.constexpr, D: gl.constexpr, layout: gl.constexpr):
    """Issues the scores of a block."""
    none = gl.zeros([rows, KEYS], gl.float32, layout)
    k = keys.buffer(turn).reshape([KEYS, D])
    return warpgroup_mma(q, k.permute((1, 0)), none, use_acc=False, is_async=True)


@gluon.jit
def _softmax(s, m, l, factor, t, j, CAUSAL: gl.constexpr):
    """A block's weights, and what they make of the rows' maximum and sum; t and j are its first query and key."""
    layout: gl.constexpr = s.type.layout
    if CAUSAL:  # noqa: SIM102 - the one is known to the compiler
        if j + KEYS > t:
            rows = t + gl.arange(0, s.shape[0], gl.SliceLayout(1, layout))
            columns = j + gl.arange(0, s.shape[1], gl.SliceLayout(0, layout))
            s = gl.where(gl.expand_dims(columns, 0) <= gl.expand_dims(rows, 1), s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, 1) * factor)
    alpha = gl.exp2(m - m_new)
    p = gl.exp2(s * factor - gl.expand_dims(m_new, 1))
    return p, m_new, l * alpha + gl.sum(p, 1), alpha


@gluon.jit
def _scaled(acc, alpha):
    return acc * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout)), 1)


@gluon.jit
def _store(acc, m, l, output, o_desc, lse_ptr, b, h, H, T, t):
    rows = t + gl.arange(0, acc.shape[0], m.type.layout)
    gl.store(lse_ptr + (b * H + h).to(gl.int64) * T + rows, (m + gl.log2(l)) * LN2)
    staged = output.reshape([acc.shape[0], acc.shape[1]])
    staged.store(_scaled(acc, 1.0 / l).to(output.dtype))
    fence_async_shared()
    tma_store(o_desc, [b, h, t, 0], output)
    tma_store_wait(0)


@gluon.jit
def plain(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, factor, tiles,
    D: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Eight warps, 128 queries: ask for the next block, multiply, wait, softmax, multiply, wait."""
    dtype: gl.constexpr = q_desc.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, KEYS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, D, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    queries = ring(gl.allocate_shared_memory(dtype, [1, 1, 1, ROWS, D], q_desc.layout), 1, 1)
    keys = ring(gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, KEYS, D], k_desc.layout), SLOTS, 1)
    values = ring(gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, KEYS, D], v_desc.layout), SLOTS, 1)
    fence_async_shared()
    H = q_desc.shape[1].to(gl.int32)
    T = q_desc.shape[2].to(gl.int32)
    bh = gl.program_id(0) // tiles
    t = (tiles - 1 - gl.program_id(0) % tiles) * ROWS
    b = bh // H
    h = bh % H
    blocks = T // KEYS
    if CAUSAL:
        blocks = t // KEYS + 1
    _ask(queries, 0, q_desc, b, h, t)
    _ask(keys, 0, k_desc, b, h, 0)
    _ask(values, 0, v_desc, b, h, 0)
    queries.wait_full(0)
    q = queries.buffers.index(0).reshape([ROWS, D])
    acc = gl.zeros([ROWS, D], gl.float32, o_layout)
    m = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
    l = gl.zeros([ROWS], gl.float32, row_layout)
    for i in range(blocks):
        if i + 1 < blocks:
            # its last reader has waited for the product
            _ask(keys, i + 1, k_desc, b, h, (i + 1) * KEYS)
            _ask(values, i + 1, v_desc, b, h, (i + 1) * KEYS)
        keys.wait_full(i)
        s = warpgroup_mma_wait(0, deps=(_scores(q, keys, i, ROWS, D, s_layout),))
        p, m, l, alpha = _softmax(s, m, l, factor, t, i * KEYS, CAUSAL)
        values.wait_full(i)
        weights = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, o_layout, 2))
        acc = warpgroup_mma(weights, values.buffer(i).reshape([KEYS, D]), _scaled(acc, alpha), is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        # all warps have read their block: it may be overwritten
        barrier()
    _store(acc, m, l, queries.buffers.index(0), o_desc, lse_ptr, b, h, H, T, t)


@gluon.jit
def _load(queries: Ring, keys: Ring, values: Ring, q_desc, k_desc, v_desc, b, h, t, blocks):
    """The role that asks for copies."""
    for i in gl.static_range(2):
        _ask(queries, i, q_desc, b, h, t + i * 64)
    for i in range(blocks):
        keys.wait_empty(i)
        _ask(keys, i, k_desc, b, h, i * KEYS)
        values.wait_empty(i)
        _ask(values, i, v_desc, b, h, i * KEYS)


@gluon.jit
def _compute(
    WG: gl.constexpr, queries: Ring, keys: Ring, values: Ring, o_desc, lse_ptr, factor, b, h, H, T, t, blocks,
    D: gl.constexpr, CAUSAL: gl.constexpr, OVERLAPPED: gl.constexpr, PING_PONG: gl.constexpr,
):  # fmt: skip
    """The role of a warpgroup: 64 queries."""
    dtype: gl.constexpr = queries.buffers.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    row = t + WG * 64
    output = queries.buffers.index(WG)
    acc = gl.zeros([64, D], gl.float32, o_layout)
    m = gl.full([64], float("-inf"), gl.float32, row_layout)
    l = gl.zeros([64], gl.float32, row_layout)
    queries.wait_full(WG)
    q = output.reshape([64, D])
    if PING_PONG and WG == 1:
        named_barrier("arrive", TURNS)
    if OVERLAPPED:
        keys.wait_full(0)
        s = warpgroup_mma_wait(0, deps=(_scores(q, keys, 0, 64, D, s_layout),))
        keys.release(0)
        p, m, l, alpha = _softmax(s, m, l, factor, row, 0, CAUSAL)
        weights = gl.convert_layout(p.to(dtype), left)
        for i in range(1, blocks):
            keys.wait_full(i)
            if PING_PONG:
                named_barrier("sync", TURNS + WG)
            s = _scores(q, keys, i, 64, D, s_layout)
            values.wait_full(i - 1)
            acc = warpgroup_mma(weights, values.buffer(i - 1).reshape([KEYS, D]), acc, is_async=True)
            if PING_PONG:
                named_barrier("arrive", TURNS + 1 - WG)
            s = warpgroup_mma_wait(1, deps=(s,))
            keys.release(i)
            p, m, l, alpha = _softmax(s, m, l, factor, row, i * KEYS, CAUSAL)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            values.release(i - 1)
            acc = _scaled(acc, alpha)
            weights = gl.convert_layout(p.to(dtype), left)
        values.wait_full(blocks - 1)
        acc = warpgroup_mma(weights, values.buffer(blocks - 1).reshape([KEYS, D]), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        values.release(blocks - 1)
    else:
        for i in range(blocks):
            keys.wait_full(i)
            s = warpgroup_mma_wait(0, deps=(_scores(q, keys, i, 64, D, s_layout),))
            keys.release(i)
            p, m, l, alpha = _softmax(s, m, l, factor, row, i * KEYS, CAUSAL)
            values.wait_full(i)
            weights = gl.convert_layout(p.to(dtype), left)
            acc = warpgroup_mma(weights, values.buffer(i).reshape([KEYS, D]), _scaled(acc, alpha), is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            values.release(i)
    if PING_PONG and WG == 0:
        named_barrier("sync", TURNS)
    _store(acc, m, l, output, o_desc, lse_ptr, b, h, H, T, row)


# fmt: off
@gluon.jit
def specialised(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, factor, tiles,
    D: gl.constexpr, CAUSAL: gl.constexpr, OVERLAPPED: gl.constexpr, PING_PONG: gl.constexpr,
):
    # fmt: on
    """One loader warp and two consumer warpgroups; one program per tile of 128 queries."""
    dtype: gl.constexpr = q_desc.dtype
    queries = ring(gl.allocate_shared_memory(dtype, [2, 1, 1, 64, D], q_desc.layout), 2, 1)
    keys = ring(gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, KEYS, D], k_desc.layout), SLOTS, 2)
    values = ring(gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, KEYS, D], v_desc.layout), SLOTS, 2)
    fence_async_shared()
    H = q_desc.shape[1].to(gl.int32)
    T = q_desc.shape[2].to(gl.int32)
    bh = gl.program_id(0) // tiles
    t = (tiles - 1 - gl.program_id(0) % tiles) * ROWS
    b = bh // H
    h = bh % H
    blocks = T // KEYS
    if CAUSAL:
        blocks = t // KEYS + 1
    gl.warp_specialize(
        [
            (_compute, (
                0, queries, keys, values, o_desc, lse_ptr, factor, b, h, H, T, t, blocks, D, CAUSAL, OVERLAPPED, PING_PONG,
            )),
            (_compute, (
                1, queries, keys, values, o_desc, lse_ptr, factor, b, h, H, T, t, blocks, D, CAUSAL, OVERLAPPED, PING_PONG,
            )),
            (_load, (queries, keys, values, q_desc, k_desc, v_desc, b, h, t, blocks)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, rung: str) -> tuple[Tensor, Tensor]:
    """o and lse of (B, T, H, D) tensors, T a multiple of 128, by a rung of the ladder."""
    B, T, H, D = q.shape
    o = torch.empty_like(q)
    lse = torch.empty((B, H, T), dtype=torch.float32, device=q.device)
    rows = 128 if rung == "plain" else 64
    described = (descriptor(q, (1, rows, D)), descriptor(k, (1, 128, D)), descriptor(v, (1, 128, D)), descriptor(o, (1, rows, D)))
    tiles = T // 128
    numbers = (lse, D**-0.5 * LOG2E.value, tiles)
    if rung == "plain":
        plain[(tiles * B * H,)](*described, *numbers, D=D, CAUSAL=causal, num_warps=8)
    else:
        switches = {"OVERLAPPED": rung != "specialised", "PING_PONG": rung == "ping-pong"}
        specialised[(tiles * B * H,)](*described, *numbers, D=D, CAUSAL=causal, **switches, num_warps=4)
    return o, lse
