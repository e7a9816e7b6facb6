"""Attention to a paged cache, portable Triton: decoding, prompts, and parts of prompts.

A tile is some queries of a sequence times the heads of a group (of a large one, HEADS of them), so that a block of keys is read
once for them all. The keys are walked by chunks of CHUNK_KEYS positions, and a chunk's softmax is joined to those before it:

    m' = max(m, m_c)    l = 2^(m - m') l + 2^(m_c - m') l_c    O = 2^(m - m') O + 2^(m_c - m') O_c

Where tiles are few, the chunks of one go to programs of their own (`_forward` with SPLIT), and `_join` joins them in the same
order: a row's bits depend neither on how many programs there were nor on the sequence's neighbours in the batch.

Kwon et al., PagedAttention, arXiv:2309.06180; Dao et al., Flash-Decoding, 2023.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.exact.backends.device.split_kv import write_output
from rooftile.exact.backends.device.visibility import MaskNumbers, first_key, last_key, visible
from rooftile.exact.backends.triton.call import KernelSpec, constants_of, padded
from rooftile.exact.backends.triton.schedule import packed_tile
from rooftile.exact.backends.triton.scores import LOG2E, nan_if_non_finite, scaled_tanh, zero_non_finite
from rooftile.exact.spec import Options, Spec, output_dtype
from rooftile.kvcache import PagedKV
from rooftile.runtime.launch import Kernel

CHUNK_KEYS = tl.constexpr(1024)
# programs that fill any chip: with fewer tiles than this, chunks go to programs of their own
ENOUGH = 512
# fp32 numbers of memory for partials, at most; beyond it one program walks all chunks of its tile, with the same bits
MOST_NUMBERS = 1 << 26


class PagedSpec(NamedTuple):
    """The compile-time configuration of a kernel that reads pages: its argument SPEC."""

    GROUP: int
    HEADS: int  # query heads of a group in a tile
    D: int
    DV: int
    PAGE_SIZE: int
    PACKED: bool
    LEFT: bool
    RIGHT: bool
    PREFIX: bool
    CHUNK: bool
    SOFTCAP: bool
    ALIBI: bool
    SINKS: bool
    SCALED: bool  # keys and values in FP8, with a scale per token and head
    PRECISION: str  # how fp32 numbers are multiplied
    BLOCK_D: int
    BLOCK_DV: int
    ROWS: int  # rows per tile: BLOCK_T queries times HEADS
    BLOCK_T: int = 0


@triton.jit
def _merge_softmax(m, l, acc, m_c, l_c, acc_c):
    """Joins the running softmax of some keys and of the keys after them."""
    m_new = tl.maximum(m, m_c)
    reference = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp2(m - reference)
    beta = tl.exp2(m_c - reference)
    return m_new, l * alpha + l_c * beta, acc * alpha[:, None] + acc_c * beta[:, None]


# fmt: off
@triton.jit
def _walk(
    q, first, stop, k_ptr, v_ptr, table_ptr, k_stride_p, k_stride_s, v_stride_p, v_stride_s, k_scale_ptr, v_scale_ptr,
    scale_stride_p, scale_stride_s, i, S, slope, scale, softcap, mask,
    SPEC: tl.constexpr, BLOCK_S: tl.constexpr, STAGES: tl.constexpr, NAN_SAFE: tl.constexpr,
):
    # fmt: on
    """The softmax over the keys from first up to stop: maximum, sum and output, not divided."""
    BLOCK_DV: tl.constexpr = SPEC.BLOCK_DV
    ROWS: tl.constexpr = SPEC.ROWS
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, SPEC.BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    l = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BLOCK_DV), tl.float32)
    for j_0 in tl.range(first, stop, BLOCK_S, num_stages=STAGES):
        j = j_0 + s
        in_bounds = j < S
        page = tl.load(table_ptr + j // SPEC.PAGE_SIZE, mask=in_bounds, other=0).to(tl.int64)
        k_lines = k_ptr + page * k_stride_p + (j % SPEC.PAGE_SIZE) * k_stride_s
        v_lines = v_ptr + page * v_stride_p + (j % SPEC.PAGE_SIZE) * v_stride_s
        k = tl.load(k_lines[:, None] + d[None, :], mask=in_bounds[:, None] & (d < SPEC.D)[None, :], other=0.0)
        v = tl.load(v_lines[:, None] + dv[None, :], mask=in_bounds[:, None] & (dv < SPEC.DV)[None, :], other=0.0)
        if SPEC.SCALED:
            # by way of fp32: straight from FP8 to bf16 Triton has an F2F for each number, a slow instruction on Hopper
            k = k.to(tl.float32).to(q.dtype)
            # weights are times a value's scale, which in fp16 could be too much or too little
            v = v.to(tl.float32).to(tl.bfloat16 if q.dtype == tl.float16 else q.dtype)
        if NAN_SAFE:
            x = tl.dot(q, tl.trans(zero_non_finite(k)), input_precision=SPEC.PRECISION) + nan_if_non_finite(k, 1)[None, :]
        else:
            x = tl.dot(q, tl.trans(k), input_precision=SPEC.PRECISION)
        if SPEC.SCALED:
            lines = page * scale_stride_p + (j % SPEC.PAGE_SIZE) * scale_stride_s
            x *= tl.load(k_scale_ptr + lines, mask=in_bounds, other=0.0)[None, :]
        if SPEC.SOFTCAP:
            x = scaled_tanh(x, scale, softcap) * (softcap * LOG2E)
        else:
            x = x * (scale * LOG2E)
        if SPEC.ALIBI:
            x -= tl.abs(i[:, None] - j[None, :]).to(tl.float32) * (slope * LOG2E)[:, None]
        sees = visible(i[:, None], j[None, :], S, mask, SPEC)
        x = tl.where(sees, x, float("-inf"))
        m_new = tl.maximum(m, tl.max(x, 1))
        reference = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(x - reference[:, None])
        alpha = tl.exp2(m - reference)
        l = l * alpha + tl.sum(p, 1)
        if SPEC.SCALED:
            p *= tl.load(v_scale_ptr + lines, mask=in_bounds, other=0.0)[None, :]
        if NAN_SAFE:
            p = tl.where(sees, p + nan_if_non_finite(v, 1)[None, :], 0.0)
            v = zero_non_finite(v)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=SPEC.PRECISION)
        m = m_new
    return m, l, acc


@triton.jit
def _rows_of(cu_q_ptr, B, H, T, tiles, SPEC: tl.constexpr):
    """Returns a tile's sequence, its first row, length, first query and key head; and the query and head of each row."""
    TILES_PER_GROUP: tl.constexpr = (SPEC.GROUP + SPEC.HEADS - 1) // SPEC.HEADS
    heads = H // SPEC.GROUP * TILES_PER_GROUP
    slot = tl.program_id(0) // heads
    h_k = tl.program_id(0) % heads // TILES_PER_GROUP
    row_0 = tl.cast(0, tl.int64)
    if SPEC.PACKED:
        b, i_t = packed_tile(slot, cu_q_ptr, B, SPEC.BLOCK_T)
        row_0 = tl.load(cu_q_ptr + b).to(tl.int64)
        T = (tl.load(cu_q_ptr + b + 1) - row_0).to(tl.int32)
    else:
        b = slot // tiles
        i_t = slot % tiles
        row_0 += b.to(tl.int64) * T
    r = tl.arange(0, SPEC.ROWS)
    t = i_t * SPEC.BLOCK_T + r // SPEC.HEADS
    g = tl.program_id(0) % TILES_PER_GROUP * SPEC.HEADS + r % SPEC.HEADS
    in_bounds = (t < T) & (r < SPEC.BLOCK_T * SPEC.HEADS) & (g < SPEC.GROUP)
    return b, row_0, T, i_t * SPEC.BLOCK_T, h_k, t, h_k * SPEC.GROUP + g, in_bounds


# fmt: off
@triton.jit(
    do_not_specialize=["B", "H", "T", "total", "tiles", "chunks", "table_stride", "left", "right", "prefix", "chunk"],
    do_not_specialize_on_alignment=["table_ptr", "lengths_ptr", "cu_q_ptr"],
)
def _forward(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, partials_ptr, table_ptr, lengths_ptr, cu_q_ptr, alibi_ptr, sinks_ptr,
    q_strides, k_strides, v_strides, table_stride, k_scale_ptr, v_scale_ptr, scale_strides, alibi_strides,
    B, H, T, total, tiles, chunks, scale, softcap, left, right, prefix, chunk,
    SPEC: tl.constexpr, SPLIT: tl.constexpr, BLOCK_S: tl.constexpr, STAGES: tl.constexpr,
):
    # fmt: on
    BLOCK_DV: tl.constexpr = SPEC.BLOCK_DV
    ROWS: tl.constexpr = SPEC.ROWS
    q_stride_t, q_stride_h = q_strides
    k_stride_p, k_stride_s, k_stride_h = k_strides
    v_stride_p, v_stride_s, v_stride_h = v_strides
    scale_stride_p, scale_stride_s = scale_strides
    alibi_stride_b, alibi_stride_h = alibi_strides
    mask = MaskNumbers(left, right, prefix, chunk)
    b, row_0, T, t_0, h_k, t, h, in_bounds = _rows_of(cu_q_ptr, B, H, T, tiles, SPEC)
    if t_0 >= T:
        return
    S = tl.load(lengths_ptr + b)
    d = tl.arange(0, SPEC.BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    lines = (row_0 + t).to(tl.int64)
    q_tile = q_ptr + (lines * q_stride_t + h * q_stride_h)[:, None] + d[None, :]
    q = tl.load(q_tile, mask=in_bounds[:, None] & (d < SPEC.D)[None, :], other=0.0)
    k_ptr += h_k.to(tl.int64) * k_stride_h
    v_ptr += h_k.to(tl.int64) * v_stride_h
    k_scale_ptr += h_k
    v_scale_ptr += h_k
    table_ptr += b.to(tl.int64) * table_stride
    offset = S - T
    i = t + offset
    slope = tl.zeros((ROWS,), tl.float32)
    if SPEC.ALIBI:
        slope = tl.load(alibi_ptr + b * alibi_stride_b + h * alibi_stride_h, mask=in_bounds, other=0.0).to(tl.float32)
    sink = tl.zeros((ROWS,), tl.float32)
    if SPEC.SINKS:
        sink = tl.load(sinks_ptr + h, mask=in_bounds, other=0.0).to(tl.float32) * LOG2E

    bottom = tl.minimum(t_0 + SPEC.BLOCK_T, T) - 1 + offset
    start = first_key(t_0 + offset, mask, SPEC) // BLOCK_S * BLOCK_S
    stop = tl.maximum(last_key(bottom, S, mask, SPEC) + 1, start)
    c_first = start // CHUNK_KEYS
    c_stop = tl.cdiv(stop, CHUNK_KEYS)
    if SPLIT:
        c_first = tl.maximum(c_first, tl.program_id(1))
        c_stop = tl.minimum(c_stop, tl.program_id(1) + 1)
        if c_first >= c_stop:
            return
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    l = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BLOCK_DV), tl.float32)
    for c in range(c_first, c_stop):
        low = tl.maximum(start, c * CHUNK_KEYS)
        high = tl.minimum(stop, (c + 1) * CHUNK_KEYS)
        # fmt: off
        m_c, l_c, acc_c = _walk(
            q, low, high, k_ptr, v_ptr, table_ptr, k_stride_p, k_stride_s, v_stride_p, v_stride_s, k_scale_ptr, v_scale_ptr,
            scale_stride_p, scale_stride_s, i, S, slope, scale, softcap, mask, SPEC, BLOCK_S, STAGES, False)
        if SPEC.LEFT or SPEC.RIGHT or SPEC.PREFIX or SPEC.CHUNK:
            # 0 * NaN is NaN: recompute this chunk with hidden non-finite values set to zero
            if tl.max(tl.where(acc_c == acc_c, 0, 1)) > 0:
                m_c, l_c, acc_c = _walk(
                    q, low, high, k_ptr, v_ptr, table_ptr, k_stride_p, k_stride_s, v_stride_p, v_stride_s, k_scale_ptr,
                    v_scale_ptr, scale_stride_p, scale_stride_s, i, S, slope, scale, softcap, mask, SPEC, 16, 1, True)
        # fmt: on
        m, l, acc = _merge_softmax(m, l, acc, m_c, l_c, acc_c)
    if SPLIT:
        # (total, H, chunks) lines of DV outputs, a maximum and a sum
        line = ((lines * H + h) * chunks + tl.program_id(1)) * (SPEC.DV + 2)
        tl.store(partials_ptr + line[:, None] + dv[None, :], acc, mask=in_bounds[:, None] & (dv < SPEC.DV)[None, :])
        tl.store(partials_ptr + line + SPEC.DV, m, mask=in_bounds)
        tl.store(partials_ptr + line + SPEC.DV + 1, l, mask=in_bounds)
    else:
        write_output(m, l, acc, sink, o_ptr, lse_ptr, b, H, T, total, t, h, lines, in_bounds, SPEC.DV, SPEC.SINKS, SPEC.PACKED, BLOCK_DV)


# fmt: off
@triton.jit(
    do_not_specialize=["B", "H", "T", "total", "tiles", "chunks", "left", "right", "prefix", "chunk"],
    do_not_specialize_on_alignment=["lengths_ptr", "cu_q_ptr"],
)
def _join(
    o_ptr, lse_ptr, partials_ptr, lengths_ptr, cu_q_ptr, sinks_ptr, B, H, T, total, tiles, chunks, left, right, prefix, chunk,
    SPEC: tl.constexpr, BLOCK_S: tl.constexpr,
):
    # fmt: on
    """Merges the chunks of a tile in their order."""
    BLOCK_DV: tl.constexpr = SPEC.BLOCK_DV
    ROWS: tl.constexpr = SPEC.ROWS
    mask = MaskNumbers(left, right, prefix, chunk)
    b, row_0, T, t_0, _, t, h, in_bounds = _rows_of(cu_q_ptr, B, H, T, tiles, SPEC)
    if t_0 >= T:
        return
    S = tl.load(lengths_ptr + b)
    dv = tl.arange(0, BLOCK_DV)
    lines = (row_0 + t).to(tl.int64)
    offset = S - T
    bottom = tl.minimum(t_0 + SPEC.BLOCK_T, T) - 1 + offset
    start = first_key(t_0 + offset, mask, SPEC) // BLOCK_S * BLOCK_S
    stop = tl.maximum(last_key(bottom, S, mask, SPEC) + 1, start)
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    l = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BLOCK_DV), tl.float32)
    for c in range(start // CHUNK_KEYS, tl.cdiv(stop, CHUNK_KEYS)):
        line = ((lines * H + h) * chunks + c) * (SPEC.DV + 2)
        acc_c = tl.load(partials_ptr + line[:, None] + dv[None, :], mask=in_bounds[:, None] & (dv < SPEC.DV)[None, :], other=0.0)
        m_c = tl.load(partials_ptr + line + SPEC.DV, mask=in_bounds, other=float("-inf"))
        l_c = tl.load(partials_ptr + line + SPEC.DV + 1, mask=in_bounds, other=0.0)
        m, l, acc = _merge_softmax(m, l, acc, m_c, l_c, acc_c)
    sink = tl.zeros((ROWS,), tl.float32)
    if SPEC.SINKS:
        sink = tl.load(sinks_ptr + h, mask=in_bounds, other=0.0).to(tl.float32) * LOG2E
    write_output(m, l, acc, sink, o_ptr, lse_ptr, b, H, T, total, t, h, lines, in_bounds, SPEC.DV, SPEC.SINKS, SPEC.PACKED, BLOCK_DV)


_start_forward, _start_join = Kernel(_forward), Kernel(_join)


def attend(q: Tensor, cache: PagedKV, options: Options, spec: Spec) -> tuple[Tensor, Tensor]:
    """o (B, T, H, Dv) and lse (B, H, T), or packed (total, H, Dv) and (H, total)."""
    packed = cache.cu_q is not None
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (cache.k, cache.v))
    rows = (q if packed else q.flatten(0, 1)).contiguous()
    total, H, _ = rows.shape
    B, T = cache.table.shape[0], total if packed else q.shape[1]
    o = torch.empty((*q.shape[:-1], spec.dim_v), dtype=output_dtype(q, spec), device=q.device)
    lse = torch.empty((H, total) if packed else (B, H, T), dtype=torch.float32, device=q.device)
    if not lse.numel():
        return o, lse
    kind = (spec, packed, cache.size, 0 if packed else T)
    known = _constants(*kind)["SPEC"]
    block_t = known.BLOCK_T
    tiles = -(-T // block_t)
    parts_of_group = -(-spec.group // known.HEADS)
    programs = (total // block_t + B if packed else tiles * B) * (H // spec.group) * parts_of_group
    # the most that a table has room for: lengths are on the GPU, and the host does not wait for them
    chunks = max(-(-cache.table.shape[1] * cache.size // CHUNK_KEYS.value), 1)
    size = total * H * chunks * (spec.dim_v + 2)
    split = programs < ENOUGH and chunks > 1 and size <= MOST_NUMBERS
    numbers = constants_of(spec).numbers
    partials = torch.empty(size if split else 0, dtype=torch.float32, device=q.device)
    table, lengths = cache.table.contiguous(), cache.lengths.contiguous()
    # a fresh tensor stands in for an absent one: whether an address is a multiple of 16 is part of what is compiled
    cu_q, sinks = (lse if x is None else x.contiguous() for x in (cache.cu_q, options.sinks))
    alibi = options.alibi
    slopes = (0, 0) if alibi is None else (alibi.stride(0) if alibi.ndim == 2 else 0, alibi.stride(-1))
    sizes = (B, H, T, total, tiles, chunks)
    *scales, scale_stride_p, scale_stride_s = cache.scales_and_strides()
    scale_strides = (scale_stride_p, scale_stride_s)
    arguments = (
        rows, k, v, o, lse, partials if split else lse, table, lengths, cu_q, lse if alibi is None else alibi, sinks,
        rows.stride()[:2], k.stride()[:3], v.stride()[:3], table.stride(0), *scales, scale_strides, slopes,
        *sizes, *numbers[:6],
    )  # fmt: skip
    _start_forward((programs, chunks if split else 1, 1), arguments, _with_split(*kind, split))
    if split:
        arguments = (o, lse, partials, lengths, cu_q, sinks, *sizes, *numbers[2:6])
        _start_join((programs, 1, 1), arguments, _constants_of_join(*kind))
    return o, lse


def spec_of(spec: Spec, T: int) -> KernelSpec:
    """Returns a kernel's configuration; a single query under a causal mask sees every key, as without a mask."""
    known = constants_of(spec).spec
    return known._replace(RIGHT=False, PREFIX=False) if T == 1 and spec.mask.right == 0 else known


@cache
def _constants(spec: Spec, packed: bool, size: int, T: int) -> dict[str, Any]:
    """The compile-time arguments; T is the number of queries if all sequences have as many."""
    wide = padded(max(spec.dim, spec.dim_v)) > 128 or spec.dtype == torch.float32
    # rows of a tile: what the matrix instructions take at least, and of few queries no more than there are
    most = 32 if wide else 64
    heads = min(spec.group, most)
    rows = min(max(triton.next_power_of_2(T * heads), 16), most) if T else most
    known = paged_spec(spec_of(spec, T), spec, size, heads, rows)._replace(PACKED=packed, BLOCK_T=rows // heads)
    return {"SPEC": known, "BLOCK_S": 32 if wide else 64, "STAGES": 2 if wide else 3, "num_warps": 4}


@cache
def _with_split(spec: Spec, packed: bool, size: int, T: int, split: bool) -> dict[str, Any]:
    return _constants(spec, packed, size, T) | {"SPLIT": split}


@cache
def _constants_of_join(spec: Spec, packed: bool, size: int, T: int) -> dict[str, Any]:
    constants = _constants(spec, packed, size, T)
    return {"SPEC": constants["SPEC"], "BLOCK_S": constants["BLOCK_S"], "num_warps": 4}


def paged_spec(known: KernelSpec, spec: Spec, size: int, heads: int, rows: int) -> PagedSpec:
    """The same with pages of `size` tokens and tiles of `rows` rows, for `heads` heads of a group."""
    shared = {name: value for name, value in known._asdict().items() if name in PagedSpec._fields}
    own = {"HEADS": heads, "PAGE_SIZE": size, "SCALED": spec.has_kv_scales, "ROWS": rows}
    return PagedSpec(**shared | own)
