"""How the warp roles of a program hand buffers to each other: rings of shared memory with a pair of barriers a slot.

A filler waits until a slot is `empty`, fills it, and its bytes' arrival makes it `full`; readers wait for that and give the
slot back. The turn counts all fills since the kernel began: its slot is turn % slots, and the barriers' phase flips each
time around. A barrier starts in phase 0, so the first wait on `empty`, for the phase before it, passes at once.
"""

from rooftile.backends.hopper.device import ptx
from rooftile.backends.hopper.gluon import aggregate, gl, gluon, mbarrier


@aggregate
class Ring:
    """`slots` buffers and the barriers that say whose turn each is."""

    buffers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    stages: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, buffers, full, empty, stages):
        self.buffers = buffers
        self.full = full
        self.empty = empty
        self.stages = gl.constexpr(stages)

    @gluon.jit
    def buffer(self, fill):
        return self.buffers.index(fill % self.stages)

    @gluon.jit
    def wait_empty(self, fill):
        mbarrier.wait(self.empty.index(fill % self.stages), ((fill // self.stages) & 1) ^ 1)

    @gluon.jit
    def wait_full(self, fill, wait=True):
        """`there` false: passes at once."""
        mbarrier.wait(self.full.index(fill % self.stages), (fill // self.stages) & 1, pred=wait)

    @gluon.jit
    def full_barrier(self, fill):
        """The barrier that counts what arrives in the slot of a turn."""
        return self.full.index(fill % self.stages)

    @gluon.jit
    def release(self, fill):
        mbarrier.arrive(self.empty.index(fill % self.stages), count=1)


@gluon.jit
def ring(buffers, stages: gl.constexpr, consumers: gl.constexpr, producers: gl.constexpr = 1):
    """A ring over `slots` buffers, filled by `fillers` roles and given back by `readers`; `fence_async_shared` must follow."""
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(stages):
        mbarrier.init(full.index(i), count=producers)
        mbarrier.init(empty.index(i), count=consumers)
    return Ring(buffers, full, empty, stages)


@gluon.jit
def named_barrier(verb: gl.constexpr, name: gl.constexpr):
    """Two warpgroups meet at one of the 16 named barriers: `sync` waits until both have come, `arrive` comes and goes on.

    Triton takes 0 and 1, and then one a warp role.
    """
    gl.inline_asm_elementwise(ptx.barrier_text(verb, name), "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def hide_from_ptxas(x):
    """x, in a way that the assembler cannot tell: what follows from it is computed anew.

    ptxas 12.8 keeps what two loops in a row have in common where it was computed for the first, and then runs the second
    with nothing there when the first made no turn.
    """
    return gl.inline_asm_elementwise(ptx.COPY, "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)
