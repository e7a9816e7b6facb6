"""Scores, mask and online softmax of one block of keys.

Scores are in units of log2, so that an exponential is one multiply-add and one instruction.
"""

from rooftile.exact.backends.hopper.device.config import LOG2E, WG_ROWS, KernelConfig, query_offset
from rooftile.exact.backends.hopper.device.scheduler import MaskBounds
from rooftile.runtime.hopper import ptx
from rooftile.runtime.hopper.gluon import aggregate, gl, gluon

# how far, in powers of 2, a row's largest score may be above what its weights refer to
LAG = gl.constexpr(8.0)


@aggregate
class ScoreNumbers:
    """From the products of queries and keys to the exponents of 2."""

    mask: MaskBounds
    scale: gl.tensor
    softcap: gl.tensor
    scale_log2: gl.tensor  # what a score is still to be multiplied with

    @gluon.jit
    def apply_softcap(self, s):
        """softcap tanh(scale s / softcap) in units of log2: tanh by one exponential that saturates at both ends."""
        return self.softcap * LOG2E * (1 - 2 / (gl.exp2(s * (2 * LOG2E * self.scale / self.softcap)) + 1))


@gluon.jit
def make_scoring(mask: MaskBounds, scale, softcap, SOFTCAP: gl.constexpr, BIAS: gl.constexpr = False):
    scale_log2 = scale * LOG2E
    if BIAS:
        # the sum of scaled scores and bias is in natural units
        scale_log2 = scale * 0.0 + LOG2E
    if SOFTCAP:
        # capped scores have their unit already
        scale_log2 = scale * 0.0 + 1.0
    return ScoreNumbers(mask, scale, softcap, scale_log2)


@gluon.jit
def cap_and_mask(s, row, column, work, scoring: ScoreNumbers, config: KernelConfig, CHECK: gl.constexpr):
    """The products of queries and keys, capped, and -inf where the mask or the end of the keys hides one."""
    if config.SOFTCAP:
        s = scoring.apply_softcap(s)
    if CHECK:
        if config.MASKED:
            s = apply_mask(s, row, column, work, scoring.mask, config.ROWS)
        elif column + config.KEYS > work.S:
            s = apply_mask(s, row, column, work, scoring.mask, config.ROWS)
    return s


@gluon.jit
def cap_and_mask_listed(s, row, word, place, bits, work, scoring: ScoreNumbers, config: KernelConfig):
    """The same for a listed block; its word has its number, and whether the mask hides something. Bits are read if place >= 0."""
    if config.SOFTCAP:
        s = scoring.apply_softcap(s)
    if word % 2 != 0:
        s = apply_mask(s, row, word // 2 * config.KEYS, work, scoring.mask, config.ROWS)
    if config.LIST_BITS:
        if place >= 0:
            s = _apply_bits(s, bits)
    return s


@gluon.jit
def _apply_bits(s, bits):
    """Scores with -inf where a bit, of (rows, keys / 32) words, is not set."""
    KEYS: gl.constexpr = s.shape[1]
    # a thread holds a pair in each eight of its rows: it shifts a word by its lane, and tests constant bits
    parts = s.reshape([WG_ROWS, KEYS // 32, 4, 4, 2])
    layout: gl.constexpr = parts.type.layout
    of_pair: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    of_lane: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, layout))))
    of_eight: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, gl.SliceLayout(4, layout))))
    words = _last_axes(bits, 3) >> _first_axes(gl.arange(0, 4, of_lane) * 2, 3, 1)
    tested = 1 << (_first_axes(gl.arange(0, 4, of_eight) * 8, 2, 2) + _first_axes(gl.arange(0, 2, of_pair), 4, 0))
    seen = gl.where((words & tested) != 0, parts, float("-inf"))
    return gl.convert_layout(seen.reshape([WG_ROWS, KEYS]), s.type.layout)


@gluon.jit
def _last_axes(x, COUNT: gl.constexpr):
    """x with COUNT axes of one element behind its own."""
    for _ in gl.static_range(COUNT):
        x = gl.expand_dims(x, len(x.shape))
    return x


@gluon.jit
def _first_axes(x, BEFORE: gl.constexpr, AFTER: gl.constexpr):
    """A vector with axes of one element before and behind its own."""
    for axis in gl.static_range(BEFORE):
        x = gl.expand_dims(x, axis)
    return _last_axes(x, AFTER)


@gluon.jit
def add_bias(s, bias, scoring: ScoreNumbers):
    """The scaled products of queries and keys, and the bias."""
    if bias.dtype == gl.bfloat16:
        # by itself the compiler takes three instructions for two numbers
        wide = gl.inline_asm_elementwise(ptx.WIDEN_BF16, "=f,=f,r", [bias], dtype=gl.float32, is_pure=True, pack=2)
    else:
        wide = bias.to(gl.float32)
    return s * scoring.scale + wide


@gluon.jit
def apply_mask(s, row, column, work, mask: MaskBounds, ROWS: gl.constexpr = WG_ROWS, HIDDEN: gl.constexpr = float("-inf")):
    """Scores with -inf, or another number, for each key that its row does not see."""
    KEYS: gl.constexpr = s.shape[1]
    # columns as (eights, lane of four, pair): what a thread holds differs by constants, and a lane shifts its limits
    parts = s.reshape([WG_ROWS, KEYS // 8, 4, 2])
    layout: gl.constexpr = parts.type.layout
    rows = gl.arange(0, WG_ROWS, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    i = row + work.S - work.T + query_offset(rows, ROWS)
    eights = gl.arange(0, KEYS // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout))))
    pair = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))
    j = _column(eights * 8) + _pair(pair)
    start = column + _lane(lane * 2)
    sees = j <= _row(mask.last_key(i, work.S)) - start
    if mask.LEFT or mask.CHUNK:
        sees = sees & (j >= _row(mask.first_key(i)) - start)
    return gl.convert_layout(gl.where(sees, parts, HIDDEN).reshape([WG_ROWS, KEYS]), s.type.layout)


@gluon.jit
def _row(x):
    return gl.expand_dims(gl.expand_dims(gl.expand_dims(x, 1), 2), 3)


@gluon.jit
def _column(x):
    return gl.expand_dims(gl.expand_dims(gl.expand_dims(x, 0), 2), 3)


@gluon.jit
def _lane(x):
    return gl.expand_dims(gl.expand_dims(gl.expand_dims(x, 0), 1), 3)


@gluon.jit
def _pair(x):
    return gl.expand_dims(gl.expand_dims(gl.expand_dims(x, 0), 1), 2)


@gluon.jit
def update_softmax(s, m, l, scale_log2, config: KernelConfig, FIRST: gl.constexpr):
    """Online softmax: the block's weights, and the rows' reference, sum and the factor for what was summed before.

    Weights are powers of 2 of how far a score is above its row's reference m, which is the largest score so far. Any reference
    gives the same quotients in the end; a LAZY one stays until the largest score is more than LAG above it: weights stay below
    2**LAG, far from the largest number of 16 bits, and the factor is exactly 1 for nearly every block.

    The sum is kept in four parts a row, one a thread, and added up once a tile.
    """
    top = gl.maximum(m, gl.max(s, 1))
    m_new = top
    if config.LAZY and not FIRST:
        m_new = gl.where((top - m) * scale_log2 > LAG, top, m)
    # a row that has seen no key yet: exp2(-inf - 0) is 0
    reference = gl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = gl.exp2((m - reference) * scale_log2)
    if config.BIAS is not None:
        # log2(e) times the smallest number of a dtype would be -inf; of scores so large any factor tells apart those that differ
        factor = gl.where(gl.abs(reference) > 1e30, 0.5, scale_log2)
        p = gl.exp2(s * gl.expand_dims(factor, 1) - gl.expand_dims(reference * factor, 1))
    else:
        p = gl.exp2(s * scale_log2 - gl.expand_dims(reference * scale_log2, 1))
    parts = gl.sum(gl.sum(gl.reshape(p, [WG_ROWS, config.KEYS // 8, 4, 2]), 3), 1)
    if FIRST:
        l = parts
    else:
        l = l * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, parts.type.layout)), 1) + parts
    return p, m_new, l, alpha


@gluon.jit
def force_before_wait(l):
    """Forces `l` to be computed before the next wgmma wait.

    ptxas hoists the wait above the exponentials that should run under it; it does not hoist across a branch.
    """
    return gl.inline_asm_elementwise(ptx.BRANCH_ON_NAN, "=f,=f,0,1", [l], dtype=gl.float32, is_pure=False, pack=2)


@gluon.jit
def rescale(acc, alpha, config: KernelConfig):
    """Each row of an accumulator times its factor.

    LAZY: a warp whose 16 rows all have a factor of 1 does nothing, and the result is the same to the bit.
    Zadouri et al., FlashAttention-4, rescale as seldom.
    """
    WORDS: gl.constexpr = config.DV // 2
    alpha = gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, config.o_layout)), 1)
    if config.LAZY:
        acc, alpha = gl.broadcast(acc, alpha)
        acc = gl.inline_asm_elementwise(
            ptx.rescale_text(WORDS), ptx.in_place(WORDS), [acc, alpha], dtype=gl.float32, is_pure=False, pack=WORDS
        )
    else:
        acc = acc * alpha
    return acc


@gluon.jit
def pack_16bit(p, dtype: gl.constexpr):
    """A block's weights in 16 bits, two to a register.

    They live from one iteration of a loop to the next, and as tensors of 16 bits the compiler would take the pairs apart and
    put them together again each time around.
    """
    even, odd = p.reshape([p.shape[0], p.shape[1] // 2, 2]).split()
    kind: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    return gl.inline_asm_elementwise(ptx.narrow_text(kind), "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpack_16bit(p, dtype: gl.constexpr, layout: gl.constexpr):
    """The weights of `packed` as the left side of a product: no instruction, only another name for the registers."""
    twice = gl.join(p, p).reshape([p.shape[0], p.shape[1] * 2])
    if dtype == gl.bfloat16:
        weights = gl.inline_asm_elementwise(ptx.COPY, "=r,r,r", [twice], dtype=gl.bfloat16, is_pure=True, pack=2)
    else:
        weights = gl.inline_asm_elementwise(ptx.COPY, "=r,r,r", [twice], dtype=gl.float16, is_pure=True, pack=2)
    return gl.convert_layout(weights, layout)
