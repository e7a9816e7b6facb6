"""All inline PTX of the Hopper kernels: what each string computes. `$n` are its operands, outputs first.

    string or function     computes                                                                    user
    COPY                   a register under another name, or one that ptxas knows nothing of           pipeline and softmax
    barrier_text           a named barrier: `sync` waits for the other warpgroup, `arrive` does not    pipeline
    BRANCH_ON_NAN          nothing: a branch, across which ptxas moves no wait                         softmax
    rescale_text           n numbers times n factors, unless all factors of a warp are 1               softmax, quantised
    narrow_text            two fp32 numbers as a pair of bf16 or fp16                                  softmax, flash_bwd
    WIDEN_FP16             a pair of fp16 as two fp32 numbers                                          flash_bwd
    WIDEN_BF16             a pair of bf16 as two fp32 numbers                                          softmax
    finite_text            a pair of bf16 or fp16 as fp32, NaN for each that is not finite             quantised
    LOG2                   the approximate log2 of an fp32 number                                      flash_bwd
    LOGISTIC_PAIR          1 / (1 + 2^a) of two fp32 numbers, by one reciprocal                        recommend
    ROUND                  the nearest integer to an fp32 number, ties to even                         quantised
    exchange_text          the register of the lane that is `lanes` away                               quantised
    dependent_launch_text  nothing: lets the next kernel begin, or waits for the one before            pipeline, quantised
    nibbles_text           eight codes of 4 bits as 16-bit numbers                                     matmul
    e2m1_text              eight codes in e2m1 as 16-bit numbers                                       matmul
    bytes_text             four codes of 8 bits as 16-bit numbers                                      matmul
    GROUPS                 eight groups of a 2:4 weight: their numbers and zeros                       matmul
    fp8_weights_text       n weights in FP8 from n scores, with the rows' sums and references          quantised
    ""                     nothing: the registers that it names are computed by then                   quantised

`in_place`, `unchanged` and `fp8_weights_constraints` say which registers a string reads and writes.
"""

import struct

from rooftile.runtime.hopper.gluon import gl, gluon

COPY = gl.constexpr("mov.b32 $0, $1;")
LOG2 = gl.constexpr("lg2.approx.f32 $0, $1;")
# 1/x = y / (x y) and 1/y = x / (x y): a reciprocal takes four times as long as a product. 2^63 stands for what is above it
LOGISTIC_PAIR = gl.constexpr(
    "{ .reg .f32 x, y, r; min.f32 x, $2, 0f427C0000; min.f32 y, $3, 0f427C0000; "
    "ex2.approx.ftz.f32 x, x; ex2.approx.ftz.f32 y, y; add.f32 x, x, 0f3F800000; add.f32 y, y, 0f3F800000; "
    "mul.f32 r, x, y; rcp.approx.ftz.f32 r, r; mul.f32 $0, r, y; mul.f32 $1, r, x; }"
)
ROUND = gl.constexpr("cvt.rni.s32.f32 $0, $1;")
WIDEN_FP16 = gl.constexpr("{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }")
WIDEN_BF16 = gl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;")
# taken only where a sum is NaN, which then waits early: that costs time and nothing else
BRANCH_ON_NAN = gl.constexpr(
    "{ .reg .pred nan; setp.nan.f32 nan, $0, $0; setp.nan.or.f32 nan, $1, $1, nan; vote.sync.any.pred nan, nan, -1; "
    "@!nan bra number; wgmma.wait_group.sync.aligned 0; number: }"
)


@gluon.constexpr_function
def barrier_text(verb, name):
    return f"{{ bar.{verb} {name}, 256; mov.u32 $0, 0; }}"


@gluon.constexpr_function
def dependent_launch_text(verb):
    """`launch_dependents`: the next kernel may begin; `wait`: waits until the kernel before has written its results."""
    return f"{{ griddepcontrol.{verb}; mov.u32 $0, 0; }}"


@gluon.constexpr_function
def narrow_text(kind):
    """kind is "bf16x2" or "f16x2"."""
    return f"cvt.rn.{kind}.f32 $0, $2, $1;"


@gluon.constexpr_function
def exchange_text(lanes):
    return f"shfl.sync.bfly.b32 $0, $1, {lanes}, 0x1f, 0xffffffff;"


@gluon.constexpr_function
def finite_text(kind):
    """PTX: two 16-bit numbers as fp32, NaN where they are not finite. 0 x + x is x otherwise."""
    finite = f".reg .b32 zero, two; mov.b32 zero, 0; fma.rn.{kind}x2 two, $2, zero, $2;"
    if kind == "bf16":
        return f"{{ {finite} shl.b32 $0, two, 16; and.b32 $1, two, 0xffff0000; }}"
    return f"{{ {finite} .reg .b16 low, high; mov.b32 {{low, high}}, two; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }}"


@gluon.constexpr_function
def rescale_text(n):
    """Multiplies registers 0 to n - 1 with n to 2 n - 1, unless those are all 1 in the whole warp. Rows take turns by pairs."""
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n))
    one = "0f3F800000"
    return (
        f"{{ .reg .pred moved; setp.neu.f32 moved, ${2 * n}, {one}; setp.neu.or.f32 moved, ${2 * n + 2}, {one}, moved; "
        f"vote.sync.any.pred moved, moved, -1; @!moved bra unmoved; {products} unmoved: }}"
    )


@gluon.constexpr_function
def in_place(n):
    """The constraints of n registers that are read and written, and n that are read."""
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n)


@gluon.constexpr_function
def unchanged(n):
    """The constraints of n registers that stay as they are."""
    return ",".join(["=f"] * n + [str(i) for i in range(n)])


@gluon.constexpr_function
def nibbles_text(bf16: bool) -> str:
    """PTX for four bytes of two codes: their low halves ($0, $1) and high halves ($2, $3) as numbers, less shifts, times scales.

    $4 the bytes, $5 and $6 the scales, and $7 and $8 the shifts, two to a register. Codes are put below the digits of 128
    in bf16 and of 1024 in fp16, two at a time: bytes 0 and 2 come first, then 1 and 3.
    """
    kind, magic = ("bf16x2", "0x43004300") if bf16 else ("f16x2", "0x64006400")
    lines = ["{ .reg .b32 w;"]
    for bits, out, pair in ((0, 0, 0), (4, 2, 0), (8, 1, 1), (12, 3, 1)):
        lines.append(f"shr.b32 w, $4, {bits};" if bits else "mov.b32 w, $4;")
        # 0xea is the function that masks with the second operand and adds the digits of the third
        lines.append(f"lop3.b32 w, w, 0x000f000f, {magic}, 0xea;")
        lines.append(f"sub.rn.{kind} w, w, ${7 + pair}; mul.rn.{kind} ${out}, w, ${5 + pair};")
    return " ".join([*lines, "}"])


@gluon.constexpr_function
def e2m1_text(bf16: bool) -> str:
    """PTX for four bytes of two codes in e2m1: their low halves ($0, $1) and high halves ($2, $3) as numbers, times scales.

    $4 the bytes, $5 and $6 the scales; the order is that of `nibbles_text`. A code's exponent and digit among the bits of a
    16-bit number make one that is 2^126 times too small in bf16, and 2^14 in fp16: a power of two sets that right.
    """
    kind, mask, factor, first = ("bf16x2", "0x01c001c0", "0x7e807e80", 6) if bf16 else ("f16x2", "0x0e000e00", "0x74007400", 9)
    lines = [f"{{ .reg .b32 w, s, f; mov.b32 f, {factor};"]
    for bits, out, pair in ((0, 0, 0), (4, 2, 0), (8, 1, 1), (12, 3, 1)):
        lines.append(_moved("w", "$4", first - bits))
        lines.append(_moved("s", "$4", 12 - bits))
        lines.append(f"and.b32 w, w, {mask}; lop3.b32 w, s, 0x80008000, w, 0xea;")
        lines.append(f"mul.rn.{kind} w, w, f; mul.rn.{kind} ${out}, w, ${5 + pair};")
    return " ".join([*lines, "}"])


@gluon.constexpr_function
def bytes_text(format: str, bf16: bool) -> str:
    """PTX for four codes of 8 bits as numbers times scales: bytes 0 and 2 ($0), then 1 and 3 ($1).

    $2 the bytes, $3 and $4 the scales, two to a register.

        w8 in bf16    seven bits below the digits of 128, less 128, or less 256 where the eighth is set
        w8 in fp16    eight bits, the eighth turned, below the digits of 1024; less 1152
        mxfp8         e4m3 among the bits of bf16 is a number 2^120 times too small
    """
    kind = "bf16x2" if bf16 else "f16x2"
    lines = ["{ .reg .b32 w, s;"]
    for bits in (0, 8):
        if format == "mxfp8":
            lines.append(_moved("w", "$2", 4 - bits))
            lines.append(_moved("s", "$2", 8 - bits))
            lines.append("and.b32 w, w, 0x07f007f0; lop3.b32 w, s, 0x80008000, w, 0xea;")
            lines.append("mov.b32 s, 0x7b807b80; mul.rn.bf16x2 w, w, s;")
        else:
            lines.append(_moved("w", "$2", -bits))
            if bf16:
                lines.append("lop3.b32 s, w, 0x00800080, 0x43004300, 0xea; lop3.b32 w, w, 0x007f007f, 0x43004300, 0xea;")
            else:
                # 0x6a masks with the second operand and turns the bits of the third
                lines.append("lop3.b32 w, w, 0x00ff00ff, 0x64806480, 0x6a; mov.b32 s, 0x64806480;")
            lines.append(f"sub.rn.{kind} w, w, s;")
        lines.append(f"mul.rn.{kind} ${bits // 8}, w, ${3 + bits // 8};")
    return " ".join([*lines, "}"])


@gluon.constexpr_function
def _moved(to: str, of: str, left: int) -> str:
    """Bits moved to the left, or to the right."""
    if left == 0:
        return f"mov.b32 {to}, {of};"
    return f"shl.b32 {to}, {of}, {left};" if left > 0 else f"shr.b32 {to}, {of}, {-left};"


# A byte permutation takes two bytes of the first value of a group, of the second, or of zero.
_FIRST, _SECOND, _NONE = 0x10, 0x32, 0x44
# The last three bits of a group's places say where its two values go. (0, 1) and (0, 3) share theirs, so 7 stands for (0, 1).
_KEPT = {0: (0, 2), 1: (1, 2), 4: (0, 3), 5: (1, 3), 6: (2, 3), 7: (0, 1)}


def _groups_text() -> str:
    """PTX for the weights of eight groups of four from their values and places."""
    tables = []
    for number in range(4):
        kept = [_KEPT.get(n, (-1, -1)) for n in range(8)]
        taken = [_FIRST if a == number else _SECOND if c == number else _NONE for a, c in kept]
        tables.append([f"{int.from_bytes(bytes(part), 'little'):#x}" for part in (taken[:4], taken[4:])])
    lines = [
        "{ .reg .b32 z, p, t, b0, b1, b2, b3, s;",
        "mov.b32 z, 0;",
        # the fourth bit of a group's places is clear for (0, 1) alone: 3 is added to the last three then
        "shr.b32 t, $24, 3;",
        "lop3.b32 t, t, 0x11111111, t, 0x0c;",
        "shl.b32 s, t, 1;",
        "lop3.b32 p, $24, 0x77777777, t, 0xea;",
        "or.b32 p, p, s;",
    ]
    for half in (0, 4):
        if half:
            lines.append("shr.b32 p, p, 16;")
        lines += [f"mov.b32 s, {high}; mov.b32 t, {low}; prmt.b32 b{n}, t, s, p;" for n, (low, high) in enumerate(tables)]
        for pair, taken in ((0, "0x5140"), (2, "0x7362")):
            for part, (a, b) in enumerate((("b0", "b1"), ("b2", "b3"))):
                lines.append(f"prmt.b32 s, {a}, {b}, {taken};")
                for group in (half + pair, half + pair + 1):
                    lines.append(f"prmt.b32 ${8 * part + group}, ${16 + group}, z, s;")
                    if group == half + pair:
                        lines.append("shr.b32 s, s, 16;")
    return " ".join([*lines, "}"])


GROUPS = gl.constexpr(_groups_text())
# 16 results, eight registers of values, and the places once for each value
GROUPS_CONSTRAINTS = gl.constexpr(",".join(["=&r"] * 16 + ["r"] * (8 + 16)))


def _number(x: float) -> str:
    """In PTX."""
    return "0f" + struct.pack(">f", x).hex().upper()


def fp8_weights_text(n: int, raised_by: float, too_large_from: float) -> str:
    """PTX for n numbers per thread, which has two rows: of register e, row e // 2 % 2, column e % 2 + 8 (e // 4) from its first.

    $0 on     four weights each, where a register is used: columns 0, 1, 8 and 9 of each 16
    $n on     the rows' sums at registers 0 and 2, their references at 4 and 6
    $2n on    scores, references, and what scores are multiplied by, n each

    The warpgroups take turns at the exponentials, by two barriers: what computes them is busy with one of the two.
    """
    raised, too_large, factor = _number(raised_by), _number(too_large_from), f"${4 * n}"
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
        again += [f"shfl.sync.bfly.b32 t, top{row}, {lanes}, 0x1f, -1; max.f32 top{row}, top{row}, t;" for lanes in (1, 2)]
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


@gluon.constexpr_function
def with_barriers(text, mine, other):
    return text.replace("MINE", str(mine)).replace("OTHER", str(other))


@gluon.constexpr_function
def fp8_weights_constraints(n):
    return ",".join(["=r"] * n + ["=f"] * n + ["f"] * (3 * n))
