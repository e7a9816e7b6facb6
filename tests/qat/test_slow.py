"""A device without FP8 units trains for FP8 by the definition, and says so once. Here a CPU stands for such a device."""

from __future__ import annotations

import copy
import pickle
import re
import warnings

import pytest
import torch
from torch import nn

import rooftile as rt
from rooftile.errors import Unsupported
from rooftile.qat.rounding import product, slow
from rooftile.weights import dispatch as backends
from rooftile.weights import quantise
from tests.qat.models import inputs, mlp

SENTENCE = (
    "layers are prepared for {}, and cpu has no FP8 units: their forward is computed by the definition, as a product of codes in "
    "fp32, so it takes at least as long as a layer in fp32 and the rounding of its weight and inputs; the result equals a "
    "device's with FP8"
)
REFUSED = "FP8 products on compute capability 8.0; needs 8.9: w8 and int4 multiply in 16 bits everywhere"


@pytest.fixture
def without_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without FP8 units."""
    for module in (backends, quantise):
        monkeypatch.setattr(module, "lacks_fp8", lambda device: True)
    monkeypatch.setattr(backends, "capability", lambda device: (8, 0))
    monkeypatch.setattr(product, "COMPILED", slow.SlowFormatWarning())


def results(model: nn.Module) -> list[torch.Tensor]:
    """The output of a model, and the gradients of its inputs and parameters."""
    x = inputs().requires_grad_()
    y = model(x)
    y.square().mean().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("options", [{}, {"sparsity": rt.sparsity.Recipe()}], ids=["dense", "2:4"])
@pytest.mark.parametrize("format", ["fp8", "fp8_tile"])
def test_bits_are_those_of_a_device_with_fp8_and_the_warning_comes_once(
    format: str, options: dict[str, object], request: pytest.FixtureRequest
) -> None:
    due = results(rt.qat.prepare(mlp(), format, **options))
    served = rt.qat.convert(rt.qat.prepare(mlp(), format, **options))
    request.getfixturevalue("without_fp8")
    # nothing is multiplied yet
    model = rt.qat.prepare(mlp(), format, **options)
    with pytest.warns(UserWarning, match=re.escape(SENTENCE.format(format))) as told:
        found = results(model)
    assert len(told) == 1
    for mine, other in zip(found, due, strict=True):
        assert torch.equal(mine, other)
    # warnings are errors in tests
    model(inputs())
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    optimiser.step()
    assert torch.equal(model.eval()(inputs()), rt_linear(rt.qat.convert(copy.deepcopy(model)), inputs()))
    # a server has another choice
    with pytest.raises(Unsupported, match=re.escape(REFUSED)):
        served(inputs())


def rt_linear(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The result of a converted model by the named definition."""
    for layer in model:
        is_linear = isinstance(layer, rt.qat.QuantisedLinear)
        x = rt.linear(x, layer.quantised, layer.bias, backend="definition") if is_linear else layer(x)
    return x


@pytest.mark.usefixtures("without_fp8")
def test_each_model_has_its_own_warning() -> None:
    model = rt.qat.prepare(mlp(), {"0": "int8", "*": "fp8"})
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for one in (model, *copies, rt.qat.prepare(mlp(), {"0": "fp8_tile", "*": "fp8"})):
        with pytest.warns(UserWarning, match="has no FP8 units") as told:
            one(inputs())
        assert len(told) == 1
        one(inputs())
    with warnings.catch_warnings(record=True) as told:
        rt.qat.prepare(mlp(), "int8")(inputs())
        rt.qat.prepare(mlp(), "mxfp8")(inputs())
        rt.quantise_model(mlp(), "fp8")
    assert told == []


@pytest.mark.usefixtures("without_fp8")
def test_a_compiled_model() -> None:
    model, x = rt.qat.prepare(mlp(), "fp8"), inputs()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.warns(UserWarning, match="has no FP8 units") as told:
        y = compiled(x)
    assert len(told) == 1
    compiled(x)
    with pytest.warns(UserWarning, match="has no FP8 units"):
        torch.testing.assert_close(y, model(x))


@pytest.mark.usefixtures("without_fp8")
@pytest.mark.parametrize("data", [None, lambda model: model(inputs()).square().mean()])
def test_a_plan_of_training_leaves_the_format_out(data) -> None:
    plan = rt.plan(mlp(), inputs(), formats=["bf16", "fp8", "int8"], data=data, measure=False, backward=True)
    assert list(plan.layers[0].why_not) == ["fp8"]
    assert plan.layers[0].why_not["fp8"].startswith(REFUSED)


@pytest.mark.parametrize("lacks", [True, False])
def test_the_kernel_that_quantises_weights_is_for_devices_that_have_its_numbers(
    lacks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantise, "lacks_fp8", lambda device: lacks)
    monkeypatch.setattr(quantise, "runs_kernels", lambda w: True)
    w = torch.randn(4, 128)
    for name, group in (("fp8", 128), ("mxfp8", 32), ("int8", 128), ("w8", 128), ("int4", 32), ("mxfp4", 32)):
        runs = quantise._runs_kernel(w, quantise.weight_format(name), group)
        assert runs != (lacks and name in ("fp8", "mxfp8"))
