"""The functions of FlashAttention-3's package (flash_attn_interface), under their names and in their argument order.

    from rooftile.integrations.flash_attn_3 import flash_attn_func    # was: from flash_attn_interface import flash_attn_func

The same: layouts, groups, causal aligned bottom-right, -1 for no bound in window_size, 0 for no softcap and no attention_chunk,
the result out, or (out, lse) with return_attn_probs or return_softmax_lse, and gradients for q, k and v.

Different:

- every device and dtype that Rooftile supports, including fp32 and the CPU, and any head dim; pages of any power of two;
- gradients flow through lse;
- num_splits, pack_gqa, sm_margin, scheduler_metadata and max_seqlen do not change the result, and are ignored: Rooftile chooses;
- FP8 is `rooftile.attention(..., precision="fp8")` on 16-bit tensors: q_descale, k_descale and v_descale are refused.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rooftile.errors import InvalidInput, Unsupported
from rooftile.exact import api
from rooftile.exact.masks import Chunk, Mask
from rooftile.integrations import flash_attn
from rooftile.integrations.flash_attn.arguments import mask_of, options_of
from rooftile.integrations.flash_attn_4 import UsedRows, refuse
from rooftile.kvcache import PagedKV
from rooftile.runtime.arguments import shown

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

_FP8 = 'quantise inside: rooftile.attention(q, k, v, mask, precision="fp8") takes 16-bit tensors'
_REFUSED = {
    "qv": "join q and qv, and k and v, along the last axis",
    "q_descale": _FP8,
    "k_descale": _FP8,
    "v_descale": _FP8,
}
WithLse = tuple[Tensor, Tensor]
Output = Tensor | WithLse


def flash_attn_func(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, S, Hk, D)
    v: Tensor,  # (B, S, Hk, Dv)
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: None = None,
    q_descale: None = None,
    k_descale: None = None,
    v_descale: None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Output:
    """`rooftile.attention` with FlashAttention-3's arguments; the module's docstring lists the differences.

    Returns:
        out (B, T, H, Dv); with return_attn_probs also softmax's lse (B, H, T), fp32.

    Raises:
        Unsupported: qv or a descale is not None.

    Example:
        >>> q, k, v = (torch.randn(2, 100, 8, 64) for _ in range(3))
        >>> flash_attn_func(q, k, v, causal=True, window_size=(32, 0)).shape
        torch.Size([2, 100, 8, 64])
    """
    refuse(locals(), _REFUSED)
    options = options_of(0.0, softmax_scale, softcap, None, deterministic)
    found = api.attention_with_lse(q, k, v, _chunked(mask_of(causal, window_size), attention_chunk), **options)
    return found if return_attn_probs else found[0]


def flash_attn_varlen_func(
    q: Tensor,  # (total_q, H, D)
    k: Tensor,  # (total_k, Hk, D)
    v: Tensor,  # (total_k, Hk, Dv)
    cu_seqlens_q: Tensor,  # (B + 1,)
    cu_seqlens_k: Tensor,  # (B + 1,)
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,  # (B,)
    seqused_k: Tensor | None = None,  # (B,)
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: None = None,
    q_descale: None = None,
    k_descale: None = None,
    v_descale: None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Output:
    """`rooftile.attention_packed` with FlashAttention-3's arguments.

    Args:
        seqused_q, seqused_k: the number of first rows of each sequence that count. The others' outputs are zero, their lse -inf.

    Returns:
        out (total_q, H, Dv); with return_attn_probs also softmax's lse (H, total_q), fp32.

    Example:
        >>> q, k, v = (torch.randn(10, 4, 64) for _ in range(3))
        >>> cu = torch.tensor([0, 3, 10], dtype=torch.int32)
        >>> flash_attn_varlen_func(q, k, v, cu, cu, 7, 7, causal=True).shape
        torch.Size([10, 4, 64])
    """
    refuse(locals(), _REFUSED)
    options = options_of(0.0, softmax_scale, softcap, None, deterministic)
    mask = _chunked(mask_of(causal, window_size), attention_chunk)
    queries, keys = UsedRows("q", q, cu_seqlens_q, seqused_q), UsedRows("k", k, cu_seqlens_k, seqused_k)
    o, lse = api.attention_packed_with_lse(
        queries.take(q), keys.take(k), keys.take(v), queries.offsets, keys.offsets, mask, **options
    )
    return (queries.put(o), queries.put_lse(lse)) if return_attn_probs else queries.put(o)


def flash_attn_with_kvcache(
    q: Tensor,  # (B, T, H, D), with cu_seqlens_q (total_q, H, D)
    k_cache: Tensor,  # (B or more, S, Hk, D), with page_table (P, size, Hk, D)
    v_cache: Tensor,  # (B or more, S, Hk, Dv), with page_table (P, size, Hk, Dv)
    k: Tensor | None = None,  # (B, T_new, Hk, D)
    v: Tensor | None = None,  # (B, T_new, Hk, Dv)
    qv: None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,  # (B,)
    cache_batch_idx: Tensor | None = None,  # (B,)
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,  # (B, N)
    cu_seqlens_q: Tensor | None = None,  # (B + 1,)
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: None = None,
    k_descale: None = None,
    v_descale: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Output:
    """Appends k and v to a KV cache and attends to it: `flash_attn.flash_attn_with_kvcache` with FlashAttention-3's arguments.

    With cu_seqlens_q the queries are packed, and attend to what the pages hold already: k, v and rotary_cos are None then.

    Returns:
        out in the layout of q; with return_softmax_lse also lse (B, H, T), or packed (H, total_q), fp32.

    Raises:
        Unsupported: cu_seqlens_k_new, rotary_seqlens or attention_chunk was given, or cu_seqlens_q together with new keys.

    Example:
        >>> k_cache, v_cache = torch.zeros(2, 2, 64, 4, 64)
        >>> q, k, v = (torch.randn(2, 1, 4, 64) for _ in range(3))
        >>> flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=10, causal=True).shape
        torch.Size([2, 1, 4, 64])
    """
    refuse(locals(), _REFUSED)
    for name, given in (("cu_seqlens_k_new", cu_seqlens_k_new), ("rotary_seqlens", rotary_seqlens)):
        if given is not None:
            raise Unsupported(f"{name} is {shown(given)}; must be None: write new keys by rooftile.kvcache, then attend")
    if attention_chunk:
        raise Unsupported(f"attention_chunk is {attention_chunk}; with a cache call rooftile.attention_paged with rooftile.Chunk")
    if cu_seqlens_q is None:
        return flash_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, page_table,
            softmax_scale, causal, window_size, softcap, rotary_interleaved, None, 0, return_softmax_lse,
        )  # fmt: skip
    if k is not None or v is not None or rotary_cos is not None:
        raise Unsupported("cu_seqlens_q came with k, v or rotary_cos; write new keys by rooftile.kvcache, then attend")
    if page_table is None or not isinstance(cache_seqlens, Tensor):
        raise InvalidInput("cu_seqlens_q came without page_table, or without cache_seqlens (B,); packed queries need both")
    options = options_of(0.0, softmax_scale, softcap, None, False)
    del options["dropout"]
    cache = PagedKV(k_cache, v_cache, page_table.int(), cache_seqlens.int(), cu_seqlens_q.int())
    found = api.attention_paged_with_lse(q, cache, mask_of(causal, window_size), **options)
    return found if return_softmax_lse else found[0]


def _chunked(mask: Mask, size: int) -> Mask:
    return mask & Chunk(size) if size else mask
