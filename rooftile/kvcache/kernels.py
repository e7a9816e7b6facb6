"""Memory-bound kernels of a paged cache, in Triton: putting tokens into their slots, rotated, and copying blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# of a program's piece of a block, in words of four bytes
WORDS = tl.constexpr(2048)
NUMBERS = 4096


# fmt: off
@triton.jit(do_not_specialize=["total"])
def _write(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, cos_ptr, sin_ptr, total,
    k_stride_t, v_stride_t, k_stride_p, k_stride_s, v_stride_p, v_stride_s, cos_stride_t,
    SIZE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):
    # fmt: on
    """Keys and values of BLOCK_T tokens, whose heads lie side by side, into their slots; a slot below 0 is nobody's."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = tl.arange(0, BLOCK_N)
    slot = tl.load(slots_ptr + t, mask=t < total, other=-1).to(tl.int64)
    there = (slot >= 0)[:, None] & (n < HEADS * D)[None, :]
    t = t.to(tl.int64)
    k_tile = k_ptr + (t * k_stride_t)[:, None] + n[None, :]
    k = tl.load(k_tile, mask=there, other=0.0)
    if ROTARY > 0:
        k = _rotated(k, k_tile, cos_ptr, sin_ptr, t, n, there, cos_stride_t, D, ROTARY).to(k.dtype)
    v = tl.load(v_ptr + (t * v_stride_t)[:, None] + n[None, :], mask=there, other=0.0)
    k_line = slot // SIZE * k_stride_p + slot % SIZE * k_stride_s
    v_line = slot // SIZE * v_stride_p + slot % SIZE * v_stride_s
    tl.store(k_cache_ptr + k_line[:, None] + n[None, :], k.to(k_cache_ptr.dtype.element_ty), mask=there)
    tl.store(v_cache_ptr + v_line[:, None] + n[None, :], v.to(v_cache_ptr.dtype.element_ty), mask=there)


@triton.jit
def _rotated(x, x_tile, cos_ptr, sin_ptr, t, n, there, stride_t, D: tl.constexpr, ROTARY: tl.constexpr):
    """The first ROTARY numbers of each head turned: x_d cos - x_(d + half) sin, and x_(d + half) cos + x_d sin."""
    HALF: tl.constexpr = ROTARY // 2
    d = n % D
    turns = there & (d < ROTARY)[None, :]
    # of d + half the partner lies before it
    other = tl.load(x_tile + tl.where(d < HALF, HALF, -HALF)[None, :], mask=turns, other=0.0).to(tl.float32)
    place = (t * stride_t)[:, None] + (d % HALF)[None, :]
    cos = tl.load(cos_ptr + place, mask=turns, other=1.0)
    sin = tl.load(sin_ptr + place, mask=turns, other=0.0)
    sin = tl.where((d < HALF)[None, :], -sin, sin)
    return x.to(tl.float32) * cos + other * sin


@triton.jit(do_not_specialize=["total"])
def _rotate(
    x_ptr, o_ptr, cos_ptr, sin_ptr, total, x_stride_t, cos_stride_t,
    HEADS: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    there = (t < total)[:, None] & (n < HEADS * D)[None, :]
    x_tile = x_ptr + (t * x_stride_t)[:, None] + n[None, :]
    x = tl.load(x_tile, mask=there, other=0.0)
    turned = _rotated(x, x_tile, cos_ptr, sin_ptr, t, n, there, cos_stride_t, D, ROTARY)
    tl.store(o_ptr + (t * HEADS * D)[:, None] + n[None, :], turned.to(x.dtype), mask=there)


@triton.jit(do_not_specialize=["words"])
def _copy(storage_ptr, pairs_ptr, stride, words):
    """A piece of a block, from the first to the second of a pair."""
    source = tl.load(pairs_ptr + 2 * tl.program_id(1))
    target = tl.load(pairs_ptr + 2 * tl.program_id(1) + 1)
    n = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    piece = tl.load(storage_ptr + source * stride + n, mask=n < words)
    tl.store(storage_ptr + target * stride + n, piece, mask=n < words)


def write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, rotation: tuple[Tensor, Tensor] | None) -> None:
    """Puts k and v (total, heads, D) into slots (total,) of a layer's caches (blocks, size, heads, D); k rotated."""
    total, heads, dim = k.shape
    if not total:
        return
    k, v = (x if x.stride(2) == 1 and x.stride(1) == dim else x.contiguous() for x in (k, v))
    cos, sin = (k, k) if rotation is None else rotation
    block_n = triton.next_power_of_2(heads * dim)
    block_t = max(min(NUMBERS // block_n, triton.next_power_of_2(total)), 1)
    _write[(triton.cdiv(total, block_t),)](
        k, v, k_cache, v_cache, slots, cos, sin, total, k.stride(0), v.stride(0), *k_cache.stride()[:2], *v_cache.stride()[:2],
        cos.stride(0), SIZE=k_cache.shape[1], HEADS=heads, D=dim, ROTARY=0 if rotation is None else 2 * cos.shape[1],
        BLOCK_T=block_t, BLOCK_N=block_n,
    )  # fmt: skip


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """x (total, heads, D) turned by cos and sin (total, half the numbers that turn), fp32."""
    total, heads, dim = x.shape
    x = x if x.stride(2) == 1 and x.stride(1) == dim else x.contiguous()
    o = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    cos, sin = rotation
    block_n = min(triton.next_power_of_2(heads * dim), NUMBERS)
    block_t = max(min(NUMBERS // block_n, triton.next_power_of_2(total)), 1)
    _rotate[(triton.cdiv(total, block_t), triton.cdiv(heads * dim, block_n))](
        x, o, cos, sin, total, x.stride(0), cos.stride(0), HEADS=heads, D=dim, ROTARY=2 * cos.shape[1], BLOCK_T=block_t,
        BLOCK_N=block_n,
    )  # fmt: skip
    return o


def copy_blocks(storage: Tensor, pairs: Tensor) -> None:
    """Copies blocks of `storage`, (source, target) each in pairs (n, 2), int64; no target is another's source."""
    blocks = storage.flatten(1).view(torch.int32)
    words = blocks.shape[1]
    _copy[(triton.cdiv(words, WORDS.value), pairs.shape[0])](blocks, pairs, blocks.stride(0), words)
