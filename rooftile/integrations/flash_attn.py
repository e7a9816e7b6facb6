"""The functions of the flash-attn package (version 2), under their names and in their argument order.

    from rooftile.integrations.flash_attn import flash_attn_func    # was: from flash_attn import flash_attn_func

What is the same: layouts, defaults, groups, causal aligned bottom-right, -1 for no bound in window_size, 0.0 for no softcap,
zeros for a row that sees no key, and gradients for q, k and v.

What differs:

- any device and dtype that Rooftile has, fp32 and the CPU included, and any head dim;
- dropout draws from Rooftile's generator, seeded from PyTorch's: other weights are dropped than flash-attn would;
- return_attn_probs=True returns (out, softmax_lse, None): the weights are never formed, not even for tests. Gradients flow
  through softmax_lse too;
- deterministic=True holds, and False follows torch.use_deterministic_algorithms;
- max_seqlen arguments are not needed, and not read;
- block_table is refused: rooftile.attention_paged is the place for a paged cache.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rooftile import api
from rooftile.errors import InvalidInput, Unsupported
from rooftile.masks import CAUSAL, FULL, Mask, Window
from rooftile.validate import shown

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
]

Output = Tensor | tuple[Tensor, Tensor, None]


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
    """`rooftile.attention` by flash-attn's arguments; the module says what differs.

    Returns:
        out (B, T, H, Dv); with return_attn_probs also softmax_lse (B, H, T), fp32, and None for the weights.

    Example:
        >>> q, k, v = (torch.randn(2, 100, 8, 64) for _ in range(3))
        >>> flash_attn_func(q, k, v, causal=True, window_size=(32, 0)).shape
        torch.Size([2, 100, 8, 64])
    """
    mask = _mask(causal, window_size)
    options = _options(dropout_p, softmax_scale, softcap, alibi_slopes, deterministic)
    if not return_attn_probs:
        return api.attention(q, k, v, mask, **options)
    return *api.attention_with_lse(q, k, v, mask, **options), None


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
    k: Tensor,  # (total_k, Hk, D)
    v: Tensor,  # (total_k, Hk, Dv)
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
    block_table: Tensor | None = None,
) -> Output:
    """`rooftile.attention_packed` by flash-attn's arguments; the module says what differs.

    Returns:
        out (total_q, H, Dv); with return_attn_probs also softmax_lse (H, total_q), fp32, and None for the weights.

    Raises:
        Unsupported: block_table was given.

    Example:
        >>> q, k, v = (torch.randn(10, 4, 64) for _ in range(3))
        >>> cu = torch.tensor([0, 3, 10], dtype=torch.int32)
        >>> flash_attn_varlen_func(q, k, v, cu, cu, 7, 7, causal=True).shape
        torch.Size([10, 4, 64])
    """
    if block_table is not None:
        raise Unsupported(
            f"block_table is {shown(block_table)}; flash_attn_varlen_func has no paged keys here: gather them into k and v, "
            "or leave block_table out"
        )
    mask = _mask(causal, window_size)
    options = _options(dropout_p, softmax_scale, softcap, alibi_slopes, deterministic)
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


def _mask(causal: bool, window_size: tuple[int, int]) -> Mask:
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise InvalidInput(f"window_size is {shown(window_size)}; must be a pair (left, right), -1 for no bound")
    # any negative number leaves a side open, as in flash-attn
    left, right = (None if side is None or side < 0 else side for side in window_size)
    return Window(left, right) & (CAUSAL if causal else FULL)


def _options(
    dropout_p: float, softmax_scale: float | None, softcap: float, alibi_slopes: Tensor | None, deterministic: bool
) -> dict[str, Any]:
    return {
        "alibi": alibi_slopes,
        "deterministic": deterministic or None,
        "dropout": dropout_p,
        "scale": softmax_scale,
        # anything up to 0 is none in flash-attn
        "softcap": softcap if softcap > 0 else None,
    }


def _unpacked(name: str, x: Tensor, parts: int, axes: str) -> tuple[Tensor, ...]:
    """The tensors in one, as views."""
    ndim = axes.count(",") + 1
    if not isinstance(x, Tensor) or x.ndim != ndim or x.shape[-3] != parts:
        raise InvalidInput(f"{name} is {shown(x)}; must be a tensor {axes}")
    return x.unbind(-3)
