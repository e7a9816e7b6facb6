"""Prepared layers on a GPU: the codes of a CPU, the bits of the layers that serve them, and gradients of the rounded numbers."""

from __future__ import annotations

import copy

import pytest
import torch

import rooftile as rt
from rooftile.numerics import BLOCK_FORMATS, quantise_blocks, quantise_nvfp4, quantise_rows
from rooftile.numerics.quantised_rows import rounded_rows
from rooftile.qat.rounding.codes import inside
from rooftile.runtime import launch
from rooftile.weights import weight_format
from rooftile.weights.quantise import quantise_trained
from rooftile.weights.triton.weights import keep_inside
from tests.qat.models import FORMATS, inputs, mlp
from tests.qat.test_gradients import defined, layer
from tests.qat.test_learned import FORMATS as LEARNED
from tests.qat.test_learned import defined as learned_defined
from tests.qat.test_learned import layer as learned_layer

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


@pytest.mark.parametrize("format", LEARNED)
def test_learned_scales(format: str) -> None:
    made, other, x = learned_layer(format).cuda(), learned_layer(format), inputs(rows=40).cuda().requires_grad_()
    assert torch.equal(made.codes().codes.cpu(), other.codes().codes)
    y = made(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).cuda()
    y.backward(dy)
    rows = quantise_rows(x.detach(), "int8").dequantise() if format == "int8" else x.detach()
    _, dw, ds = learned_defined(made, format, dy.double().flatten(0, -2).T @ rows.double().flatten(0, -2))
    for found, exact in ((made.weight.grad, dw), (made.weight_scale.grad, ds)):
        assert (found.double() - exact).norm() <= 1e-5 * exact.norm()


def test_activations_in_mxfp4() -> None:
    model, x = rt.qat.prepare(mlp(), "mxfp4", activations="mxfp4").cuda(), inputs(rows=40).cuda()
    due = rt.qat.prepare(mlp(), "mxfp4", activations="mxfp4")
    # one layer: a code of the next may fall to the other side
    torch.testing.assert_close(model[0](x).cpu(), due[0](x.cpu()), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", [*BLOCK_FORMATS, "nvfp4"])
def test_blocks_have_the_bits_of_a_cpu(name: str) -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(5)) * torch.exp2(torch.arange(-32.0, 32.0))[:, None]
    quantise = quantise_nvfp4 if name == "nvfp4" else lambda x: quantise_blocks(x, name)
    found, due = quantise(x.cuda()), quantise(x)
    assert torch.equal(found.values.cpu().view(torch.uint8), due.values.view(torch.uint8))
    assert torch.equal(found.dequantise().cpu(), due.dequantise())


def trained(format: str, estimator: str = "straight", steps: int = 2) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = rt.qat.prepare(mlp().cuda(), format, estimator=estimator)
    optimiser = rt.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        model(inputs().cuda()).square().mean().backward()
        optimiser.step()
    return model, optimiser


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("estimator", ["straight", "clip"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_step_waits_for_nothing(format: str, estimator: str) -> None:
    (model, optimiser), x = trained(format, estimator), inputs().cuda()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(2):
            model(x).square().mean().backward()
            optimiser.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", ["fp8", "fp8_tile", "int8"])
def test_activations_are_rounded_in_one_launch_with_the_bits_of_a_cpu(format: str, dtype: torch.dtype) -> None:
    x, seen = inputs(rows=40, dtype=dtype), []
    with launch.observe(seen.append):
        found = rounded_rows(x.cuda(), format)
    assert seen == ["_round_rows"]
    assert torch.equal(found.cpu(), quantise_rows(x, format).dequantise())


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("format", ["fp8", "int8", "w8", "int4:32", "int4:row", "mxfp8", "mxfp4"])
def test_masked_and_clipped_codes_are_one_launch_with_the_bits_of_a_cpu(format: str, sparse: bool) -> None:
    w = torch.randn(96, 256, generator=torch.Generator().manual_seed(1))
    w[3] = 0
    mask = rt.sparsity.two_four(w) if sparse else None
    kind, _, group = format.partition(":")
    group = None if not group else -1 if group == "row" else int(group)
    kept = w if mask is None else torch.where(mask, w, 0.0)
    due, seen = rt.quantise_weight(kept, kind, group=group), []
    with launch.observe(seen.append):
        found, bits = quantise_trained(w.cuda(), kind, group, mask=None if mask is None else mask.cuda(), wants_inside=True)
    assert seen == ["_quantise_weight"]
    for a, b in zip(found.parts, due.parts, strict=True):
        assert a is b is None or torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8))
    if bits is None:
        assert inside(kept, due).all()
        return
    dw = torch.randn(96, 256, generator=torch.Generator().manual_seed(2))
    assert torch.equal(keep_inside(dw.cuda(), bits).cpu(), dw * inside(kept, due))


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4"])
def test_powers_of_two_that_are_rounded_up_have_the_bits_of_a_cpu(format: str) -> None:
    w = torch.randn(96, 256, generator=torch.Generator().manual_seed(1))
    due, seen = rt.quantise_weight(w, format, rule="round_up"), []
    with launch.observe(seen.append):
        found = rt.quantise_weight(w.cuda(), format, rule="round_up")
    assert seen == ["_quantise_weight"]
    assert torch.equal(found.codes.cpu().view(torch.uint8), due.codes.view(torch.uint8))
    assert torch.equal(found.scales.cpu(), due.scales)


@pytest.mark.parametrize("format", ["fp8", "fp8_tile", "int4:32"])
def test_a_nan_is_told_a_step_later(format: str) -> None:
    (model, optimiser), x = trained(format), inputs().cuda()
    with torch.no_grad():
        model[2].weight[1, 3] = torch.nan
    model(x).square().mean().backward()
    optimiser.step()
    with pytest.raises(rt.InvalidInput, match=r"2.weight after 3 steps cannot be quantised"):
        optimiser.step()


def test_a_captured_forward_follows_the_weight() -> None:
    (model, _), x = trained("int4:32"), inputs().cuda()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        model(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        found = model(x)
    with torch.no_grad():
        model[0].weight.mul_(0.5)
        due = model(x)
    graph.replay()
    assert torch.equal(found, due)


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
