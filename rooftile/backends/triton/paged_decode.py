"""Attention of few queries to a paged cache: every program reads as many keys as every other.

The keys of all sequences are one row of work, cut into as many parts as there are teams (`row_of_work`). A team has a program for
each key head: its programs read the same blocks of the cache at about the same time, and a block's heads lie side by side in DRAM.
The lengths are read from memory, nobody waits for them. Where the borders fall depends on the neighbours in the batch, and with them
the last bits: `deterministic` goes by `paged_fwd`, whose chunks are fixed.

One loop over the blocks of a part, whosever they are, would keep copies in flight between sequences. It was slower: what it asks of
each block costs more than the gaps.

Dao et al., Flash-Decoding, 2023.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from rooftile.backends.device.split_kv import BATCH, LOG2E, ends_of, finish, part, sequence_at, start_merge
from rooftile.backends.triton.call import constants_of, padded
from rooftile.backends.triton.paged_fwd import _walk, flags_of
from rooftile.kvcache import PagedKV
from rooftile.launch import Kernel
from rooftile.spec import Options, Spec


@triton.jit
def _rows(b, head, H, T, GROUP: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Of a tile's rows the query, the head, whether there is one, and its line among all queries."""
    PARTS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    r = tl.arange(0, ROWS)
    t = r // HEADS
    g = head % PARTS * HEADS + r % HEADS
    return t, head // PARTS * GROUP + g, (t < T) & (g < GROUP), b.to(tl.int64) * T + t


# fmt: off
@triton.jit(
    do_not_specialize=["B", "H", "T", "table_stride", "left", "right", "prefix", "chunk"],
    do_not_specialize_on_alignment=["table_ptr", "lengths_ptr"],
)
def _decode(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, parts_ptr, table_ptr, lengths_ptr, alibi_ptr, sinks_ptr,
    q_stride_t, q_stride_h, k_stride_p, k_stride_s, k_stride_h, v_stride_p, v_stride_s, v_stride_h, table_stride,
    k_scale_ptr, v_scale_ptr, scale_stride_p, scale_stride_s, alibi_stride_b, alibi_stride_h, B, H, T, scale, softcap, left, right, prefix, chunk,
    GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr, BATCH: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    SINKS: tl.constexpr, PRECISION: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_S: tl.constexpr, STAGES: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr,
):
    # fmt: on
    ends, total = ends_of(lengths_ptr, B, T, left, right, prefix, chunk, BATCH, LEFT, RIGHT, PREFIX, CHUNK, BLOCK_S)
    head = tl.program_id(0)
    share = tl.cdiv(total, tl.num_programs(1))
    place = part(tl.program_id(1), share, total)
    last = part(tl.program_id(1) + 1, share, total)
    p = tl.program_id(1) * tl.num_programs(0) + head
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    while place < last:
        b, S, start, stop, n, first = sequence_at(
            place, ends, lengths_ptr, T, left, right, prefix, chunk, LEFT, RIGHT, PREFIX, CHUNK, BLOCK_S
        )
        t, h, there, lines = _rows(b, head, H, T, GROUP, HEADS, ROWS)
        h_k = (head // ((GROUP + HEADS - 1) // HEADS)).to(tl.int64)
        i = t + S - T
        low = start + first * BLOCK_S
        count = tl.minimum(last - place, n - first)
        high = tl.minimum(stop, low + count * BLOCK_S)
        q_tile = q_ptr + (lines * q_stride_t + h * q_stride_h)[:, None] + d[None, :]
        q = tl.load(q_tile, mask=there[:, None] & (d < D)[None, :], other=0.0)
        slope = tl.zeros((ROWS,), tl.float32)
        if ALIBI:
            slope = tl.load(alibi_ptr + b * alibi_stride_b + h * alibi_stride_h, mask=there, other=0.0).to(tl.float32)
        k_head, v_head, pages = k_ptr + h_k * k_stride_h, v_ptr + h_k * v_stride_h, table_ptr + b.to(tl.int64) * table_stride
        # fmt: off
        m, l, acc = _walk(
            q, low, high, k_head, v_head, pages, k_stride_p, k_stride_s, v_stride_p, v_stride_s, k_scale_ptr + h_k,
            v_scale_ptr + h_k, scale_stride_p, scale_stride_s, i, S, slope, scale, softcap, left, right, prefix, chunk, D, DV, SIZE,
            LEFT, RIGHT, PREFIX, CHUNK, SOFTCAP, ALIBI, PRECISION, BLOCK_D, BLOCK_DV, ROWS, BLOCK_S, STAGES, SCALED, False)
        if LEFT or RIGHT or PREFIX or CHUNK:
            # a value of NaN with a weight of 0: only who sees it may have it
            if tl.max(tl.where(acc == acc, 0, 1)) > 0:
                m, l, acc = _walk(
                    q, low, high, k_head, v_head, pages, k_stride_p, k_stride_s, v_stride_p, v_stride_s, k_scale_ptr + h_k,
                    v_scale_ptr + h_k, scale_stride_p, scale_stride_s, i, S, slope, scale, softcap, left, right, prefix, chunk, D,
                    DV, SIZE, LEFT, RIGHT, PREFIX, CHUNK, SOFTCAP, ALIBI, PRECISION, BLOCK_D, BLOCK_DV, ROWS, 16, 1, SCALED, True)
        # fmt: on
        if count == n:
            sink = tl.zeros((ROWS,), tl.float32)
            if SINKS:
                sink = tl.load(sinks_ptr + h, mask=there, other=0.0).to(tl.float32) * LOG2E
            finish(m, l, acc, sink, o_ptr, lse_ptr, b, H, T, 0, t, h, lines, there, DV, SINKS, False, BLOCK_DV)
        else:
            # a program's pieces: of a tile that began before it, and of one that goes on after it
            piece = parts_ptr + ((2 * p + (first == 0)) * ROWS + tl.arange(0, ROWS)).to(tl.int64) * (DV + 2)
            tl.store(piece[:, None] + dv[None, :], acc, mask=there[:, None] & (dv < DV)[None, :])
            tl.store(piece + DV, m, mask=there)
            tl.store(piece + DV + 1, l, mask=there)
        place += count
    if PDL:
        gdc_launch_dependents()


_start_decode = Kernel(_decode)


def attend(q: Tensor, cache: PagedKV, options: Options, spec: Spec) -> tuple[Tensor, Tensor]:
    """o (B, T, H, Dv) and lse (B, H, T), of q (B, T, H, D) with few queries a sequence (see `fits`)."""
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (cache.k, cache.v))
    B, T, H, _ = q.shape
    rows = q.flatten(0, 1)
    rows = rows if rows.stride(2) == 1 else rows.contiguous()
    o = torch.empty((*q.shape[:-1], spec.dim_v), dtype=q.dtype, device=q.device)
    lse = torch.empty((B, H, T), dtype=torch.float32, device=q.device)
    constants = _constants(spec, cache.size, T, max(BATCH, triton.next_power_of_2(B)))
    heads = H // spec.group * triton.cdiv(spec.group, constants["HEADS"])
    teams = max(_programs(q.device, spec) // heads, 1)
    parts = torch.empty(2 * teams * heads * constants["ROWS"] * (spec.dim_v + 2), dtype=torch.float32, device=q.device)
    table, lengths = cache.table.contiguous(), cache.lengths.contiguous()
    alibi = options.alibi
    sinks = lengths if options.sinks is None else options.sinks.contiguous()
    slopes = (0, 0) if alibi is None else (alibi.stride(0) if alibi.ndim == 2 else 0, alibi.stride(-1))
    bounds = constants_of(spec).numbers[2:6]
    arguments = (
        rows, k, v, o, lse, parts, table, lengths, lengths if alibi is None else alibi, sinks,
        *rows.stride()[:2], *k.stride()[:3], *v.stride()[:3], table.stride(0), *cache.scales_and_strides(), *slopes, B, H, T,
        spec.scale, spec.softcap, *bounds,
    )  # fmt: skip
    _start_decode((heads, teams, 1), arguments, constants)
    if teams > 1:
        grid = (heads, teams - 1, constants["HEADS"] * T)
        constants = _constants_of_merge(spec, cache.size, T, constants["BATCH"])
        start_merge(grid, (o, lse, parts, lengths, sinks, B, H, T, *bounds), constants)
    return o, lse


def fits(spec: Spec, T: int) -> bool:
    """Whether T queries of a group's heads are one tile."""
    return T * min(spec.group, _most(spec)) <= _most(spec)


@cache
def _programs(device: torch.device, spec: Spec) -> int:
    """As many as run at once: two on a multiprocessor, or four of half the warps."""
    if device.type == "cpu":
        # interpreted
        return 10
    return 8 // _warps(spec) * torch.cuda.get_device_properties(device).multi_processor_count


def _warps(spec: Spec) -> int:
    """Of a program. Narrow heads are read faster by more and smaller ones."""
    return 2 if max(spec.dim, spec.dim_v) <= 64 else 4


def _wide(spec: Spec) -> bool:
    return padded(max(spec.dim, spec.dim_v)) > 128 or spec.dtype == torch.float32


def _most(spec: Spec) -> int:
    """Rows of a tile at most: two programs share a multiprocessor's registers."""
    return 16 if _wide(spec) else 32


@cache
def _constants(spec: Spec, size: int, T: int, batch: int) -> dict[str, Any]:
    flags = flags_of(spec, T)
    names = ("GROUP", "D", "DV", "LEFT", "RIGHT", "PREFIX", "CHUNK", "SOFTCAP", "ALIBI", "PRECISION")
    heads = min(spec.group, _most(spec))
    return {name: flags[name] for name in names} | {
        "SINKS": spec.has_sinks, "SCALED": spec.has_kv_scales, "SIZE": size, "BATCH": batch, "HEADS": heads, "BLOCK_D": max(padded(spec.dim), 16),
        "BLOCK_DV": max(padded(spec.dim_v), 16), "ROWS": max(triton.next_power_of_2(T * heads), 16), "BLOCK_S": 32 if _wide(spec) else 64, "STAGES": 6,
        "num_warps": _warps(spec), "PDL": spec.device.startswith("sm") and int(spec.device[2:]) >= 90,
    }  # fmt: skip


@cache
def _constants_of_merge(spec: Spec, size: int, T: int, batch: int) -> dict[str, Any]:
    names = ("GROUP", "HEADS", "DV", "BATCH", "LEFT", "RIGHT", "PREFIX", "CHUNK", "SINKS", "BLOCK_DV", "ROWS", "BLOCK_S", "PDL")
    constants = _constants(spec, size, T, batch)
    return {name: constants[name] for name in names} | {"num_warps": 2, "launch_pdl": constants["PDL"]}
