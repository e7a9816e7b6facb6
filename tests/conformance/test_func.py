"""Transforms of torch.func over the default backend: equal to the definition in fp64, or a sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import functional as autograd
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_leaves

import rooftile as rt

# PyTorch's decompositions for forward mode use it
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

OPTIONS: list[dict[str, Any]] = [
    {}, {"mask": rt.CAUSAL & rt.Window(4), "softcap": 2.0}, {"mask": rt.CAUSAL, "sinks": torch.tensor([0.3, -1.0])},
]  # fmt: skip
B, T, S, H, D = 2, 7, 5, 2, 8


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, T, H, D), torch.randn(B, S, H, D), torch.randn(B, S, H, D)


def close(found: Any, due: Any) -> None:
    for x, y in zip(tree_leaves(found), tree_leaves(due), strict=True):
        torch.testing.assert_close(x, y.to(x.dtype), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "window", "sinks"])
def test_derivatives(options: dict[str, Any]) -> None:
    """Equal to what autograd, which knows no transform, finds in fp64."""
    x = inputs()
    wide = tuple(y.double() for y in x)
    tangents, do = tuple(y.cos() for y in wide), torch.randn(B, T, H, D, dtype=torch.float64)

    def default(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rt.attention(q, k, v, **options)

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rt.attention(q, k, v, backend="eager", **options)

    def in_fp32(y: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(z.float() for z in y)

    close(vjp(default, *x)[1](do.float()), autograd.vjp(exact, wide, do)[1])
    close(grad(lambda *x: (default(*x) * do.float()).sum(), argnums=(0, 1, 2))(*x), autograd.vjp(exact, wide, do)[1])
    close(jvp(default, x, in_fp32(tangents)), autograd.jvp(exact, wide, tangents))
    part = [lambda k, f=f, y=y: f(y[0], k, y[2])[0, 3] for f, y in ((default, x), (exact, wide))]
    due = autograd.jacobian(part[1], wide[1])
    close(jacrev(part[0])(x[1]), due)
    close(jacfwd(part[0])(x[1]), due)
    row = [
        lambda q, f=f, y=y: f(q[None, None].expand(1, 1, H, D), y[1][:1], y[2][:1]).sum()
        for f, y in ((default, x), (exact, wide))
    ]
    close(hessian(row[0])(x[0][0, 0, 0]), autograd.hessian(row[1], wide[0][0, 0, 0]))


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "window", "sinks"])
def test_vmap(options: dict[str, Any]) -> None:
    q, k, v = (x.unsqueeze(0) + torch.randn(3, 1, 1, 1, 1) for x in inputs())
    found = vmap(lambda q, k, v: rt.attention(q, k, v, **options))(q, k, v)
    due = torch.stack([rt.attention(*x, **options) for x in zip(q, k, v, strict=True)])
    close(found, due)
    # keys that all share, and gradients per sample
    found = vmap(lambda q: rt.attention(q, k[0], v[0], **options))(q)
    close(found, torch.stack([rt.attention(x, k[0], v[0], **options) for x in q]))
    per_sample = vmap(grad(lambda q, k, v: rt.attention(q, k, v, **options).sum()))(q, k, v)
    leaf = q.clone().requires_grad_()
    total = sum(rt.attention(*x, **options).sum() for x in zip(leaf, k, v, strict=True))
    close(per_sample, torch.autograd.grad(total, leaf)[0])


def test_another_backend_says_so() -> None:
    with pytest.raises(rt.Unsupported, match=r"backend 'tiled' under a transform of torch\.func"):
        grad(lambda q: rt.attention(q, q, q, backend="tiled").sum())(inputs()[0])
