"""The roles of the fused backward that concern dq: one multiplies it, one has it added to the sum in memory."""

from rooftile.exact.backends.hopper.device.config import WG_ROWS
from rooftile.exact.backends.hopper.device.lists import read_word
from rooftile.exact.backends.hopper.device.scheduler import consume
from rooftile.exact.backends.hopper.flash_bwd.dq_accumulator import UNIT, UNIT_ROWS, to_thread_order
from rooftile.exact.backends.hopper.flash_bwd.parts import BLOCK, WORDS, BackwardConfig, advance_block, steps_of
from rooftile.runtime.hopper.gluon import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_add,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from rooftile.runtime.hopper.pipeline import Ring

# warpgroups that compute, of 64 keys each
NUM_CONSUMERS = gl.constexpr(2)


@gluon.jit
def add_dq(work_tiles: Ring, dq_staging: Ring, words, dq_sum_desc, H, padded_T, config: BackwardConfig):
    """The role that has dq added up, unit by unit."""
    UNITS: gl.constexpr = config.D // UNIT
    tile = 0
    fill = 0
    work = consume(work_tiles, 0)
    while work.is_valid != 0:
        h = work.h * config.GROUP
        block = work.first_block
        for _ in range(steps_of(work, config)):
            if config.LIST_T > 0:
                # whoever fills this has seen the words of its block
                dq_staging.wait_full(fill)
                block = read_word(words, fill // UNITS % WORDS * 2) // 2
                h = read_word(words, fill // UNITS % WORDS * 2 + 1)
            row = (work.b * H + h) * padded_T + work.padded_start
            unit = UNITS * (row // BLOCK + block)
            for c in gl.static_range(UNITS):
                dq_staging.wait_full(fill)
                tma_add(dq_sum_desc, [(unit + c) * UNIT_ROWS, 0], dq_staging.buffer(fill))
                # the one before has been read
                tma_store_wait(1)
                if fill > 0:
                    dq_staging.release(fill - 1)
                fill += 1
            if config.LIST_T == 0:
                h, block = advance_block(h, block, work, config)
        tile += 1
        work = consume(work_tiles, tile)
    tma_store_wait(0)


@gluon.jit
def issue_dq(keys: Ring, ds_blocks: Ring, fill, column: gl.constexpr, config: BackwardConfig):
    """Issues 64 columns of dS K, half of it from each warpgroup's part."""
    ds_blocks.wait_full(fill)
    dq = gl.zeros([BLOCK, UNIT], gl.float32, config.s_layout)
    for i in gl.static_range(NUM_CONSUMERS):
        ds = ds_blocks.buffers.index(fill % ds_blocks.stages * NUM_CONSUMERS + i)
        k = keys.buffers.index(i).reshape([WG_ROWS, config.D]).slice(column, UNIT, 1)
        dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=i > 0, is_async=True)
    return dq


@gluon.jit
def finish_block_of_dq(dq, dq_staging: Ring, fill):
    """Waits for 64 columns of dq and hands them to the role that adds them."""
    dq_staging.wait_empty(fill)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    dq_staging.buffer(fill).store(to_thread_order(dq))
    fence_async_shared()
    mbarrier.arrive(dq_staging.full_barrier(fill), count=1)


@gluon.jit
def multiply_dq(work_tiles: Ring, keys: Ring, ds_blocks: Ring, dq_staging: Ring, config: BackwardConfig):
    """The role that multiplies dq at D = 64."""
    tile = 0
    fill = 0
    work = consume(work_tiles, 0)
    while work.is_valid != 0:
        keys.wait_full(tile)
        for _ in range(steps_of(work, config)):
            dq = issue_dq(keys, ds_blocks, fill, 0, config)
            finish_block_of_dq(dq, dq_staging, fill)
            ds_blocks.release(fill)
            fill += 1
        keys.release(tile)
        tile += 1
        work = consume(work_tiles, tile)
