"""From scores to weights in FP8, without knowing the rows' largest score first.

Weights refer to a score of their row that may lag behind the largest so far: any reference gives the same quotients in the end.
So a block's weights are computed from the reference at hand. Only where they come out too large, in a warp's 16 rows, are the
largest scores looked for, the references moved there, and the weights computed again, which is seldom: a tile's first references
are the largest scores of its first block. Too large is a thread's sum of its weights of a row, 32 of 128 keys: 432 or more, so
that none of them is too large for the format. Where all scores are the same, and the reference too, the sum is 128.

Zadouri et al., FlashAttention-4, rescale as seldom.
"""

from rooftile.exact.backends.hopper.device.config import WG_ROWS
from rooftile.numerics import softmax
from rooftile.runtime.hopper import ptx
from rooftile.runtime.hopper.gluon import gl, gluon

RAISED = gl.constexpr(softmax.RAISED)


# the first named barriers that Triton leaves
PING_PONG_BARRIER = gl.constexpr(9)
# for blocks of 64 and of 128 keys
_TEXT_64 = gl.constexpr(ptx.fp8_weights_text(32, softmax.RAISED, softmax.TOO_LARGE))
_TEXT_128 = gl.constexpr(ptx.fp8_weights_text(64, softmax.RAISED, softmax.TOO_LARGE))


@gluon.jit
def _take_alternate(x, low: gl.constexpr):
    """Takes every other of the n in (WG_ROWS, n, 4)."""
    n: gl.constexpr = x.shape[1] // 2
    even, odd = x.reshape([WG_ROWS, n, 2, 4]).permute((0, 1, 3, 2)).split()
    if low:
        odd = even
    return odd


@gluon.jit
def _one_per_thread(x, SECOND: gl.constexpr):
    """One number per row and thread, (WG_ROWS, 4), taken from a tensor in the scores' layout: from register 0, or 4 if SECOND."""
    KEYS: gl.constexpr = x.shape[1]
    first, _ = x.reshape([WG_ROWS, KEYS // 8, 4, 2]).split()
    own = _take_alternate(_take_alternate(_take_alternate(first, not SECOND), True), True)
    if KEYS == 128:
        own = _take_alternate(own, True)
    return own.reshape([WG_ROWS, 4])


@gluon.jit
def per_thread(x, KEYS: gl.constexpr, s_layout: gl.constexpr):
    """A number for every row and thread of it, (WG_ROWS, 4)."""
    return _one_per_thread(gl.zeros([WG_ROWS, KEYS], gl.float32, s_layout) + x, False)


@gluon.jit
def initial_references(s, factor):
    """The rows' largest scores, for every thread of a row (WG_ROWS, 4)."""
    KEYS: gl.constexpr = s.shape[1]
    layout: gl.constexpr = s.type.layout
    largest = gl.max(gl.max(gl.max(gl.reshape(s, [WG_ROWS, KEYS // 8, 4, 2]), 3), 1), 1)
    largest = gl.convert_layout(largest, gl.SliceLayout(1, layout)) * factor
    return per_thread(gl.expand_dims(largest, 1), KEYS, layout)


@gluon.jit
def broadcast_to_columns(x, COLUMNS: gl.constexpr, layout: gl.constexpr):
    """(WG_ROWS, 4), one number per row and thread, over all columns that the thread holds."""
    held = gl.zeros([WG_ROWS, COLUMNS], gl.float32, layout).reshape([WG_ROWS, COLUMNS // 8, 4, 2])
    inner: gl.constexpr = gl.SliceLayout(3, held.type.layout)
    x = gl.convert_layout(x, gl.SliceLayout(1, inner), assert_trivial=True)
    x, _ = gl.broadcast(gl.expand_dims(gl.expand_dims(x, 1), 3), held)
    return gl.convert_layout(x.reshape([WG_ROWS, COLUMNS]), layout, assert_trivial=True)


@gluon.jit
def compute_weights(s, m, factor, WG: gl.constexpr):
    """Words of four weights (WG_ROWS, KEYS / 16, 4), and the rows' sums and references (WG_ROWS, 4), from scores s x factor.

    A thread holds two neighbours of every eight; four that it holds become neighbours, and values are stored in that order.
    """
    KEYS: gl.constexpr = s.shape[1]
    layout: gl.constexpr = s.type.layout
    text: gl.constexpr = _TEXT_64 if KEYS == 64 else _TEXT_128
    words, state = gl.inline_asm_elementwise(
        ptx.with_barriers(text, PING_PONG_BARRIER + WG, PING_PONG_BARRIER + 1 - WG), ptx.fp8_weights_constraints(KEYS // 2),
        [s, broadcast_to_columns(m, KEYS, layout), gl.zeros([WG_ROWS, KEYS], gl.float32, layout) + factor],
        dtype=(gl.int32, gl.float32), is_pure=False, pack=KEYS // 2,
    )  # fmt: skip
    first, _ = words.reshape([WG_ROWS, KEYS // 8, 4, 2]).split()
    return _take_alternate(first, True), _one_per_thread(state, False), _one_per_thread(state, True)


@gluon.jit
def compute_here(x):
    """An accumulator, computed here: else the compiler moves that down to where it is used."""
    WORDS: gl.constexpr = x.shape[1] // 2
    return gl.inline_asm_elementwise("", ptx.unchanged(WORDS), [x], dtype=gl.float32, is_pure=False, pack=WORDS)


@gluon.jit
def rescale(acc, alpha, o_layout: gl.constexpr):
    """Each row of an accumulator times its factor (WG_ROWS, 4), unless those are 1 in all rows of a warp."""
    WORDS: gl.constexpr = acc.shape[1] // 2
    return gl.inline_asm_elementwise(
        ptx.rescale_text(WORDS), ptx.in_place(WORDS), [acc, broadcast_to_columns(alpha, acc.shape[1], o_layout)],
        dtype=gl.float32, is_pure=False, pack=WORDS,
    )  # fmt: skip
