"""INT4 weights times 16 bits on Hopper: weights become numbers in registers, from where a matrix instruction takes its left side.

    codes    16 bytes per thread and row: 32 neighbours of K, and so of one group. A mask and a shift put two codes into the last
             digits of two 16-bit numbers, 128 or 1024 larger; less that and the zero point they are exact, and times the scale
             they are rounded once: the bits of `QuantisedWeight.dequantise`
    order    an instruction asks each thread for numbers of K that lie apart, and the sum over K does not depend on which they
             are: x is put in the order in which threads hold their codes. A warpgroup does that for few rows of x, on their way
             from one place of shared memory to another; many rows are put in order before (`ordered`)

Lin et al., QServe, arXiv:2405.04532; Frantar et al., MARLIN, arXiv:2408.11743.
"""

from rooftile.hopper import ptx
from rooftile.hopper.gluon import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from rooftile.hopper.pipeline import Ring, ring
from rooftile.matmul.hopper.schedule import ROWS, STEP, Product, load, wait_for_input, whole_sum, write

# bytes of a row in a step, and codes of a thread: a quarter of them
BYTES, QUARTER = gl.constexpr(64), gl.constexpr(32)


@gluon.constexpr_function
def _layout_of_codes():
    """A quarter of a row's bytes per thread; the rows are those of a matrix instruction's left operand."""
    registers = [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]]
    return gl.DistributedLinearLayout(
        registers, [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 64]
    )


@gluon.constexpr_function
def _layout_of_quarters():
    """One number per thread and row: the scale of its quarter."""
    return gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4]
    )


@gluon.jit
def in_order(x):
    """Rows (M, 128) of x in the order in which threads hold codes.

    Element 8 (4 w + 2 a + v) + 2 q + e is number 32 q + 8 w + 4 e + 2 a + v: thread q of four, its word w, and so on.
    """
    x = x.reshape([x.shape[0], 4, 4, 2, 2, 2])
    return x.permute((0, 2, 4, 5, 1, 3)).reshape([x.shape[0], 128])


@gluon.jit
def _quarters(numbers):
    """A number per quarter (64, 4) for each of its bytes, (64, 64)."""
    # the rows of a warp, of its two halves, and within them: a slice of no other layout can be spread
    within: gl.constexpr = gl.BlockedLayout([1, 2, 1, 1, 16], [1, 1, 8, 4, 1], [4, 1, 1, 1, 1], [4, 3, 2, 1, 0])
    numbers = gl.convert_layout(numbers.reshape([4, 2, 8, 4]), gl.SliceLayout(4, within))
    spread = gl.expand_dims(numbers, 4).broadcast_to([4, 2, 8, 4, 16]).reshape([ROWS, BYTES])
    return gl.convert_layout(spread, _layout_of_codes())


@gluon.jit
def _weights(codes, scales, shifts, operand: gl.constexpr):
    """Weights (64, 128) as a left operand: (code - zero) scale, rounded once; shifts are zero points plus 136 or 1032."""
    scales, shifts = _quarters(scales), _quarters(shifts)
    # a tuple of types has no variables in it
    if scales.dtype == gl.bfloat16:
        low, high = gl.inline_asm_elementwise(
            ptx.nibbles_text("bf16"), "=&r,=&r,=&r,=&r,r,r,r,r,r", [codes, scales, shifts], dtype=(gl.bfloat16, gl.bfloat16),
            is_pure=True, pack=4,
        )  # fmt: skip
    else:
        low, high = gl.inline_asm_elementwise(
            ptx.nibbles_text("fp16"), "=&r,=&r,=&r,=&r,r,r,r,r,r", [codes, scales, shifts], dtype=(gl.float16, gl.float16),
            is_pure=True, pack=4,
        )  # fmt: skip
    w = gl.join(low, high).reshape([ROWS, 4, 4, 2, 2, 2]).permute((0, 2, 3, 5, 1, 4)).reshape([ROWS, STEP])
    return gl.convert_layout(w, operand)


@gluon.jit
def _scales(scales_ptr, zeros_ptr, n_0, step, groups, to: Product, GROUP: gl.constexpr, ZEROS: gl.constexpr):
    """Scales and shifts of 64 rows in a step, one per quarter: (64, 4). GROUP is 0 for a whole row."""
    layout: gl.constexpr = _layout_of_quarters()
    dtype: gl.constexpr = scales_ptr.dtype.element_ty
    n = n_0 + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    quarter = gl.arange(0, 4, gl.SliceLayout(0, layout))
    group = quarter * 0
    if GROUP > 0:
        group = (step * STEP + quarter * QUARTER) // GROUP
    place = gl.expand_dims(n.to(gl.int64) * groups, 1) + gl.expand_dims(group, 0)
    there = gl.expand_dims(n < to.N, 1) & gl.expand_dims(group < groups, 0)
    scales = gl.load(scales_ptr + place, mask=there, other=0.0)
    EXCESS: gl.constexpr = 136.0 if dtype == gl.bfloat16 else 1032.0
    shifts = gl.full([ROWS, 4], EXCESS, gl.float32, layout)
    if ZEROS:
        shifts += gl.load(zeros_ptr + place, mask=there, other=0).to(gl.float32)
    return scales, shifts.to(dtype)


@gluon.jit
def _multiply(
    tiles: Ring, xs, ordered, scales_ptr, zeros_ptr, groups, to: Product, WARPGROUP: gl.constexpr, GROUP: gl.constexpr,
    ZEROS: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """The role that multiplies: this warpgroup's rows of each tile of the weight."""
    FIRST: gl.constexpr = WARPGROUP * to.BLOCKS_N * ROWS
    NEXT: gl.constexpr = (to.BLOCKS_N - 1) * ROWS
    TWO: gl.constexpr = to.BLOCKS_N == 2
    BLOCK: gl.constexpr = WARPGROUP * to.BLOCKS_N
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, to.COLUMNS, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    of_codes: gl.constexpr = _layout_of_codes()
    of_x: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    place, end = to.bounds()
    fill = 0
    while place < end:
        run = to.run_at(place, end)
        n_0 = run.tile * to.BLOCK_N + FIRST
        for tile_m in range(to.tiles_of_rows()):
            acc = gl.zeros([ROWS, to.COLUMNS], gl.float32, layout)
            acc_2 = acc
            scales, shifts = _scales(scales_ptr, zeros_ptr, n_0, run.first, groups, to, GROUP, ZEROS)
            scales_2, shifts_2 = _scales(scales_ptr, zeros_ptr, n_0 + NEXT, run.first, groups, to, GROUP, ZEROS)
            for step in range(run.first, run.stop):
                tiles.wait_full(fill)
                codes = tiles.buffer(fill)
                x = xs.index(fill % to.STAGES)
                if not ORDERED:
                    ordered.store(in_order(x.load(of_x)))
                    fence_async_shared()
                    barrier()
                    x = ordered
                w = _weights(codes.slice(FIRST, ROWS, 0).load(of_codes), scales, shifts, operand)
                acc = warpgroup_mma(w, x.permute((1, 0)), acc, is_async=True)
                if TWO:
                    w_2 = _weights(codes.slice(FIRST + NEXT, ROWS, 0).load(of_codes), scales_2, shifts_2, operand)
                    acc_2 = warpgroup_mma(w_2, x.permute((1, 0)), acc_2, is_async=True)
                # the next step's, while this one's are multiplied
                if GROUP > 0:
                    scales, shifts = _scales(scales_ptr, zeros_ptr, n_0, step + 1, groups, to, GROUP, ZEROS)
                    if TWO:
                        scales_2, shifts_2 = _scales(
                            scales_ptr, zeros_ptr, n_0 + NEXT, step + 1, groups, to, GROUP, ZEROS
                        )
                if TWO:
                    acc, acc_2 = warpgroup_mma_wait(0, deps=(acc, acc_2))
                else:
                    acc = warpgroup_mma_wait(0, deps=(acc,))
                tiles.release(fill)
                fill += 1
            m_0 = tile_m * to.BLOCK_M
            found, has_it = whole_sum(acc, run, tile_m, BLOCK, to)
            if has_it:
                write(found, n_0, m_0, to)
            if TWO:
                found, has_it = whole_sum(acc_2, run, tile_m, BLOCK + 1, to)
                if has_it:
                    write(found, n_0 + NEXT, m_0, to)
        place += run.stop - run.first


# fmt: off
@gluon.jit(do_not_specialize=["M", "tiles", "steps", "groups"])
def product_of_nibbles(
    w_desc, x_desc, scales_ptr, zeros_ptr, bias_ptr, o_ptr, partials_ptr, counters_ptr, M, N, tiles, steps, groups,
    GROUP: gl.constexpr, ZEROS: gl.constexpr, ORDERED: gl.constexpr, BIAS: gl.constexpr, T: gl.constexpr,
):
    # fmt: on
    """o (M, N): x (M, K) times a weight (N, K) transposed, in codes of 4 bits with groups, plus a bias."""
    to = Product(o_ptr, bias_ptr, partials_ptr, counters_ptr, M, N, tiles, steps, BIAS, T)
    w_smem = gl.allocate_shared_memory(gl.uint8, [to.STAGES, to.BLOCK_N, BYTES], w_desc.layout)
    xs = gl.allocate_shared_memory(x_desc.dtype, [to.STAGES, to.BLOCK_M, STEP], x_desc.layout)
    # a warpgroup orders rows of x for itself
    ordered = gl.allocate_shared_memory(x_desc.dtype, [1 if ORDERED else to.WARPGROUPS, to.BLOCK_M, STEP], x_desc.layout)
    ws = ring(w_smem, to.STAGES, to.WARPGROUPS)
    fence_async_shared()
    wait_for_input()
    # ... or none does
    OWN: gl.constexpr = 0 if ORDERED else 1
    loaded = (w_desc, x_desc, ws, xs, to)
    # a warpgroup's number stays a constant only inside of the call
    if to.WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (ws, xs, ordered.index(0), scales_ptr, zeros_ptr, groups, to, 0, GROUP, ZEROS, ORDERED)),
                (_multiply, (ws, xs, ordered.index(OWN), scales_ptr, zeros_ptr, groups, to, 1, GROUP, ZEROS, ORDERED)),
                (load, loaded),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (ws, xs, ordered.index(0), scales_ptr, zeros_ptr, groups, to, 0, GROUP, ZEROS, ORDERED)),
                (_multiply, (ws, xs, ordered.index(OWN), scales_ptr, zeros_ptr, groups, to, 1, GROUP, ZEROS, ORDERED)),
                (_multiply, (ws, xs, ordered.index(OWN * 2), scales_ptr, zeros_ptr, groups, to, 2, GROUP, ZEROS, ORDERED)),
                (_multiply, (ws, xs, ordered.index(OWN * 3), scales_ptr, zeros_ptr, groups, to, 3, GROUP, ZEROS, ORDERED)),
                (load, loaded),
            ],
            [4, 4, 4, 1], [112, 112, 112, 24],
        )  # fmt: skip
