"""flash_attn_with_kvcache: attention to a cache, with or without a table of blocks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rooftile.errors import InvalidInput, Unsupported
from rooftile.exact import api
from rooftile.exact.masks import FULL
from rooftile.integrations.flash_attn.arguments import mask_of, options_of
from rooftile.integrations.flash_attn_rotary import rotated
from rooftile.kvcache import PagedKV
from rooftile.runtime.arguments import shown


def flash_attn_with_kvcache(
    q: Tensor,  # (B, T, H, D)
    k_cache: Tensor,  # (B or more, S, Hk, D), with block_table (P, size, Hk, D)
    v_cache: Tensor,  # (B or more, S, Hk, Dv), with block_table (P, size, Hk, Dv)
    k: Tensor | None = None,  # (B, T_new, Hk, D)
    v: Tensor | None = None,  # (B, T_new, Hk, Dv)
    rotary_cos: Tensor | None = None,  # (positions, rotary dims / 2)
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,  # (B,)
    cache_batch_idx: Tensor | None = None,  # (B,)
    cache_leftpad: Tensor | None = None,  # (B,)
    block_table: Tensor | None = None,  # (B, N) int32
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,  # (H,) or (B, H)
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Appends k and v to a KV cache and attends to it: `rooftile.attention_paged` with flash-attn's arguments.

    Args:
        k_cache, v_cache: any strides but the last axis's, which must be 1: a layer of a larger tensor, a transposed one.
        cache_seqlens: the number of tokens in the cache before the call. k and v are written after them, in place.
        cache_batch_idx: the line of an unpaged cache for each sequence; the first B if None.
        cache_leftpad: the first slot that each sequence sees; those before it hold padding. The visible keys are copied.
        rotary_cos, rotary_sin: rotate k by its positions, and q by the positions after the cache: by one position each under
            causal or window_size, else all by the first.

    Returns:
        out (B, T, H, Dv); with return_softmax_lse also lse (B, H, T), fp32.

    Raises:
        Unsupported: cache_leftpad was given with a block_table.

    Example:
        >>> k_cache, v_cache = torch.zeros(2, 2, 64, 4, 64)
        >>> q, k, v = (torch.randn(2, 1, 4, 64) for _ in range(3))
        >>> flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=10, causal=True).shape
        torch.Size([2, 1, 4, 64])
    """
    if cache_leftpad is not None and block_table is not None:
        raise Unsupported(
            f"cache_leftpad is {shown(cache_leftpad)} with a block_table; must be None: let a table begin with the sequence"
        )
    if (k is None) != (v is None):
        raise InvalidInput("one of k and v is None; give both, or neither")
    if cache_seqlens is None:
        if k is not None or block_table is not None:
            raise InvalidInput("cache_seqlens is None; with k and v, or a block_table, it must give the number of tokens")
        cache_seqlens = k_cache.shape[1]
    if block_table is None and k_cache.shape[1] == 0:
        raise InvalidInput(f"k_cache is {shown(k_cache)}; must have room for at least one token per sequence")
    B, T = q.shape[:2]
    if not isinstance(cache_seqlens, Tensor):
        cache_seqlens = torch.full((B,), cache_seqlens, dtype=torch.int32, device=q.device)
    lines = torch.arange(B, device=q.device) if cache_batch_idx is None else cache_batch_idx
    lengths = cache_seqlens.int()
    if rotary_cos is not None:
        one_each = causal or mask_of(False, window_size) != FULL
        steps = torch.arange(T, device=q.device) * one_each
        q = rotated(q, rotary_cos, rotary_sin, lengths[:, None] + steps, rotary_interleaved)
    if k is not None:
        places = lengths[:, None].long() + torch.arange(k.shape[1], device=q.device)
        if rotary_cos is not None:
            k = rotated(k, rotary_cos, rotary_sin, places, rotary_interleaved)
        _append(k_cache, v_cache, k, v, places, lines, block_table)
        lengths = lengths + k.shape[1]
    if cache_leftpad is not None:
        k_cache, v_cache, lines, lengths = _without_padding(k_cache, v_cache, lines, lengths, cache_leftpad)
    if block_table is None:
        k_cache, v_cache, block_table = _lines_as_blocks(k_cache, v_cache, lines)
    options = options_of(0.0, softmax_scale, softcap, alibi_slopes, False)
    del options["dropout"]
    cache = PagedKV(k_cache, v_cache, block_table, lengths)
    found = api.attention_paged_with_lse(q, cache, mask_of(causal, window_size), **options)
    return found if return_softmax_lse else found[0]


def _append(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, places: Tensor, lines: Tensor, block_table: Tensor | None
) -> None:  # fmt: skip
    """Writes k and v (B, T, Hk, D) at their places (B, T), into lines (B,) of the cache or into the blocks of a table."""
    size = k_cache.shape[1]
    room = size if block_table is None else block_table.shape[1] * size
    if places.device.type == "cpu" and places.numel() and int(places.max()) >= room:
        raise InvalidInput(f"cache_seqlens and k come to {int(places.max()) + 1} tokens; the cache has room for {room}")
    owners = lines[:, None] if block_table is None else block_table.gather(1, places // size)
    where = (owners.long(), places % size)
    k_cache[where] = k
    v_cache[where] = v


def _without_padding(
    k: Tensor, v: Tensor, lines: Tensor, lengths: Tensor, leftpad: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Copies the lines of a cache so that each begins at its first visible slot: keys, values, lines, lengths."""
    B = lines.shape[0]
    if not isinstance(leftpad, Tensor) or leftpad.shape != (B,) or leftpad.is_floating_point():
        raise InvalidInput(f"cache_leftpad is {shown(leftpad)}; must be integers of shape ({B},), one for each sequence")
    starts = leftpad.long()
    slots = (starts[:, None] + torch.arange(k.shape[1], device=k.device)).clamp(max=k.shape[1] - 1)
    where = (lines.long()[:, None], slots)
    return k[where], v[where], torch.arange(B, device=k.device), (lengths - starts).clamp(min=0).int()


def _lines_as_blocks(k: Tensor, v: Tensor, lines: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views a cache of any strides, with a line per sequence, as a paged one. Returns the views, and a row of blocks per line."""
    S = k.shape[1]
    # the largest power of two that divides S
    size = S & -S
    strides, strides_v = _block_strides(k, size), _block_strides(v, size)
    if strides[1:] != strides_v[1:]:
        # no table fits both
        k, v = k.contiguous(), v.contiguous()
        strides, strides_v = _block_strides(k, size), _block_strides(v, size)
    _, per_line, per_block = strides
    table = lines.long()[:, None] * per_line + torch.arange(S // size, device=k.device) * per_block
    blocks = (k.shape[0] - 1) * per_line + (S // size - 1) * per_block + 1
    k = k.as_strided((blocks, size, *k.shape[2:]), (strides[0], *k.stride()[1:]))
    v = v.as_strided((blocks, size, *v.shape[2:]), (strides_v[0], *v.stride()[1:]))
    return k, v, table.int()


def _block_strides(x: Tensor, size: int) -> tuple[int, int, int]:
    """Returns a stride of blocks that reaches every block of every line, and how many of it a line and a block span."""
    line = x.stride(0) if x.shape[0] > 1 else 0
    block = size * x.stride(1) if x.shape[1] > size else 0
    unit = math.gcd(line, block) or 1
    return unit, line // unit, block // unit
