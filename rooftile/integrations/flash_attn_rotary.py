"""flash_attn.layers.rotary: the rotation of queries and keys by their positions, with gradients.

from rooftile.integrations.flash_attn_rotary import apply_rotary_emb    # was: from flash_attn.layers.rotary import ...
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.runtime.arguments import shown

__all__ = ["apply_rotary_emb", "apply_rotary_emb_func"]


def apply_rotary_emb(
    x: Tensor,  # (B, T, H, D), with cu_seqlens (total, H, D)
    cos: Tensor,  # (positions, rotary dims / 2)
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,  # or (B,)
    cu_seqlens: Tensor | None = None,  # (B + 1,)
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotates the first dims of each head by the angles of its position: pairs from both halves, or neighbours if interleaved.

    Args:
        inplace: write the result into x, which is returned.
        seqlen_offsets: position of the first row, for all sequences or for each.
        max_seqlen: not needed, and ignored.

    Returns:
        rotated rows in the shape and dtype of x.

    Example:
        >>> angles = torch.arange(10.0)[:, None] / torch.tensor([1.0, 100.0])
        >>> apply_rotary_emb(torch.randn(1, 10, 2, 8), angles.cos(), angles.sin()).shape
        torch.Size([1, 10, 2, 8])

    Su et al., RoFormer, arXiv:2104.09864.
    """
    due = "(B, T, H, D)" if cu_seqlens is None else "(total, H, D): cu_seqlens was given"
    if not isinstance(x, Tensor) or x.ndim != (4 if cu_seqlens is None else 3):
        raise InvalidInput(f"x is {shown(x)}; must be {due}")
    if isinstance(seqlen_offsets, Tensor):
        seqlen_offsets = seqlen_offsets.long()[:, None]
    if cu_seqlens is None:
        places = torch.arange(x.shape[1], device=x.device)[None] + seqlen_offsets
        places = places.expand(x.shape[0], -1)
    else:
        rows = torch.arange(x.shape[0], device=x.device)
        sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), rows.to(cu_seqlens.dtype), right=True)
        places = rows - cu_seqlens.long()[sequence]
        places = (places + (seqlen_offsets[sequence, 0] if isinstance(seqlen_offsets, Tensor) else seqlen_offsets))[None]
    # read only where that does not wait for a device, and not while a graph is traced
    known = places.device.type == "cpu" and places.numel() and not torch.compiler.is_compiling()
    if known and int(places.max()) >= cos.shape[0]:
        raise InvalidInput(f"the last position is {int(places.max())}; cos and sin have angles for {cos.shape[0]} positions")
    found = rotated(x if cu_seqlens is None else x[None], cos, sin, places, interleaved)
    found = found if cu_seqlens is None else found[0]
    return x.copy_(found) if inplace else found


apply_rotary_emb_func = apply_rotary_emb


def rotated(x: Tensor, cos: Tensor, sin: Tensor | None, places: Tensor, interleaved: bool) -> Tensor:
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
