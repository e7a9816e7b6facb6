"""From scores to weights in FP8, without knowing the rows' largest score first.

Weights refer to a score of their row that may lag behind the largest so far: any reference gives the same quotients in the end.
So a block's weights are computed from the reference at hand. Only where they come out too large, in a warp's 16 rows, are the
largest scores looked for, the references moved there, and the weights computed again, which is seldom: a tile's first references
are the largest scores of its first block. Too large is a thread's sum of its weights of a row, 32 of 128 keys: 432 or more, so
that none of them is too large for the format. Where all scores are the same, and the reference too, the sum is 128.

Zadouri et al., FlashAttention-4, rescale as seldom.
"""

import struct

from rooftile.backends.hopper.device.config import WG_ROWS
from rooftile.backends.hopper.device.softmax import rescaling, scaled_in_place
from rooftile.backends.hopper.gluon import gl, gluon
from rooftile.numerics import softmax

RAISED = gl.constexpr(softmax.RAISED)


def _number(x: float) -> str:
    """In PTX."""
    return "0f" + struct.pack(">f", x).hex().upper()


def _text(n: int) -> str:
    """PTX for n numbers a thread, which has two rows: of register e, row e // 2 % 2, column e % 2 + 8 (e // 4) from its first.

    $0 on     four weights each, where a register is used: columns 0, 1, 8 and 9 of each 16
    $n on     the rows' sums at registers 0 and 2, their references at 4 and 6
    $2n on    scores, references, and what scores are multiplied by, n each

    The warpgroups take turns at the exponentials, by two barriers: what computes them is busy with one of the two.
    """
    raised, too_large, factor = _number(softmax.RAISED), _number(softmax.TOO_LARGE), f"${4 * n}"
    weights = [f"fma.rn.f32 p{e}, ${2 * n + e}, {factor}, n{e // 2 % 2}; ex2.approx.ftz.f32 p{e}, p{e};" for e in range(n)]
    sums, packs, again = [], [], ["mov.u32 lane, %laneid; and.b32 lane, lane, 28;"]
    for row in (0, 2):
        pairs = [(e, e + 1) for e in range(row, n, 4)]
        sums.append(f"add.f32 l{row}, p{row}, p{row + 1};")
        sums += [f"add.f32 t, p{a}, p{b}; add.f32 l{row}, l{row}, t;" for a, b in pairs[1:]]
        for (a, b), (c, d) in zip(pairs[::2], pairs[1::2], strict=True):
            packs.append(
                f"cvt.rn.satfinite.e4m3x2.f32 low, p{b}, p{a}; cvt.rn.satfinite.e4m3x2.f32 high, p{d}, p{c}; "
                f"mov.b32 ${a}, {{low, high}};"
            )
        own = [2 * n + e for pair in pairs for e in pair]
        again.append(f"max.f32 top{row}, ${own[0]}, ${own[1]};")
        again += [f"max.f32 top{row}, top{row}, ${e};" for e in own[2:]]
        again += [
            f"shfl.sync.bfly.b32 t, top{row}, {lanes}, 0x1f, -1; max.f32 top{row}, top{row}, t;" for lanes in (1, 2)
        ]
        again += [
            # whether any of the row's four lanes finds it too large
            f"vote.sync.ballot.b32 all, large{row}, -1; shr.b32 all, all, lane; and.b32 all, all, 15; setp.ne.b32 large, all, 0;",
            f"mul.f32 top{row}, top{row}, {factor}; selp.f32 m{row}, top{row}, m{row}, large;",
            f"setp.eq.f32 large, m{row}, 0fFF800000; selp.f32 t, 0f00000000, m{row}, large; sub.f32 n{row // 2}, {raised}, t;",
        ]
    # a NaN is too large as well
    check = [f"setp.geu.f32 large{row}, l{row}, {too_large};" for row in (0, 2)]
    check += ["or.pred large, large0, large2; vote.sync.any.pred large, large, -1; @!large bra done;"]
    compute = [*weights, *sums]
    turn, done = "bar.sync MINE, 256;", "done: bar.arrive OTHER, 256;"
    first = [f"mov.b32 m{row}, ${3 * n + row}; sub.f32 n{row // 2}, {raised}, m{row};" for row in (0, 2)]
    last = [f"mov.b32 ${n + row}, l{row}; mov.b32 ${n + 4 + row}, m{row};" for row in (0, 2)]
    registers = (
        f".reg .f32 p<{n}>, l<3>, m<3>, top<3>, n<2>, t;",
        ".reg .b16 low, high; .reg .b32 all, lane; .reg .pred large, large0, large2;",
    )
    return " ".join(["{", *registers, turn, *first, *compute, *check, *again, *compute, done, *packs, *last, "}"])


# the first named barriers that Triton leaves
PING_PONG_BARRIER = gl.constexpr(9)
# for blocks of 64 and of 128 keys
_TEXT_64 = gl.constexpr(_text(32))
_TEXT_128 = gl.constexpr(_text(64))


@gluon.constexpr_function
def _taking_turns(text, mine, other):
    return text.replace("MINE", str(mine)).replace("OTHER", str(other))


@gluon.constexpr_function
def _constraints(n):
    return ",".join(["=r"] * n + ["=f"] * n + ["f"] * (3 * n))


@gluon.jit
def _take_alternate(x, low: gl.constexpr):
    """Of (WG_ROWS, n, 4), every other of the n."""
    n: gl.constexpr = x.shape[1] // 2
    even, odd = x.reshape([WG_ROWS, n, 2, 4]).permute((0, 1, 3, 2)).split()
    if low:
        odd = even
    return odd


@gluon.jit
def _one_per_thread(x, SECOND: gl.constexpr):
    """Of a register each row that every thread has, a thread's: (WG_ROWS, 4). It is register 0 or 4."""
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
    """(WG_ROWS, 4), a number a row and thread, over all columns that the thread holds."""
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
        _taking_turns(text, PING_PONG_BARRIER + WG, PING_PONG_BARRIER + 1 - WG), _constraints(KEYS // 2),
        [s, broadcast_to_columns(m, KEYS, layout), gl.zeros([WG_ROWS, KEYS], gl.float32, layout) + factor],
        dtype=(gl.int32, gl.float32), is_pure=False, pack=KEYS // 2,
    )  # fmt: skip
    first, _ = words.reshape([WG_ROWS, KEYS // 8, 4, 2]).split()
    return _take_alternate(first, True), _one_per_thread(state, False), _one_per_thread(state, True)


@gluon.constexpr_function
def _same(n):
    """The constraints of n registers that stay as they are."""
    return ",".join(["=f"] * n + [str(i) for i in range(n)])


@gluon.jit
def compute_here(x):
    """An accumulator, computed here: else the compiler moves that down to where it is used."""
    WORDS: gl.constexpr = x.shape[1] // 2
    return gl.inline_asm_elementwise("", _same(WORDS), [x], dtype=gl.float32, is_pure=False, pack=WORDS)


@gluon.jit
def rescale(acc, alpha, o_layout: gl.constexpr):
    """Each row of an accumulator times its factor (WG_ROWS, 4), unless those are 1 in all rows of a warp."""
    WORDS: gl.constexpr = acc.shape[1] // 2
    return gl.inline_asm_elementwise(
        rescaling(WORDS), scaled_in_place(WORDS), [acc, broadcast_to_columns(alpha, acc.shape[1], o_layout)],
        dtype=gl.float32, is_pure=False, pack=WORDS,
    )  # fmt: skip
