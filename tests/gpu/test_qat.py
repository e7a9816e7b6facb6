"""Prepared layers on a GPU: the codes of a CPU, the bits of the layers that serve them, and gradients of the rounded numbers."""

from __future__ import annotations

import copy

import pytest
import torch

import rooftile as rt
from rooftile.matmul import weight_format
from tests.qat.models import FORMATS, inputs, mlp
from tests.qat.test_gradients import defined, layer

pytestmark = pytest.mark.gpu


def prepared(format: str, dtype: torch.dtype, device: str) -> torch.nn.Module:
    return rt.qat.prepare(mlp(dtype=dtype), format).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", FORMATS)
def test_prepared_and_converted_layers_agree(format: str, dtype: torch.dtype) -> None:
    model, x = prepared(format, dtype, "cuda"), inputs(rows=40, dtype=dtype).cuda()
    for mine, theirs in zip(model.modules(), prepared(format, dtype, "cpu").modules(), strict=True):
        if hasattr(mine, "codes"):
            pairs = zip(mine.codes().parts, theirs.codes().parts, strict=True)
            assert all(a is b is None or torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)
    y = model(x)
    served = rt.qat.convert(copy.deepcopy(model))(x)
    if weight_format(format.partition(":")[0]).activations is not None:
        assert torch.equal(served, y)
        return
    exact = rt.qat.convert(copy.deepcopy(model)).cpu()(x.cpu().double())
    plain, found = ((one.cpu().double() - exact).norm() for one in (served, y))
    # the product with the dequantised weight sums in another order
    assert found <= 2 * plain + torch.finfo(dtype).eps * exact.norm()


@pytest.mark.parametrize("format", FORMATS)
def test_gradients_are_those_of_the_rounded_numbers(format: str) -> None:
    made, x = layer(format).cuda(), inputs(rows=40).cuda().requires_grad_()
    y = made(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).cuda()
    y.backward(dy)
    _, dx, dw, db = defined(made, x.detach(), dy)
    for found, exact in ((x.grad, dx), (made.weight.grad, dw), (made.bias.grad, db)):
        assert (found.double() - exact).norm() <= 1e-5 * exact.norm()


@pytest.mark.parametrize("format", ["fp8", "int4:32"])
def test_a_compiled_step_under_autocast(format: str) -> None:
    model, x = prepared(format, torch.float32, "cuda"), inputs(rows=40).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        due = model(x)
        due.float().square().mean().backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        found = torch.compile(model, fullgraph=True)(x)
        found.float().square().mean().backward()
    torch.testing.assert_close(found, due, rtol=0.02, atol=0.02 * due.abs().max().item())
    for p, one in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(p.grad, one, rtol=0.05, atol=0.02 * one.abs().max().item())
