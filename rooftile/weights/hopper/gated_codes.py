"""Gate and up projections in FP8 as one product on Hopper, whose gated result leaves in FP8.

A warpgroup has the sums of 64 rows of the gate and of the 64 rows that they gate, as in `widened`, and sums them as `codes` does.
A scale per token would need the largest number of a whole row, of which a program has a part; so the scale of the results is
known before: it is the static one of a checkpoint.

Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202.
"""

from rooftile.numerics.row_kernels import given_codes
from rooftile.runtime.hopper.gluon import fence_async_shared, gl, gluon
from rooftile.runtime.hopper.pipeline import Ring, ring, wait_for_input
from rooftile.weights.hopper.codes import added
from rooftile.weights.hopper.schedule import ROWS, STEP, TiledProduct, load, whole_pair, with_bias, with_scales
from rooftile.weights.hopper.widened import gated_pair

LARGEST = gl.constexpr(448.0)


@gluon.jit
def _put_codes(y, given, n_0, m_0, to: TiledProduct):
    """Writes the codes of results (64, COLUMNS) in 16 bits to o (M, N).

    They change threads before they are codes: of single bytes ptxas reads registers that nothing wrote.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    y = gl.convert_layout(y.permute((1, 0)), layout).to(gl.float32)
    m = m_0 + gl.arange(0, to.COLUMNS, gl.SliceLayout(1, layout))
    n = n_0 + gl.arange(0, ROWS, gl.SliceLayout(0, layout))
    there = gl.expand_dims(m < to.M, 1) & gl.expand_dims(n < to.N, 0)
    codes = given_codes(y, given, LARGEST).to(to.o.dtype.element_ty)
    gl.store(to.o + (gl.expand_dims(m.to(gl.int64) * to.N, 1) + gl.expand_dims(n, 0)), codes, mask=there)


@gluon.jit
def _multiply(
    tiles: Ring, xs, x_scales_ptr, w_scales_ptr, given_ptr, o_scales_ptr, to: TiledProduct, WARPGROUP: gl.constexpr,
    DTYPE: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    """The role that multiplies: this warpgroup's rows of both halves of each tile of the weight."""
    FIRST: gl.constexpr = WARPGROUP * ROWS
    NEXT: gl.constexpr = to.WARPGROUPS * ROWS
    BLOCK: gl.constexpr = WARPGROUP * to.BLOCKS_N
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, to.COLUMNS, 32])
    column = gl.arange(0, to.COLUMNS, gl.SliceLayout(0, layout))
    end = to.N * 2
    wait_for_input()
    place, stop = to.bounds()
    fill = 0
    while place < stop:
        run = to.run_at(place, stop)
        n_0 = run.tile_n * NEXT + FIRST
        for tile_m in range(run.tile_m, to.tiles_of_rows(), to.spread):
            gate = gl.zeros([ROWS, to.COLUMNS], gl.float32, layout)
            up = gate
            for _ in range(run.first, run.stop):
                tiles.wait_full(fill)
                w = tiles.buffer(fill)
                x = xs.index(fill % to.STAGES)
                gate = added(gate, w.slice(FIRST, ROWS, 0), x, column, "fp8")
                up = added(up, w.slice(FIRST + NEXT, ROWS, 0), x, column, "fp8")
                tiles.release(fill)
                fill += 1
            m_0 = tile_m * to.BLOCK_M
            gate, up, has_it = whole_pair(gate, up, run, tile_m, BLOCK, to)
            if has_it:
                m = m_0 + column
                gate = with_scales(gate, n_0, m_0, x_scales_ptr, w_scales_ptr, end, to)
                gate = with_bias(gate, n_0, end, to)
                up = with_scales(up, n_0 + to.N, m_0, x_scales_ptr, w_scales_ptr, end, to)
                up = with_bias(up, n_0 + to.N, end, to)
                given = gl.load(given_ptr)
                _put_codes(gated_pair(gate, up, DTYPE, GATE).to(DTYPE), given, n_0, m_0, to)
                # one program has the first rows of the weight
                gl.store(o_scales_ptr + m, m * 0.0 + given, mask=(m < to.M) & (n_0 == 0))
        place += run.stop - run.first


# fmt: off
@gluon.jit(do_not_specialize=["M", "tiles", "steps", "spread", "early"])
def product_of_gates(
    w_desc, x_desc, x_scales_ptr, w_scales_ptr, bias_ptr, given_ptr, o_scales_ptr, o_ptr, partials_ptr, counters_ptr, M, N, tiles,
    steps, spread, early, DTYPE: gl.constexpr, GATE: gl.constexpr, BIAS: gl.constexpr, T: gl.constexpr,
):
    # fmt: on
    """o (M, N) and its scales (M,): the activation GATE of the first half of x (M, K) times a weight (2 N, K), times the second.

    All are rounded to DTYPE, as in kernels that follow one another, and the result to FP8 with a given scale.
    """
    to = TiledProduct(o_ptr, bias_ptr, partials_ptr, counters_ptr, M, N, tiles, steps, spread, BIAS, T)
    w_smem = gl.allocate_shared_memory(w_desc.dtype, [to.STAGES, to.BLOCK_N, STEP], w_desc.layout)
    xs = gl.allocate_shared_memory(x_desc.dtype, [to.STAGES, to.BLOCK_M, STEP], x_desc.layout)
    ws = ring(w_smem, to.STAGES, to.WARPGROUPS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (ws, xs, x_scales_ptr, w_scales_ptr, given_ptr, o_scales_ptr, to, 0, DTYPE, GATE)),
            (_multiply, (ws, xs, x_scales_ptr, w_scales_ptr, given_ptr, o_scales_ptr, to, 1, DTYPE, GATE)),
            (load, (w_desc, x_desc, ws, xs, to, early)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip
