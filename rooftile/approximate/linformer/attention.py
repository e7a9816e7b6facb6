"""Linformer: keys and values are projected along the text to a few rows, and queries attend to these exactly.

Wang et al., Linformer: Self-Attention with Linear Complexity, arXiv:2006.04768.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.approximate.arguments import check_qkv, check_scale
from rooftile.approximate.linformer import definition
from rooftile.errors import InvalidInput
from rooftile.exact import api
from rooftile.exact.masks import FULL, Mask
from rooftile.recurrent.split.context import follows_context
from rooftile.runtime.arguments import shown
from rooftile.runtime.words import answers_foreign_words


@follows_context()
@answers_foreign_words
def linformer(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, S, Hk, D)
    v: Tensor,  # (B, S, Hk, Dv)
    e: Tensor,  # (1 | Hk | H, r, N)
    f: Tensor | None = None,  # (1 | Hk | H, r, N)
    mask: Mask | None = FULL,
    *,
    backend: str | None = None,
    deterministic: bool | None = None,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Linformer's attention, softmax(scale q (e k)^T) (f v): exact attention to r rows that are sums over all S tokens.

    Args:
        q: queries (B, T, H, D), float32, bfloat16 or float16, any strides.
        k: keys (B, S, Hk, D), S at most N. Hk divides H.
        v: values (B, S, Hk, Dv).
        e: projection of keys along the text, in the dtype of q: one for all heads (1, r, N), one per key head (Hk, r, N), or one
            per query head (H, r, N). A text shorter than N uses the first S columns. Differentiable. Any kind of projection is
            given by its numbers: learned, or 1 / n in the n columns of a row for means of n tokens.
        f: projection of values; e if None.
        mask: FULL. Linformer has no causal form, as every projected row holds the whole text.
        backend: "eager" is the definition; other names are backends of `rooftile.attention`, which attends to the projected keys.
        deterministic: as in `rooftile.attention`.
        key_padding_mask: booleans (B, S), True for tokens that are padding: they are zero before the projection.
        scale: of the scores; 1 / sqrt(D) if None.

    Returns:
        o (B, T, H, Dv), contiguous, in the dtype of q.

    Raises:
        InvalidInput: an argument is wrong; says what came and what is due.
        Unsupported: the named backend refuses the attention.

    Example:
        >>> q, k, v = (torch.randn(1, 1000, 8, 64) for _ in range(3))
        >>> linformer(q, k, v, torch.randn(1, 128, 1024) / 32).shape
        torch.Size([1, 1000, 8, 64])

    Projected keys and values are rounded to the dtype of q; their sums are in fp32. Wang et al., arXiv:2006.04768.
    """
    q, k, v, _ = check_qkv(q, k, v)
    if isinstance(e, Tensor) and not q.is_meta and torch.is_autocast_enabled(q.device.type):
        e, f = e.to(q.dtype), f.to(q.dtype) if isinstance(f, Tensor) else f
    f = e if f is None else f
    projections: tuple[tuple[str, Any], ...] = (("e", e), ("f", f))
    for name, x in projections:
        if isinstance(x, Mask):
            # f stands where other methods have their mask
            _check_mask(x)
        _check_projection(name, x, q, k)
    if e.shape[1] != f.shape[1]:
        raise InvalidInput(f"e has {e.shape[1]} rows and f has {f.shape[1]}; they must agree, as a projected key has one value")
    _check_mask(mask)
    padding = _checked_padding(key_padding_mask, k)
    number = check_scale(scale, q.shape[-1])
    if backend == "eager":
        return definition.linformer(q, k, v, e, f, scale=number, key_padding_mask=padding)
    if padding is not None:
        hidden = padding[:, :, None, None]
        k, v = k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)
    keys, values = _projected(e, k, q.shape[2]), _projected(f, v, q.shape[2])
    if keys.shape[2] != values.shape[2]:
        # one is projected per query head, so the other is repeated for its group
        keys, values = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (keys, values))
    return api.attention(
        q, keys, values, FULL, backend=None if backend == "auto" else backend, deterministic=deterministic, scale=number
    )


def _projected(e: Tensor, x: Tensor, heads: int) -> Tensor:
    """The rows of e x: (B, r, Hk, D), or (B, r, H, D) where e has a projection per query head."""
    S = x.shape[1]
    if e.shape[0] == 1:
        return torch.einsum("rs,bshd->brhd", e[0, :, :S], x)
    if e.shape[0] != x.shape[2]:
        x = x.repeat_interleave(heads // x.shape[2], dim=2)
    return torch.einsum("hrs,bshd->brhd", e[..., :S], x)


def _check_projection(name: str, x: Any, q: Tensor, k: Tensor) -> None:
    H, Hk, S = q.shape[2], k.shape[2], k.shape[1]
    if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[0] not in (1, Hk, H) or not x.shape[1]:
        heads = ", ".join(map(str, sorted({1, Hk, H})))
        raise InvalidInput(f"{name} is {shown(x)}; must be a tensor (heads, r, N) with r at least 1 and heads one of {heads}")
    if x.shape[2] < S:
        raise InvalidInput(f"{name} projects texts of up to {x.shape[2]} tokens; k has {S}: give a wider projection")
    if x.dtype != q.dtype:
        raise InvalidInput(f"{name} is {x.dtype}; q is {q.dtype}, and they must agree")
    if x.device != q.device:
        raise InvalidInput(f"{name} is on {x.device}; q is on {q.device}, and all inputs must be on one device")


def _check_mask(mask: Any) -> None:
    if mask is None or mask == FULL:
        return
    if not isinstance(mask, Mask):
        raise InvalidInput(f"mask is {shown(mask)}; Linformer has rooftile.FULL alone")
    raise InvalidInput(
        f"mask is {mask}; Linformer has FULL alone: each projected key is a sum over the whole text, so a row would see what the "
        "mask hides; write rooftile.attention, or rooftile.approximate.linear for a causal method"
    )


def _checked_padding(padding: Any, k: Tensor) -> Tensor | None:
    if padding is None:
        return None
    if not isinstance(padding, Tensor) or padding.dtype != torch.bool or padding.shape != k.shape[:2]:
        due = f"must be booleans (B, S) = {tuple(k.shape[:2])}, True for padding"
        raise InvalidInput(f"key_padding_mask is {shown(padding)}; {due}")
    if padding.device != k.device:
        raise InvalidInput(f"key_padding_mask is on {padding.device}; k is on {k.device}, and all inputs must be on one device")
    return padding
