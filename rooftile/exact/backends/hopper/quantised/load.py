"""The compile-time configuration of the kernel on quantised tensors, and the role that has tiles and their scales copied in."""

from rooftile.exact.backends.hopper.device.config import WG_ROWS
from rooftile.exact.backends.hopper.device.scheduler import (
    PADDED,
    MaskBounds,
    make_work_tile,
    publish,
    publish_end,
    reset_counter,
)
from rooftile.runtime.hopper.gluon import aggregate, gl, gluon, mbarrier, tma_load
from rooftile.runtime.hopper.pipeline import Ring

NUM_CONSUMERS = gl.constexpr(2)
# queries of a tile, and keys or values, that share a scale
BLOCK = gl.constexpr(128)


@aggregate
class QuantisedConfig:
    """The compile-time configuration of the kernel on quantised tensors."""

    GROUP: gl.constexpr
    D: gl.constexpr
    DV: gl.constexpr
    PACKED: gl.constexpr
    MASKED: gl.constexpr
    INTEGER: gl.constexpr  # scores in INT8
    SMOOTHED: gl.constexpr  # rows have a shift
    KEYS: gl.constexpr  # keys per block: 128, or 64 for wide heads
    WIDE: gl.constexpr  # the output is added to by quarters
    PART: gl.constexpr  # columns of values that a product takes
    s_layout: gl.constexpr
    o_layout: gl.constexpr  # a product with values
    acc_layout: gl.constexpr  # the output
    p_layout: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, **fields):
        """Takes the fields up to KEYS by name."""
        for name, value in fields.items():
            setattr(self, name, gl.constexpr(value))
        DV, KEYS = fields["DV"], fields["KEYS"]
        part = DV if DV <= 128 else 64
        self.WIDE = gl.constexpr(part < DV)
        self.PART = gl.constexpr(part)
        o_layout = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, part, 32])
        self.s_layout = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 32]))
        self.acc_layout = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 32]))
        self.o_layout = gl.constexpr(o_layout)
        self.p_layout = gl.constexpr(gl.DotOperandLayout(0, o_layout, 4))


@aggregate
class BlockScales:
    """Scales: in memory (blocks, heads), and in shared memory one word per stage."""

    q_ptr: gl.tensor
    k_ptr: gl.tensor
    v_ptr: gl.tensor
    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor


@gluon.jit
def store_word(words, slot, value):
    words.index(slot).store(gl.full([1], 0, gl.float32, gl.BlockedLayout([1], [32], [1], [0])) + value)


@gluon.jit
def load_word(words, slot):
    return gl.max(words.index(slot).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def load_scale(words, slot, config: QuantisedConfig):
    """A block's scale; of INT8 with a NaN among them a NaN, as their codes are numbers (see `with_care_8bit`)."""
    scale = load_word(words, slot)
    if config.INTEGER:
        scale = gl.where(scale < 0.0, float("nan"), scale)
    return scale


@gluon.jit
def _load_block(
    keys: Ring, values: Ring, scales: BlockScales, k_desc, v_desc, fill, work, block, part, Hk, config: QuantisedConfig
):
    """Has one block of keys and values copied in, and puts its scales beside them."""
    h = work.h // config.GROUP
    # asked for before the waits, known after them
    line = (part + block * config.KEYS // BLOCK) * Hk + h
    k_scale = gl.load(scales.k_ptr + line)
    v_scale = gl.load(scales.v_ptr + line)
    keys.wait_empty(fill)
    store_word(scales.k, fill % keys.stages, k_scale)
    mbarrier.expect(keys.full_barrier(fill), k_desc.block_type.nbytes)
    tma_load(k_desc, [work.b, h, work.k_start + block * config.KEYS, 0], keys.full_barrier(fill), keys.buffer(fill))
    values.wait_empty(fill)
    store_word(scales.v, fill % values.stages, v_scale)
    mbarrier.expect(values.full_barrier(fill), v_desc.block_type.nbytes)
    # packed sequences' values are padded to whole blocks each, dense ones' all alike
    column = part * BLOCK if config.PACKED else 0
    tma_load(v_desc, [work.b, h, 0, column + block * config.KEYS], values.full_barrier(fill), values.buffer(fill))


@gluon.jit
def load_tiles(
    work_tiles: Ring, queries: Ring, keys: Ring, values: Ring, scales: BlockScales, mask: MaskBounds, q_desc, k_desc, v_desc,
    B, H, T, S, tiles, balanced_heads, cu_q_ptr, cu_k_ptr, counter_ptr, config: QuantisedConfig,
):  # fmt: skip
    """The role that draws tiles and has them copied in (see `flash_fwd`)."""
    total = tiles * (H if config.PACKED else B * H)
    Hk = H // config.GROUP
    programs = gl.num_programs(0)
    n = gl.program_id(0)
    tile = 0
    fill = 0
    while n < total:
        work = make_work_tile(n, B, H, T, S, tiles, balanced_heads, cu_q_ptr, cu_k_ptr, mask, BLOCK, config.KEYS, config.PACKED)
        if work.is_valid != 0:
            if config.PACKED:
                # the sequence's first block of queries, and of keys
                part_q = work.padded_start // PADDED
                part_k = work.k_start // PADDED + (part_q - work.q_start // PADDED)
            else:
                part_q = work.b * tiles
                part_k = work.b * ((S + BLOCK - 1) // BLOCK)
            q_scale = gl.load(scales.q_ptr + (part_q + work.t // BLOCK) * H + work.h)
            publish(work_tiles, tile, work)
            queries.wait_empty(tile)
            store_word(scales.q, tile % queries.stages, q_scale)
            mbarrier.expect(queries.full_barrier(tile), q_desc.block_type.nbytes * NUM_CONSUMERS)
            for i in gl.static_range(NUM_CONSUMERS):
                tma_load(
                    q_desc, [work.b, work.h, work.q_start + work.t + i * WG_ROWS, 0], queries.full_barrier(tile),
                    queries.buffers.index(tile % queries.stages * NUM_CONSUMERS + i),
                )  # fmt: skip
            tile += 1
            for i in range(work.last_block - work.first_block):
                _load_block(keys, values, scales, k_desc, v_desc, fill, work, work.last_block - i, part_k, Hk, config)
                fill += 1
            n = gl.atomic_add(counter_ptr, 1) + programs
            _load_block(keys, values, scales, k_desc, v_desc, fill, work, work.first_block, part_k, Hk, config)
            fill += 1
        else:
            n = gl.atomic_add(counter_ptr, 1) + programs
    publish_end(work_tiles, tile)
    reset_counter(counter_ptr)
