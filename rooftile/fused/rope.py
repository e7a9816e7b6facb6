"""Rotary position embedding: pairs of a head's numbers rotated by an angle that grows with the position.

`rotate` is for decoding, `rotary` for training, with gradients: the gradient of a rotation is the rotation back.

Su et al., RoFormer, arXiv:2104.09864.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.fused import kernels
from rooftile.fused.differentiable import Operation
from rooftile.fused.where import check_floats, kernels_run_on
from rooftile.numerics.quantised_rows import as_rows
from rooftile.runtime.devices import runs_kernels
from rooftile.runtime.operators import call, define, needs_steps
from rooftile.runtime.words import answers_foreign_words


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
    if runs_kernels(x):
        return kernels.rope.rotate(x, cos, sin)
    return rotated_as_defined(x, Rotation(cos, sin))


def _fake(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x.new_empty(x.shape)


_ROTATE = define("rotate(Tensor x, Tensor cos, Tensor sin) -> Tensor", _rotate, _fake)


@answers_foreign_words
def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Rotates pairs of numbers of each head by angles, in fp32, rounded once.

    Args:
        q: (B, T, H, D).
        k: (B, T, Hk, D).
        cos: (T, R / 2) or (B, T, R / 2), for the first R numbers of a head; no gradient.
        sin: like cos.
        interleaved: whether numbers 2 d and 2 d + 1 are a pair, or d and d + R / 2.

    Example:
        >>> q, k, angles = torch.randn(1, 5, 4, 8), torch.randn(1, 5, 2, 8), torch.rand(5, 4)
        >>> rotary(q, k, angles.cos(), angles.sin())[1].shape
        torch.Size([1, 5, 2, 8])
    """
    check_floats(q=q, k=k, cos=cos, sin=sin)
    for name, x in (("q", q), ("k", k)):
        if x.ndim != 4 or x.shape[:2] != q.shape[:2]:
            raise InvalidInput(f"{name} is {x.dtype} {tuple(x.shape)}; must be a float tensor (B, T, heads, D) like q")
    fits = cos.shape == sin.shape and cos.ndim in (2, 3) and cos.shape[-2] == q.shape[1] and 2 * cos.shape[-1] <= q.shape[-1]
    if not fits or (cos.ndim == 3 and cos.shape[0] not in (1, q.shape[0])):
        T = q.shape[1]
        raise InvalidInput(f"cos is {tuple(cos.shape)} and sin {tuple(sin.shape)}; must be ({T}, R / 2) or (B, {T}, R / 2)")
    if cos.requires_grad or sin.requires_grad:
        raise InvalidInput("cos or sin requires a gradient; angles have none here: detach them")
    # angles that all sequences share are read again for each, and not copied
    cos, sin = (as_rows(x) for x in (cos, sin))
    first, second = (_rotated(x, cos, sin, interleaved) for x in (q, k))
    return first, second


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    rows, size = x.flatten(0, 1), 2 * cos.shape[-1]
    if interleaved:
        pairs = rows[..., :size].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        rows = torch.cat((pairs, rows[..., size:]), dim=-1)
    (y,) = _ROTARY(rows, cos, sin)
    if interleaved:
        back = y[..., :size].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        y = torch.cat((back, y[..., size:]), dim=-1)
    return y.view(x.shape)


def _rotary_defined(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor]:
    if cos.shape[0] != x.shape[0]:
        cos, sin = (angles.repeat(x.shape[0] // max(angles.shape[0], 1), 1) for angles in (cos, sin))
    if x.dtype == torch.float64:
        return (_in_fp64(x, cos, sin),)
    return (rotated_as_defined(x, Rotation(cos, sin)),)


def _in_fp64(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x[..., :half], x[..., half : 2 * half]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]), dim=-1)


def _run_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor]:
    if kernels_run_on(x):
        return (kernels.rope.rotate(x, cos, sin),)
    return (_rotary_defined(x, cos, sin)[0].contiguous(),)


def _gradients(dy: Tensor, y: None, x: None, cos: Tensor, sin: Tensor) -> tuple[Tensor]:
    return _rotary_defined(dy, cos, -sin)


def _run_gradients(dy: Tensor, y: None, x: None, cos: Tensor, sin: Tensor) -> tuple[Tensor]:
    return _run_rotary(dy, cos, -sin)


_ROTARY = Operation(
    "rotary", "Tensor x, Tensor cos, Tensor sin", results=1, run=_run_rotary, defined=_rotary_defined,
    run_gradients=_run_gradients, gradients=_gradients, fake=lambda x, *_: (x.new_empty(x.shape),),
    fake_gradients=lambda dy, *_: (dy.new_empty(dy.shape),), given_to={0: 0}, unused=frozenset((0, 1)),
)  # fmt: skip
