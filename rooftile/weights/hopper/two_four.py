"""2:4 weights on Hopper: values are spread in registers, from where a matrix instruction takes its left side.

    values   a thread has 16 neighbours of a row in a step, so the values of eight groups of four, and one word of places. A byte
             permutation puts both values of a group, and zeros, into two registers; which bytes it takes it looks up for four
             groups at a time (`rooftile.runtime.hopper.ptx`). Values in FP8 become fp16 before, which has them all
    order    32 neighbours of K belong to a thread, but an instruction asks for numbers that lie apart, so x is put in that order:
             by a warpgroup for few rows, before the product for many (`ordered`). x in FP8 becomes fp16 there

Mishra et al., Accelerating sparse deep neural networks, arXiv:2104.08378.
"""

from rooftile.runtime.hopper import ptx
from rooftile.runtime.hopper.gluon import barrier, fence_async_shared, gl, gluon, warpgroup_mma, warpgroup_mma_wait
from rooftile.runtime.hopper.pipeline import Ring, ring, wait_for_input
from rooftile.weights.hopper.schedule import ROWS, STEP, TiledProduct, load, whole_sum, with_scales, write

# values of a row in a step, and words of places
VALUES, WORDS = gl.constexpr(64), gl.constexpr(4)


@gluon.constexpr_function
def _layout_of_values():
    """16 neighbours of a row per thread; the rows are the rows of a matrix instruction's left operand."""
    registers = [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]]
    lanes = [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, 64])


