"""FlexAttention's function and its block masks, on Rooftile's kernels.

    from rooftile.integrations.flex_attention import flex_attention

takes the arguments of `torch.nn.attention.flex_attention.flex_attention`. Blocks that a `BlockMask` lists are computed, others
are skipped. For blocks that are seen in part its `mask_mod` is asked once, and the answers are kept as bits with the mask.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.exact import api
from rooftile.exact.masks import FULL


def flex_attention(
    query: Tensor,  # (B, H, T, D)
    key: Tensor,  # (B, Hk, S, D)
    value: Tensor,  # (B, Hk, S, Dv)
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """Attention with FlexAttention's arguments: a `BlockMask` says which pairs are seen.

    Args:
        query: (B, H, T, D), float32, bfloat16 or float16, any strides.
        key: (B, Hk, S, D). With enable_gqa, Hk divides H.
        value: (B, Hk, S, Dv).
        score_mod: refused; `rooftile.attention` has softcap=, alibi= and bias=.
        block_mask: from `create_block_mask`, for these lengths; None for none. Positions count from the top left.
        scale: of the scores; 1 / sqrt(D) if None.
        enable_gqa: allow fewer heads of key and value.
        return_lse: also return the log-sum-exp (B, H, T), natural log, fp32.
        kernel_options: refused; a backend chooses its own tiles.
        return_aux: PyTorch's `AuxRequest`, with lse alone.

    Returns:
        (B, H, T, Dv); with return_lse a pair; with return_aux the output and an `AuxOutput`.

    Raises:
        InvalidInput: an argument is wrong, or one that there is not.

    Example:
        >>> from torch.nn.attention.flex_attention import create_block_mask
        >>> q, k, v = (torch.randn(1, 2, 256, 64) for _ in range(3))
        >>> near = create_block_mask(lambda b, h, i, j: (i - j).abs() < 64, None, None, 256, 256, device="cpu")
        >>> flex_attention(q, k, v, block_mask=near).shape
        torch.Size([1, 2, 256, 64])
    """
    if score_mod is not None:
        raise InvalidInput("score_mod is not run here: rooftile.attention has softcap=, alibi= and bias= for changed scores")
    if kernel_options is not None:
        raise InvalidInput("kernel_options tune PyTorch's kernels: leave it out, a backend chooses its own tiles")
    if return_aux is not None and getattr(return_aux, "max_scores", False):
        raise InvalidInput("return_aux asks for max_scores; there is lse")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor) or x.ndim != 4:
            raise InvalidInput(f"{name} must be a tensor (B, H, T, D) of four axes")
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise InvalidInput(f"query has {query.shape[1]} heads and key has {key.shape[1]}; write enable_gqa=True for groups")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if k.shape[0] == 1 and q.shape[0] > 1:
        k, v = (x.expand(q.shape[0], -1, -1, -1) for x in (k, v))
    mask = FULL if block_mask is None else block_mask
    wants_lse = return_lse or (return_aux is not None and return_aux.lse)
    if not wants_lse and return_aux is None:
        return api.attention(q, k, v, mask, scale=scale).transpose(1, 2)
    o, lse = api.attention_with_lse(q, k, v, mask, scale=scale)
    if return_aux is None:
        return o.transpose(1, 2), lse
    from torch.nn.attention.flex_attention import AuxOutput

    return o.transpose(1, 2), AuxOutput(lse=lse if wants_lse else None, max_scores=None)
