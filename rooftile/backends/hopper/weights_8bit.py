"""From scores to weights in FP8, without knowing the rows' largest score first.

Weights refer to a score of their row that may lag behind the largest so far: any reference gives the same quotients in the end.
So a block's weights are computed from the reference at hand. Only where they come out too large, in a warp's 16 rows, are the
largest scores looked for, the references moved there, and the weights computed again: in the first block, and seldom after it.
Too large is a thread's sum of its 32 weights of a row, 432 or more, so that none of them is too large for the format. Where all
scores are the same, and the reference too, the sum is 128.

Zadouri et al., FlashAttention-4, rescale as seldom.
"""

import struct

from rooftile.backends.hopper.gluon import gl, gluon
from rooftile.backends.hopper.shape import WG_ROWS
from rooftile.backends.hopper.softmax import rescaling, scaled_in_place

BLOCK = gl.constexpr(128)
# weights are multiplied by 2^2
RAISED = gl.constexpr(2.0)
# rounds to 448, the format's largest
TOO_LARGE = 432.0


def _number(x: float) -> str:
    """In PTX."""
    return "0f" + struct.pack(">f", x).hex().upper()


def _text(mine: int, other: int) -> str:
    """PTX. A thread has two rows: of register e of 64, row e // 2 % 2, column e % 2 + 8 (e // 4) from the thread's first.

    $0 to $63    four weights each, where a register is used: columns 0, 1, 8 and 9 of each 16
    $64 to $127  the rows' sums at registers 0 and 2, their references at 4 and 6
    $128 on      scores, references, and what scores are multiplied by, 64 each

    The warpgroups take turns at the exponentials, by two barriers: what computes them is busy with one of the two.
    """
    raised, too_large = _number(RAISED.value), _number(TOO_LARGE)
    weights = [f"fma.rn.f32 p{e}, ${128 + e}, $256, n{e // 2 % 2}; ex2.approx.ftz.f32 p{e}, p{e};" for e in range(64)]
    sums, packs = [], []
    for row in (0, 2):
        pairs = [(4 * eight + row, 4 * eight + row + 1) for eight in range(16)]
        sums.append(f"add.f32 l{row}, p{row}, p{row + 1};")
        sums += [f"add.f32 t, p{a}, p{b}; add.f32 l{row}, l{row}, t;" for a, b in pairs[1:]]
        for sixteen in range(8):
            (a, b), (c, d) = pairs[2 * sixteen : 2 * sixteen + 2]
            word = 8 * sixteen + row
            packs.append(
                f"cvt.rn.satfinite.e4m3x2.f32 low, p{b}, p{a}; cvt.rn.satfinite.e4m3x2.f32 high, p{d}, p{c}; "
                f"mov.b32 ${word}, {{low, high}};"
            )
    compute = [*weights, *sums]
    # a NaN is too large as well
    check = [f"setp.geu.f32 large{row}, l{row}, {too_large};" for row in (0, 2)]
    check += ["or.pred large, large0, large2; vote.sync.any.pred large, large, -1; @!large bra done;"]
    # whether any of a row's four lanes finds it so
    again = ["mov.u32 lane, %laneid; and.b32 lane, lane, 28;"]
    for row in (0, 2):
        own = [e for e in range(64) if e // 2 % 2 == row // 2]
        again.append(f"mul.f32 top{row}, ${128 + own[0]}, $256;")
        again += [f"mul.f32 t, ${128 + e}, $256; max.f32 top{row}, top{row}, t;" for e in own[1:]]
        again += [
            f"shfl.sync.bfly.b32 t, top{row}, {lanes}, 0x1f, -1; max.f32 top{row}, top{row}, t;" for lanes in (1, 2)
        ]
        again += [
            f"vote.sync.ballot.b32 all, large{row}, -1; shr.b32 all, all, lane; and.b32 all, all, 15; setp.ne.b32 large, all, 0;",
            f"selp.f32 m{row}, top{row}, m{row}, large; setp.eq.f32 large, m{row}, 0fFF800000;",
            f"selp.f32 t, 0f00000000, m{row}, large; sub.f32 n{row // 2}, {raised}, t;",
        ]
    turn = f"bar.sync {mine}, 256;"
    first = [f"mov.b32 m{row}, ${192 + row}; sub.f32 n{row // 2}, {raised}, m{row};" for row in (0, 2)]
    last = [f"mov.b32 ${64 + row}, l{row}; mov.b32 ${68 + row}, m{row};" for row in (0, 2)]
    done = f"done: bar.arrive {other}, 256;"
    registers = (
        ".reg .f32 p<64>, l<3>, m<3>, top<3>, n<2>, t;",
        ".reg .b16 low, high; .reg .b32 all, lane; .reg .pred large, large0, large2;",
    )
    return " ".join(["{", *registers, turn, *first, *compute, *check, *again, *compute, done, *packs, *last, "}"])


# the first named barriers that Triton leaves
TURNS = gl.constexpr(9)
_TEXT_0 = gl.constexpr(_text(TURNS.value, TURNS.value + 1))
_TEXT_1 = gl.constexpr(_text(TURNS.value + 1, TURNS.value))
_CONSTRAINTS = gl.constexpr(",".join(["=r"] * 64 + ["=f"] * 64 + ["f"] * 192))


@gluon.jit
def _halved(x, low: gl.constexpr):
    """Of (WG_ROWS, n, 4), every other of the n."""
    n: gl.constexpr = x.shape[1] // 2
    even, odd = x.reshape([WG_ROWS, n, 2, 4]).permute((0, 1, 3, 2)).split()
    if low:
        odd = even
    return odd


@gluon.jit
def _own(x, SECOND: gl.constexpr):
    """Of a register each row that every thread has, a thread's: (WG_ROWS, 4). It is register 0 or 4."""
    first, _ = x.reshape([WG_ROWS, BLOCK // 8, 4, 2]).split()
    own = _halved(_halved(_halved(_halved(first, not SECOND), True), True), True)
    return own.reshape([WG_ROWS, 4])


@gluon.jit
def by_thread(x, s_layout: gl.constexpr):
    """A number for every row and thread of it, (WG_ROWS, 4)."""
    return _own(gl.zeros([WG_ROWS, BLOCK], gl.float32, s_layout) + x, False)


@gluon.jit
def spread(x, COLUMNS: gl.constexpr, layout: gl.constexpr):
    """(WG_ROWS, 4), a number a row and thread, over all columns that the thread holds."""
    held = gl.zeros([WG_ROWS, COLUMNS], gl.float32, layout).reshape([WG_ROWS, COLUMNS // 8, 4, 2])
    inner: gl.constexpr = gl.SliceLayout(3, held.type.layout)
    x = gl.convert_layout(x, gl.SliceLayout(1, inner), assert_trivial=True)
    x, _ = gl.broadcast(gl.expand_dims(gl.expand_dims(x, 1), 3), held)
    return gl.convert_layout(x.reshape([WG_ROWS, COLUMNS]), layout, assert_trivial=True)


@gluon.jit
def weights_of(s, m, factor, WG: gl.constexpr, s_layout: gl.constexpr):
    """Words of four weights (WG_ROWS, 8, 4), and the rows' sums and references (WG_ROWS, 4), from scores s x factor.

    A thread holds two neighbours of every eight; four that it holds become neighbours, and values are stored in that order.
    """
    factors = gl.zeros([WG_ROWS, BLOCK], gl.float32, s_layout) + factor
    text: gl.constexpr = _TEXT_0 if WG == 0 else _TEXT_1
    words, state = gl.inline_asm_elementwise(
        text, _CONSTRAINTS, [s, spread(m, BLOCK, s_layout), factors],
        dtype=(gl.int32, gl.float32), is_pure=False, pack=64,
    )  # fmt: skip
    first, _ = words.reshape([WG_ROWS, BLOCK // 8, 4, 2]).split()
    return _halved(first, True), _own(state, False), _own(state, True)


@gluon.jit
def rescaled(acc, alpha, o_layout: gl.constexpr):
    """Each row of an accumulator times its factor (WG_ROWS, 4), unless those are 1 in all rows of a warp."""
    WORDS: gl.constexpr = acc.shape[1] // 2
    return gl.inline_asm_elementwise(
        rescaling(WORDS), scaled_in_place(WORDS), [acc, spread(alpha, acc.shape[1], o_layout)],
        dtype=gl.float32, is_pure=False, pack=WORDS,
    )  # fmt: skip
