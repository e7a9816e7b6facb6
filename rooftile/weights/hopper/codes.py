"""FP8 and INT8 products on Hopper: codes times codes, scales on the sums.

One warp has tiles of the weight and of x copied in, and two warpgroups multiply: 64 rows of the weight each, or twice 64, by up
to 256 rows of x. The tensor cores carry about 14 bits of a sum of FP8 products between instructions, so each product over 128 of
K begins at zero, and is added to the sum in fp32; a tile's scales are taken along there (`fp8_tile`). Sums of INT8 are exact.

Micikevicius et al., FP8 formats for deep learning, arXiv:2209.05433; DeepSeek-AI, DeepSeek-V3, arXiv:2412.19437, section 3.3.2.
"""

from rooftile.runtime.hopper.gluon import fence_async_shared, gl, gluon, warpgroup_mma, warpgroup_mma_wait
from rooftile.runtime.hopper.pipeline import Ring, ring, wait_for_input
from rooftile.weights.hopper.schedule import ROWS, STEP, TiledProduct, load, whole_sum, with_scales, write


@gluon.jit
def added(acc, w, x, factor, FORMAT: gl.constexpr):
    """acc plus a step's product: of FP8 by way of fp32 registers."""
    if FORMAT == "int8":
        acc = warpgroup_mma(w, x.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
    else:
        layout: gl.constexpr = acc.type.layout
        none = gl.zeros(acc.shape, gl.float32, layout)
        product = warpgroup_mma(w, x.permute((1, 0)), none, use_acc=False, is_async=True)
        product = warpgroup_mma_wait(0, deps=(product,))
        if FORMAT == "fp8_tile":
            acc += product * gl.expand_dims(factor, 0)
        else:
            acc += product
    return acc


@gluon.jit
def _factor(x_scales_ptr, w_scales_ptr, n_0, m, step, to: TiledProduct, FORMAT: gl.constexpr):
    """The factors of a tile's product (`fp8_tile`), one per row of x."""
    factor = m
    if FORMAT == "fp8_tile":
        factor = gl.load(x_scales_ptr + (m * to.steps + step), mask=m < to.M, other=0.0)
        factor *= gl.load(w_scales_ptr + (n_0 // STEP * to.steps + step), mask=n_0 < to.N, other=0.0).to(gl.float32)
    return factor


@gluon.jit
def _finish(
    acc, run, tile_m, block: gl.constexpr, n_0, m_0, x_scales_ptr, w_scales_ptr, to: TiledProduct, FORMAT: gl.constexpr
):  # fmt: skip
    """Completes a block's sum, and writes it with scales and bias if it is complete."""
    acc, has_it = whole_sum(acc, run, tile_m, block, to)
    if has_it:
        y = acc.to(gl.float32)
        if FORMAT != "fp8_tile":
            y = with_scales(y, n_0, m_0, x_scales_ptr, w_scales_ptr, to.N, to)
        write(y, n_0, m_0, to)


@gluon.jit
def _multiply(
    tiles: Ring, xs, x_scales_ptr, w_scales_ptr, to: TiledProduct, WARPGROUP: gl.constexpr, FORMAT: gl.constexpr
):  # fmt: skip
    """The role that multiplies: this warpgroup's rows of each tile of the weight."""
    SUM: gl.constexpr = gl.int32 if FORMAT == "int8" else gl.float32
    # its rows of the weight, and where the second of its two sums lies
    FIRST: gl.constexpr = WARPGROUP * to.BLOCKS_N * ROWS
    NEXT_N: gl.constexpr = (to.BLOCKS_N - 1) * ROWS
    NEXT_M: gl.constexpr = (to.BLOCKS_M - 1) * to.COLUMNS
    TWO: gl.constexpr = to.BLOCKS_N * to.BLOCKS_M == 2
    BLOCK: gl.constexpr = WARPGROUP * to.BLOCKS_N * to.BLOCKS_M
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, to.COLUMNS, 32])
    column = gl.arange(0, to.COLUMNS, gl.SliceLayout(0, layout))
    wait_for_input()
    place, end = to.bounds()
    fill = 0
    while place < end:
        run = to.run_at(place, end)
        n_0 = run.tile_n * to.BLOCK_N + FIRST
        for tile_m in range(run.tile_m, to.tiles_of_rows(), to.spread):
            m_0 = tile_m * to.BLOCK_M
            acc = gl.zeros([ROWS, to.COLUMNS], SUM, layout)
            acc_2 = acc
            for step in range(run.first, run.stop):
                factor = _factor(x_scales_ptr, w_scales_ptr, n_0, m_0 + column, step, to, FORMAT)
                if TWO:
                    factor_2 = _factor(
                        x_scales_ptr, w_scales_ptr, n_0 + NEXT_N, m_0 + NEXT_M + column, step, to, FORMAT
                    )  # fmt: skip
                tiles.wait_full(fill)
                w = tiles.buffer(fill)
                x = xs.index(fill % to.STAGES)
                acc = added(acc, w.slice(FIRST, ROWS, 0), x.slice(0, to.COLUMNS, 0), factor, FORMAT)
                if TWO:
                    acc_2 = added(
                        acc_2, w.slice(FIRST + NEXT_N, ROWS, 0), x.slice(NEXT_M, to.COLUMNS, 0), factor_2, FORMAT
                    )  # fmt: skip
                tiles.release(fill)
                fill += 1
            _finish(acc, run, tile_m, BLOCK, n_0, m_0, x_scales_ptr, w_scales_ptr, to, FORMAT)
            if TWO:
                _finish(
                    acc_2, run, tile_m, BLOCK + 1, n_0 + NEXT_N, m_0 + NEXT_M, x_scales_ptr, w_scales_ptr, to, FORMAT
                )  # fmt: skip
        place += run.stop - run.first


# fmt: off
@gluon.jit(do_not_specialize=["M", "tiles", "steps", "spread", "early"])
def product_of_codes(
    w_desc, x_desc, x_scales_ptr, w_scales_ptr, bias_ptr, o_ptr, partials_ptr, counters_ptr, M, N, tiles, steps, spread, early,
    FORMAT: gl.constexpr, BIAS: gl.constexpr, T: gl.constexpr,
):
    # fmt: on
    """o (M, N): x (M, K) times a weight (N, K) transposed, both in codes, with their scales and a bias."""
    to = TiledProduct(o_ptr, bias_ptr, partials_ptr, counters_ptr, M, N, tiles, steps, spread, BIAS, T)
    w_smem = gl.allocate_shared_memory(w_desc.dtype, [to.STAGES, to.BLOCK_N, STEP], w_desc.layout)
    xs = gl.allocate_shared_memory(x_desc.dtype, [to.STAGES, to.BLOCK_M, STEP], x_desc.layout)
    ws = ring(w_smem, to.STAGES, to.WARPGROUPS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (ws, xs, x_scales_ptr, w_scales_ptr, to, 0, FORMAT)),
            (_multiply, (ws, xs, x_scales_ptr, w_scales_ptr, to, 1, FORMAT)),
            (load, (w_desc, x_desc, ws, xs, to, early)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip
