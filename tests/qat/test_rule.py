"""The rule of powers of two, by name: the codes of `rooftile.numerics`, in training, converted, saved and served alike."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import rooftile as rt
from rooftile.errors import InvalidInput
from rooftile.models import Decoder
from rooftile.numerics import quantise_blocks
from rooftile.weights.packing import unpack
from tests.qat.models import inputs, mlp
from tests.qat.test_save import trained

MX = {"mxfp8": ("mxfp8_e4m3", 448.0), "mxfp4": ("mxfp4", 6.0)}
RULES = ("floor", "round_up")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("format", MX)
def test_codes_are_those_of_numerics(format: str, rule: str, dtype: torch.dtype) -> None:
    w = torch.randn(40, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    # the largest number of the format times a power of two, and the next ones above and below
    kind, largest = MX[format]
    w[3, 5], w[4, 5], w[5, 5] = largest * 2.0**-5, largest * 2.0**-5 * (1 + 2.0**-7), largest * 2.0**-5 * (1 - 2.0**-8)
    w[6] = 0
    found, due = rt.quantise_weight(w, format, rule=rule), quantise_blocks(w, kind, rule=rule)
    assert torch.equal(found.scales, due.exponents)
    codes = unpack(found.codes, 96) if format == "mxfp4" else found.codes
    assert torch.equal(codes.view(torch.uint8), due.values.view(torch.uint8))
    # by its own words: the least power of two for which no number saturates, or one for which some do
    steps = w.double().unflatten(1, (-1, 32)).abs().amax(-1) / torch.exp2(found.scales.double() - 127)
    assert (steps > largest).any() == (rule == "floor")
    if rule == "round_up":
        assert (steps[steps > 0] > largest / 2).all()
    assert torch.equal(found.scales, rt.quantise_weight(w, format).scales) == (rule == "floor")


@pytest.mark.parametrize("format", MX)
def test_a_prepared_layer_is_the_converted_and_the_served_one(format: str, tmp_path: Path) -> None:
    model, x = rt.qat.prepare(mlp(), format, rule="round_up"), inputs()
    y = model(x)
    assert not torch.equal(y, rt.qat.prepare(mlp(), format)(x))
    assert torch.equal(y, rt.qat.convert(copy.deepcopy(model))(x))
    assert torch.equal(y, rt.quantise_model(mlp(), format, rule="round_up")(x))
    plain = mlp()
    for layer, other in zip(model, plain, strict=True):
        if isinstance(layer, nn.Linear):
            due = rt.quantise_weight(other.weight, format, rule="round_up")
            assert torch.equal(layer.codes().codes.view(torch.uint8), due.codes.view(torch.uint8))
    assert f"{format} round_up" in str(rt.qat.status(model))
    assert {one.clipped for one in rt.qat.status(model).layers} == {0.0}
    # all models of nn.Sequential share one forward, which is compiled anew for each
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(compiled, y, rtol=1e-5, atol=1e-4)
    model = trained(format, rule="round_up")
    rt.qat.save(model, tmp_path / "saved")
    read = Decoder.from_folder(tmp_path / "saved", device="cpu")
    for layer, served in zip(model.layers, read.layers, strict=True):
        for mine, theirs in ((layer.down, served.feed_forward.down), (layer.mixer.out, served.o)):
            due = quantise_blocks(mine.weight.detach(), MX[format][0], rule="round_up").dequantise()
            assert torch.equal(theirs.parts[0].dequantise(), due)


@pytest.mark.parametrize("estimator", ["straight", "clip"])
def test_activations_follow_the_rule_and_nothing_is_clipped(estimator: str) -> None:
    options = {"activations": "mxfp4", "rule": "round_up", "estimator": estimator}
    made, x = rt.qat.prepare(nn.Sequential(mlp()[0]), "mxfp4", **options), inputs().requires_grad_()
    y = made(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
    y.backward(dy)
    rows = quantise_blocks(x.detach(), "mxfp4", rule="round_up").dequantise().double()
    w = quantise_blocks(made[0].weight.detach(), "mxfp4", rule="round_up").dequantise().double()
    exact = (rows @ w.T + made[0].bias.double(), dy.double() @ w, dy.double().flatten(0, -2).T @ rows.flatten(0, -2))
    for found, due in zip((y, x.grad, made[0].weight.grad), exact, strict=True):
        assert (found.double() - due).norm() <= 1e-6 * due.norm()
    assert torch.equal(rt.qat.convert(made)(x), y)


def test_a_rule_is_for_the_layers_that_have_it() -> None:
    model = rt.qat.prepare(mlp(), {"0": "mxfp4", "2": "int8", "4": "mxfp8"}, rule="round_up")
    assert [one.format for one in rt.qat.status(model).layers] == ["mxfp4 round_up", "int8", "mxfp8 round_up"]
    assert torch.equal(rt.qat.convert(copy.deepcopy(model))(inputs()), model(inputs()))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: rt.quantise_weight(torch.randn(4, 64), "int8", rule="round_up"), "rule is 'round_up' and format 'int8'; only"),
        (lambda: rt.quantise_weight(torch.randn(4, 64), "nvfp4", rule="round_up"), "rule is 'round_up' and format 'nvfp4'; only"),
        (lambda: rt.quantise_weight(torch.randn(4, 64), "mxfp4", rule="even"), "rule is 'even'; must be one of floor, round_up"),
        (lambda: rt.qat.prepare(mlp(), "mxfp4", rule="up"), "rule is 'up'; must be one of floor, round_up"),
        (lambda: rt.qat.prepare(mlp(), "int8", rule="round_up"), "rule is 'round_up' and no layer is in such a format; only"),
        (lambda: rt.quantise_model(mlp(), "fp8", rule="round_up"), "rule is 'round_up' and no layer is in such a format"),
    ],
)  # fmt: skip
def test_bad_input(call, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(sentence)):
        call()


def test_a_plan_has_its_own() -> None:
    plan = rt.plan(mlp(), inputs(), formats=["mxfp4"], measure=False)
    with pytest.raises(InvalidInput, match=r"^rule is 'round_up' and format a plan, which has chosen .*; leave rule out$"):
        rt.qat.prepare(mlp(), plan, rule="round_up")
