"""Rows of a tile once more, key by key, where the output of `flash_fwd_8bit` holds a NaN.

It may be right, or come from behind the mask, from the sequence next door, or from another row or key of its block: INT8 has no
code that a matrix instruction takes for a NaN, so a block with one has all its scores lost (its scale is stored negative). Here
every code is looked at.
"""

from rooftile.backends.hopper.device.config import LN2, LOG2E, WG_ROWS
from rooftile.backends.hopper.device.nan_fallback import noted_rows, noted_word
from rooftile.backends.hopper.device.scheduler import PADDED
from rooftile.backends.hopper.gluon import barrier, gl, gluon


@gluon.jit
def _numbers(codes, scale, INTEGER: gl.constexpr):
    """What codes mean."""
    x = codes.to(gl.float32)
    if INTEGER:
        x = gl.where(x == -128.0, float("nan"), x)
    return x * scale


@gluon.jit
def _place(j):
    """Where key j is in the order of `v_columns`."""
    return j // 16 * 16 + j % 8 // 2 * 4 + j % 16 // 8 * 2 + j % 2


@gluon.jit
def with_care_8bit(notes, scales, o_ptr, lse_ptr, plan, row, H, total, scale, mask, shape):
    """Output and lse of a warpgroup's rows, with nothing taken from a key that a row does not see."""
    ROWS: gl.constexpr = 16
    layout: gl.constexpr = gl.BlockedLayout([1, shape.D // 32], [1, 32], [4, 1], [1, 0])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    e = gl.arange(0, shape.D, gl.SliceLayout(0, layout))
    c = gl.arange(0, shape.DV, gl.SliceLayout(0, layout))
    Hk = H // shape.GROUP
    h = plan.h // shape.GROUP
    kind: gl.constexpr = gl.int8 if shape.INTEGER else gl.float8e4nv
    q_head, _, q_stride = noted_rows(notes, 0, plan.b, plan.row, plan.h, kind)
    k_head, _, k_stride = noted_rows(notes, 1, plan.b, plan.key, h, kind)
    # values are transposed: from row to row is from channel to channel
    v_head, _, v_stride = noted_rows(notes, 2, plan.b, 0, h, gl.float8e4nv)
    shift_head = noted_word(notes, 12).to(gl.pointer_type(gl.float32), bitcast=True)
    tiles = noted_word(notes, 13).to(gl.int32)
    if shape.PACKED:
        part_q = plan.padded // PADDED
        part_k = plan.key // PADDED + (part_q - plan.row // PADDED)
        column = part_k * PADDED
    else:
        part_q = plan.b * tiles
        part_k = plan.b * ((plan.S + PADDED - 1) // PADDED)
        column = plan.b * 0
    barrier()
    q_scale = gl.abs(gl.load(scales.q_ptr + (part_q + plan.t // PADDED) * H + plan.h))
    for r in range(0, WG_ROWS, ROWS):
        t = row + r + gl.arange(0, ROWS, row_layout)
        there = t < plan.T
        lines = gl.expand_dims(t * q_stride, 1) + gl.expand_dims(e, 0)
        q = _numbers(gl.load(q_head + lines, mask=gl.expand_dims(there, 1), other=0.0), q_scale, shape.INTEGER)
        i = t + plan.S - plan.T
        first = mask.first_key(i)
        last = mask.last_key(i, plan.S)
        m = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
        l = gl.zeros([ROWS], gl.float32, row_layout)
        o = gl.zeros([ROWS, shape.DV], gl.float32, layout)
        for j in range(plan.first * shape.KEYS, gl.minimum((plan.last + 1) * shape.KEYS, plan.S)):
            part = (part_k + j // PADDED) * Hk + h
            k = _numbers(gl.load(k_head + j * k_stride + e), gl.abs(gl.load(scales.k_ptr + part)), shape.INTEGER)
            v = gl.load(v_head + c * v_stride + (column + _place(j))).to(gl.float32) * gl.load(scales.v_ptr + part)
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
        base = plan.row if shape.PACKED else plan.b.to(gl.int64) * total
        place = (base + t).to(gl.int64) * H + plan.h
        lse = (m + gl.log2(l)) * LN2
        if shape.SMOOTHED:
            lse += gl.load(shift_head + place, mask=there, other=0.0) * scale
        gl.store(lse_ptr + (plan.b * H + plan.h).to(gl.int64) * total + plan.row + t, lse, mask=there)
        gl.store(
            o_ptr + gl.expand_dims(place * shape.DV, 1) + gl.expand_dims(c, 0), o.to(o_ptr.dtype.element_ty),
            mask=gl.expand_dims(there, 1),
        )
