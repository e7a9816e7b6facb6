"""flash_attn_func and its packed forms: attention to dense batches."""

from __future__ import annotations

from torch import Tensor

from rooftile.errors import Unsupported
from rooftile.exact import api, split
from rooftile.exact.validate import check_seed
from rooftile.integrations.flash_attn.arguments import Output, mask_of, options_of, unpacked
from rooftile.integrations.flash_attn.weights import signed_weights


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
    """`rooftile.attention` with flash-attn's arguments; `rooftile.integrations.flash_attn` lists the differences.

    Returns:
        out (B, T, H, Dv); with return_attn_probs also softmax_lse (B, H, T), fp32, and None for the weights; with dropout too,
        the weights (B, H, T, S) before dropout, negative where it took one away.

    Example:
        >>> q, k, v = (torch.randn(2, 100, 8, 64) for _ in range(3))
        >>> flash_attn_func(q, k, v, causal=True, window_size=(32, 0)).shape
        torch.Size([2, 100, 8, 64])
    """
    mask = mask_of(causal, window_size)
    options = options_of(dropout_p, softmax_scale, softcap, alibi_slopes, deterministic)
    if not return_attn_probs:
        return api.attention(q, k, v, mask, **options)
    if not dropout_p:
        return *api.attention_with_lse(q, k, v, mask, **options), None
    if split.active():
        raise Unsupported("return_attn_probs with dropout inside rooftile.parallel.context, where a rank has a part of the keys")
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
    k, v = unpacked("kv", kv, 2, "(B, S, 2, Hk, D)")
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
    q, k, v = unpacked("qkv", qkv, 3, "(B, T, 3, H, D)")
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
