"""A target's pair with itself: attention to one key, whose softmax is 1 and whose lse is its score."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.exact.spec import CallSettings


def own_pair(
    q: Tensor, k: Tensor, v: Tensor, settings: CallSettings, bias: Tensor | None, kept: Tensor | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns o (..., n, H, Dv) and lse (..., H, n) of rows q (..., n, H, D), k and v (..., n, Hk, D).

    Args:
        bias: added to the scores, (..., H, n).
        kept: booleans (..., H, n), the weights that dropout keeps; None without dropout.
    """
    group = q.shape[-2] // k.shape[-2]
    wide = torch.promote_types(q.dtype, torch.float32)
    if group > 1:
        k, v = k.repeat_interleave(group, dim=-2), v.repeat_interleave(group, dim=-2)
    scale = q.shape[-1] ** -0.5 if settings.scale is None else settings.scale
    score = (q.to(wide) * k.to(wide)).sum(-1).mT * scale
    if settings.softcap:
        score = settings.softcap * torch.tanh(score / settings.softcap)
    if bias is not None:
        score = score + bias.to(wide)
    if kept is not None:
        v = torch.where(kept.mT[..., None], v / (1 - settings.dropout), 0.0)
    return v, score
