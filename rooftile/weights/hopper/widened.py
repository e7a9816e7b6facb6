"""Codes times 16 bits on Hopper: weights become numbers in registers, from where a matrix instruction takes its left side.

    codes    a thread has 32 neighbours of K per row, so their scales are one or two numbers: 16 bytes of codes of 4 bits, or 32
             of 8. A mask and a shift put two codes into two 16-bit numbers (`runtime.hopper.ptx`), where they are exact, and
             times the scale they are rounded once: the bits of `QuantisedWeight.dequantise`. The outer scale of nvfp4 multiplies
             sums instead
    gates    with an activation, a tile has rows of the gate, and as many of the other half of the weight: a warpgroup has the
             sums of both in registers, and only their gated product is written
    order    an instruction asks each thread for numbers of K that lie apart, and the sum over K does not depend on which they
             are: x is put in the order in which threads hold their codes. A warpgroup does that for few rows of x, on their way
             from one place of shared memory to another; many rows are put in order before (`ordered`)

Lin et al., QServe, arXiv:2405.04532; Frantar et al., MARLIN, arXiv:2408.11743; Rouhani et al., Microscaling data formats,
arXiv:2310.10537; Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202.
"""

from rooftile.numerics.activated import activated
from rooftile.runtime.hopper import ptx
from rooftile.runtime.hopper.gluon import barrier, fence_async_shared, gl, gluon, warpgroup_mma, warpgroup_mma_wait
from rooftile.runtime.hopper.pipeline import Ring, ring, wait_for_input
from rooftile.weights.hopper.schedule import ROWS, STEP, TiledProduct, load, put, whole_pair, whole_sum, with_bias, write


@gluon.constexpr_function
def _bytes_of(FORMAT):
    """Bytes of a row in a step."""
    return 128 if FORMAT == "w8" or FORMAT == "mxfp8" else 64


@gluon.constexpr_function
def _scales_of(FORMAT):
    """Scales of a row in a step, at most: 16 numbers of nvfp4 share one."""
    return 8 if FORMAT == "nvfp4" else 4


