"""flash_attn_varlen_func and its packed forms: attention to sequences laid back to back."""

from __future__ import annotations

from torch import Tensor

from rooftile.errors import Unsupported
from rooftile.exact import api
from rooftile.integrations.flash_attn.arguments import Output, mask_of, options_of, unpacked
from rooftile.kvcache import PagedKV


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
    mask = mask_of(causal, window_size)
    options = options_of(dropout_p, softmax_scale, softcap, alibi_slopes, deterministic)
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
    k, v = unpacked("kv", kv, 2, "(total_k, 2, Hk, D)")
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
    q, k, v = unpacked("qkv", qkv, 3, "(total, 3, H, D)")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip
