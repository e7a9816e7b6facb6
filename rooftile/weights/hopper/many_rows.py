"""INT8 products of many rows on Hopper, with scales and bias in the same pass.

cuBLAS multiplies INT8 there with instructions of Ampere (its kernels are named cutlass_80), more slowly than bf16, and leaves
sums in int32 to another pass. Here two warpgroups multiply 64 rows of x each by 256 rows of the weight, a warp has tiles copied
in, and programs walk through tiles, so that the next tile's copies begin while this one is written. Sums are exact.

Tiles of eight blocks of rows follow each other, so that programs at work share rows of x and of the weight in the L2 cache.
"""

from rooftile.runtime.hopper.gluon import (
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
from rooftile.runtime.hopper.pipeline import Ring, let_next_begin, ring, wait_for_input
from rooftile.weights.hopper.schedule import ROWS, STEP

# rows of x and of the weight in a tile
BLOCK_M, BLOCK_N = gl.constexpr(128), gl.constexpr(256)
# columns of a sum: Triton has no INT8 product of 256
COLUMNS = gl.constexpr(128)
# blocks of rows of x that follow each other
GROUP = gl.constexpr(8)
STAGES = gl.constexpr(3)


@aggregate
class Grid:
    """Sizes in tiles, and the steps over K."""

    rows: gl.tensor
    columns: gl.tensor
    steps: gl.tensor

    @gluon.jit
    def place(self, tile):
        """The first row of x and of the weight of a tile."""
        band = tile // (GROUP * self.columns)
        size = gl.minimum(GROUP, self.rows - band * GROUP)
        within = tile - band * GROUP * self.columns
        return (band * GROUP + within % size) * BLOCK_M, (within // size) * BLOCK_N


@gluon.jit
def _load(w_desc, x_desc, ws: Ring, xs, to: Grid):
    """The role that has tiles copied in."""
    SIZE: gl.constexpr = w_desc.block_type.nbytes + x_desc.block_type.nbytes
    wait_for_input()
    let_next_begin()
    fill = 0
    for tile in range(gl.program_id(0), to.rows * to.columns, gl.num_programs(0)):
        m_0, n_0 = to.place(tile)
        for step in range(to.steps):
            ws.wait_empty(fill)
            full = ws.full_barrier(fill)
            mbarrier.expect(full, SIZE)
            tma_load(x_desc, [m_0, step * STEP], full, xs.index(fill % STAGES))
            tma_load(w_desc, [n_0, step * STEP], full, ws.buffer(fill))
            fill += 1


@gluon.jit
def _write(acc, out, m_0, n_0, x_scales_ptr, w_scales_ptr, bias_ptr, o_desc, M, N, BIAS: gl.constexpr):
    """Writes sums (64, 128) with scales and bias."""
    layout: gl.constexpr = acc.type.layout
    m = m_0 + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    n = n_0 + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    y = acc.to(gl.float32) * gl.expand_dims(gl.load(x_scales_ptr + m, mask=m < M, other=0.0), 1)
    y = y * gl.expand_dims(gl.load(w_scales_ptr + n, mask=n < N, other=0.0).to(gl.float32), 0)
    if BIAS:
        y = y + gl.expand_dims(gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32), 0)
    out.store(y.to(o_desc.dtype))
    fence_async_shared()
    barrier()
    tma_store(o_desc, [m_0, n_0], out)


@gluon.jit
def _multiply(
    ws: Ring, xs, x_scales_ptr, w_scales_ptr, bias_ptr, o_desc, outs, M, N, to: Grid, WARPGROUP: gl.constexpr, BIAS: gl.constexpr
):  # fmt: skip
    """The role that multiplies: 64 rows of each tile, in two sums of 128 columns, and writes them."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    FIRST: gl.constexpr = WARPGROUP * ROWS
    wait_for_input()
    fill = 0
    for tile in range(gl.program_id(0), to.rows * to.columns, gl.num_programs(0)):
        m_0, n_0 = to.place(tile)
        acc = gl.zeros([ROWS, COLUMNS], gl.int32, layout)
        acc_2 = acc
        for step in range(to.steps):
            ws.wait_full(fill)
            x, w = xs.index(fill % STAGES).slice(FIRST, ROWS, 0), ws.buffer(fill)
            acc = warpgroup_mma(x, w.slice(0, COLUMNS, 0).permute((1, 0)), acc, is_async=True)
            acc_2 = warpgroup_mma(x, w.slice(COLUMNS, COLUMNS, 0).permute((1, 0)), acc_2, is_async=True)
            # the products of the step before are done
            acc, acc_2 = warpgroup_mma_wait(2, deps=(acc, acc_2))
            if step > 0:
                ws.release(fill - 1)
            fill += 1
        acc, acc_2 = warpgroup_mma_wait(0, deps=(acc, acc_2))
        ws.release(fill - 1)
        # results of the tile before have left shared memory, where these go next
        tma_store_wait(0)
        barrier()
        out, m_0 = 2 * WARPGROUP, m_0 + FIRST
        _write(acc, outs.index(out), m_0, n_0, x_scales_ptr, w_scales_ptr, bias_ptr, o_desc, M, N, BIAS)
        _write(acc_2, outs.index(out + 1), m_0, n_0 + COLUMNS, x_scales_ptr, w_scales_ptr, bias_ptr, o_desc, M, N, BIAS)
    tma_store_wait(0)


# fmt: off
@gluon.jit(do_not_specialize=["M", "rows", "columns", "steps"])
def product_of_many_rows(
    w_desc, x_desc, o_desc, x_scales_ptr, w_scales_ptr, bias_ptr, M, N, rows, columns, steps, BIAS: gl.constexpr,
):
    # fmt: on
    """o (M, N): codes x (M, K) times codes (N, K) transposed, with the scales of both and a bias."""
    to = Grid(rows, columns, steps)
    w_smem = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BLOCK_N, STEP], w_desc.layout)
    xs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, STEP], x_desc.layout)
    outs = gl.allocate_shared_memory(o_desc.dtype, [4, ROWS, COLUMNS], o_desc.layout)
    ws = ring(w_smem, STAGES, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (ws, xs, x_scales_ptr, w_scales_ptr, bias_ptr, o_desc, outs, M, N, to, 0, BIAS)),
            (_multiply, (ws, xs, x_scales_ptr, w_scales_ptr, bias_ptr, o_desc, outs, M, N, to, 1, BIAS)),
            (_load, (w_desc, x_desc, ws, xs, to)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip
