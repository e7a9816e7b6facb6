"""The forward on Hopper: o and lse.

A program is a crew of warp roles that pass tiles through shared memory and wait only for each other:

    load     one warp: draws the next tile of queries, tells the others, and has its queries copied in, then its keys and
             values block by block, from the last block down to the first
    compute  two or three warpgroups of 64 queries each: scores, softmax and output, all in registers

Copies are the chip's tensor memory accelerator's (TMA): one thread asks, a barrier counts the bytes. Matrix products are
asynchronous too (wgmma), and three overlaps keep the tensor cores busy while the exponentials run:

    in a warpgroup   the scores of the next block are issued before this block's product with the values, so the softmax
                     of the one runs while the other is multiplied
    across them      the warpgroups take turns to issue (ping-pong), so one's softmax runs under the other's products
    across tiles     the last product of a tile is issued together with the first scores of the next tile

Shah et al., FlashAttention-3, arXiv:2407.08608; Dao, FlashAttention-2, arXiv:2307.08691, Algorithm 1.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from rooftile.backends.hopper.counters import counter
from rooftile.backends.hopper.descriptors import descriptor, readable
from rooftile.backends.hopper.gluon import (
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
from rooftile.backends.hopper.pipeline import Ring, pass_turn, ring, take_turn
from rooftile.backends.hopper.schedule import WORDS, Mask, make_plan, publish, publish_end, take
from rooftile.backends.hopper.tiles import Tile, forward_tile
from rooftile.masks import FULL
from rooftile.spec import Options, Spec

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
# queries of a warpgroup: what one wgmma has
WG_ROWS = gl.constexpr(64)


@aggregate
class Shape:
    """What is known when the kernel is compiled."""

    GROUP: gl.constexpr
    D: gl.constexpr
    DV: gl.constexpr
    KEYS: gl.constexpr  # of a block
    CREW: gl.constexpr  # warpgroups that compute
    PACKED: gl.constexpr
    MASKED: gl.constexpr  # anything but a full mask
    SOFTCAP: gl.constexpr
    SINKS: gl.constexpr
    s_layout: gl.constexpr
    o_layout: gl.constexpr
    p_layout: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, GROUP, D, DV, KEYS, CREW, PACKED, MASKED, SOFTCAP, SINKS):
        self.GROUP = gl.constexpr(GROUP)
        self.D = gl.constexpr(D)
        self.DV = gl.constexpr(DV)
        self.KEYS = gl.constexpr(KEYS)
        self.CREW = gl.constexpr(CREW)
        self.PACKED = gl.constexpr(PACKED)
        self.MASKED = gl.constexpr(MASKED)
        self.SOFTCAP = gl.constexpr(SOFTCAP)
        self.SINKS = gl.constexpr(SINKS)
        o_layout = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
        self.s_layout = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16]))
        self.o_layout = gl.constexpr(o_layout)
        self.p_layout = gl.constexpr(gl.DotOperandLayout(0, o_layout, 2))


@gluon.jit
def _load_block(keys: Ring, values: Ring, k_desc, v_desc, turn, plan, block, shape: Shape):
    """Has one block of keys and values copied in."""
    h = plan.h // shape.GROUP
    row = plan.key + block * shape.KEYS
    keys.wait_empty(turn)
    mbarrier.expect(keys.filled(turn), k_desc.block_type.nbytes)
    tma_load(k_desc, [plan.b, h, row, 0], keys.filled(turn), keys.buffer(turn))
    values.wait_empty(turn)
    mbarrier.expect(values.filled(turn), v_desc.block_type.nbytes)
    tma_load(v_desc, [plan.b, h, row, 0], values.filled(turn), values.buffer(turn))


@gluon.jit
def _load(
    plans: Ring, queries: Ring, keys: Ring, values: Ring, mask: Mask, q_desc, k_desc, v_desc,
    B, H, T, S, tiles, tail, cu_q_ptr, cu_k_ptr, counter_ptr, shape: Shape,
):  # fmt: skip
    """The role that draws tiles and has them copied in.

    It runs as far ahead as the rings let it, which is two blocks; so the next tile is drawn when this one's last block is
    asked for: late, so that no program holds a tile that an idle one could start, and early enough to hide the wait.
    The counter is left at zero for the next launch by whoever finishes last.
    """
    total = tiles * (H if shape.PACKED else B * H)
    programs = gl.num_programs(0)
    n = gl.program_id(0)
    tile = 0
    turn = 0
    while n < total:
        plan = make_plan(n, B, H, T, S, tiles, tail, cu_q_ptr, cu_k_ptr, mask, shape.CREW * WG_ROWS, shape.KEYS, shape.PACKED)
        if plan.live != 0:
            publish(plans, tile, plan)
            queries.wait_empty(tile)
            mbarrier.expect(queries.filled(tile), q_desc.block_type.nbytes * shape.CREW)
            for i in gl.static_range(shape.CREW):
                tma_load(
                    q_desc, [plan.b, plan.h, plan.row + plan.t + i * WG_ROWS, 0], queries.filled(tile),
                    queries.buffers.index(tile % queries.slots * shape.CREW + i),
                )  # fmt: skip
            tile += 1
            for i in range(plan.last - plan.first):
                _load_block(keys, values, k_desc, v_desc, turn, plan, plan.last - i, shape)
                turn += 1
            n = gl.atomic_add(counter_ptr, 1) + programs
            _load_block(keys, values, k_desc, v_desc, turn, plan, plan.first, shape)
            turn += 1
        else:
            n = gl.atomic_add(counter_ptr, 1) + programs
    publish_end(plans, tile)
    finished = gl.atomic_add(counter_ptr + 1, 1)
    gl.store(counter_ptr, 0, mask=finished == programs - 1)
    gl.store(counter_ptr + 1, 0, mask=finished == programs - 1)


@gluon.jit
def _scores(s, row, column, plan, mask: Mask, scale, softcap, shape: Shape, CHECK: gl.constexpr):
    """The products of queries and keys, capped, and -inf where the mask or the end of the keys hides one."""
    if shape.SOFTCAP:
        # tanh by one exponential that saturates at both ends
        s = softcap * LOG2E * (1 - 2 / (gl.exp2(s * (2 * LOG2E * scale / softcap)) + 1))
    if CHECK:
        i = row + plan.S - plan.T + gl.arange(0, WG_ROWS, gl.SliceLayout(1, shape.s_layout))
        j = column + gl.arange(0, shape.KEYS, gl.SliceLayout(0, shape.s_layout))
        sees = gl.expand_dims(j, 0) <= gl.expand_dims(mask.last_key(i, plan.S), 1)
        if mask.LEFT or mask.CHUNK:
            sees = sees & (gl.expand_dims(j, 0) >= gl.expand_dims(mask.first_key(i), 1))
        s = gl.where(sees, s, float("-inf"))
    return s


@gluon.jit
def _softmax(s, m, l, factor, shape: Shape, FIRST: gl.constexpr):
    """Online softmax: the block's weights, and the rows' maximum, sum and the factor for what was summed before.

    The sum is kept in four parts a row, one a thread, and added up once a tile.
    """
    m_new = gl.maximum(m, gl.max(s, 1))
    # a row that has seen no key yet: exp2(-inf - 0) is 0
    reference = gl.where(m_new == float("-inf"), 0.0, m_new * factor)
    alpha = gl.exp2(m * factor - reference)
    p = gl.exp2(s * factor - gl.expand_dims(reference, 1))
    parts = gl.sum(gl.sum(gl.reshape(p, [WG_ROWS, shape.KEYS // 8, 4, 2]), 3), 1)
    if FIRST:
        l = parts
    else:
        l = l * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, parts.type.layout)), 1) + parts
    return p, m_new, l, alpha


@gluon.jit
def _packed(p, dtype: gl.constexpr):
    """A block's weights in 16 bits, two to a register.

    They live from one turn of a loop to the next, and as tensors of 16 bits the compiler would take the pairs apart and
    put them together again each time around.
    """
    even, odd = p.reshape([p.shape[0], p.shape[1] // 2, 2]).split()
    kind: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    return gl.inline_asm_elementwise(
        "cvt.rn." + kind + ".f32 $0, $2, $1;", "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _unpacked(p, dtype: gl.constexpr, layout: gl.constexpr):
    """The weights of `_packed` as the left side of a product: no instruction, only another name for the registers."""
    twice = gl.join(p, p).reshape([p.shape[0], p.shape[1] * 2])
    if dtype == gl.bfloat16:
        weights = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [twice], dtype=gl.bfloat16, is_pure=True, pack=2)
    else:
        weights = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [twice], dtype=gl.float16, is_pure=True, pack=2)
    return gl.convert_layout(weights, layout)


@gluon.jit
def _issue(q, keys: Ring, values: Ring, p, acc, turn, there, MINE: gl.constexpr, OTHER: gl.constexpr, shape: Shape):
    """Issues the scores of block `turn` and the product of the block before it with its values; waits for neither.

    `there` false: there is no such block, and the scores are of a buffer's old keys, for nobody to read.
    """
    keys.wait_full(turn, there)
    take_turn(MINE, "256")
    none = gl.zeros([WG_ROWS, shape.KEYS], gl.float32, shape.s_layout)
    s = warpgroup_mma(q, keys.buffer(turn).reshape([shape.KEYS, shape.D]).permute((1, 0)), none, use_acc=False, is_async=True)
    values.wait_full(turn - 1)
    weights = _unpacked(p, values.buffers.dtype, shape.p_layout)
    acc = warpgroup_mma(weights, values.buffer(turn - 1).reshape([shape.KEYS, shape.DV]), acc, is_async=True)
    pass_turn(OTHER, "256")
    return s, acc


@gluon.jit
def _opaque(x):
    """x, in a way that the assembler cannot tell: what follows from it is computed anew.

    ptxas 12.8 keeps what two loops in a row have in common where it was computed for the first, and then runs the second
    with nothing there when the first made no turn.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _step(q, keys: Ring, values: Ring, p, acc, m, l, turn, row, column, plan, mask: Mask, scale, softcap, factor,
          MINE: gl.constexpr, OTHER: gl.constexpr, shape: Shape, CHECK: gl.constexpr):
    s, acc = _issue(q, keys, values, p, acc, turn, True, MINE, OTHER, shape)
    s = warpgroup_mma_wait(1, deps=(s,))
    keys.give_back(turn)
    s = _scores(s, row, column, plan, mask, scale, softcap, shape, CHECK)
    weights, m, l, alpha = _softmax(s, m, l, factor, shape, False)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    values.give_back(turn - 1)
    p = _packed(weights, keys.buffers.dtype)
    acc = acc * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, shape.o_layout)), 1)
    return p, acc, m, l


