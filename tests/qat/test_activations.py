"""Activations in MXFP4 or MXFP8 beside weights in the same format, by the definition."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import rooftile as rt
from rooftile.errors import InvalidInput
from rooftile.numerics import quantise_blocks
from tests.qat.models import inputs, mlp
from tests.qat.test_save import ROOM, trained

# the name in numerics, and the largest number
MX = {"mxfp4": ("mxfp4", 6.0), "mxfp8": ("mxfp8_e4m3", 448.0)}
both = pytest.mark.parametrize("format", MX)


def layer(format: str, estimator: str = "straight") -> nn.Linear:
    torch.manual_seed(2)
    plain = nn.Linear(128, 37)
    with torch.no_grad():
        # 7.7 or 491 in codes, of which the largest is 6 or 448
        plain.weight[3, 7] = 0.12
    return rt.qat.prepare(nn.Sequential(plain), format, activations=format, estimator=estimator)[0]


@both
@pytest.mark.parametrize("estimator", ["straight", "clip"])
def test_result_and_gradients_are_those_of_the_definition(estimator: str, format: str) -> None:
    made, x, (name, largest) = layer(format, estimator), inputs().requires_grad_(), MX[format]
    y = made(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
    y.backward(dy)
    blocks, w = quantise_blocks(x.detach(), name), made.codes().dequantise(torch.float64)
    rows = blocks.dequantise().double()
    dx, dw = dy.double() @ w, dy.double().flatten(0, -2).T @ rows.flatten(0, -2)
    if estimator == "clip":
        steps = x.detach().double() / torch.exp2(blocks.exponents.double() - 127).repeat_interleave(32, -1)
        beyond = steps.abs() > largest + 0.5
        assert 0 < beyond.float().mean() < 0.1
        dx = dx.masked_fill(beyond, 0.0)
        assert made.weight.grad[3, 7] == 0
        dw[3, 7] = 0
    for found, due in ((y, rows @ w.T + made.bias.double()), (x.grad, dx), (made.weight.grad, dw)):
        assert (found.double() - due).norm() <= 1e-6 * due.norm()


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_converted_layer_rounds_its_inputs_too(dtype: torch.dtype, format: str) -> None:
    model, x = rt.qat.prepare(mlp(dtype=dtype), format, activations=format), inputs(dtype=dtype)
    y = model(x)
    weights_alone = rt.qat.prepare(mlp(dtype=dtype), format)
    assert not torch.equal(weights_alone(x), y)
    converted = rt.qat.convert(copy.deepcopy(model))
    assert torch.equal(converted(x), y)
    assert f"activations in {format}" in repr(converted[0])
    assert f"{format}, activations in {format}" in str(rt.qat.status(model))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(converted(x), model(x))
    with torch.inference_mode():
        assert torch.equal(converted(x), y)
    # all models of nn.Sequential share one forward, which is compiled anew for each
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)(x)
    torch.testing.assert_close(compiled, y, rtol=1e-2, atol=1e-2 * y.abs().max().item())


@both
def test_a_row_that_is_not_finite_is_lost_alone(format: str) -> None:
    made, x = layer(format), inputs()
    y = made(x)
    x[1, 2, 5] = torch.inf
    found = made(x)
    assert found[1, 2].isnan().all()
    found[1, 2] = y[1, 2]
    assert torch.equal(found, y)


@both
def test_an_embedding_has_no_activations(format: str) -> None:
    model = nn.Sequential(nn.Embedding(9, 64), nn.Linear(64, 64))
    rt.qat.prepare(model, {"*": format}, activations=format)
    assert [layer.qat.rounding.activations for layer in model] == [None, format]
    assert model(torch.arange(9)).shape == (9, 64)


@both
def test_the_checkpoint_says_so(tmp_path: Path, format: str) -> None:
    """It is served with activations in 16 bits, as there is no kernel for more."""
    model = trained(format, activations=format)
    rt.qat.save(model, tmp_path)
    section = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    (group,) = section["config_groups"].values()
    described = group["input_activations"]
    assert (described["num_bits"], described["group_size"], described["dynamic"]) == (int(format[-1]), 32, True)
    (output,) = rt.LLM(tmp_path, **ROOM).generate([[1, 2, 3]], rt.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 4


@pytest.mark.parametrize(
    ("format", "activations", "sentence"),
    [
        ("mxfp4", "fp4", "activations are 'fp4'; must be 'mxfp4' or 'mxfp8', or None for what the format says"),
        ("mxfp4", "mxfp8", "0 is mxfp4 and its activations mxfp8; both must be in one format"),
        ("int8", "mxfp4", "0 is int8 and its activations mxfp4; both must be in one format"),
        ({"0": "mxfp4", "2": "int4:32"}, "mxfp4", "2 is int4 and its activations mxfp4"),
    ],
)
def test_bad_input(format, activations: str, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(sentence)):
        rt.qat.prepare(mlp(), format, activations=activations)
