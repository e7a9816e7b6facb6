"""Arithmetic on blocks of rows before they are quantised: the Hadamard transform, products with the mean key, rounding."""

from triton.language import PropagateNan

from rooftile.runtime.hopper import ptx
from rooftile.runtime.hopper.gluon import gl, gluon

# positions of a block
BLOCK = gl.constexpr(128)
# columns of a row that a thread holds
OWN = gl.constexpr(64)
EVERY_NAN = gl.constexpr(PropagateNan.ALL)


@gluon.jit
def load_row(line, layout: gl.constexpr):
    """A row of shared memory as (1, D), for all rows of `layout`."""
    LANES: gl.constexpr = line.shape[0]
    parts: gl.constexpr = gl.BlockedLayout([1, 1, OWN], [32 // LANES, LANES, 1], [gl.num_warps(), 1, 1], [2, 1, 0])
    row = line.load(gl.SliceLayout(0, parts)).reshape([LANES * OWN])
    return gl.expand_dims(gl.convert_layout(row, gl.SliceLayout(0, layout), assert_trivial=True), 0)


@gluon.jit
def butterfly_in_thread(x, step: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr):
    """One step of the butterfly between columns `step` apart that one thread holds."""
    layout: gl.constexpr = x.type.layout
    a, b = x.reshape([ROWS, D // (2 * step), 2, step]).permute((0, 1, 3, 2)).split()
    y = gl.join(a + b, a - b).permute((0, 1, 3, 2)).reshape([ROWS, D])
    return gl.convert_layout(y, layout, assert_trivial=True)


@gluon.jit
def butterfly_across_lanes(x, column, lanes: gl.constexpr):
    """One step between columns that lanes `lanes` apart hold."""
    other = gl.inline_asm_elementwise(ptx.exchange_text(lanes), "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)
    # the first of two gets their sum, the second the first less the second
    sign = gl.where((column // (OWN * lanes)) % 2 == 0, 1.0, -1.0)
    signs, x = gl.broadcast(gl.expand_dims(sign, 0), x)
    # rounded once, as a sum is: the product is exact
    return gl.fma(signs, x, other)


@gluon.jit
def rotate(x, column, signs, D: gl.constexpr):
    """Rows times the signed Hadamard matrix, in the order of `rooftile.numerics.hadamard`; signs have its norm in them."""
    layout: gl.constexpr = x.type.layout
    x = x * load_row(signs, layout)
    x = butterfly_in_thread(x, 1, BLOCK, D)
    x = butterfly_in_thread(x, 2, BLOCK, D)
    x = butterfly_in_thread(x, 4, BLOCK, D)
    x = butterfly_in_thread(x, 8, BLOCK, D)
    x = butterfly_in_thread(x, 16, BLOCK, D)
    x = butterfly_in_thread(x, 32, BLOCK, D)
    if D >= 128:
        x = butterfly_across_lanes(x, column, 1)
    if D >= 256:
        x = butterfly_across_lanes(x, column, 2)
    return x


@gluon.jit
def split_into_quarters(x, D: gl.constexpr):
    """Splits what a thread holds of a row into four parts."""
    parts = x.reshape([x.shape[0], D // OWN, 2, 2, OWN // 4]).permute((0, 1, 4, 2, 3))
    even, odd = parts.split()
    a, b = even.split()
    c, d = odd.split()
    return a, b, c, d


@gluon.jit
def dot_with_mean(x, mean):
    """Each row times the mean key."""
    D: gl.constexpr = x.shape[1]
    mean, x = gl.broadcast(mean, x)
    a, b, c, d = split_into_quarters(x, D)
    p, q, r, s = split_into_quarters(mean, D)
    # the products and their sums in one instruction each, which is not done by itself here
    sums = gl.fma(d, s, gl.fma(c, r, gl.fma(b, q, a * p)))
    return gl.convert_layout(gl.sum(gl.sum(sums, 2), 1), gl.SliceLayout(1, x.type.layout))


@gluon.jit
def largest_size(x):
    """The largest size of what is finite; NaNs lose against any number."""
    return gl.max(gl.max(gl.abs(x), 1), 0)


@gluon.jit
def larger_or_nan(a, b):
    return gl.maximum(a, b, propagate_nan=EVERY_NAN)


@gluon.jit
def round_to_int8(x):
    """To the nearest integer, ties to even; -128 for a NaN."""
    near = gl.inline_asm_elementwise(ptx.ROUND, "=r,f", [x], dtype=gl.int32, is_pure=True, pack=1)
    return gl.where(x == x, near, -128).to(gl.int8)
