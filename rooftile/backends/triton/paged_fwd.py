"""Attention to a paged cache, portable Triton: decoding, prompts, and parts of prompts.

A tile is some queries of a sequence times the heads of a group (of a large one, HEADS of them), so that a block of keys is read
once for them all. The keys are walked by chunks of CHUNK_KEYS positions, and a chunk's softmax is joined to those before it:

    m' = max(m, m_c)    l = 2^(m - m') l + 2^(m_c - m') l_c    O = 2^(m - m') O + 2^(m_c - m') O_c

Where tiles are few, the chunks of one go to programs of their own (`_forward` with SPLIT), and `_join` joins them in the same
order: a row's bits depend neither on how many programs there were nor on the sequence's neighbours in the batch.

Kwon et al., PagedAttention, arXiv:2309.06180; Dao et al., Flash-Decoding, 2023.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.backends.device.split_kv import finish
from rooftile.backends.device.visibility import first_key, last_key, visible
from rooftile.backends.triton.call import constants_of, padded
from rooftile.backends.triton.schedule import packed_tile
from rooftile.backends.triton.scores import LOG2E, capped, finite, poison
from rooftile.kvcache import PagedKV
from rooftile.launch import Kernel
from rooftile.spec import Options, Spec

CHUNK_KEYS = tl.constexpr(1024)
# programs that fill any chip: with fewer tiles than this, chunks go to programs of their own
ENOUGH = 512
# of memory for what they find; beyond it one program walks all chunks of its tile, with the same bits
MOST_NUMBERS = 1 << 26


@triton.jit
def _joined(m, l, acc, m_c, l_c, acc_c):
    """The running softmax of some keys, and that of the keys after them, as one."""
    m_new = tl.maximum(m, m_c)
    pivot = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp2(m - pivot)
    beta = tl.exp2(m_c - pivot)
    return m_new, l * alpha + l_c * beta, acc * alpha[:, None] + acc_c * beta[:, None]


# fmt: off
@triton.jit
def _walk(
    q, first, stop, k_ptr, v_ptr, table_ptr, k_stride_p, k_stride_s, v_stride_p, v_stride_s, k_scale_ptr, v_scale_ptr,
    scale_stride_p, scale_stride_s, i, S, slope, scale, softcap, left, right, prefix, chunk,
    D: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr,
    CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr, BLOCK_S: tl.constexpr, STAGES: tl.constexpr,
    SCALED: tl.constexpr, CAREFUL: tl.constexpr,
):
    # fmt: on
    """The softmax over the keys from first up to stop: maximum, sum and output, not divided."""
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    l = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BLOCK_DV), tl.float32)
    for j_0 in tl.range(first, stop, BLOCK_S, num_stages=STAGES):
        j = j_0 + s
        there = j < S
        page = tl.load(table_ptr + j // SIZE, mask=there, other=0).to(tl.int64)
        k_lines = k_ptr + page * k_stride_p + (j % SIZE) * k_stride_s
        v_lines = v_ptr + page * v_stride_p + (j % SIZE) * v_stride_s
        k = tl.load(k_lines[:, None] + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0)
        v = tl.load(v_lines[:, None] + dv[None, :], mask=there[:, None] & (dv < DV)[None, :], other=0.0)
        if SCALED:
            # by way of fp32: straight from FP8 to bf16 Triton has an F2F for each number, a slow instruction on Hopper
            k = k.to(tl.float32).to(q.dtype)
            # weights are times a value's scale, which in fp16 could be too much or too little
            v = v.to(tl.float32).to(tl.bfloat16 if q.dtype == tl.float16 else q.dtype)
        if CAREFUL:
            x = tl.dot(q, tl.trans(finite(k)), input_precision=PRECISION) + poison(k, 1)[None, :]
        else:
            x = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if SCALED:
            lines = page * scale_stride_p + (j % SIZE) * scale_stride_s
            x *= tl.load(k_scale_ptr + lines, mask=there, other=0.0)[None, :]
        if SOFTCAP:
            x = capped(x, scale, softcap) * (softcap * LOG2E)
        else:
            x = x * (scale * LOG2E)
        if ALIBI:
            x -= tl.abs(i[:, None] - j[None, :]).to(tl.float32) * (slope * LOG2E)[:, None]
        sees = visible(i[:, None], j[None, :], S, left, right, prefix, chunk, LEFT, RIGHT, PREFIX, CHUNK)
        x = tl.where(sees, x, float("-inf"))
        m_new = tl.maximum(m, tl.max(x, 1))
        pivot = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(x - pivot[:, None])
        alpha = tl.exp2(m - pivot)
        l = l * alpha + tl.sum(p, 1)
        if SCALED:
            p *= tl.load(v_scale_ptr + lines, mask=there, other=0.0)[None, :]
        if CAREFUL:
            p = tl.where(sees, p + poison(v, 1)[None, :], 0.0)
            v = finite(v)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        m = m_new
    return m, l, acc


@triton.jit
def _rows_of(
    cu_q_ptr, B, H, T, tiles,
    GROUP: tl.constexpr, HEADS: tl.constexpr, PACKED: tl.constexpr, BLOCK_T: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Of a program's tile: its sequence, where that begins, its queries, its key head; of each row the query and the head."""
    PARTS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    heads = H // GROUP * PARTS
    slot = tl.program_id(0) // heads
    h_k = tl.program_id(0) % heads // PARTS
    row_0 = tl.cast(0, tl.int64)
    if PACKED:
        b, i_t = packed_tile(slot, cu_q_ptr, B, BLOCK_T)
        row_0 = tl.load(cu_q_ptr + b).to(tl.int64)
        T = (tl.load(cu_q_ptr + b + 1) - row_0).to(tl.int32)
    else:
        b = slot // tiles
        i_t = slot % tiles
        row_0 += b.to(tl.int64) * T
    r = tl.arange(0, ROWS)
    t = i_t * BLOCK_T + r // HEADS
    g = tl.program_id(0) % PARTS * HEADS + r % HEADS
    there = (t < T) & (r < BLOCK_T * HEADS) & (g < GROUP)
    return b, row_0, T, i_t * BLOCK_T, h_k, t, h_k * GROUP + g, there


# fmt: off
@triton.jit(
    do_not_specialize=["B", "H", "T", "total", "tiles", "chunks", "table_stride", "left", "right", "prefix", "chunk"],
    do_not_specialize_on_alignment=["table_ptr", "lengths_ptr", "cu_q_ptr"],
)
def _forward(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, parts_ptr, table_ptr, lengths_ptr, cu_q_ptr, alibi_ptr, sinks_ptr,
    q_stride_t, q_stride_h, k_stride_p, k_stride_s, k_stride_h, v_stride_p, v_stride_s, v_stride_h, table_stride,
    k_scale_ptr, v_scale_ptr, scale_stride_p, scale_stride_s, alibi_stride_b, alibi_stride_h, B, H, T, total, tiles, chunks, scale, softcap, left, right, prefix, chunk,
    GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr,
    SPLIT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_T: tl.constexpr, ROWS: tl.constexpr, BLOCK_S: tl.constexpr, STAGES: tl.constexpr, SCALED: tl.constexpr,
):
    # fmt: on
    b, row_0, T, t_0, h_k, t, h, there = _rows_of(cu_q_ptr, B, H, T, tiles, GROUP, HEADS, PACKED, BLOCK_T, ROWS)
    if t_0 >= T:
        return
    S = tl.load(lengths_ptr + b)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    lines = (row_0 + t).to(tl.int64)
    q_tile = q_ptr + (lines * q_stride_t + h * q_stride_h)[:, None] + d[None, :]
    q = tl.load(q_tile, mask=there[:, None] & (d < D)[None, :], other=0.0)
    k_ptr += h_k.to(tl.int64) * k_stride_h
    v_ptr += h_k.to(tl.int64) * v_stride_h
    k_scale_ptr += h_k
    v_scale_ptr += h_k
    table_ptr += b.to(tl.int64) * table_stride
    offset = S - T
    i = t + offset
    slope = tl.zeros((ROWS,), tl.float32)
    if ALIBI:
        slope = tl.load(alibi_ptr + b * alibi_stride_b + h * alibi_stride_h, mask=there, other=0.0).to(tl.float32)
    sink = tl.zeros((ROWS,), tl.float32)
    if SINKS:
        sink = tl.load(sinks_ptr + h, mask=there, other=0.0).to(tl.float32) * LOG2E

    bottom = tl.minimum(t_0 + BLOCK_T, T) - 1 + offset
    start = first_key(t_0 + offset, left, chunk, LEFT, CHUNK) // BLOCK_S * BLOCK_S
    stop = tl.maximum(last_key(bottom, S, right, prefix, chunk, RIGHT, PREFIX, CHUNK) + 1, start)
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
            scale_stride_p, scale_stride_s, i, S, slope, scale, softcap, left, right, prefix, chunk, D, DV, SIZE, LEFT, RIGHT, PREFIX,
            CHUNK, SOFTCAP, ALIBI, PRECISION, BLOCK_D, BLOCK_DV, ROWS, BLOCK_S, STAGES, SCALED, False)
        if LEFT or RIGHT or PREFIX or CHUNK:
            # a value of NaN with a weight of 0: only who sees it may have it
            if tl.max(tl.where(acc_c == acc_c, 0, 1)) > 0:
                m_c, l_c, acc_c = _walk(
                    q, low, high, k_ptr, v_ptr, table_ptr, k_stride_p, k_stride_s, v_stride_p, v_stride_s, k_scale_ptr,
                    v_scale_ptr, scale_stride_p, scale_stride_s, i, S, slope, scale, softcap, left, right, prefix, chunk, D, DV,
                    SIZE, LEFT, RIGHT, PREFIX, CHUNK, SOFTCAP, ALIBI, PRECISION, BLOCK_D, BLOCK_DV, ROWS, 16, 1, SCALED, True)
        # fmt: on
        m, l, acc = _joined(m, l, acc, m_c, l_c, acc_c)
    if SPLIT:
        # (total, H, chunks) lines of DV outputs, a maximum and a sum
        part = ((lines * H + h) * chunks + tl.program_id(1)) * (DV + 2)
        tl.store(parts_ptr + part[:, None] + dv[None, :], acc, mask=there[:, None] & (dv < DV)[None, :])
        tl.store(parts_ptr + part + DV, m, mask=there)
        tl.store(parts_ptr + part + DV + 1, l, mask=there)
    else:
        finish(m, l, acc, sink, o_ptr, lse_ptr, b, H, T, total, t, h, lines, there, DV, SINKS, PACKED, BLOCK_DV)


# fmt: off
@triton.jit(
    do_not_specialize=["B", "H", "T", "total", "tiles", "chunks", "left", "right", "prefix", "chunk"],
    do_not_specialize_on_alignment=["lengths_ptr", "cu_q_ptr"],
)
def _join(
    o_ptr, lse_ptr, parts_ptr, lengths_ptr, cu_q_ptr, sinks_ptr, B, H, T, total, tiles, chunks, left, right, prefix, chunk,
    GROUP: tl.constexpr, HEADS: tl.constexpr, DV: tl.constexpr, PACKED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    PREFIX: tl.constexpr, CHUNK: tl.constexpr, SINKS: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_T: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    # fmt: on
    """A tile's chunks, in their order."""
    b, row_0, T, t_0, _, t, h, there = _rows_of(cu_q_ptr, B, H, T, tiles, GROUP, HEADS, PACKED, BLOCK_T, ROWS)
    if t_0 >= T:
        return
    S = tl.load(lengths_ptr + b)
    dv = tl.arange(0, BLOCK_DV)
    lines = (row_0 + t).to(tl.int64)
    offset = S - T
    bottom = tl.minimum(t_0 + BLOCK_T, T) - 1 + offset
    start = first_key(t_0 + offset, left, chunk, LEFT, CHUNK) // BLOCK_S * BLOCK_S
    stop = tl.maximum(last_key(bottom, S, right, prefix, chunk, RIGHT, PREFIX, CHUNK) + 1, start)
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    l = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BLOCK_DV), tl.float32)
    for c in range(start // CHUNK_KEYS, tl.cdiv(stop, CHUNK_KEYS)):
        part = ((lines * H + h) * chunks + c) * (DV + 2)
        acc_c = tl.load(parts_ptr + part[:, None] + dv[None, :], mask=there[:, None] & (dv < DV)[None, :], other=0.0)
        m_c = tl.load(parts_ptr + part + DV, mask=there, other=float("-inf"))
        l_c = tl.load(parts_ptr + part + DV + 1, mask=there, other=0.0)
        m, l, acc = _joined(m, l, acc, m_c, l_c, acc_c)
    sink = tl.zeros((ROWS,), tl.float32)
    if SINKS:
        sink = tl.load(sinks_ptr + h, mask=there, other=0.0).to(tl.float32) * LOG2E
    finish(m, l, acc, sink, o_ptr, lse_ptr, b, H, T, total, t, h, lines, there, DV, SINKS, PACKED, BLOCK_DV)


_start_forward, _start_join = Kernel(_forward), Kernel(_join)


def attend(q: Tensor, cache: PagedKV, options: Options, spec: Spec) -> tuple[Tensor, Tensor]:
    """o (B, T, H, Dv) and lse (B, H, T), or packed (total, H, Dv) and (H, total)."""
    packed = cache.cu_q is not None
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (cache.k, cache.v))
    rows = (q if packed else q.flatten(0, 1)).contiguous()
    total, H, _ = rows.shape
    B, T = cache.table.shape[0], total if packed else q.shape[1]
    o = torch.empty((*q.shape[:-1], spec.dim_v), dtype=q.dtype, device=q.device)
    lse = torch.empty((H, total) if packed else (B, H, T), dtype=torch.float32, device=q.device)
    if not lse.numel():
        return o, lse
    kind = (spec, packed, cache.size, 0 if packed else T)
    constants = _constants(*kind)
    block_t = constants["BLOCK_T"]
    tiles = -(-T // block_t)
    parts_of_group = -(-spec.group // constants["HEADS"])
    programs = (total // block_t + B if packed else tiles * B) * (H // spec.group) * parts_of_group
    # the most that a table has room for: lengths are on the GPU, and nobody waits for them
    chunks = max(-(-cache.table.shape[1] * cache.size // CHUNK_KEYS.value), 1)
    numbers = total * H * chunks * (spec.dim_v + 2)
    split = programs < ENOUGH and chunks > 1 and numbers <= MOST_NUMBERS
    parts = torch.empty(numbers if split else 0, dtype=torch.float32, device=q.device)
    table, lengths = cache.table.contiguous(), cache.lengths.contiguous()
    cu_q, sinks = (lengths if x is None else x.contiguous() for x in (cache.cu_q, options.sinks))
    alibi = options.alibi
    slopes = (0, 0) if alibi is None else (alibi.stride(0) if alibi.ndim == 2 else 0, alibi.stride(-1))
    bounds = constants_of(spec).numbers[2:6]
    sizes = (B, H, T, total, tiles, chunks)
    arguments = (
        rows, k, v, o, lse, parts if split else lse, table, lengths, cu_q, lengths if alibi is None else alibi, sinks,
        *rows.stride()[:2], *k.stride()[:3], *v.stride()[:3], table.stride(0), *cache.scales_and_strides(), *slopes,
        *sizes, spec.scale, spec.softcap, *bounds,
    )  # fmt: skip
    _start_forward((programs, chunks if split else 1, 1), arguments, _with_split(*kind, split))
    if split:
        arguments = (o, lse, parts, lengths, cu_q, sinks, *sizes, *bounds)
        _start_join((programs, 1, 1), arguments, _constants_of_join(*kind))
    return o, lse


def flags_of(spec: Spec, T: int) -> dict[str, Any]:
    """A kernel's flags; of a single query under a causal mask, which sees every key, those of no mask."""
    flags = constants_of(spec).flags
    return flags | {"RIGHT": False, "PREFIX": False} if T == 1 and spec.mask.right == 0 else flags


@cache
def _constants(spec: Spec, packed: bool, size: int, T: int) -> dict[str, Any]:
    """The compile-time arguments; T is the number of queries if all sequences have as many."""
    flags = flags_of(spec, T)
    names = ("GROUP", "D", "DV", "LEFT", "RIGHT", "PREFIX", "CHUNK", "SOFTCAP", "ALIBI", "PRECISION")
    wide = padded(max(spec.dim, spec.dim_v)) > 128 or spec.dtype == torch.float32
    # rows of a tile: what the matrix instructions take at least, and of few queries no more than there are
    most = 32 if wide else 64
    heads = min(spec.group, most)
    rows = min(max(triton.next_power_of_2(T * heads), 16), most) if T else most
    return {name: flags[name] for name in names} | {
        "SINKS": spec.has_sinks, "SCALED": spec.has_kv_scales, "PACKED": packed, "SIZE": size, "BLOCK_D": max(padded(spec.dim), 16),
        "BLOCK_DV": max(padded(spec.dim_v), 16), "BLOCK_T": rows // heads, "ROWS": rows, "HEADS": heads,
        "BLOCK_S": 32 if wide else 64, "STAGES": 2 if wide else 3, "num_warps": 4,
    }  # fmt: skip


@cache
def _with_split(spec: Spec, packed: bool, size: int, T: int, split: bool) -> dict[str, Any]:
    return _constants(spec, packed, size, T) | {"SPLIT": split}


@cache
def _constants_of_join(spec: Spec, packed: bool, size: int, T: int) -> dict[str, Any]:
    names = ("GROUP", "HEADS", "DV", "PACKED", "LEFT", "RIGHT", "PREFIX", "CHUNK", "SINKS", "BLOCK_DV", "BLOCK_T", "ROWS", "BLOCK_S")
    constants = _constants(spec, packed, size, T)
    return {name: constants[name] for name in names} | {"num_warps": 4}
