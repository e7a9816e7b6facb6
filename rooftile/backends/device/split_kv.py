"""What decoding from a paged cache is cut into, and how what was cut is put together: Triton, and of no backend.

The blocks of BLOCK_S keys of all sequences, one after the other, are one row of work, of which every team of programs has an
equal part. A sequence that lies in one part is finished there. One that crosses a border is left in pieces, and `_merge` puts
these together, first to last:

    m = max m_c    l = sum 2^(m_c - m) l_c    O = sum 2^(m_c - m) O_c

A program (head, team), the p-th of all, has left at most two: at 2 p that of a sequence that began before its part, at 2 p + 1
that of one that goes on after it; each ROWS lines of DV outputs, a maximum and a sum, fp32, in units of log2.

Osama et al., Stream-K, arXiv:2301.03598.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from rooftile.backends.device.visibility import first_key, last_key
from rooftile.launch import Kernel
from rooftile.numerics import softmax

# sequences that a kernel is compiled for, at least: their lengths are added up by each program
BATCH = 256
# pieces that are read together
PIECES = tl.constexpr(16)
LOG2E, LN2 = tl.constexpr(softmax.LOG2E), tl.constexpr(softmax.LN2)


@triton.jit
def finish(
    m, l, acc, sink, o_ptr, lse_ptr, b, H, T, total, t, h, lines, there,
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
        alpha = tl.exp2(m - m_new)
        l = l * alpha + tl.exp2(sink - m_new)
        acc = acc * alpha[:, None]
        m = m_new
    nothing = l == 0.0
    l = tl.where(nothing, 1.0, l)
    tl.store(lse_lines, tl.where(nothing, float("-inf"), (m + tl.log2(l)) * LN2), mask=there)
    tl.store(o_tile, (acc / l[:, None]).to(o_tile.dtype.element_ty), mask=there[:, None] & (dv < DV)[None, :])


@triton.jit
def bounds(
    S, T, left, right, prefix, chunk,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr, CHUNK: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """The first key that a tile reads, the one after its last, and how many blocks that is, at least one."""
    start = first_key(S - T, left, chunk, LEFT, CHUNK) // BLOCK_S * BLOCK_S
    stop = tl.maximum(last_key(S - 1, S, right, prefix, chunk, RIGHT, PREFIX, CHUNK) + 1, start)
    return start, stop, tl.maximum(tl.cdiv(stop - start, BLOCK_S), 1)


@triton.jit
def ends_of(
    lengths_ptr, B, T, left, right, prefix, chunk,
    BATCH: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr, CHUNK: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Where the blocks of each sequence end in the row of work, and all."""
    b = tl.arange(0, BATCH)
    S = tl.load(lengths_ptr + b, mask=b < B, other=0)
    _, _, blocks = bounds(S, T, left, right, prefix, chunk, LEFT, RIGHT, PREFIX, CHUNK, BLOCK_S)
    ends = tl.cumsum(tl.where(b < B, blocks, 0), 0)
    return ends, tl.max(ends)


@triton.jit
def part(team, share, total):
    """Where a team's part of the row of work begins."""
    return tl.minimum(team * share, total)


@triton.jit
def sequence_at(
    place, ends, lengths_ptr, T, left, right, prefix, chunk,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr, CHUNK: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Of a place in the row of work: sequence, its keys in the cache, first key, one after the last, blocks, the place's block."""
    b = tl.sum((ends <= place).to(tl.int32))
    first = place - tl.max(tl.where(ends <= place, ends, 0))
    S = tl.load(lengths_ptr + b)
    start, stop, n = bounds(S, T, left, right, prefix, chunk, LEFT, RIGHT, PREFIX, CHUNK, BLOCK_S)
    return b, S, start, stop, n, first


# fmt: off
@triton.jit(
    do_not_specialize=["B", "H", "T", "left", "right", "prefix", "chunk"], do_not_specialize_on_alignment=["lengths_ptr"]
)
def _merge(
    o_ptr, lse_ptr, parts_ptr, lengths_ptr, sinks_ptr, B, H, T, left, right, prefix, chunk,
    GROUP: tl.constexpr, HEADS: tl.constexpr, DV: tl.constexpr, BATCH: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    PREFIX: tl.constexpr, CHUNK: tl.constexpr, SINKS: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr, BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    # fmt: on
    """A row of the sequence on the border after a team, if that is the first border in the sequence."""
    ends, total = ends_of(lengths_ptr, B, T, left, right, prefix, chunk, BATCH, LEFT, RIGHT, PREFIX, CHUNK, BLOCK_S)
    head = tl.program_id(0)
    team = tl.program_id(1)
    # after the last team there is no border
    teams = tl.num_programs(1) + 1
    share = tl.cdiv(total, teams)
    border = part(team + 1, share, total)
    b, _, _, _, n, first = sequence_at(
        tl.minimum(border, total - 1), ends, lengths_ptr, T, left, right, prefix, chunk, LEFT, RIGHT, PREFIX, CHUNK, BLOCK_S
    )
    if PDL:
        # until here it ran beside the kernel that leaves the pieces
        gdc_wait()
    begin = border - first
    if (border == total) | (first == 0) | (part(team, share, total) > begin):
        return
    PARTS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    r = tl.program_id(2)
    t = r // HEADS
    g = head % PARTS * HEADS + r % HEADS
    if (t >= T) | (g >= GROUP):
        return
    h = head // PARTS * GROUP + g
    dv = tl.arange(0, BLOCK_DV)
    m = float("-inf")
    l = 0.0
    acc = tl.zeros((BLOCK_DV,), tl.float32)
    base = team
    while (base < teams) & (part(base, share, total) < begin + n):
        at = base + tl.arange(0, PIECES)
        low = part(at, share, total)
        # the first piece is of the team that began the sequence; a part of no blocks has left none
        ours = (at < teams) & (low < begin + n) & (low < total)
        piece = parts_ptr + ((2 * (at * tl.num_programs(0) + head) + (at == team)) * ROWS + r).to(tl.int64) * (DV + 2)
        m_c = tl.load(piece + DV, mask=ours, other=float("-inf"))
        l_c = tl.load(piece + DV + 1, mask=ours, other=0.0)
        acc_c = tl.load(piece[:, None] + dv[None, :], mask=ours[:, None] & (dv < DV)[None, :], other=0.0)
        m_new = tl.maximum(m, tl.max(m_c))
        pivot = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m - pivot)
        beta = tl.exp2(m_c - pivot)
        l = l * alpha + tl.sum(l_c * beta)
        acc = acc * alpha + tl.sum(acc_c * beta[:, None], 0)
        m = m_new
        base += PIECES
    # as a tile of one row
    one = tl.arange(0, 1)
    sink = tl.zeros((1,), tl.float32)
    if SINKS:
        sink += tl.load(sinks_ptr + h).to(tl.float32) * LOG2E
    m_row = tl.zeros((1,), tl.float32) + m
    l_row = tl.zeros((1,), tl.float32) + l
    lines = b.to(tl.int64) * T + t + one
    finish(m_row, l_row, acc[None, :], sink, o_ptr, lse_ptr, b, H, T, 0, t + one, h + one, lines, one == 0, DV, SINKS, False, BLOCK_DV)


start_merge = Kernel(_merge)
