"""Rotary position embedding: pairs of a head's numbers turned by an angle that grows with the position.

Su et al., RoFormer, arXiv:2104.09864.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rotation(NamedTuple):
    """How far each of some tokens is turned: cos and sin (total, R / 2), of the first R numbers of a head."""

    cos: Tensor
    sin: Tensor


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """x (total, heads, D) with numbers d and d + R / 2 of each head turned as a pair, in fp32, rounded once."""
    if x.is_cuda:
        from rooftile.kvcache import kernels

        return kernels.turn(x, rotation)
    cos, sin = (part.unsqueeze(1) for part in rotation)
    half = cos.shape[-1]
    first, second, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    return torch.cat([(first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype), rest], -1)