@gluon.jit
def _compute(
    WG: gl.constexpr, plans: Ring, queries: Ring, keys: Ring, values: Ring, outputs, mask: Mask,
    o_desc, o_ptr, lse_ptr, sinks_ptr, H, total, scale, softcap, shape: Shape,
):  # fmt: skip
    """A warpgroup's role: 64 queries of every tile."""
    # the named barriers of the ping-pong, one a warpgroup
    MINE: gl.constexpr = "9" if WG == 0 else ("10" if WG == 1 else "11")
    OTHER: gl.constexpr = "9" if WG == shape.CREW - 1 else ("10" if WG == 0 else "11")
    dtype: gl.constexpr = queries.buffers.dtype
    row_layout: gl.constexpr = gl.SliceLayout(1, shape.s_layout)
    factor = scale * LOG2E
    if shape.SOFTCAP:
        factor = 1.0
    none = gl.full([WG_ROWS], float("-inf"), gl.float32, row_layout)
    output = outputs.index(WG)

    if WG == shape.CREW - 1:
        pass_turn("9", "256")
    tile = 0
    turn = 0
    plan = take(plans, 0)
    # the first block of the first tile has nothing to overlap with
    queries.wait_full(0, plan.live != 0)
    keys.wait_full(0, plan.live != 0)
    take_turn(MINE, "256")
    q = queries.buffers.index(WG).reshape([WG_ROWS, shape.D])
    zeros = gl.zeros([WG_ROWS, shape.KEYS], gl.float32, shape.s_layout)
    s = warpgroup_mma(q, keys.buffer(0).reshape([shape.KEYS, shape.D]).permute((1, 0)), zeros, use_acc=False, is_async=True)
    pass_turn(OTHER, "256")
    s = warpgroup_mma_wait(0, deps=(s,))
    keys.give_back(0)
    s = _scores(s, plan.t + WG * WG_ROWS, plan.last * shape.KEYS, plan, mask, scale, softcap, shape, True)
    p, m, l, alpha = _softmax(s, none, none, factor, shape, True)
    p = _packed(p, dtype)

    while plan.live != 0:
        acc = gl.zeros([WG_ROWS, shape.DV], gl.float32, shape.o_layout)
        q = queries.buffers.index(tile % queries.slots * shape.CREW + WG).reshape([WG_ROWS, shape.D])
        row = plan.t + WG * WG_ROWS
        # blocks from last down to first: some at the right end that the mask cuts, clear ones, some at the left end
        i_0 = row + plan.S - plan.T
        blocks = plan.last - plan.first + 1
        right = 1
        left = blocks
        if shape.MASKED:
            clear_stop = (mask.last_key(i_0, plan.S) + 1) // shape.KEYS
            right = gl.minimum(gl.maximum(plan.last + 1 - clear_stop, 1), blocks)
            for i in range(1, right):
                turn += 1
                p, acc, m, l = _step(q, keys, values, p, acc, m, l, turn, row, (plan.last - i) * shape.KEYS, plan, mask, scale, softcap, factor, MINE, OTHER, shape, True)
            if mask.LEFT or mask.CHUNK:
                clear_first = gl.maximum(mask.first_key(i_0 + (WG_ROWS - 1)) + (shape.KEYS - 1), 0) // shape.KEYS
                left = gl.maximum(gl.minimum(plan.last + 1 - clear_first, blocks), right)
        q = queries.buffers.index(_opaque(tile) % queries.slots * shape.CREW + WG).reshape([WG_ROWS, shape.D])
        for i in range(right, left):
            turn += 1
            p, acc, m, l = _step(q, keys, values, p, acc, m, l, turn, row, (plan.last - i) * shape.KEYS, plan, mask, scale, softcap, factor, MINE, OTHER, shape, False)
        if mask.LEFT or mask.CHUNK:
            q = queries.buffers.index(_opaque(tile) % queries.slots * shape.CREW + WG).reshape([WG_ROWS, shape.D])
            for i in range(left, blocks):
                turn += 1
                p, acc, m, l = _step(q, keys, values, p, acc, m, l, turn, row, (plan.last - i) * shape.KEYS, plan, mask, scale, softcap, factor, MINE, OTHER, shape, True)
        queries.give_back(tile)

        # the last product of this tile, together with the first scores of the next
        tile += 1
        turn += 1
        after = take(plans, tile)
        there = after.live != 0
        queries.wait_full(tile, there)
        q = queries.buffers.index(tile % queries.slots * shape.CREW + WG).reshape([WG_ROWS, shape.D])
        s, acc = _issue(q, keys, values, p, acc, turn, there, MINE, OTHER, shape)
        m = m * factor
        l = gl.convert_layout(gl.sum(l, 1), row_layout)
        share = 1.0
        if shape.SINKS:
            sink = gl.load(sinks_ptr + plan.h).to(gl.float32) * LOG2E
            m_new = gl.maximum(m, sink)
            reference = gl.where(m_new == float("-inf"), 0.0, m_new)
            share = gl.exp2(m - reference)
            l = l * share + gl.exp2(sink - reference)
            m = m_new
        t = row + gl.arange(0, WG_ROWS, row_layout)
        line = plan.b * H + plan.h
        gl.store(lse_ptr + line.to(gl.int64) * total + plan.row + t, (m + gl.log2(l)) * LN2, mask=t < plan.T)
        share = gl.where(l == 0.0, 0.0, share / l)
        s = warpgroup_mma_wait(1, deps=(s,))
        keys.give_back(turn)
        s = _scores(s, after.t + WG * WG_ROWS, after.last * shape.KEYS, after, mask, scale, softcap, shape, True)
        weights, m, l, alpha = _softmax(s, none, none, factor, shape, True)
        _wait_for_store()
        acc = warpgroup_mma_wait(0, deps=(acc,))
        values.give_back(turn - 1)
        p = _packed(weights, dtype)
        acc = acc * gl.expand_dims(gl.convert_layout(share, gl.SliceLayout(1, shape.o_layout)), 1)
        _store(output, acc.to(dtype), o_desc, o_ptr, plan, row, H, shape)
        plan = after
    tma_store_wait(0)
    if WG == 0:
        take_turn("9", "256")


