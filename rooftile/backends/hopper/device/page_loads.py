"""Having blocks of keys and values copied in from their pages, for prompts and for decoding.

A page is a box of its own, or some. What a box costs is not its bytes: the warp that asks for it takes turns with the warps that
compute, so a block is asked for in as few boxes, and a box in as few instructions, as can be (docs/concepts/paging.md).
"""

from rooftile.backends.hopper.device.config import Shape
from rooftile.backends.hopper.device.pipeline import Ring
from rooftile.backends.hopper.device.scheduler import take
from rooftile.backends.hopper.gluon import aggregate, gl, gluon, mbarrier, reinterpreted, tma_load


@aggregate
class Table:
    """Which pages are whose, and what lies between pages, in eights of tokens, and between heads, in lines."""

    pointer: gl.tensor  # int32 (sequences, pages)
    stride: gl.tensor
    pages_apart: gl.tensor
    heads_apart: gl.tensor

    @gluon.constexpr_function
    def __init__(self, pointer, stride, pages_apart, heads_apart):
        self.pointer = pointer
        self.stride = stride
        self.pages_apart = pages_apart
        self.heads_apart = heads_apart

    @gluon.jit
    def pages(self, plan, block, shape: Shape):
        """The pages that a block of keys lies in; -1, of which zeros are copied, past the sequence's end."""
        row = self.pointer + plan.key.to(gl.int64) * self.stride
        first = row + block * (shape.KEYS // shape.BOX) // (shape.SIZE // shape.BOX)
        left = plan.S - block * shape.KEYS
        pages = ()
        for i in gl.static_range(shape.KEYS // shape.BOX):
            pages = pages + (gl.load(first + i, mask=i * shape.BOX < left, other=-1),)
        return pages


@gluon.jit
def load_pages(ring: Ring, desc, table: Table, turn, plan, block, D: gl.constexpr, shape: Shape):
    """Has the keys or the values of a block copied in from their pages."""
    h = plan.h * shape.TOGETHER // shape.GROUP * table.heads_apart
    # before the wait for an empty slot, which hides how long they take
    pages = table.pages(plan, block, shape)
    ring.wait_empty(turn)
    COUNT: gl.constexpr = shape.KEYS // shape.BOX
    EIGHTS: gl.constexpr = desc.block_type.shape[0]
    COLUMNS: gl.constexpr = desc.block_type.shape[1] * desc.block_type.shape[3]
    boxes = reinterpreted(
        ring.buffers, desc.dtype, [ring.slots * (D // COLUMNS) * COUNT] + desc.block_type.shape, desc.layout
    )
    mbarrier.expect(ring.filled(turn), desc.block_type.nbytes * (D // COLUMNS) * COUNT)
    for i in gl.static_range(COUNT):
        eight = pages[i] * table.pages_apart
        if shape.SIZE > shape.KEYS:
            eight += block % (shape.SIZE // shape.KEYS) * EIGHTS
        for c in gl.static_range(D // COLUMNS):
            box = (turn % ring.slots * (D // COLUMNS) + c) * COUNT + i
            tma_load(desc, [eight, h, 0, c * COLUMNS], ring.filled(turn), boxes.index(box))


@gluon.jit
def load_values(plans: Ring, values: Ring, v_desc, table: Table, shape: Shape):
    """The role that has values copied in. One warp that asks for keys and values is slower, and so are four."""
    tile = 0
    turn = 0
    plan = take(plans, 0)
    while plan.live != 0:
        for i in range(plan.last - plan.first + 1):
            load_pages(values, v_desc, table, turn, plan, plan.last - i, shape.DV, shape)
            turn += 1
        tile += 1
        plan = take(plans, tile)
