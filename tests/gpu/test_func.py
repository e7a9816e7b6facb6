"""Transforms of torch.func on a GPU: the kernels' answers equal those of ordinary calls, sample by sample."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap

import rooftile as rt
from rooftile.exact.ops import RAN

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kernel", ["triton", pytest.param("hopper", marks=pytest.mark.sm90)])
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
def test_per_sample_gradients(kernel: str, sinks: bool) -> None:
    N, B, T, H, Hk, D = 3, 2, 300, 4, 2, 64
    make = lambda *shape: torch.randn(shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    q, k, v = make(N, B, T, H, D), make(B, T, Hk, D), make(N, B, T, Hk, D)
    more = {"sinks": torch.randn(H, device="cuda")} if sinks else {}

    def number(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rt.attention(q, k, v, rt.CAUSAL, backend=kernel, **more).float().sin().sum()

    before = Counter(RAN)
    found = vmap(grad(number, argnums=(0, 1, 2)), in_dims=(0, None, 0))(q, k, v)
    assert set(RAN - before) == {kernel}
    for n in range(N):
        leaves = [x.clone().requires_grad_() for x in (q[n], k, v[n])]
        due = torch.autograd.grad(number(*leaves), leaves)
        for x, y in zip(found, due, strict=True):
            torch.testing.assert_close(x[n], y, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kernel", ["triton", pytest.param("hopper", marks=pytest.mark.sm90)])
def test_a_jacobian(kernel: str) -> None:
    q, k, v = (torch.randn(1, 5, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    found = jacrev(lambda k: rt.attention(q, k, v, rt.CAUSAL, backend=kernel)[0, :, :, :3])(k)
    wide = [x.double() for x in (q, k, v)]
    due = torch.autograd.functional.jacobian(
        lambda k: rt.attention(wide[0], k, wide[2], rt.CAUSAL, backend="eager")[0, :, :, :3], wide[1]
    )
    torch.testing.assert_close(found.double(), due, rtol=2e-2, atol=2e-2)
