"""Activations in MXFP4 beside weights in MXFP4, by the definition."""

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


def layer(estimator: str = "straight", dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(2)
    plain = nn.Linear(128, 37).to(dtype)
    with torch.no_grad():
        # 7.7 in codes, of which the largest is 6
        plain.weight[3, 7] = 0.12
    return rt.qat.prepare(nn.Sequential(plain), "mxfp4", activations="mxfp4", estimator=estimator)[0]


@pytest.mark.parametrize("estimator", ["straight", "clip"])
def test_result_and_gradients_are_those_of_the_definition(estimator: str) -> None:
    made, x = layer(estimator), inputs().requires_grad_()
    y = made(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
    y.backward(dy)
    blocks, w = quantise_blocks(x.detach(), "mxfp4"), made.codes().dequantise(torch.float64)
    rows = blocks.dequantise().double()
    dx, dw = dy.double() @ w, dy.double().flatten(0, -2).T @ rows.flatten(0, -2)
    if estimator == "clip":
        steps = x.detach().double() / torch.exp2(blocks.exponents.double() - 127).repeat_interleave(32, -1)
        beyond = steps.abs() > 6.5
        assert 0 < beyond.float().mean() < 0.1
        dx = dx.masked_fill(beyond, 0.0)
        assert made.weight.grad[3, 7] == 0
        dw[3, 7] = 0
    for found, due in ((y, rows @ w.T + made.bias.double()), (x.grad, dx), (made.weight.grad, dw)):
        assert (found.double() - due).norm() <= 1e-6 * due.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_converted_layer_rounds_its_inputs_too(dtype: torch.dtype) -> None:
    model, x = rt.qat.prepare(mlp(dtype=dtype), "mxfp4", activations="mxfp4"), inputs(dtype=dtype)
    y = model(x)
    weights_alone = rt.qat.prepare(mlp(dtype=dtype), "mxfp4")
    assert not torch.equal(weights_alone(x), y)
    converted = rt.qat.convert(copy.deepcopy(model))
    assert torch.equal(converted(x), y)
    assert "activations in mxfp4" in repr(converted[0])
    assert "mxfp4, activations in mxfp4" in str(rt.qat.status(model))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(converted(x), model(x))
    with torch.inference_mode():
        assert torch.equal(converted(x), y)
    # all models of nn.Sequential share one forward, which is compiled anew for each
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)(x)
    torch.testing.assert_close(compiled, y, rtol=1e-2, atol=1e-2 * y.abs().max().item())


def test_a_row_that_is_not_finite_is_lost_alone() -> None:
    made, x = layer(), inputs()
    y = made(x)
    x[1, 2, 5] = torch.inf
    found = made(x)
    assert found[1, 2].isnan().all()
    found[1, 2] = y[1, 2]
    assert torch.equal(found, y)


def test_an_embedding_has_no_activations() -> None:
    model = nn.Sequential(nn.Embedding(9, 64), nn.Linear(64, 64))
    rt.qat.prepare(model, {"*": "mxfp4"}, activations="mxfp4")
    assert [layer.qat.rounding.activations for layer in model] == [None, "mxfp4"]
    assert model(torch.arange(9)).shape == (9, 64)


def test_the_checkpoint_says_so(tmp_path: Path) -> None:
    """It is served with activations in 16 bits, as there is no kernel for more."""
    model = trained("mxfp4", activations="mxfp4")
    rt.qat.save(model, tmp_path)
    section = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    (group,) = section["config_groups"].values()
    assert (group["input_activations"]["num_bits"], group["input_activations"]["dynamic"]) == (4, True)
    (output,) = rt.LLM(tmp_path, **ROOM).generate([[1, 2, 3]], rt.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 4


@pytest.mark.parametrize(
    ("format", "activations", "sentence"),
    [
        ("mxfp4", "fp4", "activations are 'fp4'; must be 'mxfp4', or None for what the format says"),
        ("int8", "mxfp4", "0 is int8 and its activations mxfp4; both must be in one format"),
        ({"0": "mxfp4", "2": "int4:32"}, "mxfp4", "2 is int4 and its activations mxfp4"),
    ],
)
def test_bad_input(format, activations: str, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(sentence)):
        rt.qat.prepare(mlp(), format, activations=activations)
