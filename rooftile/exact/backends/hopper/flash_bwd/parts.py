"""Parts that the backward kernels share: compile-time configuration, the loop of a tile of keys, weights, stores.

With P the weights, recomputed from lse, and D_i = sum_c dO_ic O_ic - dL_i, a row's word in memory beside its lse:

    S  = Q K^T            P  = exp(scale S - L)         dV = P^T dO
    dP = dO V^T           dS = P (dP - D)               dQ = scale dS K        dK = scale dS^T Q

Dao, FlashAttention-2, arXiv:2307.08691, Algorithm 2; Shah et al., FlashAttention-3, arXiv:2407.08608.
"""

from rooftile.exact.backends.hopper.device.config import LOG2E, WG_ROWS
from rooftile.exact.backends.hopper.device.lists import BlockLists, count_steps, write_word
from rooftile.exact.backends.hopper.device.mask import FAR
from rooftile.exact.backends.hopper.device.mma import mma_qk
from rooftile.exact.backends.hopper.device.nan_fallback import holds_nan
from rooftile.exact.backends.hopper.device.scheduler import (
    MOST_SORTED,
    MaskBounds,
    WorkTile,
    dense_tile,
    packed_tile,
    padded_row,
    publish,
    publish_end,
    reset_counter,
    tile_by_work,
)
from rooftile.exact.backends.hopper.device.softmax import ScoreNumbers
from rooftile.runtime.hopper import ptx
from rooftile.runtime.hopper.gluon import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_store,
)
from rooftile.runtime.hopper.pipeline import Ring

# queries, or keys, of a block
BLOCK = gl.constexpr(64)
# blocks of a list whose words are kept; no role is so far behind
WORDS = gl.constexpr(16)


@aggregate
class BackwardConfig:
    """The compile-time configuration of a backward kernel."""

    GROUP: gl.constexpr  # query heads that a tile of keys walks
    GROUP_SPLITS: gl.constexpr  # tiles that share a key head's group, each with its own sum
    BLOCKS_PER_TILE: gl.constexpr  # rows of 64 keys, or queries, in a tile
    D: gl.constexpr  # columns of all rows in shared memory, padded with zeros to a power of two
    DIM: gl.constexpr  # columns of queries and keys in memory
    DIM_V: gl.constexpr  # columns of values and outputs
    PACKED: gl.constexpr
    MASKED: gl.constexpr  # anything but a full mask
    SOFTCAP: gl.constexpr
    BIAS: gl.constexpr
    FP16: gl.constexpr  # fp16: gradients of scores are scaled before they are rounded, for its range is narrow
    ACCUMULATE_DQ: gl.constexpr  # dq is added up in memory
    DV_AFTER_DS: gl.constexpr  # a block's product with dO is issued after its gradients of the scores are known
    SCORES_AHEAD: gl.constexpr  # the next block's scores are issued before this one is done
    LIST_T: gl.constexpr  # queries and keys of a listed block; 0: there are no lists
    LIST_S: gl.constexpr
    LIST_BITS: gl.constexpr  # whether some of them are seen in part
    DQ_WARPGROUP: gl.constexpr  # at D = 64: keys and values stay in registers, and dq has a warpgroup of its own
    s_layout: gl.constexpr  # a warpgroup's scores of a block, either way round
    acc_layout: gl.constexpr
    DV: gl.constexpr  # columns of dv
    dv_layout: gl.constexpr
    p_layout: gl.constexpr  # weights as a left operand
    a_layout: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, **fields):
        """Takes the fields by name; a kernel leaves out the fields of parts that it lacks."""
        plain = {"ACCUMULATE_DQ": False, "DV_AFTER_DS": False, "SCORES_AHEAD": False, "BIAS": False}
        plain |= {"LIST_T": 0, "LIST_S": 0, "LIST_BITS": False}
        for name, value in {**plain, **fields}.items():
            setattr(self, name, gl.constexpr(value))
        D, DIM_V = fields["D"], fields["DIM_V"]
        self.DQ_WARPGROUP = gl.constexpr(D <= 64)
        acc_layout = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
        self.s_layout = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
        self.acc_layout = gl.constexpr(acc_layout)
        self.a_layout = gl.constexpr(gl.DotOperandLayout(0, acc_layout, 2))
        DV = D // 2 if DIM_V <= D // 2 else D
        dv_layout = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
        self.DV = gl.constexpr(DV)
        self.dv_layout = gl.constexpr(dv_layout)
        self.p_layout = gl.constexpr(gl.DotOperandLayout(0, dv_layout, 2))


