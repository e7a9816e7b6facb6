"""Keeping what a mask hides out of the output, also where it is a NaN: a second walk for the tiles that hold one.

A weight of zero does not hide a NaN or an infinity among the values, and 0 x NaN is what a matrix product makes of it.
"""

from rooftile.backends.hopper.device.config import LOG2E, WG_ROWS, Shape, position
from rooftile.backends.hopper.device.softmax import Scoring
from rooftile.backends.hopper.gluon import barrier, gl, gluon

# where the pages' table is noted, after three tensors
TABLE = gl.constexpr(12)


@gluon.jit
def note(notes, i: gl.constexpr, pointer, desc, page=1, head=1):
    """Puts down where a tensor is, and its strides; those of pages are some of the descriptor's (`descriptors.of_pages`)."""
    note_word(notes, 4 * i, pointer.to(gl.int64, bitcast=True))
    note_word(notes, 4 * i + 1, desc.strides[0] * page)
    note_word(notes, 4 * i + 2, desc.strides[1] * head)
    note_word(notes, 4 * i + 3, desc.strides[2])


@gluon.jit
def note_word(notes, i: gl.constexpr, value):
    notes.index(i).store(gl.full([1], 0, gl.int64, gl.BlockedLayout([1], [32], [4], [0])) + value)


@gluon.jit
def noted_word(notes, i: gl.constexpr):
    return gl.max(notes.index(i).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def noted_rows(notes, i: gl.constexpr, b, t, h, dtype: gl.constexpr):
    """The pointer to row t of a head, and the strides from head to head and from row to row."""
    stride_h = noted_word(notes, 4 * i + 2)
    stride_t = noted_word(notes, 4 * i + 3)
    offset = b * noted_word(notes, 4 * i + 1) + h * stride_h + t * stride_t
    return noted_word(notes, 4 * i).to(gl.pointer_type(dtype), bitcast=True) + offset, stride_h, stride_t


@gluon.jit
def holds_nan(acc):
    """Whether an accumulator holds a NaN: its sum is one then. Each thread sums what it has before any two meet."""
    sums = gl.sum(gl.sum(gl.sum(acc.reshape([4, 2, 8, acc.shape[1] // 8, 4, 2]), 5), 3), 1).reshape([128])
    return gl.max((sums != sums).to(gl.int32), 0) != 0


@gluon.jit
def with_care(
    notes, o_ptr, lse_ptr, plan, row, H, total, scoring: Scoring, shape: Shape,
):  # fmt: skip
    """The rows of a warpgroup once more, key by key, with nothing taken from a key that a row does not see.

    For tiles whose output holds a NaN: it may have come from behind the mask, or from the sequence next door. Their lse,
    which no value touches, is known by now. Where q, k and v are is read from shared memory: in registers it would weigh on
    the walk that everybody takes.
    """
    ROWS: gl.constexpr = 16
    layout: gl.constexpr = gl.BlockedLayout([1, shape.D // 32], [1, 32], [4, 1], [1, 0])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    e = gl.arange(0, shape.D, gl.SliceLayout(0, layout))
    c = gl.arange(0, shape.DV, gl.SliceLayout(0, layout))
    dtype: gl.constexpr = o_ptr.dtype.element_ty
    first_head = plan.h * shape.TOGETHER
    q_head, q_head_stride, q_stride = noted_rows(notes, 0, plan.b, plan.row, first_head, dtype)
    key = plan.key
    if shape.SIZE > 0:
        table_ptr = noted_word(notes, TABLE).to(gl.pointer_type(gl.int32), bitcast=True) + plan.key * noted_word(notes, TABLE + 1)
        key = 0
    k_head, _, k_stride = noted_rows(notes, 1, plan.b, key, first_head // shape.GROUP, dtype)
    v_head, _, v_stride = noted_rows(notes, 2, plan.b, key, first_head // shape.GROUP, dtype)
    barrier()
    for r in range(0, WG_ROWS, ROWS):
        rows = r + gl.arange(0, ROWS, row_layout)
        t = row + position(rows, shape.ROWS)
        h = shape.head(rows, plan)
        there = t < plan.T
        line = plan.b * H + h
        lse = gl.load(lse_ptr + line.to(gl.int64) * total + plan.row + t, mask=there, other=0.0) * LOG2E
        lse = gl.where(lse == float("-inf"), 0.0, lse)
        lines = gl.expand_dims(t * q_stride + (h - first_head) * q_head_stride, 1) + gl.expand_dims(e, 0)
        q = gl.load(q_head + lines, mask=gl.expand_dims(there, 1) & gl.expand_dims(e < shape.DIM, 0), other=0.0).to(gl.float32)
        i = t + plan.S - plan.T
        first = scoring.mask.first_key(i)
        last = scoring.mask.last_key(i, plan.S)
        o = gl.zeros([ROWS, shape.DV], gl.float32, layout)
        for j in range(plan.first * shape.KEYS, gl.minimum((plan.last + 1) * shape.KEYS, plan.S)):
            k_row = j * k_stride
            v_row = j * v_stride
            if shape.SIZE > 0:
                page = gl.load(table_ptr + j // shape.SIZE).to(gl.int64)
                k_row = page * noted_word(notes, 5) + j % shape.SIZE * k_stride
                v_row = page * noted_word(notes, 9) + j % shape.SIZE * v_stride
            k = gl.load(k_head + k_row + e, mask=e < shape.DIM, other=0.0).to(gl.float32)
            v = gl.load(v_head + v_row + c, mask=c < shape.DIM_V, other=0.0).to(gl.float32)
            s = gl.sum(q * gl.expand_dims(k, 0), 1)
            if shape.SOFTCAP:
                s = scoring.capped(s)
            p = gl.exp2(s * scoring.factor - lse)
            sees = gl.expand_dims((first <= j) & (j <= last), 1)
            o += gl.where(sees, gl.expand_dims(p, 1) * gl.expand_dims(v, 0), 0.0)
        base = plan.row if shape.PACKED else plan.b.to(gl.int64) * total
        lines = ((base + t).to(gl.int64) * H + h) * shape.DIM_V
        gl.store(
            o_ptr + gl.expand_dims(lines, 1) + gl.expand_dims(c, 0), o.to(dtype),
            mask=gl.expand_dims(there, 1) & gl.expand_dims(c < shape.DIM_V, 0),
        )
