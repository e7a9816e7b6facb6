"""Keeping what a mask hides out of the output, also where it is a NaN: tiles that hold one are computed again.

A weight of zero does not hide a NaN or an infinity among the values, and 0 x NaN is what a matrix product makes of it.
"""

from rooftile.exact.backends.hopper.device.config import LOG2E, WG_ROWS, KernelConfig, query_offset
from rooftile.exact.backends.hopper.device.lists import BlockLists, list_number
from rooftile.exact.backends.hopper.device.softmax import ScoreNumbers, add_bias
from rooftile.runtime.hopper.gluon import barrier, gl, gluon

# the page table's first word, after the words of three tensors; a bias's, which no pages have, is the same
TABLE_WORD = gl.constexpr(12)
LIST_WORD = gl.constexpr(16)


@gluon.jit
def spill_tensor(spilled, i: gl.constexpr, pointer, desc, page=1, head=1):
    """Spills a tensor's pointer and strides to shared memory; the strides of pages follow from `tma.of_pages`."""
    spill_word(spilled, 4 * i, pointer.to(gl.int64, bitcast=True))
    spill_word(spilled, 4 * i + 1, desc.strides[0] * page)
    spill_word(spilled, 4 * i + 2, desc.strides[1] * head)
    spill_word(spilled, 4 * i + 3, desc.strides[2])


@gluon.jit
def spill_word(spilled, i: gl.constexpr, value):
    spilled.index(i).store(gl.full([1], 0, gl.int64, gl.BlockedLayout([1], [32], [4], [0])) + value)


@gluon.jit
def spill_lists(spilled, lists: BlockLists):
    """Spills lists of blocks behind the words of all tensors."""
    spill_word(spilled, LIST_WORD, lists.counts.to(gl.int64, bitcast=True))
    spill_word(spilled, LIST_WORD + 1, lists.indices.to(gl.int64, bitcast=True))
    spill_word(spilled, LIST_WORD + 2, lists.batch_stride)
    spill_word(spilled, LIST_WORD + 3, lists.head_stride)
    spill_word(spilled, LIST_WORD + 4, lists.per)
    spill_word(spilled, LIST_WORD + 5, lists.most)
    spill_word(spilled, LIST_WORD + 6, lists.T)
    if lists.BITS:
        spill_word(spilled, LIST_WORD + 7, lists.bits.to(gl.int64, bitcast=True))
        spill_word(spilled, LIST_WORD + 8, lists.part)


@gluon.jit
def load_word(spilled, i: gl.constexpr):
    return gl.max(spilled.index(i).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def load_row_pointer(spilled, i: gl.constexpr, b, t, h, dtype: gl.constexpr):
    """The pointer to row t of a head, and the strides from head to head and from row to row."""
    stride_h = load_word(spilled, 4 * i + 2)
    stride_t = load_word(spilled, 4 * i + 3)
    offset = b * load_word(spilled, 4 * i + 1) + h * stride_h + t * stride_t
    return load_word(spilled, 4 * i).to(gl.pointer_type(dtype), bitcast=True) + offset, stride_h, stride_t


@gluon.jit
def holds_nan(acc):
    """Whether an accumulator holds a NaN: its sum is one then. Each thread sums what it has before any two meet."""
    sums = gl.sum(gl.sum(gl.sum(acc.reshape([4, 2, 8, acc.shape[1] // 8, 4, 2]), 5), 3), 1).reshape([128])
    return gl.max((sums != sums).to(gl.int32), 0) != 0


@gluon.jit
def recompute_without_hidden_nan(
    spilled, o_ptr, lse_ptr, work, row, H, total, dtype: gl.constexpr, scoring: ScoreNumbers, config: KernelConfig,
):  # fmt: skip
    """The rows of a warpgroup once more, key by key, with nothing taken from a key that a row does not see.

    For tiles whose output holds a NaN: it may have come from behind the mask, or from the sequence next door. Their lse,
    which no value touches, is known by now. Where q, k and v are is read from shared memory: in registers it would weigh on
    the walk that everybody takes.
    """
    ROWS: gl.constexpr = 16
    layout: gl.constexpr = gl.BlockedLayout([1, config.D // 32], [1, 32], [4, 1], [1, 0])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    e = gl.arange(0, config.D, gl.SliceLayout(0, layout))
    c = gl.arange(0, config.DV, gl.SliceLayout(0, layout))
    first_head = work.h * config.HEADS_PER_TILE
    q_head, q_head_stride, q_stride = load_row_pointer(spilled, 0, work.b, work.q_start, first_head, dtype)
    key = work.k_start
    if config.PAGE_SIZE > 0:
        table_ptr = load_word(spilled, TABLE_WORD).to(
            gl.pointer_type(gl.int32), bitcast=True
        ) + work.k_start * load_word(spilled, TABLE_WORD + 1)  # fmt: skip
        key = 0
    k_head, _, k_stride = load_row_pointer(spilled, 1, work.b, key, first_head // config.GROUP, dtype)
    v_head, _, v_stride = load_row_pointer(spilled, 2, work.b, key, first_head // config.GROUP, dtype)
    if config.BIAS is not None:
        bias_head, _, bias_stride = load_row_pointer(spilled, 3, work.b, 0, work.h, config.BIAS)
    # the keys that are walked: numbers within the blocks of an interval, or of a list
    first_number = work.first_block * config.KEYS
    stop_number = gl.minimum((work.last_block + 1) * config.KEYS, work.S)
    if config.LIST_S > 0:
        most = load_word(spilled, LIST_WORD + 5)
        number = list_number(
            work, work.h, work.q_start, load_word(spilled, LIST_WORD + 2), load_word(spilled, LIST_WORD + 3),
            load_word(spilled, LIST_WORD + 4), load_word(spilled, LIST_WORD + 6),
        )  # fmt: skip
        pointer: gl.constexpr = gl.pointer_type(gl.int32)
        entries = load_word(spilled, LIST_WORD + 1).to(pointer, bitcast=True) + number * most
        count = gl.minimum(gl.load(load_word(spilled, LIST_WORD).to(pointer, bitcast=True) + number), most.to(gl.int32))
        first_number = 0
        # a count below zero is an empty list here, too
        stop_number = count * config.LIST_S
        if config.LIST_BITS:
            part = load_word(spilled, LIST_WORD + 8)
            list_rows = load_word(spilled, LIST_WORD + 6)
            list_bits = load_word(spilled, LIST_WORD + 7).to(pointer, bitcast=True)
    barrier()
    for r in range(0, WG_ROWS, ROWS):
        rows = r + gl.arange(0, ROWS, row_layout)
        t = row + query_offset(rows, config.ROWS)
        h = config.query_head(rows, work)
        in_bounds = t < work.T
        line = work.b * H + h
        lse = gl.load(lse_ptr + line.to(gl.int64) * total + work.q_start + t, mask=in_bounds, other=0.0)
        if config.BIAS is None:
            lse = lse * LOG2E
        lse = gl.where(lse == float("-inf"), 0.0, lse)
        lines = gl.expand_dims(t * q_stride + (h - first_head) * q_head_stride, 1) + gl.expand_dims(e, 0)
        q = gl.load(
            q_head + lines, mask=gl.expand_dims(in_bounds, 1) & gl.expand_dims(e < config.DIM, 0), other=0.0
        ).to(gl.float32)  # fmt: skip
        i = t + work.S - work.T
        first = scoring.mask.first_key(i)
        last = scoring.mask.last_key(i, work.S)
        if config.BIAS is not None:
            bias_rows = bias_head + t * bias_stride
        o = gl.zeros([ROWS, config.DV], gl.float32, layout)
        for n in range(first_number, stop_number):
            j = n
            is_there = True
            if config.LIST_S > 0:
                index = gl.load(entries + n // config.LIST_S)
                is_there = (index >= 0) & (index < (work.S + (config.LIST_S - 1)) // config.LIST_S)
                j = gl.where(is_there, gl.where(is_there, index, 0) * config.LIST_S + n % config.LIST_S, work.S)
                is_there = j < work.S
                j = gl.where(is_there, j, 0)
            k_row = j * k_stride
            v_row = j * v_stride
            if config.PAGE_SIZE > 0:
                page = gl.load(table_ptr + j // config.PAGE_SIZE).to(gl.int64)
                k_row = page * load_word(spilled, 5) + j % config.PAGE_SIZE * k_stride
                v_row = page * load_word(spilled, 9) + j % config.PAGE_SIZE * v_stride
            k = gl.load(k_head + k_row + e, mask=e < config.DIM, other=0.0).to(gl.float32)
            v = gl.load(v_head + v_row + c, mask=c < config.DIM_V, other=0.0).to(gl.float32)
            s = gl.sum(q * gl.expand_dims(k, 0), 1)
            if config.BIAS is not None:
                s = add_bias(s, gl.load(bias_rows + j, mask=in_bounds, other=0.0), scoring)
            if config.SOFTCAP:
                s = scoring.apply_softcap(s)
            if config.BIAS is not None:
                p = gl.exp2((s - lse) * scoring.scale_log2)
            else:
                p = gl.exp2(s * scoring.scale_log2 - lse)
            sees = gl.expand_dims((first <= j) & (j <= last), 1)
            if config.LIST_S > 0:
                sees = sees & is_there
            if config.LIST_BITS:
                place = n // config.LIST_S
                bits_row = (number * part + place) * list_rows + t % list_rows
                word = gl.load(
                    list_bits + (bits_row * config.LIST_S + n % config.LIST_S) // 32, mask=bits_row * 0 + place < part, other=-1
                )  # fmt: skip
                sees = sees & gl.expand_dims((word >> n % 32 & 1) != 0, 1)
            o += gl.where(sees, gl.expand_dims(p, 1) * gl.expand_dims(v, 0), 0.0)
        base = work.q_start if config.PACKED else work.b.to(gl.int64) * total
        lines = ((base + t).to(gl.int64) * H + h) * config.DIM_V
        gl.store(
            o_ptr + gl.expand_dims(lines, 1) + gl.expand_dims(c, 0),
            o.to(o_ptr.dtype.element_ty),
            mask=gl.expand_dims(in_bounds, 1) & gl.expand_dims(c < config.DIM_V, 0),
        )