@gluon.jit
def make_work_tile_of_keys(
    n, B, Hk, T, S, tiles, balanced_heads, cu_q_ptr, cu_k_ptr, mask: MaskBounds, KEYS: gl.constexpr, PACKED: gl.constexpr
):  # fmt: skip
    """Makes work tile number n of keys: `t` is its first key, `h` its key head, or part of one, and `first_block` to
    `last_block` are blocks of queries.

    The tiles with the most work are the first keys, which all queries see under a causal mask. Heads come from the last down:
    what `row_stats` read and wrote last is still in the L2 cache, and what comes last here is what the kernel for dq begins with.
    """
    zero = n * 0
    if PACKED:
        h, slot = dense_tile(n, tiles, Hk, balanced_heads)
        h = Hk - 1 - h
        slot = tiles - 1 - slot
        if (n >= (Hk - balanced_heads) * tiles) & (B <= MOST_SORTED):
            i_b, i_tile = tile_by_work(slot, cu_k_ptr, cu_q_ptr, B, KEYS, mask.SLOPED)
            i_tile = gl.where(i_tile < 0, tiles, i_tile)
        else:
            i_b, _ = packed_tile(slot, cu_k_ptr, B, KEYS)
            i_tile = slot - gl.load(cu_k_ptr + i_b).to(gl.int32) // KEYS - i_b
        row = gl.load(cu_q_ptr + i_b).to(gl.int32)
        key = gl.load(cu_k_ptr + i_b).to(gl.int32)
        T = gl.load(cu_q_ptr + i_b + 1).to(gl.int32) - row
        S = gl.load(cu_k_ptr + i_b + 1).to(gl.int32) - key
        b = zero
        padded = padded_row(i_b, row)
    else:
        i_bh, i_tile = dense_tile(n, tiles, B * Hk, balanced_heads)
        i_bh = B * Hk - 1 - i_bh
        i_tile = tiles - 1 - i_tile
        b = i_bh // Hk
        h = i_bh % Hk
        row = zero
        key = zero
        padded = zero
        T = zero + T
        S = zero + S
    s = i_tile * KEYS
    start = mask.first_position(s) - (S - T)
    stop = gl.minimum(mask.last_position(gl.minimum(s + KEYS, S) - 1) - (S - T) + 1, T)
    # a tile that nothing sees walks one block and finds nothing there
    last = gl.maximum(stop - 1, 0) // BLOCK
    first = gl.minimum(gl.maximum(start, 0) // BLOCK, last)
    return WorkTile((s < S).to(gl.int32), b, h, s, T, S, row, key, padded, first, last)


@gluon.jit
def advance_block(h, block, work: WorkTile, config: BackwardConfig):
    """The query head and the block of queries that a tile of keys meets next: block by block, then the next head."""
    block += 1
    if config.GROUP > 1:
        over = block > work.last_block
        h = gl.where(over, h + 1, h)
        block = gl.where(over, work.first_block, block)
    return h, block


@gluon.jit
def find_unmasked_queries(work: WorkTile, s, KEYS: gl.constexpr, mask: MaskBounds):
    """The first and the last query between which every query sees each of KEYS keys from s on.

    Queries past the end weigh nothing (see `row_stats`), so none of this asks for them.
    """
    offset = work.S - work.T
    low = mask.first_position(s + (KEYS - 1)) - offset
    high = mask.last_position(s) - offset
    return low, gl.where(s + KEYS > work.S, -FAR, high)


@gluon.jit
def issue_mma_qk(a, rows: Ring, fill, DIM: gl.constexpr, config: BackwardConfig):
    """Issues 64 rows times a block's 64, over their head dim, once the block is there."""
    rows.wait_full(fill)
    return mma_qk(a, rows.buffer(fill).reshape([64, config.D]), DIM, config.s_layout)


@gluon.jit
def apply_mask_transposed(x, s, t, work: WorkTile, mask: MaskBounds, HIDDEN: gl.constexpr = float("-inf")):
    """Scores of 64 keys from s on by 64 queries from t on, with -inf, or another number, where a query does not see the key.

    As `softmax.hidden`: along the columns a thread compares constants, with two limits a row.
    """
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    parts = x.reshape([ROWS, COLUMNS // 8, 4, 2])
    layout: gl.constexpr = parts.type.layout
    j = s + gl.arange(0, ROWS, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    eights = gl.arange(0, COLUMNS // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout))))
    pair = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))
    column = gl.expand_dims(gl.expand_dims(gl.expand_dims(eights * 8, 0), 2), 3) + gl.expand_dims(
        gl.expand_dims(gl.expand_dims(pair, 0), 1), 2
    )
    start = t + gl.expand_dims(gl.expand_dims(gl.expand_dims(lane * 2, 0), 1), 3)
    offset = work.S - work.T
    high = gl.where(j < work.S, mask.last_position(j) - offset, -FAR)
    sees = column <= _limit(high) - start
    if mask.RIGHT or mask.PREFIX or mask.CHUNK:
        sees = sees & (column >= _limit(mask.first_position(j) - offset) - start)
    return gl.convert_layout(gl.where(sees, parts, HIDDEN).reshape([ROWS, COLUMNS]), x.type.layout)


@gluon.jit
def _limit(x):
    return gl.expand_dims(gl.expand_dims(gl.expand_dims(x, 1), 2), 3)


@gluon.jit
def recompute_capped_scores(p, lses, fill, slots: gl.constexpr, config: BackwardConfig):
    """The capped scores in units of log2, from their weights: kept, they would not fit in the registers."""
    s = p
    if config.SOFTCAP:
        lse = lses.index(fill % slots).load(gl.SliceLayout(0, config.s_layout))
        log2 = gl.inline_asm_elementwise(ptx.LOG2, "=f,f", [p], dtype=gl.float32, is_pure=True, pack=1)
        s = gl.where(p == 0.0, float("-inf"), log2 + gl.expand_dims(lse, 0))
    return s


@gluon.jit
def compute_ds(p, dp, delta, s, scoring: ScoreNumbers, config: BackwardConfig):
    """dS from the weights, the gradients that come to them and, under a softcap, the capped scores in units of log2."""
    if config.FP16:
        p = p * scoring.scale
    ds = p * (dp - delta)
    if config.SOFTCAP:
        tanh = s * (1.0 / (scoring.softcap * LOG2E))
        # where the mask hides, s is -inf and ds is 0
        ds = gl.where(s == float("-inf"), 0.0, ds * (1 - tanh * tanh))
    return ds


@gluon.jit
def load_rows(ring: Ring, fill, desc, b, h, row):
    """Has a block of rows copied into a ring's slot."""
    ring.wait_empty(fill)
    mbarrier.expect(ring.full_barrier(fill), desc.block_type.nbytes)
    tma_load(desc, [b, h, row, 0], ring.full_barrier(fill), ring.buffer(fill))


@gluon.jit
def _load_rows_and_stats(ring: Ring, words, fill, desc, words_desc, b, h, row, word):
    """Loads a block of rows like `load_rows`, and one fp32 word per row."""
    ring.wait_empty(fill)
    mbarrier.expect(ring.full_barrier(fill), desc.block_type.nbytes + words_desc.block_type.nbytes)
    tma_load(desc, [b, h, row, 0], ring.full_barrier(fill), ring.buffer(fill))
    tma_load(words_desc, [word], ring.full_barrier(fill), words.index(fill % ring.stages))


@gluon.jit
def load_key_tiles(
    work_tiles: Ring, keys: Ring, values: Ring, queries: Ring, grads: Ring, lses, deltas, mask: MaskBounds,
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc,
    B, T, S, padded_T, tiles, balanced_heads, cu_q_ptr, cu_k_ptr, counter_ptr, config: BackwardConfig, biases=0, bias_desc=0,
    lists=0, words=0,
):  # fmt: skip
    """The role that draws tiles of keys, 64 per warpgroup, and has them copied in, then the queries and the gradients of the
    output that they meet.

    The first block's queries are asked for between the keys and the values: who waits for the keys needs them next.
    """
    Hk = k_desc.shape[1].to(gl.int32) * config.GROUP_SPLITS
    H = Hk * config.GROUP
    total = tiles * (Hk if config.PACKED else B * Hk)
    programs = gl.num_programs(0)
    n = gl.program_id(0)
    tile = 0
    fill = 0
    while n < total:
        work = make_work_tile_of_keys(
            n, B, Hk, T, S, tiles, balanced_heads, cu_q_ptr, cu_k_ptr, mask, config.BLOCKS_PER_TILE * BLOCK, config.PACKED
        )  # fmt: skip
        first_block = work.first_block
        last_block = work.last_block
        if config.LIST_T > 0:
            steps = 0
            if work.is_valid != 0:
                steps = count_listed(lists, work, first_block, last_block, config)
            work = work.with_steps(steps)
        if work.is_valid != 0:
            publish(work_tiles, tile, work)
            if config.LIST_T > 0:
                fill = _load_listed(
                    keys, values, queries, grads, lses, deltas, q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc,
                    H, padded_T, tile, fill, work, lists, words, steps, first_block, last_block, config,
                )  # fmt: skip
            steps = 0 if config.LIST_T > 0 else (last_block - first_block + 1) * config.GROUP
            h = work.h * config.GROUP
            block = work.first_block
            for i in range(steps):
                t = block * BLOCK
                word = (work.b * H + h) * padded_T + work.padded_start + t
                if i == 0:
                    _load_tile_rows(keys, tile, k_desc, work, config)
                _load_rows_and_stats(queries, lses, fill, q_desc, lse_desc, work.b, h, work.q_start + t, word)
                if config.BIAS:
                    _load_bias(biases, fill, bias_desc, work, h, t, config)
                if i == 0:
                    _load_tile_rows(values, tile, v_desc, work, config)
                _load_rows_and_stats(grads, deltas, fill, do_desc, delta_desc, work.b, h, work.q_start + t, word)
                fill += 1
                h, block = advance_block(h, block, work, config)
            tile += 1
        n = gl.atomic_add(counter_ptr, 1) + programs
    publish_end(work_tiles, tile)
    reset_counter(counter_ptr)


@gluon.jit
def count_listed(lists: BlockLists, work, first_block, last_block, config: BackwardConfig):
    """How many blocks of 64 queries the heads of a tile of keys list."""
    PER: gl.constexpr = config.LIST_T // BLOCK
    steps = 0
    for i in range(config.GROUP):
        entries, count = lists.of_keys(work, work.h * config.GROUP + i)
        steps += count_steps(entries, count, work.T, first_block, last_block, PER, config.LIST_T, 2)
    return steps


@gluon.jit
def _load_listed(
    keys: Ring, values: Ring, queries: Ring, grads: Ring, lses, deltas, q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc,
    H, padded_T, tile, fill, work, lists: BlockLists, words, steps, first_block, last_block, config: BackwardConfig,
):  # fmt: skip
    """Has a tile of keys copied in, and the listed blocks of queries; returns the next fill.

    Each block has two words: its number, with a bit if nothing of it is seen, and its head; where some are seen in part, a third
    says which bits are its. They are overwritten after WORDS blocks, when every role is long past them.
    """
    PER: gl.constexpr = config.LIST_T // BLOCK
    is_first = True
    for i in range(config.GROUP):
        h = work.h * config.GROUP + i
        entries, count = lists.of_keys(work, h)
        for step in range(count * PER):
            index = gl.load(entries + step // PER * 2)
            is_there = (index >= 0) & (index < (work.T + (config.LIST_T - 1)) // config.LIST_T)
            block = gl.where(is_there, index, 0) * PER + step % PER
            # just what `count_listed` counts: whoever waits for one more would wait for ever
            if is_there & (block >= first_block) & (block <= last_block):
                place = -1
                if config.LIST_BITS:
                    place = lists.place_among_bits(work, h, index, gl.load(entries + step // PER * 2 + 1))
                fill = _load_listed_block(
                    keys, values, queries, grads, lses, deltas, q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc,
                    H, padded_T, tile, fill, work, h, block, place, words, is_first, 0, config,
                )  # fmt: skip
                is_first = False
    if steps == 0:
        # a block that weighs nothing
        fill = _load_listed_block(
            keys, values, queries, grads, lses, deltas, q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc,
            H, padded_T, tile, fill, work, work.h * config.GROUP, 0, -1, words, True, 1, config,
        )  # fmt: skip
    return fill


@gluon.jit
def _load_listed_block(
    keys: Ring, values: Ring, queries: Ring, grads: Ring, lses, deltas, q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc,
    H, padded_T, tile, fill, work, h, block, place, words, is_first, nothing, config: BackwardConfig,
):  # fmt: skip
    t = block * BLOCK
    word = (work.b * H + h) * padded_T + work.padded_start + t
    write_word(words, fill % WORDS * 2, 2 * block + nothing)
    write_word(words, fill % WORDS * 2 + 1, h)
    if config.LIST_BITS:
        write_word(words, 2 * WORDS + fill % WORDS, place)
    if is_first:
        _load_tile_rows(keys, tile, k_desc, work, config)
    _load_rows_and_stats(queries, lses, fill, q_desc, lse_desc, work.b, h, work.q_start + t, word)
    if is_first:
        _load_tile_rows(values, tile, v_desc, work, config)
    _load_rows_and_stats(grads, deltas, fill, do_desc, delta_desc, work.b, h, work.q_start + t, word)
    return fill + 1


@gluon.jit
def steps_of(work: WorkTile, config: BackwardConfig):
    """How many blocks of queries a tile of keys meets, over all heads of its group."""
    steps = work.last_block - work.first_block + 1
    if config.LIST_T == 0:
        steps = steps * config.GROUP
    return steps


@gluon.jit
def _load_bias(biases: Ring, fill, desc, work, h, t, config: BackwardConfig):
    """Has the bias of a block of queries and a tile's keys copied in, 64 keys at a time; one row may be all queries'."""
    if desc.block_type.shape[2] == 1:
        t = t * 0
    biases.wait_empty(fill)
    mbarrier.expect(biases.full_barrier(fill), config.BLOCKS_PER_TILE * desc.block_type.nbytes)
    for i in gl.static_range(config.BLOCKS_PER_TILE):
        tma_load(
            desc, [work.b, h, t, work.t + i * WG_ROWS], biases.full_barrier(fill),
            biases.buffers.index(fill % biases.stages * config.BLOCKS_PER_TILE + i),
        )  # fmt: skip


@gluon.jit
def _load_tile_rows(rows: Ring, tile, desc, work, config: BackwardConfig):
    """Loads a tile's keys or values, 64 rows at a time."""
    rows.wait_empty(tile)
    mbarrier.expect(rows.full_barrier(tile), config.BLOCKS_PER_TILE * desc.block_type.nbytes)
    for i in gl.static_range(config.BLOCKS_PER_TILE):
        row = work.k_start + work.t + i * WG_ROWS
        tma_load(desc, [work.b, work.h // config.GROUP_SPLITS, row, 0], rows.full_barrier(tile), rows.buffers.index(i))


@gluon.jit
def flag_nan(nan_flag_ptr, acc, config: BackwardConfig, ALWAYS: gl.constexpr = False):
    """Notes that a gradient holds a NaN, which under a mask, or beside another sequence, may have come from behind it.

    ALWAYS: for dq, which a far row (see `device.row_stats`) makes NaN under any mask. A weight of zero does not hide a NaN or an
    infinity in the other factor. What to do about it is the launcher's.
    """
    if ALWAYS or config.MASKED or config.PACKED or config.LIST_T > 0:
        if holds_nan(acc):
            gl.store(nan_flag_ptr, 1)


@gluon.jit
def store_rows(buffer, x, desc, ptr, work: WorkTile, heads, start, base, length, dim: gl.constexpr, config: BackwardConfig):
    """64 rows, from `start` of a sequence on, to memory by way of shared memory; `wait_for_store` must follow.

    A packed sequence may end inside the tile, where the copy engine would not stop: its rows are stored one by one. Rows in fp32
    would not fit in the buffer: threads store what they hold, four of them a whole sector.
    """
    if x.dtype == gl.float32:
        t = start + gl.arange(0, WG_ROWS, gl.SliceLayout(1, x.type.layout))
        e = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
        # packed: `base` counts all sequences before, and b is 0
        lines = ((work.b.to(gl.int64) * length + base + t) * heads + work.h) * dim
        in_bounds = gl.expand_dims(t < length, 1) & gl.expand_dims(e < dim, 0)
        gl.store(ptr + gl.expand_dims(lines, 1) + gl.expand_dims(e, 0), x, mask=in_bounds)
    else:
        _store_staged_rows(buffer, x, desc, ptr, work, heads, start, base, length, dim, config)


@gluon.jit
def _store_staged_rows(
    buffer, x, desc, ptr, work: WorkTile, heads, start, base, length, dim: gl.constexpr, config: BackwardConfig
):  # fmt: skip
    staged = buffer.reshape([WG_ROWS, config.D])
    staged.store(x)
    # the copy engine reads what was written here, or writes here next
    fence_async_shared()
    if config.PACKED:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // config.D, config.D // 8], [4, 1], [1, 0])
        t = start + gl.arange(0, WG_ROWS, gl.SliceLayout(1, layout))
        e = gl.arange(0, config.D, gl.SliceLayout(0, layout))
        lines = ((base + t).to(gl.int64) * heads + work.h) * dim
        in_bounds = gl.expand_dims(t < length, 1) & gl.expand_dims(e < dim, 0)
        gl.store(ptr + gl.expand_dims(lines, 1) + gl.expand_dims(e, 0), staged.load(layout), mask=in_bounds)
    else:
        tma_store(desc, [work.b, work.h, start, 0], buffer)


@gluon.jit
def pack_for_twin(x):
    """A warpgroup's block of weights (64, 64) as words of two fp16 numbers, in the order of its threads.

    Weights lie between 0 and 1, where fp16 keeps eight times as many digits as bf16; the twin warpgroup holds them in the
    same registers, so they cross shared memory without a conflict between banks.
    """
    even, odd = x.reshape([64, 32, 2]).split()
    words = gl.inline_asm_elementwise(ptx.narrow_text("f16x2"), "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1)
    words = words.reshape([4, 2, 8, 4, 2, 4]).permute((3, 0, 2, 5, 1, 4)).reshape([2048])
    return gl.convert_layout(words, gl.BlockedLayout([4], [32], [4], [0]), assert_trivial=True)


@gluon.jit
def unpack_from_twin(words, layout: gl.constexpr):
    """The weights of `exchanged`, in fp32."""
    words = words.reshape([4, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 5, 3)).reshape([64, 32])
    even, odd = gl.inline_asm_elementwise(
        ptx.WIDEN_FP16,
        "=r,=r,r", [words], dtype=(gl.float32, gl.float32), is_pure=True, pack=1,
    )  # fmt: skip
    return gl.convert_layout(gl.join(even, odd).reshape([64, 64]), layout, assert_trivial=True)
