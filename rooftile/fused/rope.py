"""Rotary position embedding: pairs of a head's numbers rotated by an angle that grows with the position.

Su et al., RoFormer, arXiv:2104.09864.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rooftile.fused.where import runs_on
from rooftile.operators import call, define, needs_steps


class Rotation(NamedTuple):
    """By how much each token is rotated: cos and sin (total, R / 2), for the first R numbers of a head."""

    cos: Tensor
    sin: Tensor


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """x (total, heads, D) with numbers d and d + R / 2 of each head rotated as a pair, in fp32, rounded once.

    Example:
        >>> angles = torch.arange(5)[:, None] * torch.tensor([1.0, 0.1])
        >>> rotate(torch.randn(5, 2, 4), Rotation(angles.cos(), angles.sin())).shape
        torch.Size([5, 2, 4])
    """
    cos, sin = rotation
    if needs_steps(x, cos, sin):
        return rotated_as_defined(x, rotation)
    found: Tensor = call(_ROTATE, _rotate, x, cos, sin)
    return found


def rotated_as_defined(x: Tensor, rotation: Rotation) -> Tensor:
    """`rotate` in plain operations."""
    cos, sin = (part.unsqueeze(1) for part in rotation)
    half = cos.shape[-1]
    first, second, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    return torch.cat([(first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype), rest], -1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if runs_on(x):
        from rooftile.fused.kernels import rope as kernels

        return kernels.rotate(x, cos, sin)
    return rotated_as_defined(x, Rotation(cos, sin))


def _fake(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x.new_empty(x.shape)


_ROTATE = define("rotate(Tensor x, Tensor cos, Tensor sin) -> Tensor", _rotate, _fake)
