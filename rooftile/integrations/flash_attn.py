"""The functions of the flash-attn package (version 2), under their names and in their argument order.

    from rooftile.integrations.flash_attn import flash_attn_func    # was: from flash_attn import flash_attn_func

The same: layouts, defaults, groups, causal aligned bottom-right, -1 for no bound in window_size, 0.0 for no softcap,
zeros for a row that sees no key, and gradients for q, k and v.

Different:

- every device and dtype that Rooftile supports, including fp32 and the CPU, and any head dim;
- dropout draws from Rooftile's generator, seeded from PyTorch's, so it drops other weights than flash-attn;
- return_attn_probs=True returns (out, softmax_lse, None): the weights are never stored. Gradients flow through softmax_lse
  too. With dropout and dense inputs the third result has the weights before dropout, with a negative sign where dropout took one
  away, as flash-attn's tests read it: a matrix of T x S, for debugging;
- deterministic=True holds, and False follows torch.use_deterministic_algorithms;
- max_seqlen and num_splits are ignored;
- paged KV caches have blocks of any power of two, and a backward through them raises Unsupported.

`install()` lets other libraries' `import flash_attn` find these functions. Version 4 has another order of arguments:
`rooftile.integrations.flash_attn_4`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rooftile import api
from rooftile.errors import InvalidInput, Unsupported
from rooftile.integrations.flash_attn_debug import signed_weights
from rooftile.integrations.flash_attn_package import install as install
from rooftile.integrations.flash_attn_package import uninstall as uninstall
from rooftile.kvcache import PagedKV
from rooftile.masks import CAUSAL, FULL, Mask, Window
from rooftile.validate import check_seed, shown

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Output = Tensor | tuple[Tensor, Tensor, Tensor | None]


def flash_attn_func(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, S, Hk, D)
    v: Tensor,  # (B, S, Hk, Dv)
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,  # (H,) or (B, H)
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Output:
    """`rooftile.attention` with flash-attn's arguments; the module's docstring lists the differences.

    Returns:
        out (B, T, H, Dv); with return_attn_probs also softmax_lse (B, H, T), fp32, and None for the weights; with dropout too,
        the weights (B, H, T, S) before dropout, negative where it took one away.

    Example:
        >>> q, k, v = (torch.randn(2, 100, 8, 64) for _ in range(3))
        >>> flash_attn_func(q, k, v, causal=True, window_size=(32, 0)).shape
        torch.Size([2, 100, 8, 64])
    """
    mask = _mask(causal, window_size)
    options = _options(dropout_p, softmax_scale, softcap, alibi_slopes, deterministic)
    if not return_attn_probs:
        return api.attention(q, k, v, mask, **options)
    if not dropout_p:
        return *api.attention_with_lse(q, k, v, mask, **options), None
    seed = check_seed(None, dropout_p, q.device)
    found = api.attention_with_lse(q, k, v, mask, seed=seed, **options)
    del options["dropout"]
    return *found, signed_weights(q, k, mask, seed, dropout_p, **options)


def flash_attn_kvpacked_func(
    q: Tensor,  # (B, T, H, D)
    kv: Tensor,  # (B, S, 2, Hk, D)
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Output:
    """`flash_attn_func` with keys and values in one tensor."""
    k, v = _unpacked("kv", kv, 2, "(B, S, 2, Hk, D)")
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,  # (B, T, 3, H, D)
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Output:
    """`flash_attn_func` with queries, keys and values in one tensor."""
    q, k, v = _unpacked("qkv", qkv, 3, "(B, T, 3, H, D)")
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_varlen_func(
    q: Tensor,  # (total_q, H, D)
    k: Tensor,  # (total_k, Hk, D), with block_table (P, size, Hk, D)
    v: Tensor,  # (total_k, Hk, Dv), with block_table (P, size, Hk, Dv)
    cu_seqlens_q: Tensor,  # (B + 1,)
    cu_seqlens_k: Tensor,  # (B + 1,)
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,  # (H,) or (B, H)
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,  # (B, N) int32
) -> Output:
    """`rooftile.attention_packed`, or with block_table `rooftile.attention_paged`, with flash-attn's arguments.

    Returns:
        out (total_q, H, Dv); with return_attn_probs also softmax_lse (H, total_q), fp32, and None for the weights.

    Raises:
        Unsupported: dropout with a paged KV cache.

    Example:
        >>> q, k, v = (torch.randn(10, 4, 64) for _ in range(3))
        >>> cu = torch.tensor([0, 3, 10], dtype=torch.int32)
        >>> flash_attn_varlen_func(q, k, v, cu, cu, 7, 7, causal=True).shape
        torch.Size([10, 4, 64])
    """
    mask = _mask(causal, window_size)
    options = _options(dropout_p, softmax_scale, softcap, alibi_slopes, deterministic)
    if block_table is not None:
        if options.pop("dropout"):
            raise Unsupported(f"dropout_p is {dropout_p} with block_table; attention to a paged KV cache has no dropout")
        lengths = cu_seqlens_k.diff().int()
        cache = PagedKV(k, v, block_table, lengths, cu_seqlens_q.int())
        found = api.attention_paged_with_lse(q, cache, mask, **options)
        return (*found, None) if return_attn_probs else found[0]
    if not return_attn_probs:
        return api.attention_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, mask, **options)
    return *api.attention_packed_with_lse(q, k, v, cu_seqlens_q, cu_seqlens_k, mask, **options), None


def flash_attn_varlen_kvpacked_func(
    q: Tensor,  # (total_q, H, D)
    kv: Tensor,  # (total_k, 2, Hk, D)
    cu_seqlens_q: Tensor,  # (B + 1,)
    cu_seqlens_k: Tensor,  # (B + 1,)
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Output:
    """`flash_attn_varlen_func` with keys and values in one tensor."""
    k, v = _unpacked("kv", kv, 2, "(total_k, 2, Hk, D)")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,  # (total, 3, H, D)
    cu_seqlens: Tensor,  # (B + 1,)
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Output:
    """`flash_attn_varlen_func` with queries, keys and values in one tensor."""
    q, k, v = _unpacked("qkv", qkv, 3, "(total, 3, H, D)")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


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
        one_each = causal or _mask(False, window_size) != FULL
        steps = torch.arange(T, device=q.device) * one_each
        q = _rotated(q, rotary_cos, rotary_sin, lengths[:, None] + steps, rotary_interleaved)
    if k is not None:
        places = lengths[:, None].long() + torch.arange(k.shape[1], device=q.device)
        if rotary_cos is not None:
            k = _rotated(k, rotary_cos, rotary_sin, places, rotary_interleaved)
        _append(k_cache, v_cache, k, v, places, lines, block_table)
        lengths = lengths + k.shape[1]
    if cache_leftpad is not None:
        k_cache, v_cache, lines, lengths = _without_padding(k_cache, v_cache, lines, lengths, cache_leftpad)
    if block_table is None:
        k_cache, v_cache, block_table = _lines_as_blocks(k_cache, v_cache, lines)
    options = _options(0.0, softmax_scale, softcap, alibi_slopes, False)
    del options["dropout"]
    cache = PagedKV(k_cache, v_cache, block_table, lengths)
    found = api.attention_paged_with_lse(q, cache, _mask(causal, window_size), **options)
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


def _rotated(x: Tensor, cos: Tensor, sin: Tensor | None, places: Tensor, interleaved: bool) -> Tensor:
    """Rotates rows (B, T, H, D) by the angles of their positions (B, T): pairs of neighbours, or of the two halves."""
    if sin is None or cos.shape != sin.shape or cos.ndim != 2 or 2 * cos.shape[1] > x.shape[-1]:
        due = f"(positions, at most {x.shape[-1] // 2})"
        raise InvalidInput(f"rotary_cos is {shown(cos)} and rotary_sin is {shown(sin)}; must be two tensors {due}")
    half = cos.shape[1]
    cos, sin = (angles[places.long()][:, :, None].float() for angles in (cos, sin))
    turned = x[..., : 2 * half].float()
    a, b = turned.unflatten(-1, (half, 2)).unbind(-1) if interleaved else turned.split(half, dim=-1)
    pair = (a * cos - b * sin, a * sin + b * cos)
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((turned.to(x.dtype), x[..., 2 * half :]), dim=-1)


def _mask(causal: bool, window_size: tuple[int, int]) -> Mask:
    sides = window_size.tolist() if isinstance(window_size, (Tensor, np.ndarray)) else window_size
    if not isinstance(sides, (tuple, list)) or len(sides) != 2:
        raise InvalidInput(f"window_size is {shown(window_size)}; must be a pair (left, right), -1 for no bound")
    # any negative number leaves a side open, as in flash-attn
    left, right = (None if side is None or side < 0 else side for side in sides)
    return Window(left, right) & (CAUSAL if causal else FULL)


def _options(
    dropout_p: float, softmax_scale: float | None, softcap: float, alibi_slopes: Tensor | None, deterministic: bool
) -> dict[str, Any]:
    return {
        "alibi": alibi_slopes,
        "deterministic": deterministic or None,
        "dropout": dropout_p,
        "scale": softmax_scale,
        # in flash-attn, values up to 0 mean none
        "softcap": softcap if softcap > 0 else None,
    }


def _unpacked(name: str, x: Tensor, parts: int, axes: str) -> tuple[Tensor, ...]:
    """Returns the packed tensors as views."""
    ndim = axes.count(",") + 1
    if not isinstance(x, Tensor) or x.ndim != ndim or x.shape[-3] != parts:
        raise InvalidInput(f"{name} is {shown(x)}; must be a tensor {axes}")
    return x.unbind(-3)
