"""Having blocks of keys and values copied in from their pages, for prompts and for decoding.

A page is a box of its own, or some. What a box costs is not its bytes: the warp that asks for it takes turns with the warps that
compute, so a block is asked for in as few boxes, and a box in as few instructions, as can be (docs/concepts/paging.md).
"""

from rooftile.exact.backends.hopper.device.config import KernelConfig
from rooftile.exact.backends.hopper.device.scheduler import consume
from rooftile.runtime.hopper.gluon import aggregate, gl, gluon, mbarrier, reinterpreted, tma_load
from rooftile.runtime.hopper.pipeline import Ring


@aggregate
class PageTable:
    """The page table, the distance between pages in units of 8 tokens, and between heads in swizzled lines."""

    pointer: gl.tensor  # int32 (sequences, pages)
    stride: gl.tensor
    page_stride: gl.tensor
    head_stride: gl.tensor

    @gluon.jit
    def pages(self, work, block, config: KernelConfig):
        """The pages that a block of keys lies in; -1, of which zeros are copied, past the sequence's end."""
        row = self.pointer + work.k_start.to(gl.int64) * self.stride
        first = row + block * (config.KEYS // config.TMA_TOKENS) // (config.PAGE_SIZE // config.TMA_TOKENS)
        left = work.S - block * config.KEYS
        pages = ()
        for i in gl.static_range(config.KEYS // config.TMA_TOKENS):
            pages = pages + (gl.load(first + i, mask=i * config.TMA_TOKENS < left, other=-1),)
        return pages


@gluon.jit
def load_pages(ring: Ring, desc, table: PageTable, fill, work, block, D: gl.constexpr, config: KernelConfig):
    """Has the keys or the values of a block copied in from their pages."""
    h = work.h * config.HEADS_PER_TILE // config.GROUP * table.head_stride
    # before the wait for an empty slot, which hides how long they take
    pages = table.pages(work, block, config)
    ring.wait_empty(fill)
    COUNT: gl.constexpr = config.KEYS // config.TMA_TOKENS
    EIGHTS: gl.constexpr = desc.block_type.shape[0]
    COLUMNS: gl.constexpr = desc.block_type.shape[1] * desc.block_type.shape[3]
    boxes = reinterpreted(ring.buffers, desc.dtype, [ring.stages * (D // COLUMNS) * COUNT] + desc.block_type.shape, desc.layout)
    mbarrier.expect(ring.full_barrier(fill), desc.block_type.nbytes * (D // COLUMNS) * COUNT)
    for i in gl.static_range(COUNT):
        eight = pages[i] * table.page_stride
        if config.PAGE_SIZE > config.KEYS:
            eight += block % (config.PAGE_SIZE // config.KEYS) * EIGHTS
        for c in gl.static_range(D // COLUMNS):
            box = (fill % ring.stages * (D // COLUMNS) + c) * COUNT + i
            tma_load(desc, [eight, h, 0, c * COLUMNS], ring.full_barrier(fill), boxes.index(box))


@gluon.jit
def load_values(work_tiles: Ring, values: Ring, v_desc, table: PageTable, config: KernelConfig):
    """The role that has values copied in. One warp that asks for keys and values is slower, and so are four."""
    tile = 0
    fill = 0
    work = consume(work_tiles, 0)
    while work.is_valid != 0:
        for i in range(work.last_block - work.first_block + 1):
            load_pages(values, v_desc, table, fill, work, work.last_block - i, config.DV, config)
            fill += 1
        tile += 1
        work = consume(work_tiles, tile)
