"""Attention of few queries to a paged cache: every program reads as many keys as every other.

The key blocks of all sequences are cut into equal splits (`split_kv`). A split has a program for each key head: its programs read the same blocks of the cache at about the same time, and a block's heads lie side by side in DRAM.
The lengths are read from memory; the host does not wait for them. Where the borders fall depends on the neighbours in the batch, and with them
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

from rooftile.exact.backends.device.split_kv import (
    BATCH,
    LOG2E,
    MergeSpec,
    block_offsets,
    find_sequence,
    range_start,
    start_merge,
    write_output,
)
from rooftile.exact.backends.device.visibility import MaskNumbers
from rooftile.exact.backends.triton.call import constants_of, padded
from rooftile.exact.backends.triton.paged_fwd import _walk, paged_spec, spec_of
from rooftile.exact.spec import Options, Spec, output_dtype
from rooftile.kvcache import PagedKV
from rooftile.runtime.dependent_launch import has_dependent_launches
from rooftile.runtime.launch import Kernel


@triton.jit
def _rows(b, head, H, T, SPEC: tl.constexpr):
    """Returns, per row of a tile, the query, the head, whether the row exists, and its line among all queries."""
    TILES_PER_GROUP: tl.constexpr = (SPEC.GROUP + SPEC.HEADS - 1) // SPEC.HEADS
    r = tl.arange(0, SPEC.ROWS)
    t = r // SPEC.HEADS
    g = head % TILES_PER_GROUP * SPEC.HEADS + r % SPEC.HEADS
    return t, head // TILES_PER_GROUP * SPEC.GROUP + g, (t < T) & (g < SPEC.GROUP), b.to(tl.int64) * T + t


# fmt: off
@triton.jit(
    do_not_specialize=["B", "H", "T", "table_stride", "left", "right", "prefix", "chunk"],
    do_not_specialize_on_alignment=["table_ptr", "lengths_ptr"],
)
def _decode(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, partials_ptr, table_ptr, lengths_ptr, alibi_ptr, sinks_ptr,
    q_strides, k_strides, v_strides, table_stride, k_scale_ptr, v_scale_ptr, scale_strides, alibi_strides,
    B, H, T, scale, softcap, left, right, prefix, chunk,
    SPEC: tl.constexpr, BATCH: tl.constexpr, BLOCK_S: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):
    # fmt: on
    ROWS: tl.constexpr = SPEC.ROWS
    q_stride_t, q_stride_h = q_strides
    k_stride_p, k_stride_s, k_stride_h = k_strides
    v_stride_p, v_stride_s, v_stride_h = v_strides
    scale_stride_p, scale_stride_s = scale_strides
    alibi_stride_b, alibi_stride_h = alibi_strides
    mask = MaskNumbers(left, right, prefix, chunk)
    ends, total = block_offsets(lengths_ptr, B, T, mask, SPEC, BATCH, BLOCK_S)
    head = tl.program_id(0)
    blocks_per_split = tl.cdiv(total, tl.num_programs(1))
    place = range_start(tl.program_id(1), blocks_per_split, total)
    last = range_start(tl.program_id(1) + 1, blocks_per_split, total)
    p = tl.program_id(1) * tl.num_programs(0) + head
    d = tl.arange(0, SPEC.BLOCK_D)
    dv = tl.arange(0, SPEC.BLOCK_DV)
    while place < last:
        b, S, start, stop, n, first = find_sequence(place, ends, lengths_ptr, T, mask, SPEC, BLOCK_S)
        t, h, in_bounds, lines = _rows(b, head, H, T, SPEC)
        h_k = (head // ((SPEC.GROUP + SPEC.HEADS - 1) // SPEC.HEADS)).to(tl.int64)
        i = t + S - T
        low = start + first * BLOCK_S
        count = tl.minimum(last - place, n - first)
        high = tl.minimum(stop, low + count * BLOCK_S)
        q_tile = q_ptr + (lines * q_stride_t + h * q_stride_h)[:, None] + d[None, :]
        q = tl.load(q_tile, mask=in_bounds[:, None] & (d < SPEC.D)[None, :], other=0.0)
        slope = tl.zeros((ROWS,), tl.float32)
        if SPEC.ALIBI:
            slope = tl.load(alibi_ptr + b * alibi_stride_b + h * alibi_stride_h, mask=in_bounds, other=0.0).to(tl.float32)
        k_head, v_head, pages = k_ptr + h_k * k_stride_h, v_ptr + h_k * v_stride_h, table_ptr + b.to(tl.int64) * table_stride
        # fmt: off
        m, l, acc = _walk(
            q, low, high, k_head, v_head, pages, k_stride_p, k_stride_s, v_stride_p, v_stride_s, k_scale_ptr + h_k,
            v_scale_ptr + h_k, scale_stride_p, scale_stride_s, i, S, slope, scale, softcap, mask, SPEC, BLOCK_S, STAGES, False)
        if SPEC.LEFT or SPEC.RIGHT or SPEC.PREFIX or SPEC.CHUNK:
            # 0 * NaN is NaN: recompute this tile with hidden non-finite values set to zero
            if tl.max(tl.where(acc == acc, 0, 1)) > 0:
                m, l, acc = _walk(
                    q, low, high, k_head, v_head, pages, k_stride_p, k_stride_s, v_stride_p, v_stride_s, k_scale_ptr + h_k,
                    v_scale_ptr + h_k, scale_stride_p, scale_stride_s, i, S, slope, scale, softcap, mask, SPEC, 16, 1, True)
        # fmt: on
        if count == n:
            sink = tl.zeros((ROWS,), tl.float32)
            if SPEC.SINKS:
                sink = tl.load(sinks_ptr + h, mask=in_bounds, other=0.0).to(tl.float32) * LOG2E
            write_output(m, l, acc, sink, o_ptr, lse_ptr, b, H, T, 0, t, h, lines, in_bounds, SPEC.DV, SPEC.SINKS, False, SPEC.BLOCK_DV)
        else:
            # a program's partials: one for a tile that began before it, and of one that goes on after it
            partial = partials_ptr + ((2 * p + (first == 0)) * ROWS + tl.arange(0, ROWS)).to(tl.int64) * (SPEC.DV + 2)
            tl.store(partial[:, None] + dv[None, :], acc, mask=in_bounds[:, None] & (dv < SPEC.DV)[None, :])
            tl.store(partial + SPEC.DV, m, mask=in_bounds)
            tl.store(partial + SPEC.DV + 1, l, mask=in_bounds)
        place += count
    if PDL:
        gdc_launch_dependents()


_start_decode = Kernel(_decode)


def attend(q: Tensor, cache: PagedKV, options: Options, spec: Spec) -> tuple[Tensor, Tensor]:
    """o (B, T, H, Dv) and lse (B, H, T), of q (B, T, H, D) with few queries per sequence (see `fits`)."""
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (cache.k, cache.v))
    B, T, H, _ = q.shape
    rows = q.flatten(0, 1)
    rows = rows if rows.stride(2) == 1 else rows.contiguous()
    o = torch.empty((*q.shape[:-1], spec.dim_v), dtype=output_dtype(q, spec), device=q.device)
    lse = torch.empty((B, H, T), dtype=torch.float32, device=q.device)
    constants = _constants(spec, cache.size, T, max(BATCH, triton.next_power_of_2(B)))
    known = constants["SPEC"]
    heads = H // spec.group * triton.cdiv(spec.group, known.HEADS)
    splits = max(_programs(q.device, spec) // heads, 1)
    partials = torch.empty(2 * splits * heads * known.ROWS * (spec.dim_v + 2), dtype=torch.float32, device=q.device)
    table, lengths = cache.table.contiguous(), cache.lengths.contiguous()
    alibi = options.alibi
    sinks = lse if options.sinks is None else options.sinks.contiguous()
    slopes = (0, 0) if alibi is None else (alibi.stride(0) if alibi.ndim == 2 else 0, alibi.stride(-1))
    numbers = constants_of(spec).numbers
    *scales, scale_stride_p, scale_stride_s = cache.scales_and_strides()
    arguments = (
        rows, k, v, o, lse, partials, table, lengths, lse if alibi is None else alibi, sinks,
        rows.stride()[:2], k.stride()[:3], v.stride()[:3], table.stride(0), *scales, (scale_stride_p, scale_stride_s), slopes,
        B, H, T, *numbers[:6],
    )  # fmt: skip
    _start_decode((heads, splits, 1), arguments, constants)
    if splits > 1:
        grid = (heads, splits - 1, known.HEADS * T)
        constants = _constants_of_merge(spec, cache.size, T, constants["BATCH"])
        start_merge(grid, (o, lse, partials, lengths, sinks, B, H, T, *numbers[2:6]), constants)
    return o, lse


def fits(spec: Spec, T: int) -> bool:
    """Whether T queries of a group's heads are one tile."""
    return T * min(spec.group, _most(spec)) <= _most(spec)


@cache
def _programs(device: torch.device, spec: Spec) -> int:
    """Returns how many programs run at once: two per multiprocessor, or four with half the warps."""
    if device.type == "cpu":
        # interpreted
        return 10
    return 8 // _warps(spec) * torch.cuda.get_device_properties(device).multi_processor_count


def _warps(spec: Spec) -> int:
    """Returns the warps per program. Narrow heads are read faster by more and smaller programs."""
    return 2 if max(spec.dim, spec.dim_v) <= 64 else 4


def _wide(spec: Spec) -> bool:
    return padded(max(spec.dim, spec.dim_v)) > 128 or spec.dtype == torch.float32


def _most(spec: Spec) -> int:
    """Rows of a tile at most: two programs share a multiprocessor's registers."""
    return 16 if _wide(spec) else 32


@cache
def _constants(spec: Spec, size: int, T: int, batch: int) -> dict[str, Any]:
    heads = min(spec.group, _most(spec))
    known = paged_spec(spec_of(spec, T), spec, size, heads, max(triton.next_power_of_2(T * heads), 16))
    return {
        "SPEC": known, "BATCH": batch, "BLOCK_S": 32 if _wide(spec) else 64, "STAGES": 6, "num_warps": _warps(spec),
        "PDL": has_dependent_launches(spec.device),
    }  # fmt: skip


@cache
def _constants_of_merge(spec: Spec, size: int, T: int, batch: int) -> dict[str, Any]:
    constants = _constants(spec, size, T, batch)
    known = MergeSpec(**{name: value for name, value in constants["SPEC"]._asdict().items() if name in MergeSpec._fields})
    shared = {name: constants[name] for name in ("BATCH", "BLOCK_S", "PDL")}
    return {"SPEC": known, **shared, "num_warps": 2, "launch_pdl": constants["PDL"]}
