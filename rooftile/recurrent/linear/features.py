"""Feature maps of linear attention, and their gradients: what each does to a tile of queries or keys, in plain operations.

    identity     x
    relu         max(x, 0)
    elu          elu(x) + 1: x + 1 above zero, exp x below
    exp          exp(w_f . y - |y|^2 / 2)             y = sqrt(scale) x, w_f the rows of a projection W
    wave         exp(|y|^2 / 2) [cos w_f . y, sin w_f . y]
    random relu  max(w_f . y, 0)

The features of `exp` and `wave` have a factor per token that no format holds. A map returns it apart, as its logarithm `m`: the
features are f exp(m), and f is at most 1. Constant factors such as 1 / sqrt(number of features) are left out: they cancel.

Katharopoulos et al., arXiv:2006.16236; Choromanski et al., Rethinking Attention with Performers, arXiv:2009.14794.
"""

from __future__ import annotations

import torch
from torch import Tensor

PLAIN = ("identity", "relu", "elu")
# kinds whose features have a factor of their own per token
SCALED = ("exp", "wave")


def width(kind: str, dim: int, projection: Tensor | None) -> int:
    """The number of features of a head of this dimension."""
    if kind in PLAIN:
        return dim
    assert projection is not None
    return projection.shape[0] * (2 if kind == "wave" else 1)


def features(x: Tensor, kind: str, projection: Tensor | None, scale: float) -> tuple[Tensor, Tensor | None]:
    """The features f (..., F) of x (..., D), and m (...) where the kind has one.

    projection: W (rows, D) of the kinds that have one, in the dtype of x.
    """
    if kind == "identity":
        return x, None
    if kind == "relu":
        return x.relu(), None
    if kind == "elu":
        return torch.where(x > 0, x + 1, x.clamp(max=0).exp()), None
    assert projection is not None
    p = scale**0.5 * (x @ projection.T)  # (..., rows)
    if kind == "random relu":
        return p.relu(), None
    half = 0.5 * scale * x.square().sum(-1)  # |y|^2 / 2
    if kind == "wave":
        return torch.cat((p.cos(), p.sin()), -1), half
    assert kind == "exp"
    # a constant in the gradient, as every result is the same without it
    largest = p.detach().amax(-1)
    return (p - largest[..., None]).exp(), largest - half


def gradient(x: Tensor, f: Tensor, df: Tensor, kind: str, projection: Tensor | None, scale: float) -> Tensor:
    """The gradient of x, from the gradient of its features f; the factor exp(m) of each token is part of `df`."""
    if kind == "identity":
        return df
    if kind == "relu":
        return df * (x > 0)
    if kind == "elu":
        # the derivative of exp is itself, and f is 1 where they meet
        return df * f.clamp(max=1)
    assert projection is not None
    root = scale**0.5
    if kind == "random relu":
        return root * ((df * (f > 0)) @ projection)
    g = df * f
    total = g.sum(-1, keepdim=True)
    if kind == "exp":
        return root * (g @ projection) - scale * total * x
    cos, sin = f.chunk(2, -1)
    d_cos, d_sin = df.chunk(2, -1)
    return root * ((d_sin * cos - d_cos * sin) @ projection) + scale * total * x