@gluon.constexpr_function
def _layout_of_codes(FORMAT):
    """A quarter of a row's bytes per thread; the rows are the rows of a matrix instruction's left operand."""
    size = 128 if FORMAT == "w8" or FORMAT == "mxfp8" else 64
    registers = [[0, 1 << n] for n in range(8) if 4 << n < size] + [[8, 0]]
    lanes = [[0, size // 4], [0, size // 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, size])


@gluon.constexpr_function
def _layout_of_scales(FORMAT):
    """The scales of a thread's codes: one per quarter and row, or two."""
    registers, lanes = [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    if FORMAT == "nvfp4":
        registers, lanes = [[0, 1], [8, 0]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, 8 if FORMAT == "nvfp4" else 4])


@gluon.constexpr_function
def _layout_of_spread(FORMAT):
    """Scales repeated for each byte: the rows of a warp, of its two halves and within them, scales of a row, and their bytes."""
    sizes = {"int4": (1, 16), "mxfp4": (1, 16), "nvfp4": (2, 8)}
    scales, size = sizes.get(FORMAT, (1, 32))
    return gl.BlockedLayout([1, 2, 1, scales, size], [1, 1, 8, 4, 1], [4, 1, 1, 1, 1], [4, 3, 2, 1, 0])


@gluon.jit
def in_order(x, WIDE: gl.constexpr):
    """Rows (M, 128) of x in the order in which threads hold codes, of 8 bits if WIDE, else of 4.

    Of 4 bits: element 8 (4 w + 2 a + v) + 2 q + e is number 32 q + 8 w + 4 e + 2 a + v: thread q of four, its word w, and so on.
    Of 8 bits: element 8 (2 w + a) + 2 q + e is number 32 q + 4 w + 2 e + a.
    """
    if WIDE:
        o = x.reshape([x.shape[0], 4, 8, 2, 2]).permute((0, 2, 4, 1, 3))
    else:
        o = x.reshape([x.shape[0], 4, 4, 2, 2, 2]).permute((0, 2, 4, 5, 1, 3))
    return o.reshape([x.shape[0], 128])


@gluon.jit
def _spread(numbers, FORMAT: gl.constexpr):
    """A number per scale (64, 4 or 8) for each of its bytes, (64, 64 or 128)."""
    BYTES: gl.constexpr = _bytes_of(FORMAT)
    SCALES: gl.constexpr = _scales_of(FORMAT)
    # a slice of no other layout can be spread
    numbers = gl.convert_layout(numbers.reshape([4, 2, 8, SCALES]), gl.SliceLayout(4, _layout_of_spread(FORMAT)))
    spread = gl.expand_dims(numbers, 4).broadcast_to([4, 2, 8, SCALES, BYTES // SCALES]).reshape([ROWS, BYTES])
    return gl.convert_layout(spread, _layout_of_codes(FORMAT))


@gluon.jit
def _weights(codes, scales, shifts, operand: gl.constexpr, dtype: gl.constexpr, FORMAT: gl.constexpr):
    """Weights (64, 128) as a left operand: (code - zero) scale, rounded once; shifts are zero points of int4 plus 136 or 1032."""
    scales = _spread(_as_numbers(scales, dtype, FORMAT), FORMAT)
    IN_BF16: gl.constexpr = scales.dtype == gl.bfloat16
    if FORMAT == "w8" or FORMAT == "mxfp8":
        bits = gl.inline_asm_elementwise(
            ptx.bytes_text(FORMAT, IN_BF16), "=&r,=&r,r,r,r", [codes, scales], dtype=gl.int16, is_pure=True, pack=4
        )
        bits = bits.reshape([ROWS, 4, 8, 2, 2]).permute((0, 2, 3, 1, 4))
    else:
        if FORMAT == "int4":
            low, high = gl.inline_asm_elementwise(
                ptx.nibbles_text(IN_BF16), "=&r,=&r,=&r,=&r,r,r,r,r,r", [codes, scales, _spread(shifts, FORMAT)],
                dtype=(gl.int16, gl.int16), is_pure=True, pack=4,
            )  # fmt: skip
        else:
            low, high = gl.inline_asm_elementwise(
                ptx.e2m1_text(IN_BF16), "=&r,=&r,=&r,=&r,r,r,r", [codes, scales],
                dtype=(gl.int16, gl.int16), is_pure=True, pack=4,
            )  # fmt: skip
        bits = gl.join(low, high).reshape([ROWS, 4, 4, 2, 2, 2]).permute((0, 2, 3, 5, 1, 4))
    w = bits.reshape([ROWS, STEP]).to(scales.dtype, bitcast=True)
    return gl.convert_layout(w, operand)


@gluon.jit
def _as_numbers(scales, dtype: gl.constexpr, FORMAT: gl.constexpr):
    """Scales as numbers of 16 bits."""
    if FORMAT == "mxfp8" or FORMAT == "mxfp4":
        # the bits of a power of two; the smallest is subnormal
        bits = gl.where(scales == 0, 64, scales.to(gl.int32) << 7)
        scales = bits.to(gl.int16).to(dtype, bitcast=True)
    elif FORMAT == "nvfp4":
        # e4m3 in the bits of fp16 is a number 2^8 times too small, and in the bits of bf16 2^120 times
        MOVED: gl.constexpr = 4 if dtype == gl.bfloat16 else 7
        FACTOR: gl.constexpr = 2.0**120 if dtype == gl.bfloat16 else 256.0
        scales = (scales.to(gl.int32) << MOVED).to(gl.int16).to(dtype, bitcast=True) * FACTOR
    return scales


@gluon.jit
def _scales(
    scales_ptr, zeros_ptr, n_0, end, step, groups, dtype: gl.constexpr, FORMAT: gl.constexpr, GROUP: gl.constexpr,
    ZEROS: gl.constexpr,
):  # fmt: skip
    """Scales and shifts of 64 rows of a weight that has `end`, in a step: (64, 4), or (64, 8) for nvfp4. GROUP is 0 for a row."""
    SCALES: gl.constexpr = _scales_of(FORMAT)
    layout: gl.constexpr = _layout_of_scales(FORMAT)
    n = n_0 + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    part = gl.arange(0, SCALES, gl.SliceLayout(0, layout))
    group = part * 0
    if GROUP > 0:
        group = (step * STEP + part * (STEP // SCALES)) // GROUP
    place = gl.expand_dims(n.to(gl.int64) * groups, 1) + gl.expand_dims(group, 0)
    there = gl.expand_dims(n < end, 1) & gl.expand_dims(group < groups, 0)
    scales = gl.load(scales_ptr + place, mask=there, other=0)
    shifts = scales
    if FORMAT == "int4":
        EXCESS: gl.constexpr = 136.0 if dtype == gl.bfloat16 else 1032.0
        excess = gl.full([ROWS, SCALES], EXCESS, gl.float32, layout)
        if ZEROS:
            excess += gl.load(zeros_ptr + place, mask=there, other=0).to(gl.float32)
        shifts = excess.to(dtype)
    return scales, shifts


@gluon.jit
def _times_outer(y, outer_ptr, stride, n_0, end, FORMAT: gl.constexpr):
    """Sums (64, COLUMNS) times the outer scale of their row of the weight; the stride is 0 where all rows have one."""
    if FORMAT == "nvfp4":
        n = n_0 + gl.arange(0, ROWS, gl.SliceLayout(1, y.type.layout))
        y = y * gl.expand_dims(gl.load(outer_ptr + n * stride, mask=n < end, other=0.0), 1)
    return y


@gluon.jit
def gated_pair(gate, up, dtype: gl.constexpr, GATE: gl.constexpr):
    """The activation of gates times their other halves, rounded as the kernels that do so one after the other round."""
    opened = activated(gate.to(dtype).to(gl.float32), GATE).to(dtype).to(gl.float32)
    return opened * up.to(dtype).to(gl.float32)


@gluon.jit
def _multiply(
    tiles: Ring, xs, ordered, scales_ptr, zeros_ptr, outer_ptr, outer_stride, groups, to: TiledProduct, WARPGROUP: gl.constexpr,
    FORMAT: gl.constexpr, GROUP: gl.constexpr, ZEROS: gl.constexpr, ORDERED: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    """The role that multiplies: this warpgroup's rows of each tile of the weight."""
    TWO: gl.constexpr = to.BLOCKS_N == 2
    GATED: gl.constexpr = GATE != ""
    # its rows in a tile, and where the second of its two blocks lies: beside the first, or in the tile's other half
    FIRST: gl.constexpr = WARPGROUP * ROWS if GATED else WARPGROUP * to.BLOCKS_N * ROWS
    NEXT: gl.constexpr = to.WARPGROUPS * ROWS if GATED else (to.BLOCKS_N - 1) * ROWS
    TILE: gl.constexpr = NEXT if GATED else to.BLOCK_N
    BLOCK: gl.constexpr = WARPGROUP * to.BLOCKS_N
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, to.COLUMNS, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    of_codes: gl.constexpr = _layout_of_codes(FORMAT)
    WIDE: gl.constexpr = FORMAT == "w8" or FORMAT == "mxfp8"
    dtype: gl.constexpr = xs.dtype
    of_x: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    wait_for_input()
    place, end = to.bounds()
    fill = 0
    while place < end:
        run = to.run_at(place, end)
        n_0 = run.tile_n * TILE + FIRST
        n_1 = n_0 + NEXT
        rows = to.N
        if GATED:
            n_1 = n_0 + to.N
            rows = to.N * 2
        for tile_m in range(run.tile_m, to.tiles_of_rows(), to.spread):
            acc = gl.zeros([ROWS, to.COLUMNS], gl.float32, layout)
            acc_2 = acc
            scales, shifts = _scales(scales_ptr, zeros_ptr, n_0, rows, run.first, groups, dtype, FORMAT, GROUP, ZEROS)
            scales_2, shifts_2 = _scales(scales_ptr, zeros_ptr, n_1, rows, run.first, groups, dtype, FORMAT, GROUP, ZEROS)
            for step in range(run.first, run.stop):
                tiles.wait_full(fill)
                codes = tiles.buffer(fill)
                x = xs.index(fill % to.STAGES)
                if not ORDERED:
                    ordered.store(in_order(x.load(of_x), WIDE))
                    fence_async_shared()
                    barrier()
                    x = ordered
                w = _weights(codes.slice(FIRST, ROWS, 0).load(of_codes), scales, shifts, operand, dtype, FORMAT)
                acc = warpgroup_mma(w, x.permute((1, 0)), acc, is_async=True)
                if TWO:
                    codes_2 = codes.slice(FIRST + NEXT, ROWS, 0).load(of_codes)
                    w_2 = _weights(codes_2, scales_2, shifts_2, operand, dtype, FORMAT)
                    acc_2 = warpgroup_mma(w_2, x.permute((1, 0)), acc_2, is_async=True)
                # the next step's, while this one's are multiplied
                if GROUP > 0:
                    scales, shifts = _scales(scales_ptr, zeros_ptr, n_0, rows, step + 1, groups, dtype, FORMAT, GROUP, ZEROS)
                    if TWO:
                        scales_2, shifts_2 = _scales(
                            scales_ptr, zeros_ptr, n_1, rows, step + 1, groups, dtype, FORMAT, GROUP, ZEROS
                        )  # fmt: skip
                if TWO:
                    acc, acc_2 = warpgroup_mma_wait(0, deps=(acc, acc_2))
                else:
                    acc = warpgroup_mma_wait(0, deps=(acc,))
                tiles.release(fill)
                fill += 1
            m_0 = tile_m * to.BLOCK_M
            if GATED:
                gate, up, has_it = whole_pair(acc, acc_2, run, tile_m, BLOCK, to)
                if has_it:
                    gate = with_bias(_times_outer(gate, outer_ptr, outer_stride, n_0, rows, FORMAT), n_0, rows, to)
                    up = with_bias(_times_outer(up, outer_ptr, outer_stride, n_1, rows, FORMAT), n_1, rows, to)
                    put(gated_pair(gate, up, to.o.dtype.element_ty, GATE), n_0, m_0, to)
            else:
                found, has_it = whole_sum(acc, run, tile_m, BLOCK, to)
                if has_it:
                    write(_times_outer(found, outer_ptr, outer_stride, n_0, rows, FORMAT), n_0, m_0, to)
                if TWO:
                    found, has_it = whole_sum(acc_2, run, tile_m, BLOCK + 1, to)
                    if has_it:
                        write(_times_outer(found, outer_ptr, outer_stride, n_1, rows, FORMAT), n_1, m_0, to)
        place += run.stop - run.first


# fmt: off
@gluon.jit(do_not_specialize=["M", "tiles", "steps", "spread", "early", "groups", "outer_stride"])
def product_of_widened(
    w_desc, x_desc, scales_ptr, zeros_ptr, outer_ptr, bias_ptr, o_ptr, partials_ptr, counters_ptr, M, N, tiles, steps, spread,
    early, groups, outer_stride, FORMAT: gl.constexpr, GROUP: gl.constexpr, ZEROS: gl.constexpr, ORDERED: gl.constexpr,
    GATE: gl.constexpr, BIAS: gl.constexpr, T: gl.constexpr,
):
    # fmt: on
    """o (M, N): x (M, K) in 16 bits times a weight (N, K) transposed, in codes of 4 or 8 bits, plus a bias.

    GATE is an activation's formula, or "": with it the weight is (2 N, K), and o is the activation of its first half's product
    times the scale of its second half.
    """
    to = TiledProduct(o_ptr, bias_ptr, partials_ptr, counters_ptr, M, N, tiles, steps, spread, BIAS, T)
    w_smem = gl.allocate_shared_memory(gl.uint8, [to.STAGES, to.BLOCK_N, w_desc.block_type.shape[1]], w_desc.layout)
    xs = gl.allocate_shared_memory(x_desc.dtype, [to.STAGES, to.BLOCK_M, STEP], x_desc.layout)
    # a warpgroup orders rows of x for itself
    ordered = gl.allocate_shared_memory(x_desc.dtype, [1 if ORDERED else to.WARPGROUPS, to.BLOCK_M, STEP], x_desc.layout)
    ws = ring(w_smem, to.STAGES, to.WARPGROUPS)
    fence_async_shared()
    # ... or none does
    OWN: gl.constexpr = 0 if ORDERED else 1
    # a warpgroup's number stays a constant only inside of the call
    loaded = (w_desc, x_desc, ws, xs, to, early)
    gl.warp_specialize(
        [
            (_multiply, (ws, xs, ordered.index(0), scales_ptr, zeros_ptr, outer_ptr, outer_stride,
                         groups, to, 0, FORMAT, GROUP, ZEROS, ORDERED, GATE)),
            (_multiply, (ws, xs, ordered.index(OWN), scales_ptr, zeros_ptr, outer_ptr, outer_stride,
                         groups, to, 1, FORMAT, GROUP, ZEROS, ORDERED, GATE)),
            (load, loaded),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip
