"""Rows of a tile once more, key by key, where the output of `flash_fwd_8bit` holds a NaN.

It may be right, or come from behind the mask, from the sequence next door, or from another row or key of its block: INT8 has no
code that a matrix instruction takes for a NaN, so a block with one has all its scores lost (its scale is stored negative). Here
every code is looked at.
"""

from rooftile.exact.backends.hopper.device.config import LN2, LOG2E, WG_ROWS
from rooftile.exact.backends.hopper.device.nan_fallback import load_row_pointer, load_word
from rooftile.exact.backends.hopper.device.scheduler import PADDED
from rooftile.runtime.hopper.gluon import barrier, gl, gluon


@gluon.jit
def _decode(codes, scale, INTEGER: gl.constexpr):
    """Decodes FP8 or INT8 codes to fp32."""
    x = codes.to(gl.float32)
    if INTEGER:
        x = gl.where(x == -128.0, float("nan"), x)
    return x * scale


@gluon.jit
def _stored_column(j):
    """Returns the column in which the values of key j are stored."""
    return j // 16 * 16 + j % 8 // 2 * 4 + j % 16 // 8 * 2 + j % 2


@gluon.jit
def recompute_quantised_without_hidden_nan(spilled, scales, o_ptr, lse_ptr, work, row, H, total, scale, mask, config):
    """Output and lse of a warpgroup's rows, with nothing taken from a key that a row does not see."""
    ROWS: gl.constexpr = 16
    layout: gl.constexpr = gl.BlockedLayout([1, config.D // 32], [1, 32], [4, 1], [1, 0])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    e = gl.arange(0, config.D, gl.SliceLayout(0, layout))
    c = gl.arange(0, config.DV, gl.SliceLayout(0, layout))
    Hk = H // config.GROUP
    h = work.h // config.GROUP
    kind: gl.constexpr = gl.int8 if config.INTEGER else gl.float8e4nv
    q_head, _, q_stride = load_row_pointer(spilled, 0, work.b, work.q_start, work.h, kind)
    k_head, _, k_stride = load_row_pointer(spilled, 1, work.b, work.k_start, h, kind)
    # values are transposed: from row to row is from channel to channel
    v_head, _, v_stride = load_row_pointer(spilled, 2, work.b, 0, h, gl.float8e4nv)
    shift_head = load_word(spilled, 12).to(gl.pointer_type(gl.float32), bitcast=True)
    tiles = load_word(spilled, 13).to(gl.int32)
    if config.PACKED:
        part_q = work.padded_start // PADDED
        part_k = work.k_start // PADDED + (part_q - work.q_start // PADDED)
        column = part_k * PADDED
    else:
        part_q = work.b * tiles
        part_k = work.b * ((work.S + PADDED - 1) // PADDED)
        column = work.b * 0
    barrier()
    q_scale = gl.abs(gl.load(scales.q_ptr + (part_q + work.t // PADDED) * H + work.h))
    for r in range(0, WG_ROWS, ROWS):
        t = row + r + gl.arange(0, ROWS, row_layout)
        in_bounds = t < work.T
        lines = gl.expand_dims(t * q_stride, 1) + gl.expand_dims(e, 0)
        q = _decode(gl.load(q_head + lines, mask=gl.expand_dims(in_bounds, 1), other=0.0), q_scale, config.INTEGER)
        i = t + work.S - work.T
        first = mask.first_key(i)
        last = mask.last_key(i, work.S)
        m = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
        l = gl.zeros([ROWS], gl.float32, row_layout)
        o = gl.zeros([ROWS, config.DV], gl.float32, layout)
        for j in range(work.first_block * config.KEYS, gl.minimum((work.last_block + 1) * config.KEYS, work.S)):
            part = (part_k + j // PADDED) * Hk + h
            k = _decode(gl.load(k_head + j * k_stride + e), gl.abs(gl.load(scales.k_ptr + part)), config.INTEGER)
            v = gl.load(v_head + c * v_stride + (column + _stored_column(j))).to(gl.float32) * gl.load(scales.v_ptr + part)
            s = gl.sum(q * gl.expand_dims(k, 0), 1) * (scale * LOG2E)
            sees = (first <= j) & (j <= last)
            s = gl.where(sees, s, float("-inf"))
            m_new = gl.maximum(m, s)
            reference = gl.where(m_new == float("-inf"), 0.0, m_new)
            alpha = gl.exp2(m - reference)
            p = gl.exp2(s - reference)
            l = l * alpha + p
            seen = gl.where(gl.expand_dims(sees, 1), gl.expand_dims(p, 1) * gl.expand_dims(v, 0), 0.0)
            o = o * gl.expand_dims(alpha, 1) + seen
            m = m_new
        o = o * gl.expand_dims(gl.where(l == 0.0, 0.0, 1.0 / l), 1)
        base = work.q_start if config.PACKED else work.b.to(gl.int64) * total
        place = (base + t).to(gl.int64) * H + work.h
        lse = (m + gl.log2(l)) * LN2
        if config.SMOOTHED:
            lse += gl.load(shift_head + place, mask=in_bounds, other=0.0) * scale
        gl.store(lse_ptr + (work.b * H + work.h).to(gl.int64) * total + work.q_start + t, lse, mask=in_bounds)
        gl.store(
            o_ptr + gl.expand_dims(place * config.DV, 1) + gl.expand_dims(c, 0),
            o.to(o_ptr.dtype.element_ty),
            mask=gl.expand_dims(in_bounds, 1),
        )