@gluon.jit
def _store(output, o, o_desc, o_ptr, plan, row, H, shape: Shape):
    """The rows of a warpgroup, to memory, at most 128 columns at a time."""
    if shape.DV > 128:
        low, high = o.reshape([WG_ROWS, 2, shape.DV // 2]).permute((0, 2, 1)).split()
        _store_columns(output, low, 0, o_desc, o_ptr, plan, row, H, shape)
        _wait_for_store()
        _store_columns(output, high, shape.DV // 2, o_desc, o_ptr, plan, row, H, shape)
    else:
        _store_columns(output, o, 0, o_desc, o_ptr, plan, row, H, shape)


@gluon.jit
def _wait_for_store():
    """Until the staged rows are on their way: one thread asked for the copy, and all of them are to write there next."""
    tma_store_wait(0)
    barrier()


@gluon.jit
def _store_columns(output, o, column: gl.constexpr, o_desc, o_ptr, plan, row, H, shape: Shape):
    """A packed sequence may end inside the tile, where the copy engine would not stop: its rows are stored one by one."""
    columns: gl.constexpr = o.shape[1]
    staged = output.reshape([WG_ROWS, columns])
    staged.store(o)
    if shape.PACKED:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [4, 1], [1, 0])
        t = row + gl.arange(0, WG_ROWS, gl.SliceLayout(1, layout))
        e = column + gl.arange(0, columns, gl.SliceLayout(0, layout))
        lines = ((plan.row + t).to(gl.int64) * H + plan.h) * shape.DV
        there = gl.expand_dims(t < plan.T, 1)
        gl.store(o_ptr + gl.expand_dims(lines, 1) + gl.expand_dims(e, 0), staged.load(layout), mask=there)
    else:
        fence_async_shared()
        tma_store(o_desc, [plan.b, plan.h, row, column], output)


# fmt: off
@gluon.jit(do_not_specialize=["B", "H", "T", "S", "tiles", "tail", "total", "left", "right", "prefix", "chunk"])
def _forward(
    q_desc, k_desc, v_desc, o_desc, o_ptr, lse_ptr, sinks_ptr, cu_q_ptr, cu_k_ptr, counter_ptr,
    B, H, T, S, tiles, tail, total, scale, softcap, left, right, prefix, chunk,
    GROUP: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, PACKED: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, PREFIX: gl.constexpr, CHUNK: gl.constexpr,
    SOFTCAP: gl.constexpr, SINKS: gl.constexpr,
    KEYS: gl.constexpr, CREW: gl.constexpr, Q_SLOTS: gl.constexpr, KV_SLOTS: gl.constexpr,
    COMPUTE_REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr,
):
    # fmt: on
    dtype: gl.constexpr = q_desc.dtype
    shape = Shape(GROUP, D, DV, KEYS, CREW, PACKED, LEFT or RIGHT or PREFIX or CHUNK, SOFTCAP, SINKS)
    mask = Mask(left, right, prefix, chunk, LEFT, RIGHT, PREFIX, CHUNK)
    queries = ring(gl.allocate_shared_memory(dtype, [Q_SLOTS * CREW, 1, 1, WG_ROWS, D], q_desc.layout), Q_SLOTS, CREW)
    keys = ring(gl.allocate_shared_memory(dtype, [KV_SLOTS, 1, 1, KEYS, D], k_desc.layout), KV_SLOTS, CREW)
    values = ring(gl.allocate_shared_memory(dtype, [KV_SLOTS, 1, 1, KEYS, DV], v_desc.layout), KV_SLOTS, CREW)
    outputs = gl.allocate_shared_memory(dtype, [CREW, 1, 1, WG_ROWS, min(DV, 128)], o_desc.layout)
    words: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    plans = ring(gl.allocate_shared_memory(gl.int32, [2 * WORDS, 1], words), 2, CREW)
    fence_async_shared()
    load = (
        plans, queries, keys, values, mask, q_desc, k_desc, v_desc,
        B, H, T, S, tiles, tail, cu_q_ptr, cu_k_ptr, counter_ptr, shape,
    )
    args = (plans, queries, keys, values, outputs, mask, o_desc, o_ptr, lse_ptr, sinks_ptr, H, total, scale, softcap, shape)
    if CREW == 2:
        gl.warp_specialize(
            [(_compute, (0,) + args), (_compute, (1,) + args), (_load, load)],
            [4, 1], [COMPUTE_REGISTERS, COPY_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [(_compute, (0,) + args), (_compute, (1,) + args), (_compute, (2,) + args), (_load, load)],
            [4, 4, 1], [COMPUTE_REGISTERS, COMPUTE_REGISTERS, COPY_REGISTERS],
        )


def forward(q: Tensor, k: Tensor, v: Tensor, options: Options, spec: Spec) -> tuple[Tensor, Tensor]:
    """Returns o (B, T, H, Dv) and lse (B, H, T), or packed (total_q, H, Dv) and (H, total_q)."""
    packed = spec.layout == "packed"
    if packed:
        B, (T, H), S = options.cu_q.shape[0] - 1, q.shape[:2], k.shape[0]
    else:
        (B, T, H), S = q.shape[:3], k.shape[1]
    o = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
    lse = torch.empty((H, T) if packed else (B, H, T), dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return o, lse
    if S == 0:
        # a descriptor needs an element; the kernel sees that none is visible
        k, v = (x.new_zeros((*x.shape[:-3], 1, *x.shape[-2:])) for x in (k, v))
    tile = forward_tile(spec, T)
    tiles = T // tile.rows + B if packed else -(-T // tile.rows)
    programs = min(tiles * (H if packed else B * H), processors(q.device))
    columns = min(spec.dim_v, 128)
    none = lse
    _forward[(programs,)](
        descriptor(readable(q), tile.rows // tile.CREW, spec.dim), descriptor(readable(k), tile.KEYS, spec.dim),
        descriptor(readable(v), tile.KEYS, spec.dim_v), descriptor(o, tile.rows // tile.CREW, columns), o, lse,
        *(none if x is None else x for x in (options.sinks, options.cu_q, options.cu_k)), counter(q.device),
        B, H, T, S, tiles, tail(spec, tiles, programs, H if packed else B * H), T, *_numbers(spec), **_constants(spec, tile),
    )  # fmt: skip
    return o, lse


def tail(spec: Spec, tiles: int, programs: int, heads: int) -> int:
    """How many heads are taken together at the end: enough for the programs to even out what tiles of many lengths left."""
    if spec.mask == FULL:
        return 0
    return min(-(-TAIL * programs // tiles), heads)


TAIL = 2


@cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _numbers(spec: Spec) -> tuple[float, ...]:
    mask = spec.mask
    (chunk,) = mask.chunks or (0,)
    return (spec.scale, spec.softcap, mask.left or 0, mask.right or 0, mask.prefix or 0, chunk)


@cache
def _constants(spec: Spec, tile: Tile) -> dict[str, Any]:
    mask = spec.mask
    return {
        "GROUP": spec.group,
        "D": spec.dim,
        "DV": spec.dim_v,
        "PACKED": spec.layout == "packed",
        "LEFT": mask.left is not None,
        "RIGHT": mask.right is not None,
        "PREFIX": mask.prefix is not None,
        "CHUNK": bool(mask.chunks),
        "SOFTCAP": spec.softcap > 0,
        "SINKS": spec.has_sinks,
        **tile.constants,
        "num_warps": 4,
    }
