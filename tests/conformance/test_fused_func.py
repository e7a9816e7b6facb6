"""Norms, gates, rotary positions and products under the transforms of torch.func, against plain formulas in fp64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd import functional as autograd
from torch.func import grad, hessian, jvp, vmap
from torch.nn import functional

from rooftile.fused import gated, linear
from rooftile.fused.norm import Weights, add_norm, normalise
from rooftile.fused.rope import Rotation, rotate

# PyTorch's decompositions for forward mode use it
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

SIZE, TOTAL, N = 6, 5, 3
generator = torch.Generator().manual_seed(1)
weight, bias, matrix = (torch.rand(shape, generator=generator).double() for shape in (SIZE, SIZE, (4, SIZE)))
angles = torch.arange(TOTAL)[:, None] * torch.tensor([1.0, 0.1], dtype=torch.float64)


def rms(x: Tensor) -> Tensor:
    return weight.to(x) * x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


def layer(x: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return rms(x) + bias.to(x)


def turned(x: Tensor) -> Tensor:
    """Numbers 0 and 2, and 1 and 3, as complex numbers times exp(i angle)."""
    y = torch.complex(x[..., :2], x[..., 2:4]) * torch.polar(torch.ones_like(angles), angles).to(x.device)
    return torch.cat((y.real, y.imag, x[..., 4:]), -1)


def norm(x: Tensor, bias: Tensor | None = None) -> Weights:
    return Weights(weight.to(x), None if bias is None else bias.to(x), 1e-6, False)


# each function of x (total, size), and the formula that it must follow
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "rms": (lambda x: normalise(x, norm(x)), rms),
    "layer": (lambda x: normalise(x, norm(x, bias)), layer),
    "add_norm": (lambda x: sum(add_norm(x, x.sin(), norm(x))), lambda x: rms(x + x.sin()) + x + x.sin()),
    "add_norm, post": (
        lambda x: sum(add_norm(x, x.sin(), norm(x), norm(x, bias))), lambda x: rms(layer(x) + x.sin()) + layer(x) + x.sin()
    ),
    "gated": (lambda x: gated(x, "silu"), lambda x: functional.silu(x[..., :3]) * x[..., 3:]),
    "linear": (lambda x: linear(x, matrix.to(x)), lambda x: x @ matrix.to(x).T),
    "rotate": (lambda x: rotate(x[:, None], Rotation(angles.cos().to(x), angles.sin().to(x)))[:, 0], turned),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_transforms(name: str) -> None:
    run, formula = FUNCTIONS[name]
    wide = torch.randn(N, TOTAL, SIZE, dtype=torch.float64)
    x, close = wide.float(), partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5, check_dtype=False)

    def summed(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return run(x).sin().sum()

    each, derived = [formula(y) for y in wide], [autograd.vjp(partial(summed, formula), y)[1] for y in wide]
    close(vmap(run)(x), torch.stack(each))
    close(vmap(run, in_dims=2, out_dims=1)(x.movedim(0, 2)), torch.stack(each, 1))
    close(grad(partial(summed, run))(x[0]), derived[0])
    close(vmap(grad(partial(summed, run)))(x), torch.stack(derived))
    close(grad(partial(summed, vmap(run)))(x), torch.stack(derived))
    close(jvp(run, (x[0],), (x[1],)), autograd.jvp(formula, wide[0], wide[1]))
    close(hessian(partial(summed, run))(x[0]), autograd.hessian(partial(summed, formula), wide[0]))
    # autograd's own gradient, through a mapped function
    x.requires_grad_()
    close(torch.autograd.grad(summed(vmap(run), x), x)[0], torch.stack(derived))
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(run(forward_ad.make_dual(x[0].detach(), x[1].detach())))
        close((found.primal, found.tangent), autograd.jvp(formula, wide[0], wide[1]))
