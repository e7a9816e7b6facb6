"""`quantise_model`: the codes of `quantise_weight` in every layer, and a model that stays as it was where it cannot be done."""

from __future__ import annotations

import copy
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import rooftile as rt
from rooftile.errors import InvalidInput
from rooftile.qat import QuantisedLinear
from tests.qat.models import FORMATS, inputs, mlp


@pytest.mark.parametrize("format", FORMATS)
def test_layers_are_rounded_to_nearest(format: str) -> None:
    model, plain, x = mlp(), mlp(), inputs()
    assert rt.quantise_model(model, format) is model
    name, _, group = format.partition(":")
    for mine, due in zip(model, plain, strict=True):
        if isinstance(due, nn.Linear):
            weight = rt.quantise_weight(due.weight, name, group={"": None, "row": -1, "32": 32}[group])
            assert torch.equal(mine.quantised.codes.view(torch.uint8), weight.codes.view(torch.uint8))
            assert torch.equal(mine.quantised.scales.view(torch.uint8), weight.scales.view(torch.uint8))
            x, known = mine(x), x
            assert torch.equal(x, rt.linear(known, weight, due.bias))
        else:
            x = due(x)


def test_a_dictionary_and_a_plan_mix_formats() -> None:
    words = {"0": "int4:32", "4": "int8"}
    model = rt.quantise_model(mlp(), words)
    assert [layer.format for layer in model if isinstance(layer, QuantisedLinear)] == ["int4", "int8"]
    assert type(model[2]) is nn.Linear
    plan = planned(mlp(), words)
    assert torch.equal(rt.quantise_model(mlp(), plan)(inputs()), model(inputs()))
    # a plan that keeps everything
    kept = rt.quantise_model(mlp(), planned(mlp(), {}))
    assert torch.equal(kept(inputs()), mlp()(inputs()))
    with pytest.raises(InvalidInput, match=r"^group is 64 and format a plan, which has chosen .*; leave group out$"):
        rt.quantise_model(mlp(), plan, group=64)
    with pytest.raises(InvalidInput, match=r"^the plan is for another model: 0 is"):
        rt.quantise_model(nn.Sequential(nn.Linear(64, 64)), plan)


def planned(model: nn.Module, words: dict[str, str]) -> rt.planning.Plan:
    """A plan whose choice is known."""
    found = rt.plan(model, inputs(), formats=["bf16", "int8", "int4:32", "2:4"], measure=False)
    return replace(found, layers=tuple(replace(layer, chosen=words.get(layer.name, "fp32")) for layer in found.layers))


class Nested(nn.Module):
    """Names that end alike."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down, self.block, self.model = nn.Linear(128, 128), nn.Sequential(), nn.Sequential()
        self.block.down, self.model.down = nn.Linear(128, 128), nn.Linear(128, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(self.block(self.down(x)))


@pytest.mark.parametrize("words", [{"down": "int8"}, {"model.down": "int8", "down": "int4:32"}, {"model.down": "2:4"}])
def test_a_plan_means_layers_and_no_patterns(words: dict[str, str]) -> None:
    plan = planned(Nested(), words)
    assert plan.weights == words
    made = rt.quantise_model(Nested(), plan)
    kinds = {name: type(layer).__name__ for name, layer in made.named_modules() if name.endswith("down")}
    due = {"int8": "QuantisedLinear", "int4:32": "QuantisedLinear", "2:4": "SparseLinear"}
    assert kinds == {name: due.get(words.get(name, ""), "Linear") for name in ("down", "block.down", "model.down")}
    prepared = plan.prepare(Nested())
    assert {one.name: one.format for one in rt.qat.status(prepared).layers} == words


@pytest.mark.parametrize("format", ["fp8", "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_2_4_layer_of_codes_keeps_their_dtypes(format: str, dtype: torch.dtype) -> None:
    w = torch.randn(64, 128)
    mask = rt.sparsity.two_four(w)
    codes = rt.quantise_weight(w * mask, format)
    layer = rt.qat.SparseLinear(rt.sparsity.compress(codes.codes, mask, codes.scales), nn.Parameter(torch.randn(64)))
    due = layer(inputs().to(dtype))
    moved = copy.deepcopy(layer).to(dtype)
    assert (moved.values.dtype, moved.scales.dtype, moved.bias.dtype) == (codes.codes.dtype, torch.float32, dtype)
    assert torch.equal(moved.values.view(torch.uint8), layer.values.view(torch.uint8))
    torch.testing.assert_close(moved(inputs().to(dtype)), due, rtol=2e-2, atol=2e-2)


def test_the_head_stays_and_an_embedding_is_rounded_by_name() -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding, self.body, self.lm_head = nn.Embedding(9, 64), nn.Linear(64, 64), nn.Linear(64, 9)

    model = rt.quantise_model(Small(), "int4", group=32)
    assert type(model.lm_head) is nn.Linear
    assert isinstance(model.body, QuantisedLinear)
    assert torch.equal(model.embedding.weight, Small().embedding.weight)
    model = rt.quantise_model(Small(), {"embedding": "mxfp4"})
    assert torch.equal(model.embedding.weight, rt.quantise_weight(Small().embedding.weight, "mxfp4").dequantise())


@pytest.mark.parametrize("wrapped", ["compile", "inference", "autocast"])
def test_the_result_runs_as_any_model_does(wrapped: str) -> None:
    model, x = rt.quantise_model(mlp(), "int4:32"), inputs()
    due = model(x)
    if wrapped == "compile":
        # all models of nn.Sequential share one forward, which is compiled anew for each
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(model, fullgraph=True)(x), due, rtol=1e-5, atol=1e-4)
    elif wrapped == "inference":
        with torch.inference_mode():
            assert torch.equal(rt.quantise_model(mlp(), "int4:32")(x), due)
    else:
        with torch.autocast("cpu", torch.bfloat16):
            found = model(x)
        assert found.dtype == torch.bfloat16
        assert (found - due).norm() < 0.02 * due.norm()


def lost(model: nn.Sequential) -> nn.Sequential:
    with torch.no_grad():
        model[2].weight[3, 4] = torch.nan
    return model


@pytest.mark.parametrize(
    ("model", "format", "options", "sentence"),
    [
        (mlp, "int5", {}, "format is 'int5'; must be one of fp8"),
        (mlp, 4, {}, "format is 4; must be one of fp8"),
        (mlp, {"layer.*": "int8"}, {}, "format has the pattern 'layer.*', which matches no layer; near names are"),
        (mlp, "int4", {"group": 48}, "0.weight (256, 128) cannot be int4:48: group is 48; int4 has 32, 64, 128"),
        (lambda: lost(mlp()), "int4:32", {}, "2.weight cannot be quantised to int4: weight is nan at row 3, column 4"),
        (lambda: nn.Sequential(nn.ReLU()), "int8", {}, "has no layer of the class nn.Linear itself"),
        (lambda: rt.qat.prepare(mlp(), "int8"), "int8", {}, "0 is prepared already; restore the model first"),
        (lambda: "model", "int8", {}, "model is str; must be a torch.nn.Module"),
        (mlp, "int4", {"group_size": 32}, "no argument group_size: write group="),
    ],
)
def test_what_cannot_be_done_leaves_the_model_as_it_was(model, format, options, sentence: str) -> None:
    made = model()
    before = copy.deepcopy(made)
    with pytest.raises(InvalidInput, match=re.escape(sentence)):
        rt.quantise_model(made, format, **options)
    if isinstance(made, nn.Module):
        assert [type(layer) for layer in made.modules()] == [type(layer) for layer in before.modules()]
