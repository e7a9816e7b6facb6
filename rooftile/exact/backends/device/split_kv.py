"""Stream-K split of paged decoding: cuts the key blocks of all sequences into equal parts and merges the partial softmaxes.

Shared by the Triton and Hopper backends. The blocks of BLOCK_S keys of all sequences, one after the other, are cut into equal
splits. A sequence that lies in one split is finished there. One that crosses a boundary leaves partials, and `_merge` merges them,
first to last:

    m = max m_c    l = sum 2^(m_c - m) l_c    O = sum 2^(m_c - m) O_c

A program (head, split), the p-th of all, leaves at most two partials: at 2 p for a sequence that began before its part, at 2 p + 1
for one that goes on after it; each ROWS lines of DV outputs, a maximum and a sum, fp32, in units of log2.

Osama et al., Stream-K, arXiv:2301.03598.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from rooftile.exact.backends.device.visibility import MaskNumbers, first_key, last_key
from rooftile.numerics import softmax
from rooftile.runtime.dependent_launch import wait_for_inputs
from rooftile.runtime.launch import Kernel

# sequences that a kernel is compiled for, at least: their lengths are added up by each program
BATCH = 256
# partials that are read together
PARTIALS = tl.constexpr(16)
LOG2E, LN2 = tl.constexpr(softmax.LOG2E), tl.constexpr(softmax.LN2)


class MergeSpec(NamedTuple):
    """The compile-time configuration of `_merge`: its argument SPEC."""

    GROUP: int
    HEADS: int  # query heads of a group in a tile
    DV: int
    BLOCK_DV: int
    ROWS: int  # rows per partial
    LEFT: bool
    RIGHT: bool
    PREFIX: bool
    CHUNK: bool
    SINKS: bool


@triton.jit
def write_output(
    m, l, acc, sink, o_ptr, lse_ptr, b, H, T, total, t, h, lines, in_bounds,
    DV: tl.constexpr, SINKS: tl.constexpr, PACKED: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Writes output and lse of rows whose softmax is complete but for the sink."""
    dv = tl.arange(0, BLOCK_DV)
    o_tile = o_ptr + ((lines * H + h) * DV)[:, None] + dv[None, :]
    if PACKED:
        lse_lines = lse_ptr + h.to(tl.int64) * total + lines
    else:
        lse_lines = lse_ptr + (b.to(tl.int64) * H + h) * T + t
    if SINKS:
        m_new = tl.maximum(m, sink)
        # a sink of -inf beside no key: -inf - -inf is nan
        reference = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m - reference)
        l = l * alpha + tl.exp2(sink - reference)
        acc = acc * alpha[:, None]
        m = m_new
    sees_none = l == 0.0
    l = tl.where(sees_none, 1.0, l)
    tl.store(lse_lines, tl.where(sees_none, float("-inf"), (m + tl.log2(l)) * LN2), mask=in_bounds)
    tl.store(o_tile, (acc / l[:, None]).to(o_tile.dtype.element_ty), mask=in_bounds[:, None] & (dv < DV)[None, :])


@triton.jit
def visible_blocks(S, T, mask, SPEC: tl.constexpr, BLOCK_S: tl.constexpr):
    """The first key that a tile reads, the one after its last, and how many blocks that is, at least one."""
    start = first_key(S - T, mask, SPEC) // BLOCK_S * BLOCK_S
    stop = tl.maximum(last_key(S - 1, S, mask, SPEC) + 1, start)
    return start, stop, tl.maximum(tl.cdiv(stop - start, BLOCK_S), 1)


@triton.jit
def block_offsets(lengths_ptr, B, T, mask, SPEC: tl.constexpr, BATCH: tl.constexpr, BLOCK_S: tl.constexpr):
    """Returns the end of each sequence in the list of all key blocks, and how many blocks there are."""
    b = tl.arange(0, BATCH)
    S = tl.load(lengths_ptr + b, mask=b < B, other=0)
    _, _, blocks = visible_blocks(S, T, mask, SPEC, BLOCK_S)
    ends = tl.cumsum(tl.where(b < B, blocks, 0), 0)
    return ends, tl.max(ends)


@triton.jit
def range_start(split, blocks_per_split, total):
    """Returns the first block of a split."""
    return tl.minimum(split * blocks_per_split, total)


