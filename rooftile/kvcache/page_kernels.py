"""Memory-bound Triton kernels of a paged cache: writing tokens into their slots, gathering sequences, copying blocks."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.fused.kernels.rope import NUMBERS, rotate_heads, rotates, store_heads
from rooftile.runtime.dependent_launch import overlaps, wait_for_inputs
from rooftile.runtime.launch import Kernel

# how much of a block one program copies, in words of four bytes
WORDS = 1024


# fmt: off
@triton.jit(do_not_specialize=["total"], do_not_specialize_on_alignment=["slots_ptr"])
def _write(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, cos_ptr, sin_ptr, total,
    k_stride_t, k_stride_h, v_stride_t, v_stride_h, k_stride_p, k_stride_s, k_stride_n, v_stride_p, v_stride_s, v_stride_n,
    cos_stride_t, k_scale_ptr, v_scale_ptr, scale_stride_p, scale_stride_s, q_ptr, o_ptr, q_stride_t, q_stride_h,
    SIZE: tl.constexpr, HEADS: tl.constexpr, Q_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_HALF: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr,
):
    # fmt: on
    """Writes keys and values of BLOCK_R heads into their slots, keys rotated; further programs rotate queries.

    A token with a slot below 0 is left out.
    """
    if PDL:
        wait_for_inputs()
    if Q_HEADS > 0:
        n = tl.program_id(0) - tl.cdiv(total * HEADS, BLOCK_R)
        if n >= 0:
            rotate_heads(
                q_ptr, o_ptr, cos_ptr, sin_ptr, total, total, n, q_stride_t, q_stride_h, cos_stride_t, Q_HEADS, D, HALF, BLOCK_R,
                BLOCK_D, BLOCK_HALF,
            )  # fmt: skip
            return
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    t, h = r // HEADS, r % HEADS
    slot = tl.load(slots_ptr + t, mask=t < total, other=-1).to(tl.int64)
    there = slot >= 0
    page, place = slot // SIZE, slot % SIZE
    waves = (t * cos_stride_t)[:, None]
    scale = page * scale_stride_p + place * scale_stride_s + h
    store_heads(
        k_ptr + (t * k_stride_t + h * k_stride_h)[:, None],
        k_cache_ptr + (page * k_stride_p + place * k_stride_s + h * k_stride_n)[:, None],
        cos_ptr + waves, sin_ptr + waves, k_scale_ptr + scale, there, D, HALF, BLOCK_D, BLOCK_HALF, SCALED,
    )  # fmt: skip
    store_heads(
        v_ptr + (t * v_stride_t + h * v_stride_h)[:, None],
        v_cache_ptr + (page * v_stride_p + place * v_stride_s + h * v_stride_n)[:, None],
        cos_ptr, sin_ptr, v_scale_ptr + scale, there, D, 0, BLOCK_D, BLOCK_HALF, SCALED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["words"])
def _copy(storage_ptr, pairs_ptr, stride, words, WORDS: tl.constexpr):
    """Copies WORDS words of a block, from the first block of a pair to the second."""
    source = tl.load(pairs_ptr + 2 * tl.program_id(1))
    target = tl.load(pairs_ptr + 2 * tl.program_id(1) + 1)
    n = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    piece = tl.load(storage_ptr + source * stride + n, mask=n < words)
    tl.store(storage_ptr + target * stride + n, piece, mask=n < words)


# fmt: off
@triton.jit(
    do_not_specialize=["B", "N", "table_stride"], do_not_specialize_on_alignment=["table_ptr", "lengths_ptr", "cu_k_ptr"]
)
def _gather(
    k_cache_ptr, v_cache_ptr, k_ptr, v_ptr, table_ptr, lengths_ptr, cu_k_ptr, B, N,
    k_stride_p, k_stride_s, k_stride_n, v_stride_p, v_stride_s, v_stride_n, table_stride, k_scale_ptr, v_scale_ptr,
    scale_stride_p, scale_stride_s,
    SIZE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAST: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, SCALED: tl.constexpr,
):
    # fmt: on
    """Copies some heads of some tokens out of a block; writes zeros after the last sequence."""
    b = tl.program_id(1)
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    j, h = r // HEADS, r % HEADS
    line = (tl.load(cu_k_ptr + b).to(tl.int64) + j) * HEADS + h
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    length = tl.load(lengths_ptr + b, mask=b < B, other=0)
    if tl.program_id(0) * BLOCK_R >= length * HEADS:
        if b == B:
            past = (j < PAST)[:, None]
            tl.store(k_ptr + line[:, None] * D + d[None, :], 0.0, mask=past & (d < D)[None, :])
            tl.store(v_ptr + line[:, None] * DV + dv[None, :], 0.0, mask=past & (dv < DV)[None, :])
        return
    there = (j < length)[:, None]
    page = tl.load(table_ptr + b * table_stride + j // SIZE, mask=j < length, other=0).to(tl.int64)
    k_place = page * k_stride_p + j % SIZE * k_stride_s + h * k_stride_n
    v_place = page * v_stride_p + j % SIZE * v_stride_s + h * v_stride_n
    k = tl.load(k_cache_ptr + k_place[:, None] + d[None, :], mask=there & (d < D)[None, :]).to(tl.float32)
    v = tl.load(v_cache_ptr + v_place[:, None] + dv[None, :], mask=there & (dv < DV)[None, :]).to(tl.float32)
    if SCALED:
        scale = page * scale_stride_p + j % SIZE * scale_stride_s + h
        k *= tl.load(k_scale_ptr + scale, mask=j < length, other=0.0)[:, None]
        v *= tl.load(v_scale_ptr + scale, mask=j < length, other=0.0)[:, None]
    tl.store(k_ptr + line[:, None] * D + d[None, :], k.to(k_ptr.dtype.element_ty), mask=there & (d < D)[None, :])
    tl.store(v_ptr + line[:, None] * DV + dv[None, :], v.to(v_ptr.dtype.element_ty), mask=there & (dv < DV)[None, :])


_start_write, _start_gather, _start_copy = Kernel(_write), Kernel(_gather), Kernel(_copy)
_COPIES = {"WORDS": WORDS, "num_warps": 8}


def write(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, cos: Tensor | None, sin: Tensor | None,
    k_scale: Tensor | None, v_scale: Tensor | None, q: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """Puts k and v (total, heads, D) into slots (total,) of a layer's caches (blocks, size, heads, D); k rotated.

    With scales (blocks, size, heads) the caches are in FP8 or INT8. Returns q (total, q_heads, D) rotated, by the same kernel.
    """
    total, heads, dim = k.shape
    o = None if q is None else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not total:
        return o
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    x = k if q is None else q if q.stride(2) == 1 else q.contiguous()
    half = 0 if cos is None else cos.shape[1]
    if cos is None:
        cos = sin = k
    q_heads = 0 if q is None else q.shape[1]
    constants = _writes(heads, q_heads, dim, half, k_cache.shape[1], k_scale is not None, k.device)
    block_r = constants["BLOCK_R"]
    arguments = (
        k, v, k_cache, v_cache, slots, cos, sin, total, *k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3],
        *v_cache.stride()[:3], cos.stride(0), *_scales(k_scale, v_scale, k_cache), x, x if o is None else o, *x.stride()[:2],
    )  # fmt: skip
    _start_write((triton.cdiv(total * heads, block_r) + triton.cdiv(total * q_heads, block_r), 1, 1), arguments, constants)
    return o


def _scales(k_scale: Tensor | None, v_scale: Tensor | None, unread: Tensor) -> tuple[Tensor | int, ...]:
    """Returns the scales of keys and values and their strides in the kernels' form; any tensor stands in for missing ones."""
    return (unread, unread, 0, 0) if k_scale is None else (k_scale, v_scale, *k_scale.stride()[:2])


def gather(
    k_cache: Tensor, v_cache: Tensor, table: Tensor, lengths: Tensor, k_scale: Tensor | None, v_scale: Tensor | None,
    dtype: torch.dtype, past: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Copies keys and values sequence after sequence; the copy has room for all that the table can hold and `past` rows more.

    Returns keys, values and offsets.
    """
    B, N = table.shape
    _, size, heads, dim = k_cache.shape
    dim_v = v_cache.shape[3]
    k_cache, v_cache = (x if x.stride(3) == 1 else x.contiguous() for x in (k_cache, v_cache))
    room = N * size
    k, v = (torch.empty(B * room + past, heads, x.shape[3], dtype=dtype, device=x.device) for x in (k_cache, v_cache))
    lengths, table = lengths.contiguous(), table.contiguous()
    cu_k = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    constants = _gathers(heads, dim, dim_v, size, past, k_scale is not None)
    arguments = (
        k_cache, v_cache, k, v, table, lengths, cu_k, B, N, *k_cache.stride()[:3], *v_cache.stride()[:3], table.stride(0),
        *_scales(k_scale, v_scale, k),
    )  # fmt: skip
    _start_gather((triton.cdiv(max(room, past) * heads, constants["BLOCK_R"]), B + 1, 1), arguments, constants)
    return k, v, cu_k


def copy_blocks(storage: Tensor, pairs: Tensor) -> None:
    """Copies blocks of `storage`, (source, target) each in pairs (n, 2), int64; no target is another's source."""
    blocks = storage.flatten(1).view(torch.int32)
    words = blocks.shape[1]
    grid = (triton.cdiv(words, WORDS), pairs.shape[0], 1)
    _start_copy(grid, (blocks, pairs, blocks.stride(0), words), _COPIES)


@cache
def _gathers(heads: int, dim: int, dim_v: int, size: int, past: int, scaled: bool) -> dict[str, int]:
    block_d, block_dv = triton.next_power_of_2(dim), triton.next_power_of_2(dim_v)
    return {
        "SIZE": size, "HEADS": heads, "D": dim, "DV": dim_v, "PAST": past, "BLOCK_R": max(NUMBERS // max(block_d, block_dv), 1),
        "BLOCK_D": block_d, "BLOCK_DV": block_dv, "SCALED": scaled,
    }  # fmt: skip


@cache
def _writes(
    heads: int, q_heads: int, dim: int, half: int, size: int, scaled: bool, device: torch.device
) -> dict[str, int]:  # fmt: skip
    return rotates(heads, dim, half) | {"Q_HEADS": q_heads, "SIZE": size, "SCALED": scaled} | overlaps(device)
