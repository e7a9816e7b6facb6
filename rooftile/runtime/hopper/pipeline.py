"""How the warp roles of a program hand buffers to each other: rings of shared memory with a pair of barriers a slot.

A filler waits until a slot is `empty`, fills it, and its bytes' arrival makes it `full`; readers wait for that and give the
slot back. `fill` counts all fills since the kernel began: its slot is fill % stages, and the barriers' phase flips each
time around. A barrier starts in phase 0, so the first wait on `empty`, for the phase before it, passes at once.
"""

from rooftile.runtime.hopper import ptx
from rooftile.runtime.hopper.gluon import aggregate, barrier, gl, gluon, mbarrier, tma_store_wait


@aggregate
class Ring:
    """`stages` buffers, each with a barrier that says that it is full and one that says that it is empty."""

    buffers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    stages: gl.constexpr

    @gluon.jit
    def buffer(self, fill):
        return self.buffers.index(fill % self.stages)

    @gluon.jit
    def wait_empty(self, fill):
        mbarrier.wait(self.empty.index(fill % self.stages), ((fill // self.stages) & 1) ^ 1)

    @gluon.jit
    def wait_full(self, fill, wait=True):
        """Passes at once if `wait` is false."""
        mbarrier.wait(self.full.index(fill % self.stages), (fill // self.stages) & 1, pred=wait)

    @gluon.jit
    def full_barrier(self, fill):
        """Returns the barrier that counts the bytes of a fill."""
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
def wait_for_input():
    """Waits until the kernel in front has written its results: this one may have been launched beside its end."""
    text: gl.constexpr = ptx.dependent_launch_text("wait")
    gl.inline_asm_elementwise(text, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_next_begin():
    """Lets the next kernel start where a multiprocessor is free; it waits for this one's results by itself."""
    text: gl.constexpr = ptx.dependent_launch_text("launch_dependents")
    gl.inline_asm_elementwise(text, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def named_barrier(verb: gl.constexpr, name: gl.constexpr):
    """Two warpgroups meet at one of the 16 named barriers: `sync` waits until both have come, `arrive` comes and goes on.

    Triton takes 0 and 1, and then one a warp role.
    """
    gl.inline_asm_elementwise(ptx.barrier_text(verb, name), "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def hide_from_ptxas(x):
    """Hides x from common-subexpression elimination in ptxas.

    ptxas 12.8 computes what two consecutive loops share inside the first one; if that loop runs zero times, the second reads
    garbage.
    """
    return gl.inline_asm_elementwise(ptx.COPY, "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for_store():
    """Until the staged rows are on their way: one thread asked for the copy, and all of them are to write there next."""
    tma_store_wait(0)
    barrier()
