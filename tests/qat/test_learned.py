"""LSQ: learned scales, their gradient by the formula and by finite differences, and optimisers that do not hold them."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn

import rooftile as rt
from rooftile.errors import InvalidInput
from rooftile.qat.rounding import learned
from tests.qat.models import inputs, mlp

# format, its least and largest code, numbers per scale of 128 columns
FORMATS = {"int4:32": (-8, 7, 32), "int4:row": (-8, 7, 128), "w8": (-128, 127, 128), "int8": (-127, 127, 128)}


def layer(format: str, *, bias: bool = True) -> nn.Linear:
    """A layer with outliers, a row of zeros, numbers at ties and at the limits of its codes, and scales of all sizes."""
    torch.manual_seed(2)
    made = nn.Linear(128, 37, bias=bias)
    with torch.no_grad():
        made.weight[3, 7] = 9.0
        made.weight[5] = 0.0
    made = rt.qat.prepare(nn.Sequential(made), format, estimator="lsq")[0]
    least, most, _ = FORMATS[format]
    with torch.no_grad():
        made.weight_scale[7] = 0.25
        made.weight[7, :6] = torch.tensor([least, most, least - 0.5, most + 0.5, 0.5, 1.5]) * 0.25
        made.weight_scale[9] *= 0.1
    return made


def stored(made, format: str) -> torch.Tensor:
    """The scales that codes are taken with, fp64."""
    scales = made.weight_scale.detach().clamp(min=2.0**-24)
    return (scales if format == "int8" else scales.bfloat16()).double()


def defined(made, format: str, dw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rounded weight and the gradients of the weight and of the scales in fp64, by the paper's formulas."""
    least, most, n = FORMATS[format]
    s = stored(made, format).repeat_interleave(n, 1)
    # in fp32, as codes are taken
    u = (made.parameter.detach() / s.float()).double()
    is_inside = (u >= least) & (u <= most)
    slope = torch.where(is_inside, u.round() - u, u.clamp(least, most))
    g = 1 / (n * most) ** 0.5
    ds = g * (dw.double() * slope).unflatten(1, (-1, n)).sum(-1)
    return u.round().clamp(least, most) * s, dw.double() * is_inside, ds


@pytest.mark.parametrize("format", FORMATS)
def test_scales_begin_as_the_paper_says(format: str) -> None:
    made = rt.qat.prepare(mlp(), format, estimator="lsq")[0]
    _, most, n = FORMATS[format]
    due = 2 * mlp()[0].weight.detach().unflatten(1, (-1, n)).abs().mean(-1) / most**0.5
    assert isinstance(made.weight_scale, nn.Parameter)
    assert made.weight_scale.dtype == torch.float32
    torch.testing.assert_close(made.weight_scale.detach(), due)


@pytest.mark.parametrize("format", FORMATS)
def test_gradients_are_those_of_the_formulas(format: str) -> None:
    made, x = layer(format), inputs().requires_grad_()
    y = made(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
    y.backward(dy)
    rows = x.detach()
    if format == "int8":
        rows = rt.numerics.quantise_rows(rows, "int8").dequantise()
    dw = dy.double().flatten(0, -2).T @ rows.double().flatten(0, -2)
    w, due_w, due_s = defined(made, format, dw)
    for found, due in (
        (y, rows.double() @ w.T + made.bias.double()), (x.grad, dy.double() @ w), (made.weight.grad, due_w),
        (made.weight_scale.grad, due_s),
    ):  # fmt: skip
        assert (found.double() - due).norm() <= 2e-6 * due.norm()
    assert 0 < (made.weight.grad == 0).float().mean() < 1


@pytest.mark.parametrize("format", FORMATS)
def test_the_gradient_of_scales_is_that_of_the_surrogate(format: str) -> None:
    """With rne(u) - u held fixed inside, and the code held outside, the rounded weight is linear in s."""
    made = layer(format, bias=False)
    least, most, n = FORMATS[format]
    dw = torch.randn(37, 128, generator=torch.Generator().manual_seed(4))
    _, ds = learned.gradients_of(dw, made.parameter, made.codes())
    w, s = made.parameter.detach().double(), stored(made, format)
    u = (made.parameter.detach() / s.float().repeat_interleave(n, 1)).double()
    is_inside, error = (u >= least) & (u <= most), u.round() - u

    def loss(scales: torch.Tensor) -> torch.Tensor:
        """One number per scale."""
        each = scales.repeat_interleave(n, 1)
        rounded = torch.where(is_inside, w + each * error, each * u.clamp(least, most))
        return (dw.double() * rounded).unflatten(1, (-1, n)).sum(-1)

    step = 1e-3 * s
    due = (loss(s + step) - loss(s - step)) / (2 * step) / (n * most) ** 0.5
    torch.testing.assert_close(ds.double(), due, rtol=1e-4, atol=1e-4 * due.abs().max().item())


@pytest.mark.parametrize("format", FORMATS)
def test_codes_are_taken_with_the_scales_that_are_stored(format: str) -> None:
    model = rt.qat.prepare(mlp(), format, estimator="lsq")
    with torch.no_grad():
        # between two numbers of bf16
        model[0].weight_scale.mul_(1 + 2.0**-10)
    x = inputs()
    y = model(x)
    codes = model[0].codes()
    assert codes.scales.dtype == (torch.float32 if format == "int8" else torch.bfloat16)
    least, most, n = FORMATS[format]
    u = model[0].parameter.detach() / codes.scales.float().repeat_interleave(n, 1)
    numbers = codes.dequantise() / codes.scales.float().repeat_interleave(n, 1)
    torch.testing.assert_close(numbers, u.round().clamp(least, most))
    converted = rt.qat.convert(copy.deepcopy(model))
    assert torch.equal(converted(x), y)


def test_training_learns_scales_and_keeps_them_above_the_least() -> None:
    model, x = rt.qat.prepare(mlp(), "int4:32", estimator="lsq"), inputs()
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)
    before = copy.deepcopy(model.state_dict())
    losses = []
    for _ in range(15):
        loss = (model(x) - 1).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
        assert torch.equal(model(x), rt.qat.convert(copy.deepcopy(model))(x))
    assert losses[-1] < losses[0]
    assert all(not torch.equal(x, before[name]) for name, x in model.state_dict().items() if name.endswith("weight_scale"))
    model[0].weight_scale.grad = torch.full_like(model[0].weight_scale, 1e9)
    optimiser.step()
    assert (model[0].weight_scale == 2.0**-24).all()


