"""Attention in 8 bits by Triton on a GPU: the definition's output, which the interpreter shows for fp32 on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import rooftile as rt
from rooftile.exact.masks import Mask
from tests.unit.test_precision import RECIPES, recipes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="no FP8 matrix instructions here"
    ),
]


def inputs(T: int, S: int, H: int, Hk: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    made = [torch.randn(2, n, h, dim, device="cuda") for n, h in ((T, H), (S, Hk), (S, Hk))]
    made[1] += 2 * torch.randn(Hk, dim, device="cuda")
    q, k, v = (x.bfloat16() for x in made)
    return q, k, v


def assert_as_emulated(found: tuple[Tensor, Tensor], due: tuple[Tensor, Tensor], exact: Tensor) -> None:
    """Closer to the definition of the recipe than that is to exact attention, by far; the same lse."""
    (o, lse), (emulated, due_lse) = found, due
    assert o.isfinite().all()
    # the tensor cores cut sums of products in FP8
    torch.testing.assert_close(lse, due_lse, rtol=2e-3, atol=1e-2)
    apart = (o.double() - emulated.double()).square().mean().sqrt()
    lost = (emulated.double() - exact).square().mean().sqrt()
    assert apart <= 0.2 * lost + 4e-3 * exact.abs().mean()


@recipes
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("mask", [rt.FULL, rt.CAUSAL, rt.CAUSAL & rt.Window(300), rt.Chunk(90)], ids=str)
def test_output_is_the_definitions(precision: rt.Precision, mask: Mask, dim: int) -> None:
    q, k, v = inputs(640, 1153, 4, 2, dim)
    found = rt.attention_with_lse(q, k, v, mask, precision=precision, backend="triton")
    due = rt.attention_with_lse(q, k, v, mask, precision=precision, backend="eager")
    assert_as_emulated(found, due, rt.attention(q.double(), k.double(), v.double(), mask))


@pytest.mark.parametrize("name", ["fp8", "int8", "per row"])
def test_packed_output_is_the_definitions(name: str) -> None:
    lengths = [(130, 200), (1, 5), (0, 7), (300, 300)]
    cu_q, cu_k = (torch.tensor([0, *n], device="cuda").cumsum(0).int() for n in zip(*lengths, strict=True))
    q, k, v = (x[0] for x in inputs(int(cu_q[-1]), int(cu_k[-1]), 4, 2, 64))
    call = (q, k, v, cu_q, cu_k, rt.CAUSAL)
    found = rt.attention_packed_with_lse(*call, precision=RECIPES[name], backend="triton")
    due = rt.attention_packed_with_lse(*call, precision=RECIPES[name], backend="eager")
    exact = rt.attention_packed(q.double(), k.double(), v.double(), cu_q, cu_k, rt.CAUSAL)
    assert_as_emulated(found, due, exact)


def test_a_nan_stays_where_it_is_seen() -> None:
    q, k, v = inputs(300, 300, 2, 1, 64)
    k[0, 200, 0, 0] = torch.inf
    v[1, 80, 0, 7] = torch.nan
    for precision in ("fp8", "int8"):
        found = rt.attention(q, k, v, rt.CAUSAL, precision=precision, backend="triton")
        due = rt.attention(q, k, v, rt.CAUSAL, precision=precision, backend="eager")
        assert torch.equal(found.isnan(), due.isnan())
        assert found.isnan().any()