@triton.jit
def find_sequence(place, ends, lengths_ptr, T, mask, SPEC: tl.constexpr, BLOCK_S: tl.constexpr):
    """Finds position `place` in the list of all key blocks.

    Returns the sequence b, its length S, its visible keys [start, stop), how many blocks they span, and which of them this is.
    """
    b = tl.sum((ends <= place).to(tl.int32))
    first = place - tl.max(tl.where(ends <= place, ends, 0))
    S = tl.load(lengths_ptr + b)
    start, stop, n = visible_blocks(S, T, mask, SPEC, BLOCK_S)
    return b, S, start, stop, n, first


# fmt: off
@triton.jit(
    do_not_specialize=["B", "H", "T", "left", "right", "prefix", "chunk"], do_not_specialize_on_alignment=["lengths_ptr"]
)
def _merge(
    o_ptr, lse_ptr, partials_ptr, lengths_ptr, sinks_ptr, B, H, T, left, right, prefix, chunk,
    SPEC: tl.constexpr, BATCH: tl.constexpr, BLOCK_S: tl.constexpr, PDL: tl.constexpr,
):
    # fmt: on
    """Merges a row of the sequence that crosses the boundary after a split, if that is the sequence's first boundary."""
    BLOCK_DV: tl.constexpr = SPEC.BLOCK_DV
    mask = MaskNumbers(left, right, prefix, chunk)
    ends, total = block_offsets(lengths_ptr, B, T, mask, SPEC, BATCH, BLOCK_S)
    head = tl.program_id(0)
    split = tl.program_id(1)
    # there is no boundary after the last split
    splits = tl.num_programs(1) + 1
    blocks_per_split = tl.cdiv(total, splits)
    boundary = range_start(split + 1, blocks_per_split, total)
    b, _, _, _, n, first = find_sequence(tl.minimum(boundary, total - 1), ends, lengths_ptr, T, mask, SPEC, BLOCK_S)
    if PDL:
        # until here it ran beside the kernel that leaves the partials
        wait_for_inputs()
    sequence_start = boundary - first
    if (boundary == total) | (first == 0) | (range_start(split, blocks_per_split, total) > sequence_start):
        return
    TILES_PER_GROUP: tl.constexpr = (SPEC.GROUP + SPEC.HEADS - 1) // SPEC.HEADS
    r = tl.program_id(2)
    t = r // SPEC.HEADS
    g = head % TILES_PER_GROUP * SPEC.HEADS + r % SPEC.HEADS
    if (t >= T) | (g >= SPEC.GROUP):
        return
    h = head // TILES_PER_GROUP * SPEC.GROUP + g
    dv = tl.arange(0, BLOCK_DV)
    m = float("-inf")
    l = 0.0
    acc = tl.zeros((BLOCK_DV,), tl.float32)
    first_split = split
    while (first_split < splits) & (range_start(first_split, blocks_per_split, total) < sequence_start + n):
        i_split = first_split + tl.arange(0, PARTIALS)
        first_block = range_start(i_split, blocks_per_split, total)
        # the split that began the sequence left the first partial; a split of no blocks left none
        holds_partial = (i_split < splits) & (first_block < sequence_start + n) & (first_block < total)
        partial = partials_ptr + ((2 * (i_split * tl.num_programs(0) + head) + (i_split == split)) * SPEC.ROWS + r).to(tl.int64) * (SPEC.DV + 2)
        m_c = tl.load(partial + SPEC.DV, mask=holds_partial, other=float("-inf"))
        l_c = tl.load(partial + SPEC.DV + 1, mask=holds_partial, other=0.0)
        acc_c = tl.load(partial[:, None] + dv[None, :], mask=holds_partial[:, None] & (dv < SPEC.DV)[None, :], other=0.0)
        m_new = tl.maximum(m, tl.max(m_c))
        reference = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m - reference)
        beta = tl.exp2(m_c - reference)
        l = l * alpha + tl.sum(l_c * beta)
        acc = acc * alpha + tl.sum(acc_c * beta[:, None], 0)
        m = m_new
        first_split += PARTIALS
    # as a tile of one row
    one = tl.arange(0, 1)
    sink = tl.zeros((1,), tl.float32)
    if SPEC.SINKS:
        sink += tl.load(sinks_ptr + h).to(tl.float32) * LOG2E
    m_row = tl.zeros((1,), tl.float32) + m
    l_row = tl.zeros((1,), tl.float32) + l
    lines = b.to(tl.int64) * T + t + one
    write_output(m_row, l_row, acc[None, :], sink, o_ptr, lse_ptr, b, H, T, 0, t + one, h + one, lines, one == 0, SPEC.DV, SPEC.SINKS, False, BLOCK_DV)


start_merge = Kernel(_merge)
