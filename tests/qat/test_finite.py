"""Weights that are not finite: refused at once, or in training on a GPU at a later step. Here a CPU stands for a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rooftile as rt
from rooftile.errors import InvalidInput
from rooftile.qat.rounding import finite, learned
from rooftile.runtime.operators import replaced
from rooftile.weights import quantise
from tests.qat.models import FORMATS, inputs, mlp

OPTIMISERS = {"sgd": torch.optim.SGD, "adamw": rt.optim.AdamW}


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU whose host must not look at weights in training."""
    monkeypatch.setattr(finite, "_is_later", lambda w: not replaced(w))
    monkeypatch.setattr(finite, "_SHARED", {})
    monkeypatch.setattr(finite, "_READERS", [])


def flags(model: nn.Module) -> list[int]:
    return [int(layer.qat.raised.flag) for layer in model.modules() if hasattr(layer, "qat")]


def step(model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    model(inputs()).square().mean().backward()
    optimiser.step()
    optimiser.zero_grad()


def trained(format: str, estimator: str = "straight", name: str = "sgd") -> tuple[nn.Module, torch.optim.Optimizer]:
    """A prepared model after two steps."""
    model = rt.qat.prepare(mlp(), format, estimator=estimator)
    optimiser = OPTIMISERS[name](model.parameters(), lr=1e-3)
    for _ in range(2):
        step(model, optimiser)
    return model, optimiser


def refuse(*arguments: object) -> None:
    raise AssertionError("the host looks at a weight")


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("name", OPTIMISERS)
@pytest.mark.parametrize(("format", "lost"), [*((one, torch.nan) for one in FORMATS), ("int8", -torch.inf)])
def test_the_error_comes_a_step_later(format: str, lost: float, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimiser = trained(format, name=name)
    with torch.no_grad():
        model[2].weight[1, 3] = lost
    with monkeypatch.context() as patch:
        patch.setattr(quantise, "_check_finite", refuse)
        step(model, optimiser)
        model(inputs()).square().mean().backward()
    word = format.partition(":")[0]
    with pytest.raises(InvalidInput, match=rf"2.weight after 3 steps cannot be quantised to {word}: weight is"):
        optimiser.step()
    # it has been told
    assert flags(model) == [0, 0, 0]


@pytest.mark.usefixtures("later")
def test_a_finite_model_trains_on_and_a_repaired_one_too() -> None:
    model, optimiser = trained("int4:32")
    for _ in range(3):
        step(model, optimiser)
    assert flags(model) == [0, 0, 0]
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan
    model(inputs())
    assert flags(model) == [1, 0, 0]
    model.load_state_dict(mlp(seed=5).state_dict())
    for _ in range(3):
        step(model, optimiser)
    assert flags(model) == [0, 0, 0]


@pytest.mark.usefixtures("later")
def test_learned_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimiser = trained("int4:32", estimator="lsq")
    with torch.no_grad():
        model[2].weight_scale[4, 1] = torch.nan
    with monkeypatch.context() as patch:
        patch.setattr(learned, "_check_finite", refuse)
        step(model, optimiser)
        model(inputs())
    with pytest.raises(InvalidInput, match=r"2.weight after 3 steps cannot be quantised to int4: (w|a scale) is"):
        optimiser.step()


def test_numbers_too_large_for_fp32() -> None:
    flag = torch.zeros(1, dtype=torch.int32)
    quantise.quantise_trained(torch.full((1, 32), 1e39, dtype=torch.float64), "int4", 32, flag=flag)
    assert flag.item() == 1


@pytest.mark.usefixtures("later")
def test_the_host_looks_at_once_before_the_first_step_and_in_evaluation() -> None:
    sentence = r"0.weight( after 2 steps)? cannot be quantised to int8: weight is nan at row 0, column 0"
    model = rt.qat.prepare(mlp(), "int8")
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan
    with pytest.raises(InvalidInput, match=sentence):
        model(inputs())
    model, _ = trained("int8")
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan
    model(inputs())
    for look in (lambda: model.eval()(inputs()), lambda: rt.qat.status(model), lambda: rt.qat.convert(model)):
        with pytest.raises(InvalidInput, match=sentence):
            look()


@pytest.mark.usefixtures("later")
def test_compiled_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimiser = trained("int4:32")
    compiled = torch.compile(model, backend="aot_eager")
    step(compiled, optimiser)
    with torch.no_grad():
        model[4].weight[1, 3] = torch.nan
    with monkeypatch.context() as patch:
        patch.setattr(quantise, "_check_finite", refuse)
        step(compiled, optimiser)
        compiled(inputs()).square().mean().backward()
    with pytest.raises(InvalidInput, match=r"0.weight after 4 steps cannot be quantised to int4: weight is nan"):
        optimiser.step()


def test_a_cpu_is_looked_at_without_a_flag() -> None:
    model, _ = trained("int8")
    assert finite.flag_for(model[0].weight, in_training=True) is None
    assert model[0].qat.raised.flag is None


@pytest.mark.usefixtures("later")
def test_another_model_and_its_optimiser_go_on() -> None:
    (model, optimiser), (other, others) = trained("int8"), trained("int8")
    with torch.no_grad():
        other[0].weight[0, 0] = torch.nan
    other(inputs())
    for _ in range(3):
        step(model, optimiser)
    others.step()
    with pytest.raises(InvalidInput, match=r"0.weight after 3 steps"):
        others.step()


@pytest.mark.usefixtures("later")
def test_weights_that_no_optimiser_holds_are_read_by_any() -> None:
    model = rt.qat.prepare(mlp(), {"0": "int8", "2": "int8"})
    model[0].weight.requires_grad_(False)
    optimiser = torch.optim.SGD([model[4].weight], lr=1e-3)
    for _ in range(2):
        step(model, optimiser)
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan
    step(model, optimiser)
    with pytest.raises(InvalidInput, match=r"0.weight cannot be quantised to int8: weight is nan at row 0, column 0"):
        step(model, optimiser)