def test_a_later_start_begins_with_the_weights_of_then() -> None:
    model, x = rt.qat.prepare(mlp(), "int4:32", estimator="lsq", start_step=2), inputs()
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(4):
        (model(x) / 100).square().mean().backward()
        assert (model[0].weight_scale.grad is None) == (step < 2)
        optimiser.step()
        optimiser.zero_grad()
        due = learned.first_scales(model[0].parameter, "int4", 32)
        assert torch.equal(model[0].weight_scale, due) == (step == 1)


def test_state_dicts_hold_scales_and_restore_takes_them_away() -> None:
    model = rt.qat.prepare(mlp(), "int4:32", estimator="lsq")
    assert {name for name in model.state_dict() if name not in mlp().state_dict()} == {f"{n}.weight_scale" for n in (0, 2, 4)}
    with torch.no_grad():
        model[2].weight_scale.mul_(1.5)
    other = rt.qat.prepare(mlp(seed=5), "int4:32", estimator="lsq")
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(inputs()), model(inputs()))
    rt.qat.restore(model)
    assert model.state_dict().keys() == mlp().state_dict().keys()
    assert torch.equal(model(inputs()), mlp()(inputs()))


def test_a_shared_weight_has_shared_scales() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(20, 64), nn.Linear(64, 20, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.embedding(tokens))

    torch.manual_seed(0)
    model = rt.qat.prepare(Tied(), {"*": "int4:32"}, estimator="lsq")
    assert model.embedding.weight_scale is model.head.weight_scale
    assert len(list(model.parameters())) == 2
    model(torch.arange(20)).square().sum().backward()
    both = model.head.weight_scale.grad.clone()
    model.zero_grad()
    # each part by itself
    numbers = model.embedding(torch.arange(20))
    model.head(numbers.detach()).square().sum().backward()
    of_head = model.head.weight_scale.grad.clone()
    numbers.backward(2 * (model.head(numbers.detach()) @ model.head.codes().dequantise()).detach())
    torch.testing.assert_close(model.head.weight_scale.grad, both, rtol=1e-4, atol=1e-3)
    assert not torch.allclose(of_head, both)


@pytest.mark.parametrize("format", ["int4:32", "int8"])
def test_compiled_and_functional(format: str) -> None:
    model, x = rt.qat.prepare(mlp(), format, estimator="lsq"), inputs()
    model(x).square().mean().backward()
    due = {name: p.grad for name, p in model.named_parameters()}
    found = torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).square().mean())(dict(model.named_parameters()))
    for name, one in due.items():
        torch.testing.assert_close(found[name], one, rtol=1e-4, atol=1e-4 * one.abs().max().item())
    model.zero_grad()
    # all models of nn.Sequential share one forward, which is compiled anew for each
    torch._dynamo.reset()
    torch.compile(model, fullgraph=True)(x).square().mean().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, due[name], rtol=1e-3, atol=1e-3 * due[name].abs().max().item())


def test_an_optimiser_of_before_is_refused_at_its_first_step() -> None:
    model, x = mlp(), inputs()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    rt.qat.prepare(model, "int4:32", estimator="lsq")
    before = copy.deepcopy(model.state_dict())
    model(x).sum().backward()
    sentence = 'holds 0.weight and not its scales, 0.weight_scale, which "lsq" learns; make it after prepare'
    with pytest.raises(InvalidInput, match=re.escape(sentence)):
        early.step()
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    # scales that are frozen are nobody's to learn
    for one in (0, 2, 4):
        model[one].weight_scale.requires_grad_(False)
    early.step()
    # one optimiser for weights and one for scales, which steps first
    other = rt.qat.prepare(mlp(), "int4:32", estimator="lsq")
    weights = torch.optim.SGD([p for name, p in other.named_parameters() if not name.endswith("scale")], lr=0.1)
    scales = torch.optim.SGD([p for name, p in other.named_parameters() if name.endswith("scale")], lr=0.1)
    other(x).sum().backward()
    scales.step()
    weights.step()
    assert other[0].qat.steps == 1


def with_nan() -> nn.Module:
    model = rt.qat.prepare(mlp(), "int4:32", estimator="lsq")
    with torch.no_grad():
        model[2].weight_scale[4, 1] = torch.nan
    return model


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: rt.qat.prepare(mlp(), "fp8", estimator="lsq"), "0 is fp8; lsq learns scales of int4, w8, int8"),
        (lambda: rt.qat.prepare(mlp(), {"0": "int8", "2": "mxfp4"}, estimator="lsq"), "2 is mxfp4; lsq learns scales of"),
        (lambda: with_nan()(inputs()), "2.weight cannot be quantised to int4: a scale is nan at row 4, column 1; must be finite"),
    ],
)
def test_bad_input(call, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(sentence)):
        call()