@gluon.constexpr_function
def _layout_of_places():
    """The word of a thread's eight groups, per row."""
    return gl.DistributedLinearLayout([[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4])


@gluon.constexpr_function
def _layout_of_repeated():
    """Words repeated for each value: the rows of a warp, of its two halves and within them, words of a row, and their values."""
    return gl.BlockedLayout([1, 2, 1, 1, 16], [1, 1, 8, 4, 1], [4, 1, 1, 1, 1], [4, 3, 2, 1, 0])


@gluon.jit
def in_pairs(x):
    """Rows (M, 128) of x in the order in which threads hold weights: element 8 s + 2 q + e is number 32 q + 2 s + e."""
    return x.reshape([x.shape[0], 4, 16, 2]).permute((0, 2, 1, 3)).reshape([x.shape[0], 128])


@gluon.jit
def _weights(values, places, operand: gl.constexpr, dtype: gl.constexpr):
    """Weights (64, 128) as a left operand, from values (64, 64) and places (64, 4)."""
    places = gl.convert_layout(places.reshape([4, 2, 8, WORDS]), gl.SliceLayout(4, _layout_of_repeated()))
    places = gl.expand_dims(places, 4).broadcast_to([4, 2, 8, WORDS, VALUES // WORDS]).reshape([ROWS, VALUES])
    places = gl.convert_layout(places, _layout_of_values())
    values = values.to(dtype)
    low, high = gl.inline_asm_elementwise(
        ptx.GROUPS, ptx.GROUPS_CONSTRAINTS, [values, places], dtype=(gl.int16, gl.int16), is_pure=True, pack=16
    )
    # the two registers of a group follow each other
    bits = gl.join(low, high).reshape([ROWS, 4, 8, 2, 2]).permute((0, 2, 4, 1, 3))
    return gl.convert_layout(bits.reshape([ROWS, STEP]).to(dtype, bitcast=True), operand)


@gluon.jit
def _finish(acc, run, tile_m, block, n_0, x_scales_ptr, w_scales_ptr, to: TiledProduct, SCALED: gl.constexpr):
    """Completes a block's sum, and writes it with scales and bias if it is complete."""
    m_0 = tile_m * to.BLOCK_M
    y, has_it = whole_sum(acc, run, tile_m, block, to)
    if has_it:
        if SCALED:
            y = with_scales(y, n_0, m_0, x_scales_ptr, w_scales_ptr, to.N, to)
        write(y, n_0, m_0, to)


@gluon.jit
def _ready(
    tiles: Ring, places, xs, ordered, fill, to: TiledProduct, WARPGROUP: gl.constexpr, operand: gl.constexpr,
    ORDERED: gl.constexpr,
):  # fmt: skip
    """Waits for a step's tiles, puts its rows of x in order unless they are, and returns this warpgroup's weights."""
    dtype: gl.constexpr = ordered.dtype
    tiles.wait_full(fill)
    if not ORDERED:
        of_x: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
        ordered.index(2 * WARPGROUP + fill % 2).store(in_pairs(xs.index(fill % to.STAGES).load(of_x).to(dtype)))
    words = places.index(fill % to.STAGES).slice(WARPGROUP * ROWS, ROWS, 0).load(_layout_of_places())
    values = tiles.buffer(fill).slice(WARPGROUP * ROWS, ROWS, 0).load(_layout_of_values())
    return _weights(values, words, operand, dtype)


@gluon.jit
def _multiply(
    tiles: Ring, places, xs, ordered, x_scales_ptr, w_scales_ptr, to: TiledProduct, WARPGROUP: gl.constexpr,
    ORDERED: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """The role that multiplies: this warpgroup's rows of each tile of the weight."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, to.COLUMNS, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    wait_for_input()
    place, end = to.bounds()
    fill = 0
    while place < end:
        run = to.run_at(place, end)
        n_0 = run.tile_n * to.BLOCK_N + WARPGROUP * ROWS
        for tile_m in range(run.tile_m, to.tiles_of_rows(), to.spread):
            acc = gl.zeros([ROWS, to.COLUMNS], gl.float32, layout)
            w = _ready(tiles, places, xs, ordered, fill, to, WARPGROUP, operand, ORDERED)
            for step in range(run.first, run.stop):
                if ORDERED:
                    x = xs.index(fill % to.STAGES)
                else:
                    fence_async_shared()
                    barrier()
                    x = ordered.index(2 * WARPGROUP + fill % 2)
                acc = warpgroup_mma(w, x.permute((1, 0)), acc, is_async=True)
                # the next step's weights are spread while this one's are multiplied
                w_next = w
                if step + 1 < run.stop:
                    w_next = _ready(tiles, places, xs, ordered, fill + 1, to, WARPGROUP, operand, ORDERED)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                tiles.release(fill)
                fill += 1
                w = w_next
            _finish(acc, run, tile_m, WARPGROUP, n_0, x_scales_ptr, w_scales_ptr, to, SCALED)
        place += run.stop - run.first


# fmt: off
@gluon.jit(do_not_specialize=["M", "tiles", "steps", "spread", "early"])
def product_of_two_four(
    w_desc, x_desc, places_desc, x_scales_ptr, w_scales_ptr, bias_ptr, o_ptr, partials_ptr, counters_ptr, M, N, tiles, steps,
    spread, early, ORDERED: gl.constexpr, SCALED: gl.constexpr, BIAS: gl.constexpr, T: gl.constexpr,
):
    # fmt: on
    """o (M, N): x (M, K) times a 2:4 weight (N, K) transposed, plus a bias; in FP8 with the scales of both (`SCALED`).

    Places come as words (N, K / 32). x is in FP8 as the values are, or `ORDERED`, and then it is in fp16.
    """
    to = TiledProduct(o_ptr, bias_ptr, partials_ptr, counters_ptr, M, N, tiles, steps, spread, BIAS, T)
    dtype: gl.constexpr = gl.float16 if SCALED else x_desc.dtype
    w_smem = gl.allocate_shared_memory(w_desc.dtype, [to.STAGES, to.BLOCK_N, VALUES], w_desc.layout)
    places = gl.allocate_shared_memory(gl.int32, [to.STAGES, to.BLOCK_N, WORDS], places_desc.layout)
    xs = gl.allocate_shared_memory(x_desc.dtype, [to.STAGES, to.BLOCK_M, STEP], x_desc.layout)
    # a warpgroup orders rows of x for itself, for one step while it multiplies with the rows of another; or none does
    of_ordered: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    ordered = gl.allocate_shared_memory(
        dtype, [1 if ORDERED else 2 * to.WARPGROUPS, 8 if ORDERED else to.BLOCK_M, STEP], of_ordered
    )  # fmt: skip
    ws = ring(w_smem, to.STAGES, to.WARPGROUPS)
    fence_async_shared()
    # a warpgroup's number stays a constant only inside of the call
    gl.warp_specialize(
        [
            (_multiply, (ws, places, xs, ordered, x_scales_ptr, w_scales_ptr, to, 0, ORDERED, SCALED)),
            (_multiply, (ws, places, xs, ordered, x_scales_ptr, w_scales_ptr, to, 1, ORDERED, SCALED)),
            (load, (w_desc, x_desc, ws, xs, to, early, places_desc, places)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip
