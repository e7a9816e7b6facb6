"""Single tokens' attention to latents in the absorbed form, in place in the cache: each latent is key and value.

    x = scale (q_c C^T + q_r R^T)    m' = max(m, rowmax x)    p = 2^(x - m')
    acc = 2^(m - m') acc + p C       l = 2^(m - m') l + rowsum p

A program owns some heads of a sequence and a part of its keys, since a step has few sequences and many keys: it reads each latent
once and multiplies it twice. Parts of the same length leave acc / l and log2 of the sum, which `_merge` weighs. How long parts
are follows from the columns of the tables, which the host knows, and not from lengths.

DeepSeek-V2, arXiv:2405.04434; Dao et al., Flash-Decoding, 2023.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.runtime.devices import arch
from rooftile.runtime.launch import Kernel

LOG2E = 1.4426950408889634
# a part of fewer keys is not worth the merge
LEAST_KEYS = 128
MOST_PARTS = 64
# programs per processor
WAVES = 2


# fmt: off
@triton.jit(do_not_specialize=["table_stride", "parts"], do_not_specialize_on_alignment=["table_ptr", "lengths_ptr"])
def _decode(
    q_ptr, turning_ptr, cache_ptr, o_ptr, lse_ptr, table_ptr, lengths_ptr,
    scale, q_strides, turning_strides, cache_strides, table_stride, parts,
    H: tl.constexpr, R: tl.constexpr, ROTATED: tl.constexpr, SIZE: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):
    # fmt: on
    """Attends BLOCK_H heads of a sequence to a part of its keys."""
    b, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    r, d = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_T)
    in_h, in_r, in_d = (h < H)[:, None], (r < R)[None, :], (d < ROTATED)[None, :]
    q = tl.load(q_ptr + b * q_strides[0] + (h * q_strides[1])[:, None] + r[None, :], mask=in_h & in_r, other=0.0)
    turning = tl.load(
        turning_ptr + b * turning_strides[0] + (h * turning_strides[1])[:, None] + d[None, :], mask=in_h & in_d, other=0.0
    )
    length = tl.load(lengths_ptr + b)
    each = tl.cdiv(tl.cdiv(length, parts), BLOCK_S) * BLOCK_S
    start = part * each
    stop = tl.minimum(start + each, length)
    m = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, BLOCK_R), tl.float32)
    for first in range(start, stop, BLOCK_S):
        s = first + tl.arange(0, BLOCK_S)
        there = s < stop
        page = tl.load(table_ptr + b * table_stride + s // SIZE, mask=there, other=0).to(tl.int64)
        row = (page * cache_strides[0] + s % SIZE * cache_strides[1])[:, None]
        latent = tl.load(cache_ptr + row + r[None, :], mask=there[:, None] & in_r, other=0.0)
        rotated = tl.load(cache_ptr + row + R + d[None, :], mask=there[:, None] & in_d, other=0.0)
        x = tl.dot(q, tl.trans(latent), input_precision="ieee")
        x = tl.dot(turning, tl.trans(rotated), x, input_precision="ieee") * scale
        x = tl.where(there[None, :], x, float("-inf"))
        # each block has a key, so that its maximum is a number
        m_new = tl.maximum(m, tl.max(x, 1))
        p = tl.exp2(x - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(latent.dtype), latent, acc * alpha[:, None], input_precision="ieee")
        m = m_new
    none = l == 0.0
    l = tl.where(none, 1.0, l)
    line = (b * H + h) * parts + part
    tl.store(o_ptr + line[:, None] * R + r[None, :], (acc / l[:, None]).to(o_ptr.dtype.element_ty), mask=in_h & in_r)
    if not WHOLE:
        tl.store(lse_ptr + line, tl.where(none, float("-inf"), m + tl.log2(l)), mask=h < H)


@triton.jit(do_not_specialize=["parts"])
def _merge(parts_ptr, lse_ptr, o_ptr, parts, R: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr):
    """Weighs the parts of one head of a sequence."""
    line = tl.program_id(0).to(tl.int64)
    n, r = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_R)
    lse = tl.load(lse_ptr + line * parts + n, mask=n < parts, other=float("-inf"))
    m = tl.max(lse, 0)
    # a sequence without keys: -inf - -inf is nan
    w = tl.exp2(lse - tl.where(m == float("-inf"), 0.0, m))
    total = tl.sum(w, 0)
    acc = tl.zeros((BLOCK_R,), tl.float32)
    for part in range(parts):
        own = tl.sum(tl.where(n == part, w, 0.0), 0)
        acc += own * tl.load(parts_ptr + (line * parts + part) * R + r, mask=r < R, other=0.0)
    acc = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(o_ptr + line * R + r, acc.to(o_ptr.dtype.element_ty), mask=r < R)


_start_decode, _start_merge = Kernel(_decode), Kernel(_merge)


def attend(q: Tensor, turning: Tensor, latents: Tensor, table: Tensor, lengths: Tensor, rotated: int, scale: float) -> Tensor:
    """Returns sums of latents (B, H, rank), in the dtype of q.

    Args:
        q, turning: (B, H, rank), absorbed, and (B, H, rotated).
        latents: (blocks, size, 1, rank + rotated).
        table, lengths: (B, N) int32 and (B,) int32.
        rotated: the last numbers of a row.
        scale: of the scores.
    """
    (B, H, R), size = q.shape, latents.shape[1]
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    if not o.numel():
        return o
    q, turning = (x if x.stride(2) == 1 else x.contiguous() for x in (q, turning))
    table = table if table.stride(1) == 1 else table.contiguous()
    tile = tile_of(H, q.dtype, arch(q.device))
    tiles = triton.cdiv(H, tile.BLOCK_H)
    parts = parts_of(B * tiles, table.shape[1] * size, _programs(q.device))
    partial, lse = o, o
    if parts > 1:
        partial = torch.empty(B, H, parts, R, dtype=torch.float32, device=q.device)
        lse = torch.empty(B, H, parts, dtype=torch.float32, device=q.device)
    arguments = (
        q, turning, latents, partial, lse, table, lengths, scale * LOG2E, q.stride()[:2], turning.stride()[:2],
        latents.stride()[:2], table.stride(0), parts,
    )  # fmt: skip
    _start_decode((B, tiles, parts), arguments, constants_of(H, R, rotated, size, tile, parts == 1))
    if parts > 1:
        _start_merge((B * H, 1, 1), (partial, lse, o, parts), merge_constants(R))
    return o


class Tile(NamedTuple):
    """The heads and keys that a program takes at a time, its warps and its stages."""

    BLOCK_H: int
    BLOCK_S: int
    num_warps: int
    num_stages: int = 2


# the wide one takes 221 kB of shared memory, which Hopper has; the others, of 57 and 75 kB, fit everywhere
WIDE, NARROW, PRECISE = Tile(64, 64, 8), Tile(16, 32, 4), Tile(16, 16, 4)


def tile_of(heads: int, dtype: torch.dtype, device: str) -> Tile:
    """Returns the tile; on an H200 with 128 heads and 64 x 4,096 keys the wide one took 0.39 ms, the narrow one 0.71."""
    if dtype == torch.float32:
        return PRECISE
    return WIDE if heads > 32 and device == "sm90" else NARROW


def parts_of(programs: int, keys: int, wanted: int) -> int:
    """Returns into how many parts keys are cut, a power of two, so that about as many programs run as are wanted."""
    most = min(max(1, keys // LEAST_KEYS), MOST_PARTS)
    found = 1
    while 2 * found <= most and programs * found < wanted:
        found *= 2
    return found


def _programs(device: torch.device) -> int:
    return WAVES * (torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1)


@cache
def constants_of(H: int, R: int, rotated: int, size: int, tile: Tile, whole: bool) -> dict[str, Any]:
    """One dictionary for the same arguments."""
    blocks = {"BLOCK_R": max(16, triton.next_power_of_2(R)), "BLOCK_T": max(16, triton.next_power_of_2(rotated))}
    return {"H": H, "R": R, "ROTATED": rotated, "SIZE": size, "WHOLE": whole, **blocks, **tile._asdict()}


@cache
def merge_constants(R: int) -> dict[str, Any]:
    """One dictionary for the same arguments."""
    return {"R": R, "BLOCK_R": triton.next_power_of_2(R), "BLOCK_P": MOST_PARTS, "num_warps": 4}
